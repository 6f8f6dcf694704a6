//! Allocation of devices: the kubelet's device manager (`pkg/kubelet/cm/devicemanager`) without its plugins'
//! sockets.
//!
//! [`Devices`] is the ledger. An allocation takes several steps, since only the caller can talk to a plugin:
//! [`Devices::select`] names the devices (or the question for the plugin), the caller has the plugin allocate
//! them, and [`Devices::commit`] records the allocation. The caller must not begin another allocation of the
//! same resource in between; any other call is allowed. Must never allocate a device that another container
//! of a living pod holds; must never do I/O.
//!
//! Times are [`Duration`]s since an origin of the caller's choice.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};

use crate::{dra::is_claimed, resources};
use beelet_units::field::FieldError;

pub mod admission;
pub mod checkpoint;
mod choice;
mod error;
mod holders;
mod inventory;
mod rebuild;
pub mod registration;
mod serving;
pub mod topology;

pub use choice::Question;
pub use error::AllocateError;
pub use holders::Holders;
pub use inventory::{Capacity, Inventory};
pub use rebuild::Remnant;
pub use serving::Serving;

use checkpoint::{CheckpointError, Data, HolderKey, Snapshot};
use choice::{fill, with_nodes};
use inventory::Endpoint;

/// Time for which the resource of a disconnected plugin stays listed (as unhealthy).
pub const ENDPOINT_GRACE: Duration = Duration::from_secs(300);

/// The NUMA node of a device without one.
const NO_NODE: i64 = -1;

type Ids = BTreeSet<String>;

/// A plugin's options (`v1beta1.DevicePluginOptions`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PluginOptions {
    /// The plugin must be called before each start of a container with its devices.
    pub pre_start_required: bool,
    /// The plugin answers `GetPreferredAllocation`.
    pub get_preferred_allocation_available: bool,
}

/// A device as its plugin lists it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// The device's id, unique within the resource.
    pub id: String,
    /// The device's health.
    pub health: Health,
    /// NUMA nodes near the device; empty for a device near no node.
    #[serde(default)]
    pub numa_nodes: Vec<i64>,
}

/// A device's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    /// The device may be allocated.
    Healthy,
    /// The device must not be allocated.
    Unhealthy,
}

/// Devices that a container holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeldDevices {
    /// Device ids by NUMA node, -1 for none; a device near several nodes is listed under each.
    pub by_node: BTreeMap<i64, Vec<String>>,
    /// The plugin's answer: an encoded `v1beta1.ContainerAllocateResponse`.
    pub response: Vec<u8>,
}

impl HeldDevices {
    /// Returns the ids.
    #[must_use]
    pub fn ids(&self) -> Ids {
        self.by_node.values().flatten().cloned().collect()
    }
}

/// A container's devices by resource. Never changed in place, and so shared with the checkpoint writer.
pub type HeldByResource = BTreeMap<String, Arc<HeldDevices>>;

/// Rule by which a container passes on its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// Ends before the containers start: they may get its devices.
    Init,
    /// A sidecar (restartable init container) or a container: keeps its devices.
    Lasting,
}

/// A container's device requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest<'a> {
    /// The container's name.
    pub container: &'a str,
    /// Rule by which the container passes on its devices.
    pub kind: ContainerKind,
    /// Count of each resource, by its name. All limits are included, devices or not.
    pub limits: Vec<(&'a str, usize)>,
}

/// Returns the device requests of a pod's containers in the order of serving, without devices that a claim
/// provides.
///
/// # Errors
/// The path of the first limit that is not a quantity.
pub fn container_requests(pod: &Pod) -> Result<Vec<ContainerRequest<'_>>, FieldError> {
    let Some(spec) = &pod.spec else { return Ok(Vec::new()) };
    let inits = spec.init_containers.iter().flatten().enumerate();
    let inits = inits.map(|(i, container)| {
        let kind =
            if resources::is_restartable(container) { ContainerKind::Lasting } else { ContainerKind::Init };
        container_request(pod, container, kind).map_err(|e| e.under(&format!("spec.initContainers[{i}]")))
    });
    let containers = spec.containers.iter().enumerate().map(|(i, container)| {
        container_request(pod, container, ContainerKind::Lasting)
            .map_err(|e| e.under(&format!("spec.containers[{i}]")))
    });
    inits.chain(containers).collect()
}

