//! Benches of devices and probes: one allocation, one checkpoint, one probe outcome.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::{hint::black_box, time::Duration};

use beelet_policy::{
    devices::{
        Device, Devices, Health, PluginOptions, Request, Selection, Serving,
        checkpoint::{Data, Text},
    },
    probe::{EdgePolicy, Outcome, ProbeKind, ProbeParams, ProbeState},
};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

const RESOURCE: &str = "example.com/gpu";

/// Returns a ledger of 512 devices on 8 NUMA nodes, with 100 pods that hold two devices each.
fn ledger() -> Devices {
    let mut devices = Devices::default();
    devices.inventory.register(RESOURCE, PluginOptions::default());
    let device =
        |i: i64| Device { id: format!("device-{i:03}"), health: Health::Healthy, numa_nodes: vec![i / 64] };
    devices.inventory.list(RESOURCE, (0..512_i64).map(device));
    (0..100).for_each(|pod| allocate(&mut devices, &format!("pod-{pod}"), 2));
    devices
}

fn allocate(devices: &mut Devices, pod_uid: &str, count: usize) {
    let request = Request { pod_uid, container: "main", resource: RESOURCE, count, already_running: false };
    if let Ok(Selection::Chosen(ids)) = devices.select(&request, &Serving::default()) {
        devices.commit(&request, &ids, vec![0; 300]);
    }
}

fn devices(c: &mut Criterion) {
    let ledger = ledger();
    c.bench_function("8 of 512 devices allocated", |b| {
        b.iter_batched_ref(|| ledger.clone(), |devices| allocate(devices, "new", 8), BatchSize::SmallInput);
    });
    c.bench_function("device checkpoint of 100 pods written", |b| {
        b.iter(|| black_box(&ledger).checkpoint().write().ok());
    });
    c.bench_function("device checkpoint with one pod more written", |b| {
        let mut text = Text::default();
        text.write(ledger.checkpoint()).unwrap_or_default();
        let mut more = ledger.clone();
        b.iter(|| {
            more.holders.forget("new");
            allocate(&mut more, "new", 2);
            text.write(more.checkpoint()).ok()
        });
    });
    let file = ledger.checkpoint().write().unwrap_or_default();
    c.bench_function("device checkpoint of 100 pods read", |b| b.iter(|| Data::read(black_box(&file)).ok()));
}

fn probe(c: &mut Criterion) {
    let params = ProbeParams {
        initial_delay: Duration::ZERO,
        success_threshold: 1,
        failure_threshold: 3,
        waits_for_startup: false,
        edge_policy: EdgePolicy::Immediate,
    };
    let mut state = ProbeState::new(ProbeKind::Readiness, &params);
    state.container_started(Duration::ZERO, Duration::ZERO);
    c.bench_function("probe outcome recorded", |b| {
        b.iter(|| state.record(black_box(Duration::from_secs(9)), Outcome::Success));
    });
    c.bench_function("readiness edge decided", |b| {
        b.iter(|| (state.edge(Duration::from_secs(9), false), state.edge(Duration::from_secs(9), true)));
    });
}

criterion_group!(benches, devices, probe);
criterion_main!(benches);
