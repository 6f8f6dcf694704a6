//! Tests of a runtime that fails every call, hangs, or answers with garbage, with messages of the maximum
//! size, or with valid messages of impossible content.

use std::collections::{BTreeSet, HashMap};

use beelet_proto::cri;
use beelet_tests::cri::{Asked, FakeCri, Op, Script};
use beelet_tests::require;
use serde_json::json;
use tonic::Code;

use super::scene::{Scene, config_map, is_relist, pod, with_volumes};

/// Calls that the agent makes by itself while pods start, run and end.
const MADE: [Op; 12] = [
    Op::Version,
    Op::Status,
    Op::ListPodSandbox,
    Op::ListContainers,
    Op::PodSandboxStatus,
    Op::ContainerStatus,
    Op::ImageStatus,
    Op::RunPodSandbox,
    Op::CreateContainer,
    Op::StartContainer,
    Op::ListImages,
    Op::ImageFsInfo,
];

/// Size of the largest message that the agent accepts, in bytes.
const MAX_MESSAGE: usize = 16 << 20;

/// Returns a node with a running pod, and the pod's sandbox.
fn with_a_pod() -> (Scene, String) {
    let scene = Scene::start(|_, options| options);
    scene.apply(&config_map());
    scene.apply(&with_volumes("web"));
    scene.until_ready("web");
    let sandbox = scene.sandbox("web").unwrap();
    (scene, sandbox)
}

/// Asserts that the pod `web` runs on in the same sandbox, and that a new pod starts and ends.
fn all_is_well(scene: &Scene, sandbox: &str, what: &str) {
    scene.until_relisted();
    scene.is_well();
    let web = scene.until_ready("web");
    assert_eq!((web.restarts(), scene.sandbox("web").as_deref()), (0, Some(sandbox)), "{what}");
    assert_eq!(scene.containers("web"), "main/0+", "{what}");
    scene.apply(&pod("late"));
    scene.until_ready("late");
    scene.remove("late");
    scene.until_gone("late");
}

/// Asserts that no call from number `first` on stopped or removed the pod `web` or one of its containers.
fn web_was_left_alone(scene: &Scene, first: usize, sandbox: &str, what: &str) {
    let world = scene.cri.world();
    let of_web =
        |id: &str| id == sandbox || world.containers.get(id).is_some_and(|c| c.sandbox_id == sandbox);
    for call in scene.cri.calls().iter().skip(first) {
        if let Some(id) = ended(&call.asked) {
            assert!(!of_web(id), "{what}: {:?}", call.asked);
        }
    }
}

/// Returns the id of the sandbox or container that a call stops or removes.
fn ended(asked: &Asked) -> Option<&str> {
    match asked {
        Asked::StopPodSandbox(request) => Some(&request.pod_sandbox_id),
        Asked::RemovePodSandbox(request) => Some(&request.pod_sandbox_id),
        Asked::StopContainer(request) => Some(&request.container_id),
        Asked::RemoveContainer(request) => Some(&request.container_id),
        _ => None,
    }
}

#[test]
fn a_runtime_that_fails_every_call_harms_no_pod() {
    require!(root);
    let (scene, sandbox) = with_a_pod();
    for code in
        [Code::Unknown, Code::Unavailable, Code::Internal, Code::ResourceExhausted, Code::Unimplemented]
    {
        let first = scene.cri.calls().len();
        scene.cri.on_any().always().fail(code, "transport is closing: \u{fffd}\0\u{1b}[31m");
        scene.apply(&pod("new"));
        scene.until_called("failing relists", first, 3, is_relist);
        scene.is_well();
        web_was_left_alone(&scene, first, &sandbox, &format!("{code:?}"));
        assert!(scene.until_ready("web").restarts() == 0);
        scene.cri.heal();
        scene.until_ready("new");
        scene.remove("new");
        scene.until_gone("new");
    }
    scene.until_logged("the container runtime answers again");
    all_is_well(&scene, &sandbox, "failing calls");
}

#[test]
fn an_agent_waits_for_a_runtime_that_fails_every_call_from_the_start() {
    require!(root);
    let cri = FakeCri::start();
    cri.on_any().always().fail(Code::Unavailable, "the server is starting");
    let mut scene = Scene::spawn_on(cri, |_, options| options);
    scene.agent.wait_until_up().unwrap();
    scene.apply(&pod("web"));
    scene.until_called("attempts", 0, 4, |_| true);
    scene.is_well();
    scene.cri.heal();
    scene.until_ready("web");
    scene.is_well();
}