fn container_request<'a>(
    pod: &Pod,
    container: &'a Container,
    kind: ContainerKind,
) -> Result<ContainerRequest<'a>, FieldError> {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    let limits = resources::ResourceList::read(limits).map_err(|e| e.under("resources.limits"))?;
    let limits = limits
        .iter()
        .filter(|(name, _)| !is_claimed(pod, &container.name, name))
        .map(|(name, quantity)| (name, usize::try_from(quantity.value()).unwrap_or(0)))
        .collect();
    Ok(ContainerRequest { container: &container.name, kind, limits })
}

/// A request for one resource of one container.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The pod's uid.
    pub pod_uid: &'a str,
    /// The container's name.
    pub container: &'a str,
    /// The resource.
    pub resource: &'a str,
    /// Number of devices.
    pub count: usize,
    /// The container has been running since before this agent: it has its devices, even if the plugin is
    /// missing.
    pub already_running: bool,
}

/// The result of [`Devices::select`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// The container has its devices already, or requests none.
    Nothing,
    /// Devices for the plugin to allocate.
    Chosen(BTreeSet<String>),
    /// Ask the plugin for its preference first.
    Ask(Question),
}

/// The ledger of devices and their holders.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    /// Devices that the plugins list.
    pub inventory: Inventory,
    /// Containers that hold devices.
    pub holders: Holders,
}

impl Devices {
    /// Returns true for a device plugin's resource: one that is registered or held.
    #[must_use]
    pub fn knows(&self, resource: &str) -> bool {
        self.inventory.healthy.contains_key(resource) || self.holders.taken.contains_key(resource)
    }

    /// Selects the devices that a container would get.
    ///
    /// # Errors
    /// If the container cannot get them (possibly only for now: see [`AllocateError::may_pass`]).
    pub fn select(&mut self, request: &Request<'_>, serving: &Serving) -> Result<Selection, AllocateError> {
        let resource = request.resource.to_owned();
        let held = self
            .holders
            .pods
            .get(request.pod_uid)
            .and_then(|pod| pod.get(request.container)?.get(request.resource));
        let held = held.map(|held| held.ids());
        if let Some(held) = held.as_ref().filter(|held| held.len() != request.count) {
            return Err(AllocateError::Changed {
                pod_uid: request.pod_uid.to_owned(),
                container: request.container.to_owned(),
                resource,
                held: held.len(),
                requested: request.count,
            });
        }
        if request.already_running {
            return Ok(Selection::Nothing);
        }
        // Health before need: a container that lost its devices must not continue (k/k issue 109595).
        let Some(healthy) = self.inventory.healthy.get(request.resource) else {
            return Err(AllocateError::Unregistered { resource });
        };
        if healthy.is_empty() {
            return Err(AllocateError::NoneHealthy { resource });
        }
        if held.as_ref().is_some_and(|held| !held.is_subset(healthy)) {
            return Err(AllocateError::HeldUnhealthy { resource });
        }
        if held.is_some() || request.count == 0 {
            return Ok(Selection::Nothing);
        }
        self.select_new(request, resource, serving)
    }

    fn select_new(
        &mut self,
        request: &Request<'_>,
        resource: String,
        serving: &Serving,
    ) -> Result<Selection, AllocateError> {
        let options = self.inventory.options(request.resource);
        let taken = self.holders.taken.entry(resource.clone()).or_default();
        let mut must_include: Ids = serving.left(request.resource).take(request.count).cloned().collect();
        let healthy = self.inventory.healthy.entry(resource.clone()).or_default();
        let lent: Vec<&String> = serving.lent(request.resource).filter(|id| healthy.contains(*id)).collect();
        let near = self.inventory.nodes.get(request.resource);
        let is_near = |id: &&&String| {
            let near = near.and_then(|nodes| nodes.get(**id)).into_iter().flatten();
            serving.affinity.as_ref().is_none_or(|wanted| near.into_iter().any(|node| wanted.contains(node)))
        };
        for id in lent.iter().filter(is_near) {
            if must_include.len() < request.count {
                must_include.insert((*id).clone());
            }
        }
        let others = lent.iter().copied().filter(|id| taken.contains(*id));
        let mut free: Vec<&str> = healthy.difference(taken).chain(others).map(String::as_str).collect();
        if !must_include.is_empty() {
            free.retain(|id| !must_include.contains(*id));
        }
        let wanted = request.count - must_include.len();
        if free.len() < wanted {
            return Err(AllocateError::TooFew { resource, requested: wanted, available: free.len() });
        }
        let Some(options) = options else {
            self.holders.recount();
            return Err(AllocateError::PluginGone { resource });
        };
        if wanted == 0 {
            return Ok(Selection::Chosen(must_include));
        }
        let nodes = self.inventory.nodes.entry(resource).or_default();
        let mut left: Vec<(&str, &[i64])> = with_nodes(free, nodes).collect();
        if let Some(affinity) = &serving.affinity {
            let is_near = |(_, near): &(&str, &[i64])| near.iter().any(|node| affinity.contains(node));
            let aligned: Vec<(&str, &[i64])> = left.iter().copied().filter(is_near).collect();
            if aligned.len() >= wanted {
                left = aligned;
            } else {
                must_include.extend(aligned.into_iter().map(|(id, _)| id.to_owned()));
            }
        }
        if !options.get_preferred_allocation_available {
            return Ok(Selection::Chosen(fill(must_include, request.count, &left, nodes)));
        }
        let mut available: Ids = left.iter().map(|(id, _)| (*id).to_owned()).collect();
        available.extend(must_include.iter().cloned());
        let near = with_nodes(&available, nodes).filter(|(_, near)| !near.is_empty());
        let nodes = near.map(|(id, near)| (id.to_owned(), near.to_vec())).collect();
        Ok(Selection::Ask(Question { available, must_include, size: request.count, nodes }))
    }

