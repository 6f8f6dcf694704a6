//! Benches of preemption over 1,000 pods. Bounds: policy kubelet, 10 victims 0.3 ms, 1,000 victims 5 ms.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;

use beelet_policy::admission::preemption::{Candidate, Policy, Requirement, choose, preempt};
use bench::Numbers;
use criterion::{Criterion, criterion_group, criterion_main};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

const PODS: u64 = 1_000;

/// Returns pods of every QoS class, with two containers each and amounts as in real manifests.
fn pods() -> Vec<Pod> {
    let mut numbers = Numbers::new(1);
    (0..PODS).map(|index| pod(index, &mut numbers)).collect()
}

fn pod(index: u64, numbers: &mut Numbers) -> Pod {
    let mut resources = || {
        let amounts = json!({"cpu": format!("{}m", 10 + numbers.below(490)), "memory": format!("{}Mi", 16 + numbers.below(1000))});
        match index % 4 {
            0 => json!({}),
            1 => json!({"requests": amounts, "limits": amounts}),
            _ => json!({"requests": amounts}),
        }
    };
    let containers =
        json!([{"name": "app", "resources": resources()}, {"name": "log", "resources": resources()}]);
    let meta = json!({"name": format!("pod-{index}"), "namespace": "bench", "uid": format!("uid-{index}")});
    let value = json!({"metadata": meta, "spec": {"priority": index % 5 * 100, "containers": containers}});
    serde_json::from_value(value).expect("a pod")
}

fn critical() -> Pod {
    serde_json::from_value(
        json!({"metadata": {"name": "critical"}, "spec": {"priority": 2_000_000_000, "containers": []}}),
    )
    .expect("a pod")
}

/// Returns the amounts for which the policy evicts about `victims` pods.
fn requirements(victims: u64) -> Vec<Requirement> {
    let amount = |resource: &str, each: u64| Requirement {
        resource: resource.to_owned(),
        amount: i64::try_from(each * victims).unwrap_or(i64::MAX),
    };
    vec![amount("cpu", 900), amount("memory", 1_900 << 20)]
}

fn preemption(c: &mut Criterion) {
    let (pods, critical) = (pods(), critical());
    let all =
        vec![Requirement { resource: "pods".to_owned(), amount: i64::try_from(PODS).unwrap_or(i64::MAX) }];
    let cases = [
        ("kubelet, 10 victims", Policy::Kubelet, requirements(10)),
        ("kubelet, 1000 victims", Policy::Kubelet, all),
        ("minimal, 10 victims", Policy::Minimal, requirements(10)),
    ];
    let mut group = c.benchmark_group("preemption of 1000 pods");
    for (name, policy, requirements) in &cases {
        let victims = preempt(&critical, &pods, requirements, *policy).expect("quantities").victims.len();
        println!("{name}: {victims} victims");
        // From the manifests: the cost of a decision without kept values.
        group.bench_function(*name, |b| {
            b.iter(|| preempt(&critical, black_box(&pods), requirements, *policy));
        });
        // From the values that the agent keeps for running pods.
        let read = |(index, pod)| Candidate::read(index, pod, &critical, requirements).expect("quantities");
        let candidates: Vec<_> = pods.iter().enumerate().filter_map(read).collect();
        group.bench_function(format!("{name}, pods read before"), |b| {
            b.iter(|| choose(black_box(&candidates), requirements, *policy));
        });
    }
    group.finish();
}

criterion_group!(benches, preemption);
criterion_main!(benches);
