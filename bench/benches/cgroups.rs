//! Benches of the cgroup values of a node with 500 pods, and of parsing the quantities for them.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;

use beelet_policy::resources::cgroups::{
    CgroupConfig, CgroupVersion, NodeAmounts, container_cgroup, node_cgroups, pod_cgroup,
};
use beelet_units::quantity::Quantity;
use criterion::{Criterion, criterion_group, criterion_main};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

fn pods() -> Vec<Pod> {
    let pod = |index: u32| {
        let amounts =
            json!({"cpu": format!("{}m", 10 + index % 490), "memory": format!("{}Mi", 16 + index % 1000)});
        let resources = if index.is_multiple_of(2) {
            json!({"requests": amounts})
        } else {
            json!({"requests": amounts, "limits": amounts})
        };
        let container = |name: &str| json!({"name": name, "resources": resources});
        let meta =
            json!({"name": format!("pod-{index}"), "uid": format!("00000000-0000-4000-8000-{index:012}")});
        let value = json!({"metadata": meta, "spec": {"containers": [container("app"), container("log")]}});
        serde_json::from_value(value).expect("a pod")
    };
    (0..500).map(pod).collect()
}

fn cgroups(c: &mut Criterion) {
    let pods = pods();
    let node =
        NodeAmounts { memory_capacity: 256 << 30, allocatable_millis: 64_000, allocatable_memory: 250 << 30 };
    for (name, version) in [("v1", CgroupVersion::V1), ("v2", CgroupVersion::V2)] {
        let config = CgroupConfig::new(version, node);
        c.bench_function(&format!("cgroups of 500 pods, {name}: node and QoS levels"), |b| {
            b.iter(|| node_cgroups(black_box(&pods), &config).expect("quantities"));
        });
        c.bench_function(&format!("cgroups of 500 pods, {name}: every cgroup"), |b| {
            b.iter(|| {
                let level = node_cgroups(black_box(&pods), &config).expect("quantities");
                let each = pods.iter().map(|pod| {
                    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
                    let containers = containers
                        .map(|container| container_cgroup(pod, container, &config).expect("quantities"));
                    (pod_cgroup(pod, &config).expect("quantities"), containers.collect::<Vec<_>>())
                });
                (level, each.collect::<Vec<_>>())
            });
        });
    }
}

fn quantities(c: &mut Criterion) {
    for text in ["250m", "512Mi", "1.5Gi", "129e6", "1.123456789012345678901234Ei"] {
        c.bench_function(&format!("quantity {text}"), |b| b.iter(|| Quantity::parse(black_box(text))));
    }
}

criterion_group!(benches, cgroups, quantities);
criterion_main!(benches);