#[test]
fn an_agent_waits_for_a_runtime_that_hangs_and_repeats_no_call() {
    require!(root);
    let (scene, sandbox) = with_a_pod();
    let first = scene.cri.calls().len();
    let held = scene.cri.on_any().always().hold();
    scene.apply(&pod("new"));
    scene.poll_until("calls that hang", || {
        let pending = scene.cri.calls().len() - first;
        if pending >= 2 { Ok(()) } else { Err(format!("{pending} calls")) }
    });
    // The agent still answers its clients.
    let pods = scene.stdout_of(&["get", "pods"]);
    assert!(pods.contains("web-testnode") && pods.contains("new-testnode"), "{pods}");
    assert!(scene.until_ready("web").restarts() == 0);
    web_was_left_alone(&scene, first, &sandbox, "hanging");
    scene.cri.heal();
    held.release();
    scene.until_ready("new");
    assert_eq!(scene.containers("new"), "main/0+");
    let asked = |op: Op| scene.cri.calls().iter().skip(first).filter(|call| call.op() == op).count();
    assert_eq!((asked(Op::RunPodSandbox), asked(Op::StartContainer)), (1, 1));
    scene.remove("new");
    scene.until_gone("new");
    all_is_well(&scene, &sandbox, "hanging calls");
}

#[test]
fn calls_that_time_out_are_repeated_until_the_runtime_answers() {
    require!(root);
    let scene = Scene::start(|_, options| options.kubelet("runtimeRequestTimeout", "1s"));
    scene.apply(&pod("web"));
    scene.until_ready("web");
    let sandbox = scene.sandbox("web").unwrap();
    let first = scene.cri.calls().len();
    let held = scene.cri.on_any().always().hold();
    scene.apply(&pod("new"));
    scene.until_called("relists that timed out", first, 3, is_relist);
    scene.is_well();
    web_was_left_alone(&scene, first, &sandbox, "hanging");
    scene.cri.heal();
    held.release();
    scene.until_ready("new");
    assert_eq!(scene.containers("new"), "main/0+");
    scene.remove("new");
    scene.until_gone("new");
    all_is_well(&scene, &sandbox, "calls that timed out");
}

/// Returns answers that cannot be decoded.
fn unreadable() -> Vec<(&'static str, Answer)> {
    let tag_without_end = vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f];
    let mut noise: Vec<u8> = Vec::new();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..4096 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.push(state.to_le_bytes()[0]);
    }
    vec![
        ("a length beyond the message", Answer::Message(tag_without_end)),
        ("an endless varint", Answer::Message(vec![0xff; 64])),
        ("nested groups", Answer::Message(vec![0x0b; 100_000])),
        ("noise", Answer::Message(noise.clone())),
        ("a message over the limit", Answer::Message(vec![0; MAX_MESSAGE + 1])),
        ("an empty body", Answer::Body(Vec::new())),
        ("half a frame", Answer::Body(vec![0, 0, 0, 0, 9, 1, 2])),
        ("a frame of four gigabytes", Answer::Body(vec![0, 0xff, 0xff, 0xff, 0xff, 1])),
        ("a frame of an unknown kind", Answer::Body(vec![7, 0, 0, 0, 0])),
        ("an unrequested compressed frame", Answer::Body(vec![1, 0, 0, 0, 2, 1, 2])),
        ("noise without a frame", Answer::Body(noise)),
    ]
}

#[derive(Clone)]
enum Answer {
    Message(Vec<u8>),
    Body(Vec<u8>),
}

impl Answer {
    fn to(self, script: Script<'_>) {
        match self {
            Answer::Message(message) => script.answer_message(&message),
            Answer::Body(body) => script.answer_body(body),
        }
    }
}

#[test]
fn answers_that_cannot_be_decoded_are_failures_and_change_nothing() {
    require!(root);
    let (scene, sandbox) = with_a_pod();
    for (what, answer) in unreadable() {
        let first = scene.cri.calls().len();
        for op in
            [Op::ListContainers, Op::ListPodSandbox, Op::ContainerStatus, Op::PodSandboxStatus, Op::Status]
        {
            answer.clone().to(scene.cri.on(op).always());
        }
        scene.until_called(what, first, 2, is_relist);
        scene.is_well();
        web_was_left_alone(&scene, first, &sandbox, what);
        assert!(scene.until_ready("web").restarts() == 0, "{what}");
        scene.cri.heal();
        scene.until_relisted();
    }
    all_is_well(&scene, &sandbox, "unreadable answers");
}

