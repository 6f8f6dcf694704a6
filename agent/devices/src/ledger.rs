//! Ledger shared by the parts of this crate, and the consequences of its changes: the node's devices, the
//! checkpoint, waiting pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::devices::{Device, Devices, ENDPOINT_GRACE, PluginOptions};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{Active, Error, Metrics, NodeDevices, Settings, plugin::Plugin};

/// Maximum number of registered plugins. Further ones are refused.
const MAX_PLUGINS: usize = 256;

/// Plugin registered since the agent's start.
#[derive(Debug)]
pub(super) struct Registered {
    /// Distinguishes registrations of the same resource.
    pub(super) generation: u64,
    pub(super) plugin: Plugin,
    pub(super) options: PluginOptions,
    /// Socket of the plugin, for display.
    pub(super) socket: PathBuf,
    /// Stops the plugin's task.
    superseded: CancellationToken,
}

/// Pod that waits for a plugin.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) since: Duration,
    pub(super) pod: String,
    pub(super) message: String,
}

/// Devices that pods hold, and pods that wait for devices.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) devices: Devices,
    pub(super) plugins: BTreeMap<String, Registered>,
    /// Waiting pods by UID.
    pub(super) waiting: BTreeMap<String, Waiting>,
    /// Pods refused for lack of devices, by UID: the resource and the number of devices needed.
    pub(super) refused: BTreeMap<String, (String, usize)>,
    /// Pods that have asked for devices, by UID, each with a receiver that has seen the active set published
    /// before: that set may not name the pod yet.
    pub(super) entering: BTreeMap<String, watch::Receiver<Active>>,
    removed: BTreeSet<String>,
    generations: u64,
    changes: u64,
    health: u64,
    /// Reason why plugins cannot register, if they cannot.
    pub(super) trouble: Option<String>,
}

impl Ledger {
    /// Frees the devices of pods that are neither active nor `asking`. Returns true if any were held.
    pub(super) fn free_inactive(&mut self, active: &BTreeSet<String>, asking: &str) -> bool {
        // An active set published after the request already accounts for the pod.
        self.entering.retain(|_, seen| !seen.has_changed().unwrap_or(true));
        let entering = &self.entering;
        self.devices
            .holders
            .free_inactive(|pod| pod == asking || entering.contains_key(pod) || active.contains(pod))
    }
}

/// Ledger of devices behind its lock, with the channels that publish its changes.
#[derive(Debug)]
pub(super) struct Shared {
    ledger: Mutex<Ledger>,
    pub(super) node: watch::Sender<Arc<NodeDevices>>,
    /// Number of changes that the checkpoint must contain.
    pub(super) dirty: watch::Sender<u64>,
    pub(super) settings: Settings,
    pub(super) metrics: Metrics,
    origin: Instant,
}

impl Shared {
    pub(super) fn new(devices: Devices, settings: Settings, metrics: Metrics) -> Self {
        let shared = Self {
            ledger: Mutex::new(Ledger { devices, ..Ledger::default() }),
            node: watch::Sender::new(Arc::default()),
            dirty: watch::Sender::new(0),
            settings,
            metrics,
            origin: Instant::now(),
        };
        shared.publish(&mut shared.lock());
        shared
    }

    /// Returns the ledger's time: the time since the agent's start.
    pub(super) fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Converts a time of the ledger to the timer's clock.
    pub(super) fn at(&self, time: Duration) -> Instant {
        self.origin.after(time)
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the ledger, or makes a change that needs no publication.
    pub(super) fn with_ledger<T>(&self, work: impl FnOnce(&mut Ledger) -> T) -> T {
        work(&mut self.lock())
    }

    /// Changes the ledger and publishes the change.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = self.lock();
        let result = change(&mut ledger);
        self.changed(&mut ledger);
        result
    }

    fn changed(&self, ledger: &mut Ledger) {
        self.dirty.send_modify(|dirty| *dirty += 1);
        self.publish(ledger);
    }

    fn publish(&self, ledger: &mut Ledger) {
        let now = self.now();
        let capacity = ledger.devices.inventory.capacity_meanwhile(now);
        ledger.removed.retain(|resource| !capacity.capacity.contains_key(resource));
        ledger.removed.extend(capacity.removed);
        ledger.changes += 1;
        // A resource whose plugin never listed devices is published with zero.
        let mut allocatable = capacity.allocatable;
        for resource in capacity.capacity.keys() {
            allocatable.entry(resource.clone()).or_default();
        }
        let node = NodeDevices {
            capacity: capacity.capacity,
            allocatable,
            removed: ledger.removed.clone(),
            changes: ledger.changes,
            health: ledger.health,
        };
        self.metrics.waiting.set(i64::try_from(ledger.waiting.len()).unwrap_or(i64::MAX));
        self.metrics.node(&node);
        self.node.send_replace(Arc::new(node));
    }

