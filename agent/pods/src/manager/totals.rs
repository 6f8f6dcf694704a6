//! Totals of all pods, updated with each change of a pod: a node with thousands of pods would otherwise count
//! all of them for each new probe result.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use crate::metrics::{Counted, Working};

/// The share of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) counted: Counted,
    /// A container of the pod may run.
    pub(super) is_active: bool,
    /// Deadline of the pod.
    pub(super) deadline: Option<Instant>,
}

/// The totals of all pods.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// By UID.
    shares: BTreeMap<String, Share>,
    working: Working,
    /// UIDs of the pods of which a container may run.
    active: BTreeSet<String>,
    deadlines: BTreeSet<(Instant, String)>,
}

impl Totals {
    /// Sets the share of a pod, or removes it if None. Returns true if the pod became active or inactive.
    pub(super) fn set(&mut self, uid: &str, share: Option<Share>) -> bool {
        let before = self.shares.get(uid).copied();
        if before == share {
            return false;
        }
        if let Some(before) = before {
            self.working.add(before.counted, -1);
            self.active.remove(uid);
            before.deadline.map(|at| self.deadlines.remove(&(at, uid.to_owned())));
        }
        match share {
            Some(share) => {
                self.shares.insert(uid.to_owned(), share);
                self.working.add(share.counted, 1);
                if share.is_active {
                    self.active.insert(uid.to_owned());
                }
                self.deadlines.extend(share.deadline.map(|at| (at, uid.to_owned())));
            }
            None => drop(self.shares.remove(uid)),
        }
        before.is_some_and(|share| share.is_active) != share.is_some_and(|share| share.is_active)
    }

    /// Returns the numbers of pods by state.
    pub(super) fn working(&self) -> &Working {
        &self.working
    }

    /// Returns the UIDs of the pods of which a container may run.
    pub(super) fn active(&self) -> &BTreeSet<String> {
        &self.active
    }

    /// Returns the earliest deadline of all pods.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Returns the UIDs of the pods whose deadline has passed.
    pub(super) fn overdue(&self, now: Instant) -> Vec<String> {
        self.deadlines.iter().take_while(|(at, _)| *at <= now).map(|(_, uid)| uid.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::Lifecycle;

    #[test]
    fn totals_follow_each_pod() {
        let now = Instant::now();
        let share = |lifecycle, deadline: Option<u64>| Share {
            counted: Counted { is_static: true, is_desired: true, lifecycle },
            is_active: lifecycle != Lifecycle::Terminated,
            deadline: deadline.map(|seconds| now + Duration::from_secs(seconds)),
        };
        let mut totals = Totals::default();
        assert!(totals.set("a", Some(share(Lifecycle::Sync, Some(9)))));
        assert!(totals.set("b", Some(share(Lifecycle::Sync, Some(5)))));
        assert!(!totals.set("b", Some(share(Lifecycle::Terminating, Some(7)))), "the pod was active before");
        assert_eq!(totals.next_deadline(), Some(now + Duration::from_secs(7)));
        assert_eq!(totals.overdue(now + Duration::from_secs(8)), ["b"]);
        assert!(totals.set("b", Some(share(Lifecycle::Terminated, None))));
        assert_eq!(totals.active().iter().collect::<Vec<_>>(), ["a"]);
        assert!(totals.set("a", None));
        assert!(!totals.set("b", None));
        assert_eq!(totals, Totals::default());
    }
}
