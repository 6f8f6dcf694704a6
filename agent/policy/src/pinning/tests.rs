//! Random schedules: pods are admitted, start containers, are resized and removed, and the agent restarts,
//! with or without its state file, in any order.
//! No CPU is in two exclusive sets, no reserved CPU is in one, and everything becomes free again.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    cpus::{CpuManager, CpuSettings},
    memory::{MemoryManager, MemoryNode, MemorySettings, Reservation},
    needs::Kind,
    pins::Alignment,
    topology::{Node, TopologyManager, TopologySettings},
    *,
};
use beelet_units::quantity::Quantity;

const PODS: usize = 6;
const GIB: u64 = 1 << 30;
const HUGE: &str = "hugepages-2Mi";

/// A machine and its configuration.
#[derive(Debug, Clone)]
struct Setup {
    sockets: u32,
    nodes: u32,
    cores: u32,
    threads: u32,
    /// True if sibling CPUs have consecutive numbers.
    adjacent: bool,
    options: u8,
    topology: usize,
    scope: usize,
    pod_level: bool,
}

#[derive(Debug, Clone)]
enum Event {
    Admit {
        pod: usize,
        spec: Spec,
    },
    Remove {
        pod: usize,
    },
    Resize {
        pod: usize,
        apps: Vec<u32>,
    },
    /// The agent starts without the state file of the CPUs, and containers run on.
    Lost,
    Start {
        pod: usize,
        container: usize,
    },
    Restart,
}

/// A pod: containers by CPUs (zero: half a CPU) and GiB of memory; those before `apps` are init containers.
#[derive(Debug, Clone)]
struct Spec {
    inits: Vec<(u32, u64, bool)>,
    apps: Vec<(u32, u64)>,
    of_pod: Option<(u32, u64)>,
    huge: bool,
}

fn setup() -> impl Strategy<Value = Setup> {
    let shape = (1_u32..3, 1_u32..4, 1_u32..5, 1_u32..3, any::<bool>());
    (shape, any::<u8>(), 0_usize..4, 0_usize..2, any::<bool>()).prop_map(
        |((sockets, nodes, cores, threads, adjacent), options, topology, scope, pod_level)| Setup {
            sockets,
            nodes,
            cores,
            threads,
            adjacent,
            options,
            topology,
            scope,
            pod_level,
        },
    )
}

