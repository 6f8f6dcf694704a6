//! The devices that plugins list: their health and their NUMA nodes, and the plugins themselves. Must never
//! consider holders.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use super::{Device, ENDPOINT_GRACE, Health, Ids, PluginOptions, choice::Nodes};

#[derive(Debug, Clone, Default)]
pub(super) struct Endpoint {
    pub(super) options: PluginOptions,
    pub(super) stopped_at: Option<Duration>,
}

impl Endpoint {
    fn expired(&self, now: Duration) -> bool {
        self.stopped_at.is_some_and(|at| now.saturating_sub(at) > ENDPOINT_GRACE)
    }
}

/// The node's devices of each resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capacity {
    /// All devices.
    pub capacity: BTreeMap<String, usize>,
    /// The healthy ones.
    pub allocatable: BTreeMap<String, usize>,
    /// Resources removed because their plugin has been gone for too long.
    pub removed: Ids,
}

/// The lists of all plugins.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    pub(super) endpoints: BTreeMap<String, Endpoint>,
    /// Healthy devices of each plugin's list, shared as a whole.
    pub(super) healthy: BTreeMap<String, Arc<Ids>>,
    pub(super) unhealthy: BTreeMap<String, Ids>,
    /// NUMA nodes by resource and device.
    pub(super) nodes: BTreeMap<String, Nodes>,
    /// Number of devices of each resource by the set of nodes near them: a handful of sets, for any number of
    /// devices.
    pub(super) places: BTreeMap<String, BTreeMap<Vec<i64>, usize>>,
    /// Devices healthy before the last restart, of resources whose plugin has not listed its devices since.
    pub(super) last_known: BTreeMap<String, Arc<Ids>>,
}

impl Inventory {
    /// Records the registration of a plugin.
    pub fn register(&mut self, resource: &str, options: PluginOptions) {
        self.endpoints.insert(resource.to_owned(), Endpoint { options, stopped_at: None });
    }

    /// Replaces a plugin's list of devices.
    pub fn list(&mut self, resource: &str, devices: impl IntoIterator<Item = Device>) {
        let (mut healthy, mut unhealthy, mut nodes) = (Ids::new(), Ids::new(), BTreeMap::new());
        for device in devices {
            // If an id is listed twice, the last entry counts.
            healthy.remove(&device.id);
            unhealthy.remove(&device.id);
            let set = if device.health == Health::Healthy { &mut healthy } else { &mut unhealthy };
            set.insert(device.id.clone());
            nodes.insert(device.id, device.numa_nodes);
        }
        let mut places: BTreeMap<Vec<i64>, usize> = BTreeMap::new();
        for near in nodes.values() {
            *places.entry(near.clone()).or_default() += 1;
        }
        self.last_known.remove(resource);
        self.places.insert(resource.to_owned(), places);
        self.healthy.insert(resource.to_owned(), Arc::new(healthy));
        self.unhealthy.insert(resource.to_owned(), unhealthy);
        self.nodes.insert(resource.to_owned(), nodes);
    }

    /// Marks the devices of a disconnected plugin as unhealthy.
    pub fn stopped(&mut self, resource: &str, now: Duration) {
        let Some(endpoint) = self.endpoints.get_mut(resource) else { return };
        endpoint.stopped_at = Some(now);
        let lost = self.healthy.get_mut(resource).map(std::mem::take).unwrap_or_default();
        self.unhealthy.entry(resource.to_owned()).or_default().extend(Arc::unwrap_or_clone(lost));
    }

    /// Returns a plugin's options; `None` if the plugin is not registered or has disconnected.
    #[must_use]
    pub fn options(&self, resource: &str) -> Option<PluginOptions> {
        self.endpoints
            .get(resource)
            .filter(|endpoint| endpoint.stopped_at.is_none())
            .map(|endpoint| endpoint.options)
    }

    /// Returns the node's devices, and drops resources whose plugin has been gone for longer than
    /// [`ENDPOINT_GRACE`].
    pub fn capacity(&mut self, now: Duration) -> Capacity {
        let mut result = Capacity::default();
        let known: Ids = self.healthy.keys().chain(self.unhealthy.keys()).cloned().collect();
        for resource in known {
            if self.endpoints.get(&resource).is_none_or(|endpoint| endpoint.expired(now)) {
                self.endpoints.remove(&resource);
                self.healthy.remove(&resource);
                self.unhealthy.remove(&resource);
                self.last_known.remove(&resource);
                result.removed.insert(resource);
                continue;
            }
            let healthy = self.healthy.get(&resource).map(|ids| ids.len());
            let unhealthy = self.unhealthy.get(&resource).map_or(0, BTreeSet::len);
            result.capacity.insert(resource.clone(), healthy.unwrap_or(0) + unhealthy);
            if let Some(healthy) = healthy {
                result.allocatable.insert(resource, healthy);
            }
        }
        result
    }

    /// Returns the node's devices, where a resource whose plugin has not registered since a restart keeps its
    /// former amount: otherwise a rebooted node would seem to have no devices.
    pub fn capacity_meanwhile(&mut self, now: Duration) -> Capacity {
        let mut result = self.capacity(now);
        for (resource, ids) in &self.last_known {
            for amounts in [&mut result.capacity, &mut result.allocatable] {
                let amount = amounts.entry(resource.clone()).or_default();
                *amount = (*amount).max(ids.len());
            }
        }
        result
    }

    /// Returns the resources that are listed now, or were before the last restart.
    pub fn resources(&self) -> impl Iterator<Item = &str> {
        self.healthy.keys().map(String::as_str)
    }

    /// Returns the devices of a resource with their health, sorted by id.
    pub fn devices_of(&self, resource: &str) -> Vec<Device> {
        let nodes = self.nodes.get(resource);
        let of = |ids: Option<&Ids>, health: Health| {
            let device = |id: &String| {
                let numa_nodes = nodes.and_then(|nodes| nodes.get(id)).cloned().unwrap_or_default();
                Device { id: id.clone(), health, numa_nodes }
            };
            ids.into_iter().flatten().map(device).collect::<Vec<_>>()
        };
        let mut all = of(self.healthy.get(resource).map(|ids| &**ids), Health::Healthy);
        all.extend(of(self.unhealthy.get(resource), Health::Unhealthy));
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    /// Returns the time at which a resource's plugin disconnected; `None` while it is connected (or never
    /// was).
    #[must_use]
    pub fn gone_since(&self, resource: &str) -> Option<Duration> {
        self.endpoints.get(resource)?.stopped_at
    }

    /// Returns true if a device is healthy.
    #[must_use]
    pub fn is_healthy(&self, resource: &str, id: &str) -> bool {
        self.healthy.get(resource).is_some_and(|ids| ids.contains(id))
    }

    /// Returns the healthy devices of each resource, with the NUMA nodes near each.
    pub fn allocatable(&self) -> impl Iterator<Item = (&str, impl Iterator<Item = (&str, &[i64])>)> {
        self.healthy.iter().map(|(resource, ids)| {
            let nodes = self.nodes.get(resource);
            let near =
                move |id: &String| nodes.and_then(|nodes| nodes.get(id)).map_or(&[][..], Vec::as_slice);
            (resource.as_str(), ids.iter().map(move |id| (id.as_str(), near(id))))
        })
    }
}
