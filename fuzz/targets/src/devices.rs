//! The target for messages of device plugins, and for the ledger after them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use arbitrary::Unstructured;
use beelet_policy::devices::admission::{Admission, Circumstances, Next};
use beelet_policy::devices::topology::{TopologyPolicy, TopologyScope};
use beelet_policy::devices::{
    ContainerKind, ContainerRequest, Devices, HeldDevices, PluginOptions, registration,
};
use beelet_proto::cri;
use beelet_proto::deviceplugin::{
    ContainerAllocateResponse, Device, ListAndWatchResponse, NumaNode, RegisterRequest, TopologyInfo,
};
use prost::Message as _;

use crate::below;
use beelet_devices::{annotation, options, plugin};
use beelet_model::labels;

const RESOURCES: [&str; 3] = ["example.com/gpu", "example.com/nic", "example.com/fpga"];
const PODS: [&str; 4] = ["a", "b", "c", "d"];
/// Maximum number of events in one run.
const EVENTS: usize = 200;

/// Tests messages of plugins: first the whole input as a message of each kind, then as a sequence of events.
/// No two pods hold the same device, and the checkpoint and the containers' annotations match the ledger.
pub fn device_plugin(input: &[u8]) {
    messages(input);
    let mut from = Unstructured::new(input);
    let mut devices = Devices::default();
    let mut now = Duration::ZERO;
    for _ in 0..EVENTS {
        if from.is_empty() {
            break;
        }
        let resource = RESOURCES[below(&mut from, RESOURCES.len())];
        match below(&mut from, 8) {
            0 => {
                let asks = below(&mut from, 2) == 1;
                let options =
                    PluginOptions { get_preferred_allocation_available: asks, ..PluginOptions::default() };
                devices.inventory.register(resource, options);
            }
            1 => devices.inventory.list(resource, plugin::devices(list(&mut from))),
            2 => devices.inventory.stopped(resource, now),
            3 => {
                now += Duration::from_secs(below(&mut from, 400) as u64);
                devices.inventory.capacity_meanwhile(now);
            }
            4 => devices.holders.forget(PODS[below(&mut from, PODS.len())]),
            5 => devices = reread(&devices, now),
            _ => admit(&mut devices, &mut from),
        }
        nothing_is_held_twice(&devices);
    }
    reread(&devices, now);
}

/// Tests the input as each kind of message that a plugin sends.
fn messages(input: &[u8]) {
    if let Ok(list) = ListAndWatchResponse::decode(input) {
        let mut devices = Devices::default();
        devices.inventory.register(RESOURCES[0], PluginOptions::default());
        devices.inventory.list(RESOURCES[0], plugin::devices(list));
        let there = devices.inventory.devices_of(RESOURCES[0]);
        let ids: BTreeSet<&str> = there.iter().map(|device| device.id.as_str()).collect();
        assert_eq!(ids.len(), there.len(), "an id is listed twice");
        devices.inventory.capacity(Duration::ZERO);
        reread(&devices, Duration::ZERO);
    }
    if let Ok(request) = RegisterRequest::decode(input) {
        let _ = registration::check(&[&request.version], &request.resource_name);
    }
    if let Ok(answer) = ContainerAllocateResponse::decode(input) {
        let held = HeldDevices { by_node: BTreeMap::new(), response: answer.encode_to_vec() };
        let held = BTreeMap::from([(RESOURCES[0].to_owned(), std::sync::Arc::new(held))]);
        let mut config = cri::ContainerConfig::default();
        options::merge(&held).apply(&mut config, true);
        let own: BTreeSet<&str> = config.mounts.iter().map(|mount| mount.container_path.as_str()).collect();
        assert_eq!(own.len(), config.mounts.len(), "two mounts have the same path");
    }
}

fn list(from: &mut Unstructured<'_>) -> ListAndWatchResponse {
    let device = |from: &mut Unstructured<'_>| {
        let nodes = (0..below(from, 4)).map(|_| {
            let near = below(from, 6) as i64;
            NumaNode { id: if near == 5 { from.arbitrary().unwrap_or_default() } else { near - 1 } }
        });
        let nodes: Vec<NumaNode> = nodes.collect();
        Device {
            id: format!("d{}", below(from, 12)),
            health: ["Healthy", "Healthy", "Unhealthy", ""][below(from, 4)].to_owned(),
            topology: (below(from, 3) > 0).then_some(TopologyInfo { nodes }),
        }
    };
    ListAndWatchResponse { devices: (0..below(from, 12)).map(|_| device(from)).collect() }
}

