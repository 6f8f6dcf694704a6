//! The pods that have room, wait for room or are terminating, and the counter of their changes. Must never
//! decide: the ledger does.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::resources::critical::is_critical;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;

use super::{Held, patience};

/// Time for which a new pod waits for the list of running pods' source: without its API server a node must
/// not keep its static pods waiting for ever.
const LISTING: Duration = Duration::from_secs(60);

/// Longest time for which a new pod waits for the room of a terminating one: grace periods can last years.
/// A pod that leaves later counts as one that stays.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Pod that has room.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) pod: Arc<core::Pod>,
    pub(super) standing: Standing,
    /// The pod has just been admitted: its amounts may have changed while it waited.
    pub(super) is_new: bool,
}

/// Certainty of a tenant's stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The pod is admitted.
    Admitted,
    /// The pod terminates, and is overdue after this time.
    Leaves(Instant),
    /// The pod runs, and its source has not been listed since the agent's start: the pod may prove to be
    /// unwanted. After this time other pods no longer wait for the list.
    Unlisted(Instant),
    /// The pod runs, and its definition cannot be read.
    LeftAlone,
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

/// Terminating and unlisted pods that count as present.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    /// All.
    All,
    /// Terminating ones past their deadline, and those that leave too late to be waited for.
    Overdue,
    /// Of the terminating and unlisted ones, those that leave too late to be waited for.
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

impl Tenant {
    /// Returns true if the pod is admitted and not terminating.
    pub(super) fn is_admitted(&self) -> bool {
        self.standing == Standing::Admitted
    }

    /// Returns true if the pod has no worker.
    fn is_held(&self) -> bool {
        matches!(self.standing, Standing::Unlisted(_) | Standing::LeftAlone)
    }

    /// Returns the time at which the pod counts otherwise.
    fn changes_at(&self) -> Option<Instant> {
        match self.standing {
            Standing::Leaves(by) | Standing::Unlisted(by) => Some(by),
            Standing::Admitted | Standing::LeftAlone => None,
        }
    }
}

impl Book {
    /// Returns a counter of the events that others may wait for: room released, pods terminating, claims
    /// given up. Every change that removes or shrinks a tenant or claim must count here.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns true if the pod has room and is not terminating.
    pub(super) fn has(&self, uid: &str) -> bool {
        self.tenants.get(uid).is_some_and(Tenant::is_admitted)
    }

    /// Moves a pod from the queue to the pods that have room.
    pub(super) fn enter(&mut self, pod: &Arc<core::Pod>, is_new: bool) {
        let uid = uid_of(pod);
        self.claims.remove(&uid);
        let entered = Tenant { pod: Arc::clone(pod), standing: Standing::Admitted, is_new };
        let before = self.tenants.insert(uid, entered);
        // Pods that wait for the listing can be decided now.
        self.count_change(before.is_some_and(|tenant| tenant.is_held()));
    }

    /// Replaces the pods that hold room without being managed. Ignores admitted and terminating pods.
    pub(super) fn hold(&mut self, held: &[Held], now: Instant) {
        let uids: BTreeSet<String> = held.iter().map(|held| uid_of(&held.pod)).collect();
        let before = self.tenants.len();
        self.tenants.retain(|uid, tenant| !tenant.is_held() || uids.contains(uid));
        let mut changed = self.tenants.len() < before;
        for Held { pod, is_listed } in held {
            let known = self.tenants.get(&uid_of(pod)).map(|tenant| tenant.standing);
            let standing = match known {
                _ if *is_listed => Standing::LeftAlone,
                Some(Standing::Unlisted(until)) => Standing::Unlisted(until),
                _ => Standing::Unlisted(now.after(LISTING)),
            };
            if matches!(known, None | Some(Standing::Unlisted(_) | Standing::LeftAlone)) {
                changed |= known.is_some_and(|known| known != standing);
                let tenant = Tenant { pod: Arc::clone(pod), standing, is_new: false };
                self.tenants.insert(uid_of(pod), tenant);
            }
        }
        self.count_change(changed);
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
        if !matches!(tenant.standing, Standing::Leaves(known) if known <= by) {
            tenant.standing = Standing::Leaves(by);
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
        let leave = self.tenants.values().filter_map(Tenant::changes_at).filter(|by| *by > now);
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
            let counts = match (tenant.standing, leaving) {
                (Standing::Admitted, _) => {
                    present.push(Arc::clone(&tenant.pod));
                    false
                }
                // A critical pod would preempt most pods, and the API server itself may be such a pod: it
                // must not wait for a list that only the API server can provide.
                (Standing::Unlisted(until), Leaving::All) => until > now && !is_critical(pod),
                (Standing::Leaves(_), Leaving::All) | (Standing::LeftAlone, _) => true,
                (Standing::Leaves(by), Leaving::Overdue) if by <= now => true,
                (Standing::Leaves(by), _) if by > now.after(LONGEST_WAIT) => true,
                (Standing::Unlisted(_) | Standing::Leaves(_), _) => false,
            };
            if counts {
                present.push(unmovable(&tenant.pod));
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
