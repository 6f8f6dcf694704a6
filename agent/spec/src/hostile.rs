//! Tests of all pure functions with every field of a pod at its worst ([`beelet_testing::hostile_pods`]):
//! reading the pod, the decisions, and the CRI requests. No function may panic (overflow checks are on), and
//! every result has a bound.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::env::{Environment, Sources};
use crate::{app_armor, cri_config, definition, fixtures, resize, signals, support, sysctls};
use beelet_codec::ApiType as _;
use beelet_model::objects::Objects;
use beelet_model::pod::{default_container, grace_period, has_host_port};
use beelet_policy::{
    admission::{self, preemption::Policy},
    devices,
    eviction::{
        Candidate, DiskLayout, PodUsage, Signal,
        local_storage::{PodStorage, violation},
        rank, victim,
    },
    node::{
        fit::{NodeView, misfit},
        shutdown::Periods,
    },
    pod::{
        Observed, Sandbox, Times, Verdicts, actions, active_limit, api_status, ephemeral_containers,
        mirror::{self, Owner},
        references, variables,
    },
    probe::{Outcome, ProbeKind, ProbeParams, ProbeState, settings},
    resources::{
        PodDemand, ResourceList,
        cgroups::{
            CgroupConfig, CgroupVersion, NodeAmounts, container_cgroup, container_resources, node_cgroups,
            pod_cgroup, sandbox_resources,
        },
        critical,
        huge_pages::{self, Medium},
        qos,
    },
    volumes::{claims, csi, flex_volume, migration, mount_points, remote_disk, removed_kinds},
};
use beelet_testing::hostile_pods::{Group, cases_of, pairs, plain};
use beelet_units::{cgroup_driver::CgroupDriver, moment::Moment};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prost::Message as _;
use serde_json::Value;

/// Bytes that the requests to the runtime may have in addition to multiples of the pod's own: a label is in
/// the sandbox and in each container, references may repeat a value.
const REQUESTS_MAX: usize = 16 << 20;

/// Runs a pod through all pure layers, and returns the bytes of the requests to the runtime; None for a text
/// that is not a pod.
fn decide(text: &str) -> Option<usize> {
    let value: Value = serde_json::from_str(text).ok()?;
    let _ = support::check(&value);
    let pod = core::Pod::from_value(&value).ok()?;
    assert_eq!(
        core::Pod::from_value(&pod.to_value()).as_ref(),
        Ok(&pod),
        "a written pod reads back differently"
    );
    amounts(&pod);
    places(&pod);
    lives(&pod);
    statuses(&pod);
    volumes(&pod);
    Some(requests(&pod))
}

/// Runs admission, QoS, preemption, ranking, cgroups, devices.
fn amounts(pod: &core::Pod) {
    let bystander = core::Pod::from_value(&plain("bystander")).unwrap();
    let node = fixtures::node();
    let mut allocatable = ResourceList::default();
    for resource in ["cpu", "memory", "ephemeral-storage"] {
        allocatable.set(resource, node.allocatable(resource));
    }
    for policy in [Policy::Kubelet, Policy::Minimal] {
        let _ = admission::admit(pod, &[&bystander, pod], &allocatable, policy);
        let _ = admission::admit(&bystander, &[pod, pod], &allocatable, policy);
    }
    let _ = (qos::qos_class(pod), devices::container_requests(pod), critical::is_critical(pod));
    if let Ok(demand) = PodDemand::read(pod) {
        let _ = (demand.limits(), demand.requests(), demand.container_requests());
        let (priority, critical) = (critical::priority(pod), critical::is_critical(pod));
        let usage =
            PodUsage { memory_working_set_bytes: u64::MAX, logs_bytes: u64::MAX, ..PodUsage::default() };
        let one = Candidate { demand, priority, critical, leaving: false, usage: Some(usage) };
        let pods = [one.clone(), Candidate { usage: None, ..one }];
        for signal in
            [Signal::MemoryAvailable, Signal::NodeFsAvailable, Signal::NodeFsInodesFree, Signal::PidAvailable]
        {
            let _ = victim(&rank(signal, DiskLayout::Single, &pods), &pods);
        }
    }
    let storage = PodStorage {
        volumes: [("extra".to_owned(), u64::MAX)].into(),
        containers: [("main".to_owned(), u64::MAX)].into(),
        files: u64::MAX,
        too_deep: ["extra".to_owned()].into(),
    };
    let _ = violation(pod, &storage);
    let amounts =
        NodeAmounts { memory_capacity: 16 << 30, allocatable_millis: 4000, allocatable_memory: 15 << 30 };
    for version in [CgroupVersion::V1, CgroupVersion::V2] {
        for driver in [CgroupDriver::Cgroupfs, CgroupDriver::Systemd] {
            let config = CgroupConfig {
                driver,
                pod_pids_limit: Some(100),
                limit_huge_pages: true,
                huge_pages: [(2 << 20, 4 << 20)].into(),
                ..CgroupConfig::new(version, amounts)
            };
            let _ = (
                pod_cgroup(pod, &config),
                sandbox_resources(pod, &config),
                node_cgroups(&[pod, pod], &config),
            );
            for container in containers(pod) {
                let _ = (
                    container_resources(pod, &container, &config),
                    container_cgroup(pod, &container, &config),
                );
            }
        }
    }
}

