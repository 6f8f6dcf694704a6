//! Totals of all pods, kept up with each change of one pod: a node of thousands of pods would else count all
//! of them for each new result of a probe.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use crate::metrics::{Counted, Working};

/// The share of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) counted: Counted,
    /// Something of it may run.
    pub(super) is_active: bool,
    /// When it must have ended.
    pub(super) deadline: Option<Instant>,
}

/// The totals of all pods.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// By UID.
    shares: BTreeMap<String, Share>,
    working: Working,
    /// UIDs of those of which something may run.
    active: BTreeSet<String>,
    deadlines: BTreeSet<(Instant, String)>,
}

impl Totals {
    /// Takes over what a pod adds now; None once it is gone. Returns true if it began or ceased to be one
    /// of which something may run.
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

    /// Numbers of pods by state.
    pub(super) fn working(&self) -> &Working {
        &self.working
    }

    /// UIDs of those of which something may run.
    pub(super) fn active(&self) -> &BTreeSet<String> {
        &self.active
    }

    /// When the next pod must have ended.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// UIDs of the pods that should have ended by now.
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
        assert!(!totals.set("b", Some(share(Lifecycle::Terminating, Some(7)))), "it was active before");
        assert_eq!(totals.next_deadline(), Some(now + Duration::from_secs(7)));
        assert_eq!(totals.overdue(now + Duration::from_secs(8)), ["b"]);
        assert!(totals.set("b", Some(share(Lifecycle::Terminated, None))));
        assert_eq!(totals.active().iter().collect::<Vec<_>>(), ["a"]);
        assert!(totals.set("a", None));
        assert!(!totals.set("b", None));
        assert_eq!(totals, Totals::default());
    }
}