fn admit(devices: &mut Devices, from: &mut Unstructured<'_>) {
    let pod = PODS[below(from, PODS.len())];
    let wishes = (0..1 + below(from, 3)).map(|at| ContainerRequest {
        container: ["init", "main", "side"][at],
        kind: if at == 0 && below(from, 2) == 1 { ContainerKind::Init } else { ContainerKind::Lasting },
        limits: (0..below(from, 3)).map(|_| (RESOURCES[below(from, 3)], below(from, 9))).collect(),
    });
    let wishes: Vec<ContainerRequest<'_>> = wishes.collect();
    let policies = [
        TopologyPolicy::None,
        TopologyPolicy::BestEffort,
        TopologyPolicy::Restricted,
        TopologyPolicy::SingleNumaNode,
    ];
    let circumstances = Circumstances {
        policy: policies[below(from, policies.len())],
        scope: [TopologyScope::Container, TopologyScope::Pod][below(from, 2)],
        ..Circumstances::default()
    };
    let mut admission = Admission::new(pod, wishes, circumstances);
    loop {
        match admission.next(devices) {
            Ok(Next::Done) => return,
            Ok(Next::Free) => {}
            Ok(Next::Ask { question, .. }) => {
                let preferred: Vec<String> =
                    (0..below(from, 6)).map(|_| format!("d{}", below(from, 14))).collect();
                let (size, available) = (question.size, question.available.clone());
                let chosen = question.clone().answer(&preferred);
                assert!(chosen.is_subset(&available), "{chosen:?} of {available:?}");
                assert!(chosen.len() <= size.max(question.must_include.len()));
                admission.preferred(question, &preferred);
            }
            Ok(Next::Allocate { .. }) if below(from, 8) == 7 => return admission.abort(devices),
            Ok(Next::Allocate { .. }) => {
                let length = below(from, 24);
                let answer = from.bytes(length.min(from.len())).unwrap_or_default();
                admission.allocated(devices, answer.to_vec());
            }
            Err(_) => return admission.abort(devices),
        }
    }
}

fn nothing_is_held_twice(devices: &Devices) {
    let mut holders: BTreeMap<(&str, String), &str> = BTreeMap::new();
    for pod in devices.holders.pods() {
        for (resource, held) in devices.holders.held(pod).into_iter().flat_map(BTreeMap::values).flatten() {
            for id in held.ids() {
                let other = holders.insert((resource, id), pod);
                assert!(
                    other.is_none_or(|other| other == pod),
                    "{pod} and {other:?} hold the same device of {resource}"
                );
            }
        }
    }
}

/// Returns the ledger of the checkpoint. Checks that this ledger and the containers' annotations match
/// `devices`.
fn reread(devices: &Devices, now: Duration) -> Devices {
    let file = devices.checkpoint().write().unwrap();
    let again = Devices::read(&file, now).unwrap();
    assert!(devices.holders.pods().eq(again.holders.pods()));
    for pod in devices.holders.pods() {
        assert_eq!(devices.holders.held(pod), again.holders.held(pod));
        for held in devices.holders.held(pod).into_iter().flat_map(BTreeMap::values) {
            let mut config = cri::ContainerConfig::default();
            options::merge(held).apply(&mut config, false);
            let annotations = annotation::encode(held).map(|text| (labels::DEVICES.to_owned(), text));
            let labels = [(labels::POD_UID, pod), (labels::CONTAINER_NAME, "main")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()));
            let container = cri::Container {
                annotations: annotations.into_iter().collect(),
                labels: labels.into(),
                ..cri::Container::default()
            };
            let remnants = annotation::remnants(&[container]);
            assert!(remnants.iter().all(|remnant| remnant.held == *held));
            assert_eq!(remnants.is_empty(), held.is_empty());
        }
    }
    again
}