    /// Registers a plugin, replacing an earlier one of the resource.
    pub(super) fn register(
        &self,
        resource: &str,
        plugin: Plugin,
        options: PluginOptions,
        socket: PathBuf,
    ) -> Result<(u64, CancellationToken), Error> {
        let superseded = CancellationToken::new();
        self.change(|ledger| {
            if !ledger.plugins.contains_key(resource) && ledger.plugins.len() >= MAX_PLUGINS {
                return Err(Error::Full(MAX_PLUGINS));
            }
            ledger.generations += 1;
            let generation = ledger.generations;
            let registered =
                Registered { generation, plugin, options, socket, superseded: superseded.clone() };
            if let Some(before) = ledger.plugins.insert(resource.to_owned(), registered) {
                before.superseded.cancel();
            }
            ledger.devices.inventory.register(resource, options);
            self.metrics.registered(resource);
            Ok((generation, superseded))
        })
    }

    /// Updates a plugin's devices. Returns false if another plugin has replaced it.
    pub(super) fn listed(&self, resource: &str, generation: u64, devices: Vec<Device>) -> bool {
        self.if_current(resource, generation, |ledger, options| {
            if ledger.devices.inventory.options(resource).is_none() {
                // The plugin was away for a moment.
                ledger.devices.inventory.register(resource, options);
            }
            ledger.devices.inventory.list(resource, devices);
            ledger.health += 1;
        })
    }

    /// Marks a plugin as disconnected. Returns false if another plugin has replaced it.
    pub(super) fn stopped(&self, resource: &str, generation: u64) -> bool {
        let now = self.now();
        self.if_current(resource, generation, |ledger, _| {
            if ledger.devices.inventory.gone_since(resource).is_none() {
                ledger.devices.inventory.stopped(resource, now);
                ledger.health += 1;
            }
        })
    }

    /// Removes a plugin that has been away for too long.
    pub(super) fn given_up(&self, resource: &str, generation: u64) {
        self.if_current(resource, generation, |ledger, _| drop(ledger.plugins.remove(resource)));
    }

    /// Returns a resource's plugin with its options.
    pub(super) fn plugin(&self, resource: &str) -> Option<(Plugin, PluginOptions)> {
        self.with_ledger(|ledger| {
            let registered = ledger.plugins.get(resource)?;
            Some((registered.plugin.clone(), registered.options))
        })
    }

    /// Removes the plugin of this socket.
    pub(super) fn deregister(&self, resource: &str, socket: &std::path::Path) {
        let now = self.now();
        self.change(|ledger| {
            if ledger.plugins.get(resource).is_some_and(|registered| registered.socket == socket)
                && let Some(registered) = ledger.plugins.remove(resource)
            {
                registered.superseded.cancel();
                ledger.devices.inventory.stopped(resource, now);
                ledger.health += 1;
            }
        });
    }

    fn if_current(
        &self,
        resource: &str,
        generation: u64,
        change: impl FnOnce(&mut Ledger, PluginOptions),
    ) -> bool {
        let mut ledger = self.lock();
        let registered =
            ledger.plugins.get(resource).filter(|registered| registered.generation == generation);
        let Some(options) = registered.map(|registered| registered.options) else { return false };
        change(&mut ledger, options);
        self.changed(&mut ledger);
        true
    }
}

/// Removes resources whose plugin has been away for too long.
pub(super) async fn expire(shared: Arc<Shared>, shutdown: CancellationToken) {
    let mut changed = shared.node.subscribe();
    loop {
        changed.borrow_and_update();
        let next = next_expiry(&shared);
        let expiry = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = changed.changed() => {}
            () = expiry => shared.change(|_| ()),
        }
    }
}

/// Returns the time at which the next resource with an absent plugin expires.
fn next_expiry(shared: &Shared) -> Option<Instant> {
    shared.with_ledger(|ledger| {
        let resources: Vec<String> = ledger.devices.inventory.resources().map(str::to_owned).collect();
        let gone = resources.iter().filter_map(|resource| ledger.devices.inventory.gone_since(resource));
        gone.map(|at| shared.at(at + ENDPOINT_GRACE + Duration::from_millis(1))).min()
    })
}
