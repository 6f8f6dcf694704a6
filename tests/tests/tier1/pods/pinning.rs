//! Pods with CPUs and memory of their own: the shared pool, restarts of the agent, foreign state files,
//! NUMA nodes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use beelet_config::Config;
use beelet_pinning::machine::MachineTopology;
use beelet_policy::pinning::memory::Reservation;
use beelet_policy::pinning::{Cpu, CpuSet, memory::MemoryNode, topology::Node as NumaNode};
use beelet_units::quantity::Quantity;
use serde_json::{Value, json};

use super::node::{Node, Settings, View, container, pod, until_file, until_seen, with};

/// Two NUMA nodes with two CPUs each.
fn machine() -> MachineTopology {
    let cpu = |cpu: u32| Cpu { cpu, core: cpu, socket: cpu / 2, numa: cpu / 2, uncore: None };
    MachineTopology {
        cpus: (0..4).map(cpu).collect(),
        nodes: (0..2).map(|id| NumaNode { id, distances: None }).collect(),
        memory: (0..2).map(|id| MemoryNode { id, memory: 4 << 30, ..MemoryNode::default() }).collect(),
    }
}

/// The same with CPU 3 offline.
fn smaller() -> MachineTopology {
    let mut machine = machine();
    machine.cpus.truncate(3);
    machine
}

fn static_cpus(config: &mut Config) {
    config.pinning.cpus.policy = "static".to_owned();
    config.pinning.cpus.reserved = CpuSet::parse("0").unwrap();
    config.system_reserved.insert("cpu".to_owned(), Quantity::from_units(1));
}

fn one_node(config: &mut Config) {
    static_cpus(config);
    // The room of the node counts all four CPUs: only the pins have fewer.
    config.system_reserved.remove("cpu");
    config.pinning.topology.policy = "single-numa-node".to_owned();
}

fn static_memory(config: &mut Config) {
    static_cpus(config);
    config.pinning.memory.policy = "Static".to_owned();
    config.eviction.thresholds.clear();
    let amounts = [("memory".to_owned(), Quantity::from_units(1 << 30))];
    config.system_reserved.extend(amounts.clone());
    config.pinning.memory.reserved_memory = vec![Reservation { node: 0, limits: amounts.into() }];
}

/// True while CPU 3 is offline. Each test has its own process.
static OFFLINE: AtomicBool = AtomicBool::new(false);

fn changing() -> MachineTopology {
    if OFFLINE.load(Ordering::Relaxed) { smaller() } else { machine() }
}

fn quick_static_cpus(config: &mut Config) {
    static_cpus(config);
    config.pinning.reconcile_period = Duration::from_millis(200);
}

fn resizable(config: &mut Config) {
    static_cpus(config);
    config.pinning.gates.resize_exclusive_cpus = true;
}

fn settings(configure: fn(&mut Config)) -> Settings {
    Settings { topology: Some(machine), configure, ..Settings::default() }
}

/// A Guaranteed pod with this number of CPUs.
fn guaranteed(name: &str, cpus: &str) -> Value {
    let amounts = json!({"cpu": cpus, "memory": "64Mi"});
    let mut main = container("main");
    main["resources"] = json!({"requests": amounts, "limits": amounts});
    with(pod(name), "containers", json!([main]))
}

/// The CPUs and the memory nodes that a container was created with, and its CPU quota.
fn created(node: &Node, pod: &str) -> (String, String, i64) {
    let config = node.cri.container(&format!("{pod}-n1"), "main").unwrap().config;
    let resources = config.linux.unwrap().resources.unwrap();
    (resources.cpuset_cpus, resources.cpuset_mems, resources.cpu_quota)
}

/// Waits until the runtime was last asked to give a container these CPUs.
async fn until_cpus(node: &Node, pod: &str, expected: &str) {
    until_seen(&format!("{pod} on the CPUs {expected}"), || {
        let container = node.cri.container(&format!("{pod}-n1"), "main").ok_or("no container")?;
        let cpus = container.resources.map(|resources| resources.cpuset_cpus).unwrap_or_default();
        if cpus == expected { Ok(()) } else { Err("other CPUs") }
    })
    .await;
}

fn reason(pod: &View) -> (String, String) {
    let status = pod.0.pod.status.clone().unwrap_or_default();
    (status.reason.unwrap_or_default(), status.message.unwrap_or_default())
}

