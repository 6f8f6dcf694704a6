//! Which pods may hold devices, and how those devices are.

use std::{collections::BTreeSet, sync::Arc};

use beelet_devices::NodeDevices;
use beelet_dra::Dra;
use tokio::sync::watch;

use super::Manager;
use crate::deps::DeviceDeps;

/// What is told of devices.
#[derive(Debug)]
pub(super) struct DeviceNews {
    /// What the node has of them by plugins.
    node: watch::Receiver<Arc<NodeDevices>>,
    /// The last change of their health that was told.
    health: u64,
    /// Those that pods have by claims.
    claimed: Dra,
}

impl DeviceNews {
    pub(super) fn of(devices: &DeviceDeps) -> Self {
        Self { node: devices.plugins.node(), health: 0, claimed: devices.claims.clone() }
    }

    /// Waits until devices have become healthy or unhealthy; the pods that have them by claims, or none where
    /// it is those that plugins gave.
    pub(super) async fn changed(&mut self) -> Option<BTreeSet<String>> {
        loop {
            tokio::select! {
                Ok(()) = self.node.changed() => {
                    let health = self.node.borrow_and_update().health;
                    if std::mem::replace(&mut self.health, health) != health {
                        return None;
                    }
                }
                pods = self.claimed.health_changed() => return Some(pods),
            }
        }
    }
}

impl Manager {
    /// Tells who may hold devices: every pod of which anything may run, and those in the runtime that are
    /// left alone. Nothing as long as it isn't known what the runtime has or what is wanted.
    pub(super) fn publish_active(&mut self) {
        if !std::mem::take(&mut self.due.active) {
            return;
        }
        let known = self.runtime.as_ref().filter(|_| !self.parts.desired.borrow().is_incomplete());
        let active = known.map(|in_runtime| {
            let left_alone = in_runtime.keys().filter(|uid| !self.pods.contains_key(*uid));
            self.totals.active().iter().chain(left_alone).cloned().collect::<BTreeSet<String>>()
        });
        self.parts.active.send_if_modified(|published| {
            if published.as_deref() == active.as_ref() {
                return false;
            }
            *published = active.map(Arc::new);
            true
        });
    }

    /// Devices have become healthy or unhealthy: the statuses of those who hold them say so.
    pub(super) fn on_devices(&mut self, pods: Option<BTreeSet<String>>) {
        let holders = || self.parts.deps.devices.plugins.holders().into_iter().collect();
        for uid in pods.unwrap_or_else(holders) {
            self.publish(&uid);
        }
    }
}