#[test]
fn a_pod_comes_up_though_each_call_is_answered_once_with_noise() {
    require!(root);
    let scene = Scene::start(|_, options| options);
    // The runtime executes each call, but its answer is lost. The agent must find the result by listing.
    for op in MADE {
        scene.cri.on(op).answer_message(&[0xff; 64]);
    }
    scene.apply(&pod("web"));
    scene.until_ready("web");
    scene.is_well();
    assert_eq!(scene.containers("web"), "main/0+");
    assert_eq!(scene.cri.world().sandboxes.len(), 1);
}

/// Returns a container of another client, without the agent's labels.
fn foreign(number: usize) -> cri::Container {
    cri::Container {
        id: format!("{number:064x}"),
        pod_sandbox_id: format!("{:064x}", number + 1_000_000),
        metadata: Some(cri::ContainerMetadata { name: format!("c{number}"), attempt: u32::MAX }),
        state: i32::try_from(number % 7).unwrap(),
        created_at: i64::MIN,
        labels: HashMap::from([("io.kubernetes.pod.name".to_owned(), "x".repeat(200))]),
        ..cri::Container::default()
    }
}

fn foreign_sandbox(number: usize) -> cri::PodSandbox {
    cri::PodSandbox {
        id: format!("{:064x}", number + 1_000_000),
        metadata: Some(cri::PodSandboxMetadata {
            name: format!("p{number}"),
            uid: format!("u{number}"),
            namespace: String::new(),
            attempt: u32::MAX,
        }),
        state: i32::try_from(number % 5).unwrap(),
        created_at: i64::MAX,
        ..cri::PodSandbox::default()
    }
}

#[test]
fn thousands_of_unfiltered_foreign_containers_are_left_alone() {
    require!(root);
    const MANY: usize = 20_000;
    let (scene, sandbox) = with_a_pod();
    let first = scene.cri.calls().len();
    scene.cri.on(Op::ListContainers).always().alter(|answer: &mut cri::ListContainersResponse| {
        answer.containers.extend((0..MANY).map(foreign));
    });
    scene.cri.on(Op::ListPodSandbox).always().alter(|answer: &mut cri::ListPodSandboxResponse| {
        answer.items.extend((0..MANY).map(foreign_sandbox));
    });
    scene.until_relisted();
    scene.apply(&pod("new"));
    scene.until_relisted();
    scene.is_well();
    let ids: BTreeSet<String> =
        (0..MANY).flat_map(|number| [foreign(number).id, foreign_sandbox(number).id]).collect();
    for call in scene.cri.calls().iter().skip(first) {
        assert!(!ended(&call.asked).is_some_and(|id| ids.contains(id)), "{:?}", call.asked);
    }
    scene.cri.heal();
    scene.until_ready("new");
    scene.remove("new");
    scene.until_gone("new");
    all_is_well(&scene, &sandbox, "thousands of foreign containers");
}

#[test]
fn a_message_of_sixteen_megabytes_is_read() {
    require!(root);
    let (scene, sandbox) = with_a_pod();
    let first = scene.cri.calls().len();
    // The labels, a single one or many, fill the message almost to the limit.
    scene.cri.on(Op::ListContainers).always().alter(|answer: &mut cri::ListContainersResponse| {
        let fill = "x".repeat(MAX_MESSAGE - 100_000);
        let odd = cri::Container { labels: HashMap::from([(fill, String::new())]), ..foreign(0) };
        answer.containers.push(odd);
    });
    scene.cri.on(Op::ListPodSandbox).always().alter(|answer: &mut cri::ListPodSandboxResponse| {
        let labels = (0..400_000).map(|n| (format!("label-{n:016}"), n.to_string()));
        answer.items.push(cri::PodSandbox { labels: labels.collect(), ..foreign_sandbox(0) });
    });
    scene.until_relisted();
    scene.is_well();
    web_was_left_alone(&scene, first, &sandbox, "large messages");
    scene.cri.heal();
    all_is_well(&scene, &sandbox, "large messages");
}

