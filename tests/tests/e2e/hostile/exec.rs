//! Containers that attack the helper while its processes enter them (docs/decisions/0029-exec.md).

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use beelet_tests::agent::Options;
use beelet_tests::containerd::Containerd;
use beelet_tests::helper::{self, Helper};
use beelet_tests::workdir::{PATIENCE, unique, wait_for};
use beelet_tests::{manifests, require};
use serde_json::{Value, json};

use super::scene::{Allowance, Scene};
use crate::exec::{directly, leaves, probe_of, probed, processes};
use crate::node::{Node, as_installed};

/// Time for which a container attacks, with a command every second.
const ATTACKED: Duration = Duration::from_secs(10);

/// Starts a node with a helper and bystanders.
fn scene(change: impl FnOnce(Options) -> Options) -> (Scene, Helper) {
    let containerd = Containerd::start_for_test().unwrap();
    let helper = Helper::start(containerd.dir()).unwrap();
    let options = change(directly(Options::on(&containerd), &helper)).http().unwrap();
    let agent = beelet_tests::agent::Agent::start(as_installed(options)).unwrap();
    (Scene::on(Node { agent, containerd }), helper)
}

/// Returns the pod with a folder of the machine at `/hole`.
fn with_folder(mut pod: Value, folder: &std::path::Path) -> Value {
    pod["spec"]["volumes"] = json!([{ "name": "hole", "hostPath": { "path": folder } }]);
    manifests::with(pod, "volumeMounts", json!([{ "name": "hole", "mountPath": "/hole" }]))
}

/// Returns the capabilities that the watchers saw, and all other lines of their log.
fn judged(log: &str) -> (Vec<&str>, Vec<&str>) {
    log.lines().filter(|line| *line != "watching").partition(|line| line.starts_with("seen "))
}

