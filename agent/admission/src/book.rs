//! The pods that have room, wait for room or are terminating, and the counter of their changes. Must never
//! decide: the ledger does.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_policy::resources::critical::is_critical;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;

use super::patience;

/// Pod that has room.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) pod: Arc<core::Pod>,
    /// Deadline of a terminating pod. After it the pod counts as overdue.
    pub(super) leaves_by: Option<Instant>,
    /// The pod has just been admitted: its amounts may have changed while it waited.
    pub(super) is_new: bool,
}

/// Pod that waits for room or has a reservation.
#[derive(Debug)]
struct Claim {
    pod: Arc<core::Pod>,
    /// Place in the queue.
    number: u64,
    /// Expiry of a reservation.
    until: Option<Instant>,
}

/// The book of pods.
#[derive(Debug, Default)]
pub(super) struct Book {
    /// By UID.
    pub(super) tenants: BTreeMap<String, Tenant>,
    /// By UID.
    claims: BTreeMap<String, Claim>,
    next_number: u64,
    /// Counts releases of room: see [`Self::changes`].
    changes: u64,
}

/// Terminating pods that count as present.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    /// All.
    All,
    /// Those past their deadline.
    Overdue,
    /// No terminating pod.
    None,
}

/// Earlier claims that count as if they had their room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Claims {
    /// All.
    All,
    /// Those of critical pods: room is being made for them.
    Critical,
}

impl Book {
    /// Returns a counter of the events that others may wait for: room released, pods terminating, claims
    /// given up. Every change that removes or shrinks a tenant or claim must count here.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns true if the pod has room and is not terminating.
    pub(super) fn has(&self, uid: &str) -> bool {
        self.tenants.get(uid).is_some_and(|tenant| tenant.leaves_by.is_none())
    }

    /// Moves a pod from the queue to the pods that have room.
    pub(super) fn enter(&mut self, pod: &Arc<core::Pod>, is_new: bool) {
        let uid = uid_of(pod);
        self.claims.remove(&uid);
        self.tenants.insert(uid, Tenant { pod: Arc::clone(pod), leaves_by: None, is_new });
    }

    /// Counts a release, if there was one.
    pub(super) fn count_change(&mut self, changed: bool) {
        self.changes = self.changes.wrapping_add(u64::from(changed));
    }

    /// Marks a pod as terminating.
    pub(super) fn leaving(&mut self, uid: &str, now: Instant, grace: Duration) {
        self.withdraw(uid);
        let Some(tenant) = self.tenants.get_mut(uid) else { return };
        let by = now.after(patience(grace));
        if tenant.leaves_by.is_none_or(|known| by < known) {
            tenant.leaves_by = Some(by);
            self.count_change(true);
        }
    }

    /// Releases the room of a terminated pod.
    pub(super) fn released(&mut self, uid: &str) {
        let removed = self.tenants.remove(uid).is_some();
        self.count_change(removed);
    }

    /// Removes a pod from the queue.
    pub(super) fn withdraw(&mut self, uid: &str) {
        let removed = self.claims.remove(uid).is_some();
        self.count_change(removed);
    }

    /// Drops expired reservations.
    pub(super) fn expire(&mut self, now: Instant) {
        let before = self.claims.len();
        self.claims.retain(|_, claim| claim.until.is_none_or(|until| until > now));
        self.count_change(self.claims.len() < before);
    }

    /// Returns the time at which the next reservation expires.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.claims.values().filter_map(|claim| claim.until).min()
    }

    /// Returns the next time at which a terminating pod becomes overdue or a reservation expires.
    pub(super) fn next_change(&self, now: Instant) -> Option<Instant> {
        let leave = self.tenants.values().filter_map(|tenant| tenant.leaves_by).filter(|by| *by > now);
        leave.chain(self.next_expiry()).min()
    }

    /// Returns the pods that count for `pod`, those that can't be preempted marked so.
    pub(super) fn present(
        &self,
        pod: &core::Pod,
        (leaving, claims): (Leaving, Claims),
        now: Instant,
    ) -> Vec<Arc<core::Pod>> {
        let mut present = Vec::with_capacity(self.tenants.len());
        for tenant in self.tenants.values() {
            match tenant.leaves_by {
                None => present.push(Arc::clone(&tenant.pod)),
                Some(_) if leaving == Leaving::All => present.push(unmovable(&tenant.pod)),
                Some(by) if leaving == Leaving::Overdue && by <= now => present.push(unmovable(&tenant.pod)),
                Some(_) => {}
            }
        }
        let counts = |claim: &&Claim| match claims {
            Claims::All => true,
            Claims::Critical => is_critical(&claim.pod),
        };
        present.extend(self.before(pod).filter(counts).map(|claim| unmovable(&claim.pod)));
        present
    }

    /// Returns the claims that precede the pod's: earlier ones. A critical pod yields only to critical ones.
    fn before(&self, pod: &core::Pod) -> impl Iterator<Item = &Claim> {
        let own = self.claims.get(&uid_of(pod)).map_or(u64::MAX, |claim| claim.number);
        let critical = is_critical(pod);
        self.claims.values().filter(move |claim| claim.number < own && (!critical || is_critical(&claim.pod)))
    }

    /// Creates or updates the pod's claim with its current amounts, keeping its place.
    pub(super) fn claim(&mut self, pod: &Arc<core::Pod>, until: Option<Instant>) {
        let number = self.next_number;
        let claim = self.claims.entry(uid_of(pod)).or_insert(Claim { pod: Arc::clone(pod), number, until });
        // A smaller claim releases the difference.
        let differs = !Arc::ptr_eq(&claim.pod, pod) && claim.pod.spec != pod.spec;
        (claim.pod, claim.until) = (Arc::clone(pod), until);
        self.next_number = number.saturating_add(u64::from(claim.number == number));
        self.count_change(differs);
    }
}

pub(super) fn uid_of(pod: &core::Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

/// Returns a copy of the pod that cannot be preempted: it is terminating, or not admitted yet.
fn unmovable(pod: &Arc<core::Pod>) -> Arc<core::Pod> {
    let mut pod = core::Pod::clone(pod);
    if let Some(spec) = &mut pod.spec {
        spec.priority = Some(i32::MAX);
    }
    Arc::new(pod)
}
