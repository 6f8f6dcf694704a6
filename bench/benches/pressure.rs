//! Benches of eviction: ranking 1,000 pods. Bound: 1 ms.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;

use beelet_policy::{
    eviction::{Candidate, DiskLayout, PodUsage, Signal, rank, victim},
    resources::{PodDemand, critical},
};
use bench::Numbers;
use criterion::{Criterion, criterion_group, criterion_main};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

fn pods() -> Vec<(Pod, PodUsage)> {
    let mut numbers = Numbers::new(3);
    let pod = |i| {
        let container = |name: &str, memory: u64| json!({"name": name, "resources": {"requests": {"cpu": "100m", "memory": format!("{memory}Mi"), "ephemeral-storage": "1Gi"}}});
        let pod = json!({
            "metadata": {"name": format!("pod-{i}"), "namespace": "default"},
            "spec": {"priority": numbers.below(5), "containers": [container("app", numbers.below(512)), container("proxy", 64)]},
        });
        let usage = PodUsage {
            memory_working_set_bytes: numbers.below(1 << 30),
            swap_bytes: 0,
            rootfs_bytes: numbers.below(1 << 32),
            logs_bytes: numbers.below(1 << 28),
            volumes_bytes: numbers.below(1 << 32),
            files_bytes: numbers.below(1 << 20),
            inodes: numbers.below(100_000),
            pids: numbers.below(500),
            hides_disk: false,
        };
        (serde_json::from_value(pod).unwrap_or_default(), usage)
    };
    (0..1_000).map(pod).collect()
}

fn candidates(pods: &[(Pod, PodUsage)]) -> Vec<Candidate<'_>> {
    pods.iter().filter_map(candidate).collect()
}

fn candidate((pod, usage): &(Pod, PodUsage)) -> Option<Candidate<'_>> {
    Some(Candidate {
        demand: PodDemand::read(pod).ok()?,
        priority: critical::priority(pod),
        critical: critical::is_critical(pod),
        leaving: false,
        usage: Some(*usage),
    })
}

fn ranking(c: &mut Criterion) {
    let pods = pods();
    let ready = candidates(&pods);
    for (name, signal) in [
        ("memory", Signal::MemoryAvailable),
        ("disk", Signal::NodeFsAvailable),
        ("inodes", Signal::NodeFsInodesFree),
        ("pids", Signal::PidAvailable),
    ] {
        c.bench_function(&format!("eviction ranking of 1,000 pods by {name}"), |b| {
            b.iter(|| victim(&rank(signal, DiskLayout::Single, black_box(&ready)), &ready));
        });
    }
    c.bench_function("eviction ranking of 1,000 pods by memory, their requests parsed again", |b| {
        b.iter(|| rank(Signal::MemoryAvailable, DiskLayout::Single, &candidates(black_box(&pods))).len());
    });
}

criterion_group!(benches, ranking);
criterion_main!(benches);