fn held(node: &Node, pod: &View) -> String {
    let held = node.handles().pinning.held_by(&pod.uid());
    held.values().flat_map(|held| held.cpus.iter().copied()).collect::<CpuSet>().to_string()
}

#[tokio::test]
async fn a_guaranteed_pod_has_cpus_for_itself_and_the_shared_pool_shrinks_and_comes_back() {
    let node = Node::with_settings(settings(static_cpus), &[pod("web")]).await;
    node.until_ready("web").await;
    assert_eq!(created(&node, "web"), ("0-3".to_owned(), String::new(), 0));
    until_cpus(&node, "web", "0-3").await;

    node.apply(&guaranteed("fast", "2"));
    let fast = node.until_ready("fast").await;
    let (cpus, mems, quota) = created(&node, "fast");
    assert_eq!(
        (cpus.as_str(), mems.as_str(), quota),
        ("2-3", "", -1),
        "CPUs of a single NUMA node without a quota"
    );
    until_file(node.path(&format!("cgroup/cpu/kubepods/pod{}/cpu.cfs_quota_us", fast.uid())), "-1").await;
    until_cpus(&node, "web", "0-1").await;
    assert_eq!(held(&node, &fast), "2-3");
    let file = std::fs::read_to_string(node.path("kubelet/cpu_manager_state")).unwrap();
    let expected = format!(r#""entries":{{"{}":{{"main":"2-3"}}}}"#, fast.uid());
    assert!(
        file.contains(r#""policyName":"static","defaultCpuSet":"0-1""#) && file.contains(&expected),
        "{file}"
    );
    let allocatable = node.handles().pinning.allocatable();
    assert_eq!(allocatable.cpus, [1, 2, 3], "CPU 0 is reserved");

    node.remove("fast");
    node.until_gone("fast").await;
    until_cpus(&node, "web", "0-3").await;
}

#[tokio::test]
async fn fractions_of_cpus_and_burstable_pods_stay_in_the_shared_pool() {
    let half = guaranteed("half", "1500m");
    let mut burstable = guaranteed("burstable", "1");
    burstable["spec"]["containers"][0]["resources"]["limits"]["memory"] = json!("128Mi");
    let node = Node::with_settings(settings(static_cpus), &[half, burstable]).await;
    for name in ["half", "burstable"] {
        let pod = node.until_ready(name).await;
        assert_eq!(held(&node, &pod), "");
        assert!(created(&node, name).2 > 0, "{name} keeps its quota");
    }
    assert_eq!(node.handles().pinning.cpus(), (String::new(), "0-3".to_owned()));
}

#[tokio::test]
async fn without_a_policy_no_container_gets_a_cpuset() {
    let node = Node::with(&[guaranteed("web", "2")]).await;
    node.until_ready("web").await;
    let (cpus, mems, quota) = created(&node, "web");
    assert_eq!((cpus.as_str(), mems.as_str(), quota), ("", "", 200_000));
    assert!(!node.path("kubelet/cpu_manager_state").exists());
}

#[tokio::test]
async fn pods_keep_their_cpus_over_restarts_and_kills_of_the_agent() {
    let mut node = Node::with_settings(settings(static_cpus), &[guaranteed("fast", "1"), pod("web")]).await;
    let fast = node.until_ready("fast").await;
    node.until_ready("web").await;
    let before = held(&node, &fast);
    for _ in 0..3 {
        node.kill_and_start().await;
        let again = node.until_ready("fast").await;
        node.until_relisted().await;
        assert_eq!((held(&node, &again), again.uid()), (before.clone(), fast.uid()));
    }
    assert_eq!(node.containers("fast"), "main/0+");
    // A second pod gets CPUs that are left.
    node.apply(&guaranteed("second", "2"));
    let second = node.until_ready("second").await;
    let own = CpuSet::parse(&held(&node, &second)).unwrap();
    assert!(own.len() == 2 && own.common(&CpuSet::parse(&before).unwrap()) == 0 && !own.contains(0), "{own}");
}

#[tokio::test]
async fn a_changed_policy_or_machine_keeps_no_agent_from_starting() {
    let mut node = Node::with_settings(settings(static_cpus), &[guaranteed("fast", "2")]).await;
    let fast = node.until_ready("fast").await;
    assert_eq!(held(&node, &fast), "2-3");
    // A CPU of the pod goes offline while the agent is away.
    node.kill().await;
    node.settings.topology = Some(smaller);
    node.start().await;
    node.until_ready("fast").await;
    let said = |node: &Node, reason: &str| node.events().iter().any(|event| event.starts_with(reason));
    until_seen("the event of the pod", || if said(&node, "PinsLost: ") { Ok(()) } else { Err("none") }).await;
    assert!(said(&node, "CPUStateChanged: "), "{:?}", node.events());
    assert_eq!((node.containers("fast").as_str(), held(&node, &fast)), ("main/0+", String::new()));
    // The policy is switched off, and on again.
    node.kill().await;
    node.settings = Settings::default();
    node.start().await;
    node.until_ready("fast").await;
    assert!(said(&node, "PinningSwitchedOff: "), "{:?}", node.events());
    node.kill().await;
    node.settings = settings(static_cpus);
    node.start().await;
    node.until_ready("fast").await;
    assert_eq!(node.containers("fast"), "main/0+");
    node.apply(&guaranteed("other", "1"));
    let other = node.until_ready("other").await;
    assert_eq!(CpuSet::parse(&held(&node, &other)).unwrap().len(), 1);
}

#[tokio::test]
async fn cpus_that_go_offline_and_come_back_are_followed_by_a_running_agent() {
    let settings = Settings { topology: Some(changing), ..settings(quick_static_cpus) };
    let node = Node::with_settings(settings, &[pod("web"), guaranteed("fast", "2")]).await;
    let fast = node.until_ready("fast").await;
    node.apply(&guaranteed("small", "1"));
    let small = node.until_ready("small").await;
    assert_eq!((held(&node, &fast).as_str(), held(&node, &small).as_str()), ("2-3", "1"));
    until_cpus(&node, "web", "0").await;
    OFFLINE.store(true, Ordering::Relaxed);
    until_cpus(&node, "web", "0,2").await;
    until_cpus(&node, "fast", "0,2").await;
    assert_eq!((held(&node, &fast).as_str(), held(&node, &small).as_str()), ("", "1"));
    OFFLINE.store(false, Ordering::Relaxed);
    until_cpus(&node, "web", "0,2-3").await;
    assert_eq!(held(&node, &small), "1");
    // No container was restarted.
    assert_eq!(
        (node.containers("fast"), node.containers("small")),
        ("main/0+".to_owned(), "main/0+".to_owned())
    );
}

#[tokio::test]
async fn running_containers_keep_the_cpus_of_their_cgroups_if_the_state_is_lost() {
    let mut node = Node::with_settings(settings(static_cpus), &[pod("web"), guaranteed("fast", "2")]).await;
    let fast = node.until_ready("fast").await;
    until_cpus(&node, "web", "0-1").await;
    node.kill().await;
    // The runtime is a fake, so the test creates the container's cgroup.
    let id = node.cri.container("fast-n1", "main").unwrap().id;
    for (controller, file) in [("cpu", "cpu.shares"), ("cpuset", "cpuset.cpus")] {
        let cgroup = node.path(&format!("cgroup/{controller}/kubepods/pod{}/{id}", fast.uid()));
        std::fs::create_dir_all(&cgroup).unwrap();
        std::fs::write(cgroup.join(file), "2-3").unwrap();
    }
    let state = node.path("kubelet/cpu_manager_state");
    std::fs::remove_file(&state).unwrap();
    node.start().await;
    node.until_ready("fast").await;
    let expected = format!(r#""entries":{{"{}":{{"main":"2-3"}}}}"#, fast.uid());
    until_seen("the CPUs in the new state file", || {
        let text = std::fs::read_to_string(&state).map_err(|error| error.to_string())?;
        if text.contains(&expected) { Ok(()) } else { Err(text) }
    })
    .await;
    assert_eq!((held(&node, &fast).as_str(), node.containers("fast").as_str()), ("2-3", "main/0+"));
    until_cpus(&node, "web", "0-1").await;
    until_cpus(&node, "fast", "2-3").await;
}

#[tokio::test]
async fn a_pod_that_no_numa_node_can_have_is_refused_with_the_reason_and_tried_again_when_cpus_are_free() {
    let node = Node::with_settings(settings(one_node), &[guaranteed("first", "2")]).await;
    let first = node.until_ready("first").await;
    assert_eq!(held(&node, &first), "2-3");
    node.apply(&guaranteed("second", "2"));
    let is_refused = |pod: &View| reason(pod).0 == "TopologyAffinityError";
    let second = node.until_pod("second", "to be refused", is_refused).await;
    let message = reason(&second).1;
    let words =
        ["Resources cannot be allocated with Topology locality", "container main", "cpu", "node 0 1 CPUs"];
    for word in words {
        assert!(message.contains(word), "{word}: {message}");
    }
    node.remove("first");
    let second = node.until_ready("second").await;
    assert_eq!(held(&node, &second), "2-3");
}

#[tokio::test]
async fn memory_comes_from_a_numa_node_and_is_given_back() {
    let node = Node::with_settings(settings(static_memory), &[guaranteed("fast", "2")]).await;
    let fast = node.until_ready("fast").await;
    let (_, mems, _) = created(&node, "fast");
    let held = node.handles().pinning.held_by(&fast.uid());
    let block = &held["main"].memory[0];
    assert_eq!((block.resource.as_str(), block.size, block.nodes.len()), ("memory", 64 << 20, 1));
    assert_eq!(mems, block.nodes[0].to_string());
    let file = node.path("kubelet/memory_manager_state");
    assert!(std::fs::read_to_string(&file).unwrap().contains(&fast.uid()));
    node.remove("fast");
    node.until_gone("fast").await;
    until_seen("the memory given back", || {
        let text = std::fs::read_to_string(&file).map_err(|error| error.to_string())?;
        if text.contains(&fast.uid()) { Err("the pod is in the file".to_owned()) } else { Ok(()) }
    })
    .await;
}

#[tokio::test]
async fn a_pinned_pod_grows_and_shrinks_without_a_restart_where_the_gate_is_on() {
    let mut node = Node::with_settings(settings(resizable), &[pod("web"), guaranteed("fast", "1")]).await;
    let fast = node.until_ready("fast").await;
    let first = held(&node, &fast);
    node.apply(&guaranteed("fast", "3"));
    until_cpus(&node, "fast", "1-3").await;
    until_cpus(&node, "web", "0").await;
    node.kill_and_start().await;
    let again = node.until_ready("fast").await;
    assert_eq!((held(&node, &again).as_str(), again.uid()), ("1-3", fast.uid()));
    node.apply(&guaranteed("fast", "2"));
    until_cpus(&node, "web", "0-1").await;
    until_cpus(&node, "fast", "2-3").await;
    assert!(CpuSet::parse("1-3").unwrap().common(&CpuSet::parse(&first).unwrap()) == 1, "{first}");
    // A pod that grows waits until another one gives its CPUs back.
    node.apply(&guaranteed("other", "1"));
    node.until_ready("other").await;
    node.apply(&guaranteed("fast", "3"));
    let is_deferred = |pod: &View| {
        let conditions = pod.0.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|one| one.reason.as_deref() == Some("Deferred"))
    };
    node.until_pod("fast", "to wait for CPUs", is_deferred).await;
    assert_eq!(held(&node, &again), "2-3");
    node.remove("other");
    until_cpus(&node, "fast", "1-3").await;
    assert_eq!(node.containers("fast"), "main/0+", "no restart");
}

#[tokio::test]
async fn a_container_does_not_change_between_exclusive_and_shared_cpus_while_it_runs() {
    let node = Node::with_settings(settings(resizable), &[guaranteed("fast", "1")]).await;
    let fast = node.until_ready("fast").await;
    node.apply(&guaranteed("fast", "1500m"));
    let is_refused = |pod: &View| {
        let conditions = pod.0.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|one| one.reason.as_deref() == Some("Infeasible"))
    };
    let pod = node.until_pod("fast", "to say why it is not resized", is_refused).await;
    assert_eq!((pod.uid(), CpuSet::parse(&held(&node, &pod)).unwrap().len()), (fast.uid(), 1));
}

#[tokio::test]
async fn a_pinned_pod_is_not_resized_while_it_runs() {
    let node = Node::with_settings(settings(static_cpus), &[guaranteed("fast", "1")]).await;
    let fast = node.until_ready("fast").await;
    node.apply(&guaranteed("fast", "2"));
    let message = "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"";
    let is_refused = |pod: &View| {
        let conditions = pod.0.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|one| one.message.as_deref() == Some(message))
    };
    let pod = node.until_pod("fast", "to say why it is not resized", is_refused).await;
    assert_eq!((pod.uid(), CpuSet::parse(&held(&node, &pod)).unwrap().len()), (fast.uid(), 1));
}