#[test]
fn a_replaced_shell_that_executes_the_entering_program_gets_a_sealed_copy() {
    require!(containerd);
    let (scene, helper) = scene(|options| options);
    let hole = scene.node.agent.dir().join("hole");
    std::fs::create_dir_all(&hole).unwrap();
    let script = hole.join("sh");
    std::fs::write(&script, "#!/proc/self/exe\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = helper::binary().unwrap();
    let before = std::fs::read(&program).unwrap();
    // The copy of the helper takes the script's path for its socket, and stays until the probe's timeout.
    let mut pod = with_folder(probed("shell", &["/hole/sh"]), &hole);
    for (field, value) in [("timeoutSeconds", 3), ("periodSeconds", 600)] {
        pod["spec"]["containers"][0]["readinessProbe"][field] = json!(value);
    }
    // The container's own process looks for the helper's, and writes to its program.
    pod["spec"]["containers"][0]["command"] = json!(["/bin/testapp", "hurt", "watch", "/hole/log"]);
    // A dynamic program needs the machine's libraries.
    for (number, folder) in ["/lib64", "/lib/x86_64-linux-gnu"].iter().enumerate() {
        let Ok(path) = std::fs::canonicalize(folder) else { continue };
        let name = format!("lib{number}");
        let list = |list: &mut Value, one: Value| list.as_array_mut().unwrap().push(one);
        list(&mut pod["spec"]["volumes"], json!({ "name": name, "hostPath": { "path": path } }));
        let mounts = &mut pod["spec"]["containers"][0]["volumeMounts"];
        list(mounts, json!({ "name": name, "mountPath": folder, "readOnly": true }));
    }
    // Without this the copy, which is not dumpable, hides its program.
    let pod = manifests::with(pod, "securityContext", json!({ "capabilities": { "add": ["SYS_PTRACE"] } }));
    scene.node.apply(&pod);
    let probe = probe_of(&scene.node, "shell", |probe| !probe["last"].is_null());
    assert_eq!(probe["mode"], "direct", "{probe:#}");
    assert!(probe["last"]["detail"].as_str().unwrap().contains("timed out after 3 s"), "{probe:#}");
    std::thread::sleep(ATTACKED);
    let log = std::fs::read_to_string(hole.join("log")).unwrap();
    let (_, harm) = judged(&log);
    eprintln!("the container tried: {harm:#?}");
    assert!(harm.iter().any(|line| line.starts_with("program held")), "no attack took place: {log}");
    assert!(harm.iter().all(|line| !line.contains("written: Ok")), "{harm:?}");
    assert_eq!(std::fs::read(&program).unwrap(), before, "the helper's program on disk has changed");
    assert!(std::fs::metadata(format!("/proc/{}", helper.pid())).is_ok(), "the helper has ended");
    scene.node.apply(&probed("after", &["/bin/testapp", "probe", "ok"]));
    let after = probe_of(&scene.node, "after", |probe| probe["last"]["outcome"] == "success");
    assert_eq!(after["mode"], "direct");
    scene.end(&["shell", "after"], Allowance { cpu: ATTACKED / 2, ..Allowance::default() });
}

#[test]
fn a_container_that_may_trace_finds_only_its_own_identity_in_an_entering_process() {
    require!(containerd);
    let (scene, _helper) = scene(|options| options);
    let hole = scene.node.agent.dir().join("hole");
    std::fs::create_dir_all(&hole).unwrap();
    let watched = |name: &str, context: Value| {
        let folder = hole.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        let mut pod = with_folder(probed(name, &["/bin/testapp", "probe", "ok"]), &folder);
        pod["spec"]["containers"][0]["command"] = json!(["/bin/testapp", "hurt", "watch", "/hole/log"]);
        scene.node.apply(&manifests::with(pod, "securityContext", context));
    };
    watched("tracer", json!({ "capabilities": { "drop": ["ALL"], "add": ["SYS_PTRACE"] } }));
    watched(
        "user",
        json!({ "runAsUser": 1000, "capabilities": { "drop": ["ALL"] }, "allowPrivilegeEscalation": false }),
    );
    for name in ["tracer", "user"] {
        probe_of(&scene.node, name, |probe| {
            probe["mode"] == "direct" && probe["last"]["outcome"] == "success"
        });
    }
    std::thread::sleep(ATTACKED);
    let log = |name: &str| std::fs::read_to_string(hole.join(name).join("log")).unwrap();
    let (tracer, user) = (log("tracer"), log("user"));
    let (seen, harm) = judged(&tracer);
    eprintln!("tracer saw {} moments, e.g. {:?}; harm: {harm:?}", seen.len(), seen.first());
    // SYS_PTRACE alone: bit 19.
    let own = "permitted=0000000000080000 bounding=0000000000080000";
    assert!(seen.iter().all(|line| line.contains(own)), "{seen:?}");
    assert!(
        seen.iter().all(|line| !line.contains("\"/") || line.contains("/dev/null")),
        "a file is open: {seen:?}"
    );
    assert!(harm.iter().all(|line| !line.contains("written: Ok")), "{harm:?}");
    assert!(harm.iter().all(|line| !line.starts_with("environment")), "{harm:?}");
    let (seen, harm) = judged(&user);
    eprintln!("user saw {} moments, e.g. {:?}; harm: {harm:?}", seen.len(), seen.first());
    let own = "permitted=0000000000000000 bounding=0000000000000000";
    assert!(seen.iter().all(|line| line.contains(own)), "{seen:?}");
    assert!(!seen.is_empty(), "the user saw no process of the helper");
    assert_eq!(harm, Vec::<&str>::new(), "a process without SYS_PTRACE reached the helper's");
    scene.end(&["tracer", "user"], Allowance { cpu: ATTACKED / 2, ..Allowance::default() });
}

#[test]
fn a_working_directory_that_leads_out_of_the_container_is_refused() {
    require!(containerd);
    let (scene, _helper) = scene(|options| options);
    let hole = scene.node.agent.dir().join("hole");
    let targets = [
        "/proc/self/fd/3",
        "/proc/self/fd/7",
        "/proc/self/fd/9/../../..",
        "/proc/1/cwd",
        "/proc/thread-self/fd/4",
    ];
    for (number, target) in targets.iter().enumerate() {
        let (name, folder) = (format!("cwd{number}"), hole.join(number.to_string()));
        std::fs::create_dir_all(folder.join("work")).unwrap();
        let pod = with_folder(probed(&name, &["/bin/sh", "-c", "pwd -P; ls /proc/self/cwd/"]), &folder);
        // The folder is one when the container starts, and a link for every command.
        let replace = format!("cd /; rmdir /hole/work; ln -s {target} /hole/work; exec /bin/testapp pause");
        let mut pod = manifests::with(pod, "workingDir", json!("/hole/work"));
        pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", replace]);
        pod["spec"]["containers"][0]["readinessProbe"]["initialDelaySeconds"] = json!(2);
        scene.node.apply(&pod);
    }
    for (number, target) in targets.iter().enumerate() {
        let probe = probe_of(&scene.node, &format!("cwd{number}"), |probe| !probe["last"].is_null());
        let (outcome, detail) = (&probe["last"]["outcome"], probe["last"]["detail"].as_str().unwrap());
        eprintln!("{target}: {outcome} {detail:?} ({})", probe["mode"]);
        assert_eq!(probe["mode"], "direct", "{probe:#}");
        match outcome.as_str().unwrap() {
            "error" => assert!(detail.contains("working directory"), "{target}: {detail}"),
            // A link inside the container leads to a folder of the container.
            _ => assert!(detail.starts_with("/\n") && !detail.contains("work1"), "{target}: {detail}"),
        }
    }
    let names: Vec<String> = (0..targets.len()).map(|number| format!("cwd{number}")).collect();
    scene.end(
        &names.iter().map(String::as_str).collect::<Vec<_>>(),
        Allowance { cpu: ATTACKED, ..Allowance::default() },
    );
}

#[test]
fn commands_that_fork_without_end_or_leave_daemons_end_at_their_timeout() {
    require!(containerd);
    const LIMIT: usize = 100;
    let (scene, _helper) = scene(|options| options.kubelet("podPidsLimit", LIMIT));
    let words = ["never", "daemon", "bomb"].map(unique);
    let shout = (1 << 30).to_string();
    let bomb = format!("{}(){{ {0}|{0}& }};{0};sleep 1000", "b");
    let commands = [
        ("never", vec!["/bin/testapp", "hurt", "probe", "never", &words[0]]),
        ("shout", vec!["/bin/testapp", "hurt", "shout", &shout]),
        ("daemon", vec!["/bin/testapp", "hurt", "probe", "daemon", &words[1]]),
        ("bomb", vec!["/bin/sh", "-c", &bomb, &words[2]]),
        ("itself", vec!["/bin/testapp", "hurt", "bomb"]),
    ];
    for (name, command) in &commands {
        let mut pod = probed(name, command);
        pod["spec"]["containers"][0]["readinessProbe"]["timeoutSeconds"] = json!(2);
        pod["spec"]["containers"][0]["readinessProbe"]["periodSeconds"] = json!(2);
        scene.node.apply(&pod);
    }
    // A shell gives up when it can't fork any more.
    for name in ["never", "bomb", "itself"] {
        let probe = probe_of(&scene.node, name, |probe| !probe["last"].is_null());
        assert_eq!(
            (&probe["mode"], &probe["last"]["outcome"]),
            (&json!("direct"), &json!("failure")),
            "{probe:#}"
        );
    }
    let probe = probe_of(&scene.node, "shout", |probe| !probe["last"].is_null());
    assert!(probe["last"]["detail"].as_str().unwrap().len() <= 64 << 10, "the output has no bound");
    std::thread::sleep(ATTACKED);
    assert!(processes(&words[0]) <= 6, "{} processes of a probe that never ends", processes(&words[0]));
    assert!(processes(&words[1]) <= LIMIT);
    scene.another_comes_and_goes();
    scene.end(
        &["never", "shout", "daemon", "bomb", "itself"],
        Allowance { cpu: ATTACKED / 2, ..Allowance::default() },
    );
    assert_eq!(words.map(|word| processes(&word)), [0, 0, 0]);
    assert_eq!(leaves(&scene.node), Vec::<std::path::PathBuf>::new());
}

#[test]
fn files_of_the_container_that_never_end_do_not_hold_up_the_helper() {
    require!(containerd);
    let (scene, _helper) = scene(|options| options);
    let plant = "mkdir -p /etc; rm -f /etc/passwd; mkfifo /etc/passwd; ln -sf /dev/zero /bin/zero; exec /bin/testapp pause";
    let mut pod = probed("passwd", &["/bin/sh", "-c", "echo home $HOME"]);
    pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", plant]);
    pod["spec"]["containers"][0]["readinessProbe"]["initialDelaySeconds"] = json!(1);
    scene.node.apply(&pod);
    let probe = probe_of(&scene.node, "passwd", |probe| !probe["last"].is_null());
    assert_eq!(
        (&probe["mode"], &probe["last"]["detail"]),
        (&json!("direct"), &json!("home /\n")),
        "{probe:#}"
    );
    wait_for("the pod to be ready", PATIENCE, || {
        let pod = scene
            .node
            .agent
            .inspect(|watch| watch.pod("passwd").is_some_and(beelet_tests::pods::PodView::ready));
        if pod.unwrap() { Ok(()) } else { Err("not ready") }
    })
    .unwrap();
    scene.end(&["passwd"], Allowance::default());
}