/// Runs the checks of the node's selection and the order of shutdown.
fn places(pod: &core::Pod) {
    let _ = misfit(pod, &NodeView { name: "n1".to_owned(), ..NodeView::default() });
    let periods = Periods::of_totals(Duration::from_secs(30), Duration::from_secs(10));
    let _ = periods.groups([(pod, critical::priority(pod))]);
    let _ = (default_container(pod), has_host_port(pod), mirror::is_mirror(pod));
    let owner = Owner { name: "n1".to_owned(), uid: "u1".to_owned() };
    let name = mirror::name_of(pod);
    let _ = mirror::steps(&[(name.clone(), pod)].into(), &[(name, pod)].into(), &owner);
    let node = fixtures::node();
    let _ = (app_armor::refusal(pod, &node), pod.spec.as_ref().and_then(|spec| sysctls::refused(spec, &[])));
}

/// Runs the pod's next actions, its deadlines, its probes.
fn lives(pod: &core::Pod) {
    let _ = grace_period(pod);
    let observed = Observed {
        sandboxes: vec![Sandbox { id: "s".to_owned(), attempt: 0, ready: true }],
        containers: Vec::new(),
    };
    let now = Moment::after_start(Duration::from_secs(1000));
    let times = Times { ended: &[].into(), now };
    for observed in [Observed::default(), observed] {
        let next = actions(pod, &observed, &Verdicts::default(), Duration::from_secs(300), times);
        let _ = (next.is_idle(), next.only_makes(), next.wake_at());
    }
    let Some(spec) = &pod.spec else { return };
    let _ = active_limit(spec).map(|limit| now.plus(limit));
    let annotations = pod.metadata.annotations.clone().unwrap_or_default();
    for container in containers(pod) {
        let all = [
            (ProbeKind::Liveness, &container.liveness_probe),
            (ProbeKind::Readiness, &container.readiness_probe),
            (ProbeKind::Startup, &container.startup_probe),
        ];
        for (kind, probe) in all {
            let (found, problems) = settings::read(&annotations, &container.name, kind);
            let length: usize = problems.iter().map(String::len).sum();
            assert!(length <= 1 << 20, "{length} bytes of problems");
            let Some(probe) = probe else { continue };
            let params = ProbeParams::from_probe(probe, true, found.edge_policy.unwrap_or_default());
            let mut state = ProbeState::new(kind, &params);
            let at = Duration::from_secs(5);
            state.container_started(at, at);
            state.gate.startup_succeeded();
            let _ = (state.due(at), state.held(at), state.is_steady(at));
            state.record(Duration::MAX, Outcome::Failure);
            let command = probe.exec.iter().flat_map(|exec| exec.command.clone().unwrap_or_default());
            let _ = variables::expand_probe_command(
                &command.collect::<Vec<_>>(),
                container.env.as_deref().unwrap_or_default(),
            );
        }
    }
}