#[test]
fn impossible_times_numbers_and_states_are_harmless() {
    require!(root);
    let (scene, sandbox) = with_a_pod();
    let times = [i64::MIN, -1, 0, 1, i64::MAX];
    for time in times {
        let what = format!("{time}");
        let first = scene.cri.calls().len();
        scene.cri.on(Op::ContainerStatus).always().alter(move |answer: &mut cri::ContainerStatusResponse| {
            let Some(status) = &mut answer.status else { return };
            (status.created_at, status.started_at) = (time, time.wrapping_neg());
            if status.state() == cri::ContainerState::ContainerExited {
                status.finished_at = time;
            }
            status.exit_code = i32::MIN;
            status.log_path = "/\u{fffd}/../../..".to_owned();
            // The agent builds /proc paths from a pid, and may signal it.
            answer.info = HashMap::from([("info".to_owned(), json!({ "pid": time }).to_string())]);
        });
        scene.cri.on(Op::PodSandboxStatus).always().alter(
            move |answer: &mut cri::PodSandboxStatusResponse| {
                let Some(status) = &mut answer.status else { return };
                status.created_at = time;
                status.network = Some(cri::PodSandboxNetworkStatus {
                    ip: "999.1.1.1:80; rm -rf".to_owned(),
                    additional_ips: vec![cri::PodIp { ip: "::ffff:\0".to_owned() }; 1000],
                });
                answer.info = HashMap::from([("info".to_owned(), "[[[[[[[[".repeat(10_000))]);
            },
        );
        scene.cri.on(Op::ListContainers).always().alter(move |answer: &mut cri::ListContainersResponse| {
            answer.containers.iter_mut().for_each(|container| container.created_at = time);
        });
        scene.cri.on(Op::ListPodSandbox).always().alter(move |answer: &mut cri::ListPodSandboxResponse| {
            answer.items.iter_mut().for_each(|sandbox| sandbox.created_at = time);
        });
        scene.cri.on(Op::ImageFsInfo).always().alter(move |answer: &mut cri::ImageFsInfoResponse| {
            let mountpoint = "/\u{fffd}nowhere".to_owned();
            answer.image_filesystems.push(cri::FilesystemUsage {
                timestamp: time,
                fs_id: Some(cri::FilesystemIdentifier { mountpoint }),
                used_bytes: Some(cri::UInt64Value { value: u64::MAX }),
                inodes_used: Some(cri::UInt64Value { value: u64::MAX }),
            });
        });
        scene.cri.on(Op::ListContainerStats).always().alter(
            move |answer: &mut cri::ListContainerStatsResponse| {
                for stats in &mut answer.stats {
                    stats.writable_layer = Some(cri::FilesystemUsage {
                        timestamp: time,
                        used_bytes: Some(cri::UInt64Value { value: u64::MAX }),
                        inodes_used: Some(cri::UInt64Value { value: u64::MAX }),
                        ..cri::FilesystemUsage::default()
                    });
                }
                answer.stats.push(cri::ContainerStats::default());
            },
        );
        scene.cri.on(Op::ListImages).always().alter(move |answer: &mut cri::ListImagesResponse| {
            let odd = cri::Image { size: u64::MAX, ..answer.images.first().cloned().unwrap_or_default() };
            answer.images.extend([odd.clone(), odd, cri::Image::default()]);
        });
        scene.cri.on(Op::ImageStatus).always().alter(move |answer: &mut cri::ImageStatusResponse| {
            let Some(image) = &mut answer.image else { return };
            image.size = u64::MAX;
            image.uid = Some(cri::Int64Value { value: time });
            image.username = "\0root\n".to_owned();
        });
        // During these answers a pod starts, crashes and ends, and a user calls the commands.
        scene.apply(&pod("new"));
        scene.until_relisted();
        for arguments in [&["get", "pods"][..], &["get", "node"], &["events"], &["gc", "images", "--dry-run"]]
        {
            let _ = scene.cli(arguments); // the command may fail
        }
        if let Some(container) = scene.cri.container("new-testnode", "main")
            && container.state == cri::ContainerState::ContainerRunning
        {
            scene.cri.exit(&container.id, -1);
        }
        scene.until_relisted();
        scene.is_well();
        web_was_left_alone(&scene, first, &sandbox, &what);
        scene.cri.heal();
        scene.remove("new");
        scene.until_gone("new");
    }
    all_is_well(&scene, &sandbox, "impossible numbers");
}

