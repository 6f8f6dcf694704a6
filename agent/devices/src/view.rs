//! Views of the devices for the command line, the pod resources API and pods' statuses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use beelet_policy::devices::{Health, HeldDevices};
use k8s_openapi::api::core::v1 as core;

use super::{Devices, ledger::Shared};

/// State of an extended resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceView {
    /// True if its plugin is connected.
    pub connected: bool,
    /// Socket of the plugin, if it has registered since the agent's start.
    pub socket: Option<String>,
    /// Seconds since the plugin disconnected.
    pub gone_seconds: Option<u64>,
    /// Listed devices, and unlisted ones that are still held, by id.
    pub devices: BTreeMap<String, DeviceView>,
}

/// State of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceView {
    /// True if the device can be assigned.
    pub healthy: bool,
    /// The plugin does not list the device.
    pub unlisted: bool,
    /// NUMA nodes of the device.
    pub numa_nodes: Vec<i64>,
    /// Containers that hold the device.
    pub holders: BTreeSet<Holder>,
}

/// Container that holds a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container.
    pub container: String,
}

/// Pod that waits for a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingView {
    /// `namespace/name`.
    pub pod: String,
    /// Reason why it waits.
    pub message: String,
    /// Seconds since it began to wait.
    pub seconds: u64,
}

/// The ledger as others see it.
#[derive(Clone, Copy, Debug)]
pub struct View<'a>(&'a Shared);

impl Devices {
    /// Returns the view of the ledger.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View(&self.shared)
    }
}

impl View<'_> {
    /// Returns every resource with its devices and their holders. Takes milliseconds for 100,000 devices.
    #[must_use]
    pub fn resources(&self) -> BTreeMap<String, ResourceView> {
        let now = self.0.now();
        self.0.with_ledger(|ledger| {
            let mut all: BTreeMap<String, ResourceView> = BTreeMap::new();
            for resource in ledger.devices.inventory.resources() {
                let view = all.entry(resource.to_owned()).or_default();
                view.connected = ledger.devices.inventory.options(resource).is_some();
                view.gone_seconds =
                    ledger.devices.inventory.gone_since(resource).map(|at| now.saturating_sub(at).as_secs());
                for device in ledger.devices.inventory.devices_of(resource) {
                    let healthy = device.health == Health::Healthy;
                    let of = DeviceView { healthy, numa_nodes: device.numa_nodes, ..DeviceView::default() };
                    view.devices.insert(device.id, of);
                }
            }
            for (resource, registered) in &ledger.plugins {
                all.entry(resource.clone()).or_default().socket =
                    Some(registered.socket.display().to_string());
            }
            for pod_uid in ledger.devices.holders.pods() {
                for (container, held) in ledger.devices.holders.held(pod_uid).into_iter().flatten() {
                    for (resource, held) in held {
                        let view = all.entry(resource.clone()).or_default();
                        for id in held.ids() {
                            let unlisted = || DeviceView { unlisted: true, ..DeviceView::default() };
                            let holder = Holder { pod_uid: pod_uid.to_owned(), container: container.clone() };
                            view.devices.entry(id).or_insert_with(unlisted).holders.insert(holder);
                        }
                    }
                }
            }
            all
        })
    }

    /// Returns the waiting pods, sorted by name.
    #[must_use]
    pub fn waiting(&self) -> Vec<WaitingView> {
        let now = self.0.now();
        let mut all: Vec<WaitingView> = self.0.with_ledger(|ledger| {
            let view = |waiting: &super::ledger::Waiting| WaitingView {
                pod: waiting.pod.clone(),
                message: waiting.message.clone(),
                seconds: now.saturating_sub(waiting.since).as_secs(),
            };
            ledger.waiting.values().map(view).collect()
        });
        all.sort_by(|a, b| a.pod.cmp(&b.pod));
        all
    }

    /// Returns the reason why no plugin can register, if so.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.0.with_ledger(|ledger| ledger.trouble.clone())
    }

    /// Returns the devices that each container of a pod holds: by container and resource, ids with their NUMA
    /// nodes.
    #[must_use]
    pub fn held_by(&self, pod_uid: &str) -> BTreeMap<String, BTreeMap<String, BTreeMap<String, Vec<i64>>>> {
        self.0.with_ledger(|ledger| {
            let mut all: BTreeMap<String, BTreeMap<String, BTreeMap<String, Vec<i64>>>> = BTreeMap::new();
            for (container, held) in ledger.devices.holders.held(pod_uid).into_iter().flatten() {
                for (resource, held) in held {
                    let ids = all.entry(container.clone()).or_default().entry(resource.clone()).or_default();
                    for (node, of_node) in &held.by_node {
                        for id in of_node {
                            let nodes = ids.entry(id.clone()).or_default();
                            nodes.extend((*node >= 0).then_some(*node));
                        }
                    }
                }
            }
            all
        })
    }

    /// Returns the healthy devices of each resource, with their NUMA nodes.
    #[must_use]
    pub fn allocatable(&self) -> BTreeMap<String, BTreeMap<String, Vec<i64>>> {
        self.0.with_ledger(|ledger| {
            let all = ledger.devices.inventory.allocatable();
            all.map(|(resource, devices)| {
                let devices = devices.map(|(id, nodes)| (id.to_owned(), nodes.to_vec()));
                (resource.to_owned(), devices.collect())
            })
            .collect()
        })
    }

    /// Adds the health of the pod's devices to its status (KEP-4680). A device without its plugin is
    /// `Unknown`.
    pub fn annotate(&self, pod_uid: &str, status: &mut core::PodStatus) {
        self.0.with_ledger(|ledger| {
            let Some(pod) = ledger.devices.holders.held(pod_uid) else { return };
            let inits = status.init_container_statuses.iter_mut().flatten();
            for container in inits.chain(status.container_statuses.iter_mut().flatten()) {
                let Some(held) = pod.get(&container.name) else { continue };
                let of_resource = |(resource, held): (&String, &Arc<HeldDevices>)| {
                    let health = |id: &str| {
                        let there = ledger.devices.inventory.options(resource).is_some();
                        match (there, ledger.devices.inventory.is_healthy(resource, id)) {
                            (false, _) => "Unknown",
                            (true, true) => "Healthy",
                            (true, false) => "Unhealthy",
                        }
                    };
                    let one = |id: String| core::ResourceHealth {
                        health: Some(health(&id).to_owned()),
                        resource_id: id,
                        ..Default::default()
                    };
                    core::ResourceStatus {
                        name: resource.clone(),
                        resources: Some(held.ids().into_iter().map(one).collect()),
                    }
                };
                container.allocated_resources_status = Some(held.iter().map(of_resource).collect());
            }
        });
    }
}
