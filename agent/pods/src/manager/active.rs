//! Which pods may hold devices, and how those devices are.

use std::{collections::BTreeSet, sync::Arc};

use super::Manager;

impl Manager {
    /// Tells who may hold devices: every pod that hasn't ended or still has containers, and those in the
    /// runtime that are left alone. Nothing as long as it isn't known what the runtime has or what is wanted.
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
    pub(super) fn on_devices(&mut self) {
        let health = self.devices.borrow_and_update().health;
        if health == self.device_health {
            return;
        }
        self.device_health = health;
        for uid in self.parts.launcher.devices.holders() {
            self.publish(&uid);
        }
    }

    /// The same of devices that pods have by claims.
    pub(super) fn on_claimed_devices(&mut self) {
        self.claimed_devices.mark_unchanged();
        for uid in self.parts.launcher.dra.pods() {
            self.publish(&uid);
        }
    }
}

impl super::Managed {
    /// One that was ended for good may have containers until it has given everything back.
    pub(super) fn may_have_containers(&self) -> bool {
        match &self.kept.failure {
            Some(failure) => !failure.cleared,
            None => !self.ended(),
        }
    }
}