#[test]
fn wrong_missing_and_duplicate_identifiers_are_harmless() {
    require!(root);
    let scene = Scene::start(|_, options| options);
    scene.apply(&pod("web"));
    scene.until_ready("web");
    let first = scene.cri.calls().len();
    scene.cri.on(Op::ListContainers).always().alter(|answer: &mut cri::ListContainersResponse| {
        let all = answer.containers.clone();
        for mut twin in all {
            answer.containers.push(twin.clone());
            twin.state = 99;
            answer.containers.push(twin.clone());
            twin.metadata = None;
            twin.id.clear();
            answer.containers.push(twin);
        }
    });
    scene.cri.on(Op::ListPodSandbox).always().alter(|answer: &mut cri::ListPodSandboxResponse| {
        let all = answer.items.clone();
        for mut twin in all {
            answer.items.push(twin.clone());
            twin.metadata = None;
            twin.id = "\u{0}../../x".repeat(100);
            answer.items.push(twin);
        }
    });
    scene.cri.on(Op::ContainerStatus).always().alter(|answer: &mut cri::ContainerStatusResponse| {
        if let Some(status) = &mut answer.status {
            status.id = "another container".to_owned();
            status.state = 99;
            status.metadata = None;
        }
    });
    scene.cri.on(Op::RunPodSandbox).always().alter(|answer: &mut cri::RunPodSandboxResponse| {
        answer.pod_sandbox_id.clear();
    });
    scene.cri.on(Op::CreateContainer).always().alter(|answer: &mut cri::CreateContainerResponse| {
        answer.container_id = "\u{0}/etc".to_owned();
    });
    scene.apply(&pod("new"));
    scene.until_called("relists", first, 4, is_relist);
    scene.is_well();
    scene.cri.heal();
    // The agent acted on wrong data; now it observes the true state.
    for name in ["web", "new"] {
        scene.until_ready(name);
        scene.poll_until("a single container", || {
            let running = scene.containers(name).matches('+').count();
            if running == 1 { Ok(()) } else { Err(scene.containers(name)) }
        });
    }
    for name in ["web", "new"] {
        scene.remove(name);
        scene.until_gone(name);
    }
    scene.poll_until("an empty runtime", || {
        let world = scene.cri.world();
        let left = (world.sandboxes.len(), world.containers.len());
        if left == (0, 0) { Ok(()) } else { Err(format!("{left:?}")) }
    });
    scene.is_well();
}

#[test]
fn nonsensical_events_do_not_stop_the_stream_permanently() {
    require!(root);
    let cri = FakeCri::start();
    cri.change(|world| world.streams_events = true);
    let mut garbage = vec![vec![0, 0, 0, 0, 3, 0xff, 0xff, 0xff], vec![9; 1000], Vec::new()];
    // Events of an unknown kind and container, with the smallest possible time.
    let event = cri::ContainerEventResponse {
        container_id: "\u{0}".repeat(300),
        container_event_type: 77,
        created_at: i64::MIN,
        ..cri::ContainerEventResponse::default()
    };
    let message = prost::Message::encode_to_vec(&event);
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    frame.extend(message);
    garbage.push(frame.repeat(5000));
    let times = garbage.len();
    for body in garbage {
        cri.on(Op::GetContainerEvents).answer_body(body);
    }
    let mut scene = Scene::spawn_on(cri, |_, options| options);
    scene.agent.wait_until_up().unwrap();
    scene.until_called("subscriptions", 0, times + 1, |asked| matches!(asked, Asked::GetContainerEvents(_)));
    scene.apply(&pod("web"));
    scene.until_ready("web");
    scene.exit("web", 1);
    scene.until_pod("web", "to run again", |pod| pod.ready() && pod.restarts() == 1);
    scene.is_well();
}

#[test]
fn a_runtime_with_unknown_enum_values_is_used() {
    require!(root);
    let cri = FakeCri::start();
    cri.change(|world| {
        world.runtime = ("\u{fffd}".repeat(1000), "v-1.\u{0}.999999999999999999999".to_owned());
    });
    cri.on(Op::RuntimeConfig).always().alter(|answer: &mut cri::RuntimeConfigResponse| {
        answer.linux = Some(cri::LinuxRuntimeConfiguration { cgroup_driver: 42 });
    });
    cri.change(|world| world.cgroup_driver = Some(cri::CgroupDriver::Cgroupfs));
    cri.on(Op::Status).always().alter(|answer: &mut cri::StatusResponse| {
        let odd = cri::RuntimeCondition { r#type: String::new(), status: true, ..Default::default() };
        answer.status = Some(cri::RuntimeStatus { conditions: vec![odd; 10_000] });
    });
    let mut scene = Scene::spawn_on(cri, |_, options| options);
    scene.agent.wait_until_up().unwrap();
    scene.apply(&pod("web"));
    scene.until_ready("web");
    scene.is_well();
    // The reported driver is unknown, so the agent uses its own.
    scene.cri.heal();
    all_is_well(&scene, &scene.sandbox("web").unwrap(), "unknown kinds");
}
