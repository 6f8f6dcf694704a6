//! Pinning on 256 CPUs, 8 NUMA nodes and with 1,000 containers. Bound: the 99th percentile of an admission
//! decision is at most 1 ms. Criterion's statistics are of batches, so single decisions are timed apart.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::{
    collections::BTreeMap,
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use beelet_policy::pinning::{
    Cpu, CpuSet, CpuTopology, Gates, Needs, Pins,
    cpus::{CpuManager, CpuSettings},
    memory::{MemoryManager, MemoryNode, MemorySettings, Reservation},
    pins::Alignment,
    topology::{Node, TopologyManager, TopologySettings},
};
use beelet_units::quantity::Quantity;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

const NODES: u32 = 8;
/// Two threads each.
const CORES_PER_NODE: u32 = 16;
const PODS: usize = 500;
/// Single decisions of each case.
const SINGLE: usize = 2_000;
const BOUND: Duration = Duration::from_millis(1);

fn needs(number: usize, cpus: &str) -> Needs {
    let list = json!({"cpu": cpus, "memory": "256Mi"});
    let resources = json!({"requests": list, "limits": list});
    let pod = json!({"metadata": {"name": "p", "uid": format!("uid-{number}")}, "spec": {"containers": [
        {"name": "app", "resources": resources}, {"name": "log", "resources": resources}]}});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    Needs::read(&pod, Gates::default()).expect("quantities")
}

fn pins(policy: &str, options: &[&str]) -> Pins {
    let nodes: Vec<Node> = (0..NODES).map(|id| Node { id, distances: None }).collect();
    let settings = TopologySettings { policy: policy.into(), ..TopologySettings::default() };
    let topology = TopologyManager::new(&settings, &nodes).expect("settings");
    let cores = NODES * CORES_PER_NODE;
    let cpu = |cpu: u32| {
        let core = cpu % cores;
        let numa = core / CORES_PER_NODE;
        Cpu { cpu, core, socket: numa / 4, numa, uncore: Some(core / 8) }
    };
    let machine = CpuTopology::new(&(0..2 * cores).map(cpu).collect::<Vec<_>>()).expect("a machine");
    let settings = CpuSettings {
        policy: "static".into(),
        options: options.iter().map(|name| ((*name).to_owned(), "true".to_owned())).collect(),
        reserved: CpuSet::default(),
        amount: Some(Quantity::from_units(2)),
    };
    let gates = Gates { cpu_alpha_options: true, ..Gates::default() };
    let cpus = CpuManager::new(&settings, &Arc::new(machine), topology.policy(), gates).expect("settings");
    let reserved = BTreeMap::from([("memory".to_owned(), Quantity::from_units(1 << 30))]);
    let settings = MemorySettings {
        policy: "Static".into(),
        reserved_memory: vec![Reservation { node: 0, limits: reserved.clone() }],
        reserved,
    };
    let node = |id: u32| MemoryNode { id, memory: 1 << 40, huge_pages: BTreeMap::from([(2 << 20, 1_000)]) };
    let memory = MemoryManager::new(&settings, &(0..NODES).map(node).collect::<Vec<_>>(), gates);
    let mut pins = Pins { topology, cpus, memory: memory.expect("settings") };
    pins.cpus.start(None).expect("a fresh state");
    pins.memory.start(None).expect("a fresh state");
    pins
}

/// The node with 1,000 containers, of which every tenth has CPUs of its own.
fn full(policy: &str, options: &[&str]) -> Pins {
    let mut pins = pins(policy, options);
    for number in 0..PODS {
        let needs = needs(number, if number % 10 == 0 { "2" } else { "100m" });
        pins.admit(&needs, &mut (), &mut Alignment::default()).expect("room");
    }
    pins
}

/// Times single decisions, and checks the bound on optimised code.
fn single(name: &str, pins: &Pins, needs: &Needs) {
    let decide = |_| {
        let mut pins = pins.clone();
        let began = Instant::now();
        let admitted = pins.admit(needs, &mut (), &mut Alignment::default());
        let took = began.elapsed();
        black_box(admitted).expect("room");
        took
    };
    let mut took: Vec<Duration> = (0..SINGLE).map(decide).collect();
    took.sort_unstable();
    let at = |percent: usize| took[(SINGLE * percent).div_ceil(100) - 1];
    println!("{name}: p50 {:?}, p99 {:?} of {SINGLE} decisions", at(50), at(99));
    assert!(cfg!(debug_assertions) || at(99) <= BOUND, "{name}: above the bound");
}

fn pinning(c: &mut Criterion) {
    let cases: [(&str, &str, &[&str], &str); 4] = [
        ("packed, 2 CPUs", "best-effort", &[], "2"),
        ("whole cores, restricted, 4 CPUs", "restricted", &["full-pcpus-only"], "4"),
        ("distributed over nodes, 21 CPUs", "best-effort", &["distribute-cpus-across-numa"], "21"),
        ("by L3 cache, 12 CPUs", "restricted", &["prefer-align-cpus-by-uncorecache"], "12"),
    ];
    for (name, policy, options, cpus) in cases {
        let pins = full(policy, options);
        let needs = needs(PODS, cpus);
        single(name, &pins, &needs);
        c.bench_function(name, |b| {
            b.iter_batched_ref(
                || pins.clone(),
                |pins| black_box(pins.admit(&needs, &mut (), &mut Alignment::default())),
                BatchSize::SmallInput,
            );
        });
    }
    let pins = full("best-effort", &[]);
    c.bench_function("state files", |b| b.iter(|| black_box((pins.cpus.file(), pins.memory.file()))));
}

criterion_group!(benches, pinning);
criterion_main!(benches);