    /// Records that the plugin has allocated these devices to the container; `response` is its encoded
    /// answer.
    pub fn commit(&mut self, request: &Request<'_>, ids: &BTreeSet<String>, response: Vec<u8>) {
        let nodes = self.inventory.nodes.get(request.resource);
        let mut by_node: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in ids {
            match nodes.and_then(|nodes| nodes.get(id)).filter(|near| !near.is_empty()) {
                Some(near) => near.iter().for_each(|node| by_node.entry(*node).or_default().push(id.clone())),
                None => by_node.entry(NO_NODE).or_default().push(id.clone()),
            }
        }
        self.holders.add(request, ids, HeldDevices { by_node, response });
    }

    /// Returns the number of healthy devices of a resource that no container holds.
    #[must_use]
    pub fn free(&self, resource: &str) -> usize {
        let Some(healthy) = self.inventory.healthy.get(resource) else { return 0 };
        let taken = self.holders.taken.get(resource).map_or(0, |taken| healthy.intersection(taken).count());
        healthy.len() - taken
    }

    /// Returns the state that must survive a restart of the agent.
    #[must_use]
    pub fn checkpoint(&self) -> Snapshot {
        let containers = self.holders.pods.iter().flat_map(|(uid, pod)| {
            pod.iter().flat_map(move |(container, held)| held.iter().map(move |held| (uid, container, held)))
        });
        let held = containers.map(|(pod_uid, container, (resource, held))| {
            let place = HolderKey {
                pod_uid: pod_uid.clone(),
                container: container.clone(),
                resource: resource.clone(),
            };
            (place, Arc::clone(held))
        });
        let registered = self.inventory.healthy.iter().map(|(resource, ids)| {
            (resource.clone(), Arc::clone(self.inventory.last_known.get(resource).unwrap_or(ids)))
        });
        Snapshot { held: held.collect(), registered: registered.collect() }
    }

    /// Creates the ledger after a restart: the holders are known, but every plugin must register first.
    pub(crate) fn restored(data: Data, now: Duration) -> Self {
        let mut devices = Self::default();
        for entry in data.pod_device_entries.unwrap_or_default() {
            let (HolderKey { pod_uid, container, resource }, held) = entry.into_held();
            let pod = devices.holders.pods.entry(pod_uid).or_default();
            pod.entry(container).or_default().insert(resource, Arc::new(held));
        }
        for (resource, ids) in data.registered_devices.unwrap_or_default() {
            let ids = ids.unwrap_or_default().into_iter().collect();
            devices.inventory.last_known.insert(resource.clone(), Arc::new(ids));
            devices.inventory.healthy.insert(resource.clone(), Arc::default());
            devices.inventory.unhealthy.insert(resource.clone(), Ids::new());
            devices
                .inventory
                .endpoints
                .insert(resource, Endpoint { stopped_at: Some(now), ..Endpoint::default() });
        }
        devices.holders.recount();
        devices
    }

    /// Reads the ledger from a checkpoint file.
    ///
    /// # Errors
    /// If the file is corrupt.
    pub fn read(file: &[u8], now: Duration) -> Result<Self, CheckpointError> {
        Ok(Self::restored(Data::read(file)?, now))
    }
}

#[cfg(test)]
mod tests;