/// Builds the status for the API server.
fn statuses(pod: &core::Pod) {
    let now = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    let in_api = pod.status.clone().unwrap_or_default();
    let rejected = api_status::rejected(pod, "Refused", "it hurts", now.clone());
    for ours in [rejected, api_status::finished(pod, &in_api), core::PodStatus::default()] {
        let mut merged = api_status::merged(&in_api, &ours);
        api_status::open_gates(pod, &in_api, &mut merged, &now);
        let _ = (
            api_status::vanishes(pod),
            api_status::patience(pod, &merged),
            api_status::urgency(&in_api, &merged),
        );
        let _ = api_status::patch("u1", &in_api.to_value(), &merged.to_value());
    }
}

/// Runs the decisions on volumes.
fn volumes(pod: &core::Pod) {
    let _ = (
        references::of(pod),
        references::tokens(pod),
        references::wants_trust_bundles(pod),
        claims::used(pod),
    );
    let _ = (csi::pod_context(pod, true), mount_points::nested(pod));
    for medium in [Medium::OfPod, Medium::Of(2 << 20)] {
        let _ = huge_pages::page_size(medium, pod);
    }
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let _ = (
            claims::claim_of(pod, volume),
            claims::check_kind(volume, "default"),
            claims::may_be_of_driver(volume),
        );
        let _ = (remote_disk::of_pod(volume, "default"), flex_volume::of_pod(volume, "default"));
        let _ = (
            migration::of_pod(volume, "default"),
            migration::is_migrated(volume),
            removed_kinds::is_removed(volume),
        );
    }
}

/// Returns the bytes of the requests that create its sandbox and its containers.
fn requests(pod: &core::Pod) -> usize {
    let (node, objects) = (fixtures::node(), Objects::default());
    let resources = fixtures::facts().resources;
    let sandbox = cri_config::sandbox(pod, 0, "/kubepods/x".to_owned(), resources, &node);
    let mut bytes = sandbox.map_or(0, |config| config.encoded_len());
    let _ =
        (cri_config::name_resolution(pod, &node), cri_config::dns_warnings(pod, &node), resize::shape(pod));
    let _ = (resize::is_in_progress(pod), resize::same_amounts(pod, pod), definition::renewed(pod, pod));
    for container in containers(pod) {
        let _ = (
            definition::digest(&container),
            definition::amounts(&container),
            signals::of_container(&container),
        );
        let sources = Sources { pod, pod_ips: &[], objects: &objects, node: &node };
        let env = sources.environment(&container).unwrap_or_else(|_| Environment::default());
        let made = cri_config::container(pod, &container, env, fixtures::facts(), &node);
        bytes += made.map_or(0, |config| config.encoded_len());
    }
    bytes
}

fn containers(pod: &core::Pod) -> Vec<core::Container> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let usual = spec.init_containers.iter().flatten().chain(&spec.containers).cloned();
    usual.chain(ephemeral_containers(spec)).collect()
}

/// Tests a pod; returns a sentence about a violation.
fn tried(name: &str, pod: &Value) -> Option<String> {
    let text = pod.to_string();
    let Ok(written) = catch_unwind(AssertUnwindSafe(|| decide(&text))) else {
        return Some(format!("{name}: a panic"));
    };
    let size = text.len();
    let written = written.filter(|written| *written > REQUESTS_MAX + 4 * size)?;
    Some(format!("{name}: {size} bytes of a pod became {written} bytes of requests"))
}

/// Tests every `one_of`th case of a group.
fn check(group: Group, one_of: usize) {
    let cases = cases_of(group, one_of);
    assert!(cases.len() > 100, "{}", cases.len());
    let wrong: Vec<String> = cases.iter().filter_map(|case| tried(&case.to_string(), &case.pod())).collect();
    println!("{} pods with hostile {group:?}", cases.len());
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), cases.len());
}

#[test]
fn no_number_of_a_pod_breaks_a_decision() {
    check(Group::Numbers, 1);
}

#[test]
fn no_text_of_a_pod_breaks_a_decision() {
    check(Group::Texts, 4);
}

#[test]
fn no_list_or_map_of_a_pod_breaks_a_decision() {
    check(Group::Counts, 1);
}

#[test]
fn no_json_of_another_type_breaks_a_decision() {
    check(Group::Types, 4);
}

#[test]
fn no_fields_of_a_pod_break_a_decision_together() {
    let wrong: Vec<String> = pairs(24).iter().filter_map(|pair| tried(pair.name, &pair.pod)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
