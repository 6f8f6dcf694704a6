//! Changes of the health of devices that pods hold.

use std::{collections::BTreeSet, sync::Arc};

use beelet_devices::NodeDevices;
use beelet_dra::Dra;
use tokio::sync::watch;

use super::pods::Pods;
use crate::deps::DeviceDeps;

/// Changes of devices.
#[derive(Debug)]
pub(super) struct DeviceNews {
    /// Devices of plugins.
    node: watch::Receiver<Arc<NodeDevices>>,
    /// Number of the last change of the health of plugins' devices.
    health: u64,
    /// Devices of claims.
    claimed: Dra,
}

impl DeviceNews {
    pub(super) fn of(devices: &DeviceDeps) -> Self {
        Self { node: devices.plugins.node(), health: 0, claimed: devices.claims.clone() }
    }

    /// Waits until the health of devices changes. Returns the pods that hold the devices by claims, or None
    /// for devices of plugins.
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

/// Publishes the statuses of pods after a change of the health of their devices: of the `changed` pods, or if
/// None, of all pods that hold devices of plugins.
pub(super) fn on_devices(pods: &mut Pods, changed: Option<BTreeSet<String>>) {
    let holders = || pods.deps.devices.plugins.holders().into_iter().collect();
    for uid in changed.unwrap_or_else(holders) {
        pods.publish(&uid);
    }
}