fn spec() -> impl Strategy<Value = Spec> {
    let inits = prop::collection::vec((0_u32..4, 1_u64..3, any::<bool>()), 0..3);
    let apps = prop::collection::vec((0_u32..6, 1_u64..5), 1..4);
    let of_pod = prop::option::weighted(0.3, (1_u32..12, 1_u64..8));
    (inits, apps, of_pod, any::<bool>()).prop_map(|(inits, apps, of_pod, huge)| Spec {
        inits,
        apps,
        of_pod,
        huge,
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => (0..PODS, spec()).prop_map(|(pod, spec)| Event::Admit { pod, spec }),
        2 => (0..PODS).prop_map(|pod| Event::Remove { pod }),
        2 => (0..PODS, prop::collection::vec(0_u32..6, 3))
            .prop_map(|(pod, apps)| Event::Resize { pod, apps }),
        1 => Just(Event::Lost),
        2 => (0..PODS, 0_usize..6).prop_map(|(pod, container)| Event::Start { pod, container }),
        1 => Just(Event::Restart),
    ]
}

fn resources(cpus: u32, memory: u64, huge: bool) -> Value {
    let cpus = if cpus == 0 { "500m".to_owned() } else { cpus.to_string() };
    let mut list = json!({"cpu": cpus, "memory": format!("{memory}Gi")});
    if huge {
        list[HUGE] = json!("256Mi");
    }
    json!({"requests": list, "limits": list})
}

impl Spec {
    fn pod(&self, number: usize) -> Pod {
        let inits = self.inits.iter().zip(0..).map(|((cpus, memory, sidecar), i)| {
            let policy = if *sidecar { json!("Always") } else { Value::Null };
            json!({"name": format!("i{i}"), "restartPolicy": policy, "resources": resources(*cpus, *memory, false)})
        });
        let apps = self.apps.iter().zip(0..).map(|((cpus, memory), i)| {
            // A container of a pod with pod-level resources may have none of its own.
            match self.of_pod.is_some() && *cpus == 0 {
                true => json!({"name": format!("c{i}")}),
                false => json!({"name": format!("c{i}"), "resources": resources(*cpus, *memory, self.huge && i == 0)}),
            }
        });
        let mut pod = json!({"metadata": {"name": format!("p{number}"), "uid": format!("uid-{number}")},
            "spec": {"initContainers": inits.collect::<Vec<_>>(), "containers": apps.collect::<Vec<_>>()}});
        if let Some((cpus, memory)) = self.of_pod {
            pod["spec"]["resources"] = resources(cpus, memory, false);
        }
        serde_json::from_value(pod).unwrap()
    }
}

impl Setup {
    fn gates(&self) -> Gates {
        Gates { cpu_alpha_options: true, pod_level_managers: self.pod_level, ..Gates::default() }
    }

    fn cpus(&self) -> Vec<Cpu> {
        let cores = self.sockets * self.nodes * self.cores;
        let cpu = |core: u32, thread: u32| Cpu {
            cpu: if self.adjacent { core * self.threads + thread } else { thread * cores + core },
            core: core % self.cores,
            socket: core / (self.nodes * self.cores),
            numa: core / self.cores,
            uncore: Some(core / self.cores.div_ceil(2)),
        };
        (0..cores).flat_map(|core| (0..self.threads).map(move |thread| cpu(core, thread))).collect()
    }

    fn options(&self) -> BTreeMap<String, String> {
        let names = [
            "full-pcpus-only",
            "distribute-cpus-across-numa",
            "align-by-socket",
            "distribute-cpus-across-cores",
            "strict-cpu-reservation",
            "prefer-align-cpus-by-uncorecache",
        ];
        let chosen = names.iter().enumerate().filter(|(bit, _)| self.options >> bit & 1 == 1);
        chosen.map(|(_, name)| ((*name).to_owned(), "true".to_owned())).collect()
    }

    /// Returns the managers before their start; None if the options exclude each other.
    fn pins(&self) -> Option<Pins> {
        let nodes: Vec<u32> = (0..self.sockets * self.nodes).collect();
        let policy = ["none", "best-effort", "restricted", "single-numa-node"][self.topology];
        let scope = ["container", "pod"][self.scope];
        let settings =
            TopologySettings { policy: policy.into(), scope: scope.into(), options: BTreeMap::new() };
        let node = |id: &u32| Node { id: *id, distances: None };
        let topology = TopologyManager::new(&settings, &nodes.iter().map(node).collect::<Vec<_>>()).unwrap();
        let machine = Arc::new(CpuTopology::new(&self.cpus()).unwrap());
        let settings = CpuSettings {
            policy: "static".into(),
            options: self.options(),
            reserved: CpuSet::default(),
            amount: Some(Quantity::from_millis(900)),
        };
        let cpus = CpuManager::new(&settings, &machine, topology.policy(), self.gates()).ok()?;
        let gibibytes = |count: u64| Quantity::from_units(i64::try_from(count * GIB).unwrap());
        let reserved: BTreeMap<String, Quantity> = BTreeMap::from([("memory".into(), gibibytes(1))]);
        let settings = MemorySettings {
            policy: "Static".into(),
            reserved_memory: vec![Reservation { node: 0, limits: reserved.clone() }],
            reserved,
        };
        let node =
            |id: &u32| MemoryNode { id: *id, memory: 8 * GIB, huge_pages: BTreeMap::from([(2 << 20, 256)]) };
        let nodes: Vec<MemoryNode> = nodes.iter().map(node).collect();
        let memory = MemoryManager::new(&settings, &nodes, self.gates()).unwrap();
        Some(Pins { topology, cpus, memory })
    }

    fn start(&self, files: Option<(String, String)>) -> Option<Pins> {
        let mut pins = self.pins()?;
        let (cpus, memory) = files.as_ref().map(|(cpus, memory)| (cpus.as_str(), memory.as_str())).unzip();
        pins.cpus.start(cpus).unwrap();
        pins.memory.start(memory).unwrap();
        Some(pins)
    }
}

/// Checks the invariants.
fn check(pins: &Pins, pods: &BTreeMap<usize, Needs>, setup: &Setup) {
    let state = pins.cpus.state();
    let all: CpuSet = setup.cpus().iter().map(|cpu| cpu.cpu).collect();
    let reserved = all.difference(&pins.cpus.allocatable());
    let mut taken = CpuSet::default();
    for (uid, containers) in &state.containers {
        let needs = pods.values().find(|needs| needs.uid == *uid).expect("a pod that is not there has CPUs");
        let mut of_pod = state.pods.get(uid).cloned().unwrap_or_default();
        let mut exclusive = CpuSet::default();
        for (name, cpus) in containers {
            let container = needs.containers.iter().find(|container| container.name == *name).unwrap();
            assert!(!cpus.is_empty(), "{uid} {name} runs nowhere");
            if container.cpus > 0 {
                assert_eq!(cpus.len(), container.cpus, "{uid} {name}");
                if container.kind != Kind::Init {
                    assert_eq!(exclusive.common(cpus), 0, "{uid} {name} shares CPUs that are exclusive");
                    exclusive = exclusive.union(cpus);
                }
            }
            match state.pods.get(uid) {
                Some(of_pod) => assert!(cpus.is_subset(of_pod), "{uid} {name} has CPUs outside its pod"),
                None => of_pod = of_pod.union(cpus),
            }
        }
        assert_eq!(taken.common(&of_pod), 0, "{uid} has CPUs of another pod");
        taken = taken.union(&of_pod);
    }
    assert_eq!(taken.common(&reserved), 0, "reserved CPUs are given away");
    assert_eq!(taken.common(&state.shared), 0, "exclusive CPUs are shared");
    let strict = setup.options().contains_key("strict-cpu-reservation");
    let expected = if strict { pins.cpus.allocatable() } else { all };
    assert_eq!(taken.union(&state.shared), expected, "CPUs are lost");

    let memory = pins.memory.state();
    for (number, node) in &memory.ledger.nodes {
        for (resource, table) in &node.tables {
            assert_eq!(table.free + table.reserved, table.allocatable, "node {number} {resource}");
        }
    }
    for resource in ["memory", HUGE] {
        let given: u64 = memory.ledger.nodes.values().map(|node| node.tables[resource].reserved).sum();
        let sum = |blocks: &Vec<memory::ledger::Block>| -> u64 {
            blocks.iter().filter(|block| block.resource == resource).map(|block| block.size).sum()
        };
        let of_pods: u64 = memory.pods.values().map(sum).sum();
        let others = memory.containers.iter().filter(|(uid, _)| !memory.pods.contains_key(*uid));
        let of_containers: u64 = others.flat_map(|(_, containers)| containers.values()).map(sum).sum();
        assert_eq!(given, of_pods + of_containers, "{resource} is lost, or given away twice");
    }
}

fn admit(pins: &mut Pins, needs: &Needs) -> bool {
    let admitted = pins.admit(needs, &mut (), &mut Alignment::default()).is_ok();
    if !admitted {
        pins.release(&needs.uid);
    }
    admitted
}

/// Resizes a pod; a refused resize changes nothing.
fn resize(pins: &mut Pins, needs: &mut Needs, spec: &mut Spec, apps: &[u32], (pod, setup): (usize, &Setup)) {
    let mut new = spec.clone();
    new.apps.iter_mut().zip(apps).for_each(|((cpus, _), wanted)| *cpus = *wanted);
    let wanted = Needs::read(&new.pod(pod), setup.gates()).unwrap();
    let before = pins.cpus.state().clone();
    match pins.resize(&wanted, needs) {
        Ok(()) => {
            assert!(pins.holds(&wanted), "a resized pod lacks something");
            for container in &wanted.containers {
                let of =
                    |state: &cpus::CpuState| state.containers.get(&wanted.uid)?.get(&container.name).cloned();
                let Some((old, new)) = of(&before).zip(of(pins.cpus.state())) else { continue };
                assert_eq!(old.common(&new), old.len().min(new.len()), "{} moved", container.name);
            }
            (*needs, *spec) = (wanted, new);
        }
        Err(_) => assert_eq!(*pins.cpus.state(), before),
    }
}

/// Loses the state of the CPUs, and gives the containers back the CPUs that they run on.
fn reclaim(pins: &mut Pins, pods: &BTreeMap<usize, Needs>, setup: &Setup) {
    let running = std::mem::replace(&mut pins.cpus, setup.start(None).unwrap().cpus);
    for needs in pods.values() {
        for container in needs.containers.iter().filter(|container| container.kind != Kind::Init) {
            if let Some(cpus) = running.of(&needs.uid, &container.name) {
                cpus::reclaim::reclaim(&mut pins.cpus, needs, &container.name, cpus);
            }
        }
    }
}

fn play(setup: &Setup, events: Vec<Event>) {
    let Some(mut pins) = setup.start(None) else { return };
    let fresh = pins.clone();
    let (mut pods, mut specs) = (BTreeMap::new(), BTreeMap::new());
    for event in events {
        match event {
            Event::Admit { pod, spec } if !pods.contains_key(&pod) => {
                let needs = Needs::read(&spec.pod(pod), setup.gates()).unwrap();
                if admit(&mut pins, &needs) {
                    assert!(pins.holds(&needs), "an admitted pod lacks something");
                    pods.insert(pod, needs);
                    specs.insert(pod, spec);
                }
            }
            Event::Admit { .. } => {}
            Event::Remove { pod } => {
                if let Some(needs) = pods.remove(&pod) {
                    pins.release(&needs.uid);
                }
            }
            Event::Start { pod, container } => {
                if let Some(needs) = pods.get(&pod)
                    && let Some(container) = needs.containers.get(container)
                {
                    pins.container_starts(needs, &container.name);
                }
            }
            Event::Resize { pod, apps } => {
                if let (Some(needs), Some(spec)) = (pods.get_mut(&pod), specs.get_mut(&pod)) {
                    resize(&mut pins, needs, spec, &apps, (pod, setup));
                }
            }
            Event::Lost => {
                reclaim(&mut pins, &pods, setup);
                check(&pins, &pods, setup);
                pods.retain(|_, needs| {
                    let holds = pins.holds(needs);
                    if !holds {
                        pins.release(&needs.uid);
                    }
                    holds
                });
            }
            // Like the kubelet, the agent cannot start again once strict reservation has left no shared CPU.
            Event::Restart if pins.cpus.state().shared.is_empty() => {}
            Event::Restart => {
                let before = pins.cpus.state().clone();
                pins = setup.start(Some((pins.cpus.file(), pins.memory.file()))).unwrap();
                assert_eq!(*pins.cpus.state(), before, "the state file says something else");
                pods.retain(|_, needs| {
                    assert!(pins.holds(needs), "a pod that runs has lost something");
                    admit(&mut pins, needs)
                });
            }
        }
        check(&pins, &pods, setup);
    }
    pods.values().for_each(|needs| pins.release(&needs.uid));
    assert_eq!(pins.cpus.state(), fresh.cpus.state());
    assert_eq!(pins.memory.state(), fresh.memory.state());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn pinning_assigns_nothing_twice_and_frees_everything(
        setup in setup(),
        events in prop::collection::vec(event(), 0..30),
    ) {
        play(&setup, events);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    /// Admissions of several pods are under way at a time: plugins are asked between two containers of a pod.
    #[test]
    fn pinning_serves_pods_in_turns(setup in setup(), specs in prop::collection::vec(spec(), 2..4)) {
        let Some(mut pins) = setup.start(None) else { return Ok(()) };
        let read = |(number, spec): (usize, Spec)| Needs::read(&spec.pod(number), setup.gates()).unwrap();
        let mut pods: BTreeMap<usize, Needs> =
            specs.into_iter().enumerate().map(read).enumerate().collect();
        let longest = pods.values().map(|needs| needs.containers.len()).max().unwrap_or(0);
        for turn in 0..longest {
            let mut refused = Vec::new();
            for (number, needs) in &pods {
                let Some(container) = needs.containers.get(turn) else { continue };
                if pins.is_per_pod() && turn > 0 {
                    continue;
                }
                let admitted =
                    pins.admit_next(needs, &container.name, &mut (), &mut Alignment::default());
                if admitted.is_err() {
                    pins.release(&needs.uid);
                    refused.push(*number);
                }
            }
            pods.retain(|number, _| !refused.contains(number));
            check(&pins, &pods, &setup);
        }
        for needs in pods.values() {
            prop_assert!(pins.holds(needs), "an admitted pod lacks something");
        }
    }

    /// With any change between two starts, nothing is given twice, and a pod keeps all that it had or is
    /// lost.
    #[test]
    fn pinning_starts_with_the_state_of_other_settings(
        before in setup(),
        after in setup(),
        specs in prop::collection::vec(spec(), 1..PODS),
    ) {
        let after = Setup { pod_level: before.pod_level, ..after };
        let (Some(mut old), Some(mut new)) = (before.start(None), after.pins()) else { return Ok(()) };
        let mut pods: BTreeMap<usize, Needs> = BTreeMap::new();
        for (number, spec) in specs.into_iter().enumerate() {
            let needs = Needs::read(&spec.pod(number), before.gates()).unwrap();
            if admit(&mut old, &needs) {
                pods.insert(number, needs);
            }
        }
        let lost = cpus::restart::recover(&mut new.cpus, &old.cpus.file()).unwrap();
        let lost_memory = memory::restart::recover(&mut new.memory, &old.memory.file()).unwrap();
        check(&new, &pods, &after);
        for needs in pods.values() {
            let of = |pins: &Pins| pins.cpus.state().containers.get(&needs.uid).cloned();
            let expected = of(&old).filter(|_| !lost.contains(&needs.uid));
            prop_assert_eq!(of(&new), expected);
            let of = |pins: &Pins| pins.memory.state().containers.get(&needs.uid).cloned();
            let expected = of(&old).filter(|_| !lost_memory.contains(&needs.uid));
            prop_assert_eq!(of(&new), expected);
        }
    }

    #[test]
    fn pinning_rejects_foreign_state_files(file in "\\PC{0,200}", setup in setup()) {
        if let Some(mut pins) = setup.pins() {
            prop_assert!(pins.cpus.start(Some(&file)).is_err());
            prop_assert!(pins.memory.start(Some(&file)).is_err());
        }
    }
}

#[test]
fn pinning_refusals_name_who_could_not_agree_and_what_is_free() {
    let setup = Setup {
        sockets: 1,
        nodes: 2,
        cores: 2,
        threads: 1,
        adjacent: true,
        options: 0,
        topology: 3,
        scope: 0,
        pod_level: false,
    };
    let mut pins = setup.start(None).unwrap();
    let spec = Spec { inits: Vec::new(), apps: vec![(3, 1)], of_pod: None, huge: false };
    let needs = Needs::read(&spec.pod(0), setup.gates()).unwrap();
    let mut alignment = Alignment::default();
    let refusal = pins.admit(&needs, &mut (), &mut alignment).unwrap_err();
    assert_eq!(refusal.reason, Reason::TopologyAffinity);
    let (name, hints) = alignment.hints.last().unwrap();
    assert_eq!(
        explain::disagreement(&pins, name, hints),
        "container c0: cpu could not be aligned; cpu: on node 0-1; memory: on node 0 or 1; \
         free: node 0 1 CPUs, 512Mi hugepages-2Mi, 6656Mi memory; node 1 2 CPUs, 512Mi hugepages-2Mi, 7680Mi memory"
    );
}

#[test]
fn pinning_keeps_a_pod_whose_pod_level_entry_is_empty() {
    let setup = Setup {
        sockets: 1,
        nodes: 2,
        cores: 4,
        threads: 1,
        adjacent: true,
        options: 0,
        topology: 0,
        scope: 0,
        pod_level: true,
    };
    let mut old = setup.start(None).unwrap();
    let spec = Spec { inits: Vec::new(), apps: vec![(1, 1)], of_pod: None, huge: false };
    let needs = Needs::read(&spec.pod(0), setup.gates()).unwrap();
    assert!(admit(&mut old, &needs));
    let mut state = old.memory.state().clone();
    state.pods.insert(needs.uid.clone(), Vec::new());
    let mut new = setup.pins().unwrap();
    let lost = memory::restart::recover(&mut new.memory, &state.write("Static", true)).unwrap();
    assert_eq!(lost, <[String; 0]>::default());
    assert_eq!(new.memory.state().containers, old.memory.state().containers);
    assert_eq!(new.memory.state().ledger, old.memory.state().ledger);
}
