//! Allocation of the machine's user and group ids to pods with `hostUsers: false` (KEP-127;
//! `pkg/kubelet/userns`).
//!
//! A pod gets one range, whose first id is the pod's root; no two pods share an id, and none has an id of the
//! machine itself. Must never look up the ids' current owners: callers pass in the taken ranges.

use std::ops::Range;

use crate::devices::checkpoint::fnv1a;

/// Unit of a range's length (`userNsUnitLength`): 16 bits of ids, the minimum in POSIX.
pub const UNIT: u32 = 65_536;

/// The invalid id: the kernel's `INVALID_UID` and `INVALID_GID` (include/linux/uidgid.h), -1 for system
/// calls. The kernel refuses a mapping that includes it (`map_write` in kernel/user_namespace.c; kubernetes
/// #141345).
const NO_ID: u32 = u32::MAX;

/// Consecutive ids of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdRange {
    /// The first id: root in the namespace.
    pub first: u32,
    /// Number of ids.
    pub length: u32,
}

impl IdRange {
    fn ids(self) -> Range<u64> {
        let first = u64::from(self.first);
        first..first.saturating_add(self.length.into())
    }

    /// Returns true if all ids are valid for the kernel.
    #[must_use]
    pub fn is_usable(self) -> bool {
        self.ids().end <= u64::from(NO_ID)
    }

    fn overlaps(self, other: Self) -> bool {
        let (own, other) = (self.ids(), other.ids());
        own.start < other.end && other.start < own.end
    }
}

/// The ids available to pods, divided into ranges of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdPool {
    first: u32,
    per_pod: u32,
    ranges: u32,
}

/// A reason why pods cannot get ids (`MakeUserNsManager`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdPoolError {
    /// `userNamespaces.idsPerPod` is invalid.
    #[error("a pod's number of ids, {0}, must be a multiple of {UNIT}, and not 0")]
    PerPod(u32),
    /// The first id of the user `kubelet` is invalid.
    #[error(
        "the first subordinate id of the user kubelet, {first}, must be a multiple of {per_pod}, and not 0"
    )]
    First {
        /// The first id.
        first: u32,
        /// Ids per pod.
        per_pod: u32,
    },
    /// The number of the user's ids is invalid.
    #[error("the user kubelet has {length} subordinate ids, which is not a multiple of {per_pod}")]
    Length {
        /// The number of ids.
        length: u32,
        /// Ids per pod.
        per_pod: u32,
    },
    /// The ids suffice for fewer pods than `maxPods`.
    #[error("the user kubelet has subordinate ids for {ranges} pods, and maxPods is {max_pods}")]
    TooFew {
        /// Number of pods with ids.
        ranges: u32,
        /// Maximum number of pods.
        max_pods: u32,
    },
}

impl IdPool {
    /// Divides the ids of `of` into ranges of `per_pod`; without `of`, all ids but the first range, which
    /// belongs to the machine.
    ///
    /// # Errors
    /// The ranges don't fit, or there are fewer than `max_pods`.
    pub fn new(of: Option<IdRange>, per_pod: u32, max_pods: u32) -> Result<Self, IdPoolError> {
        if per_pod == 0 || !per_pod.is_multiple_of(UNIT) {
            return Err(IdPoolError::PerPod(per_pod));
        }
        // All ids but the last, as the kubelet counts them since 1.38. If the length of a range does not
        // divide that, the rest stays unused.
        let in_all = |ids: u32| ids.checked_div(per_pod).unwrap_or(0);
        let whole = in_all(NO_ID).saturating_sub(1).saturating_mul(per_pod);
        let rest = IdRange { first: per_pod, length: whole };
        let IdRange { first, length } = of.unwrap_or(rest);
        if first < per_pod || !first.is_multiple_of(per_pod) {
            return Err(IdPoolError::First { first, per_pod });
        }
        if !length.is_multiple_of(per_pod) {
            return Err(IdPoolError::Length { length, per_pod });
        }
        // Ranges that would reach the last id, or lie beyond it, stay unused.
        let ranges = in_all(length.min(NO_ID.saturating_sub(first)));
        if ranges < max_pods {
            return Err(IdPoolError::TooFew { ranges, max_pods });
        }
        Ok(Self { first, per_pod, ranges })
    }

    /// Returns a range for the pod with this UID that overlaps none of `taken`; `None` if there is none. The
    /// UID determines the start of the search, so that a new pod does not get the ids of a deleted one.
    #[must_use]
    pub fn choose(&self, uid: &str, taken: &[IdRange]) -> Option<IdRange> {
        // FNV-1a suffices to scatter the UIDs.
        let start = fnv1a(uid).checked_rem(self.ranges)?;
        let first = |index: u32| self.first.saturating_add(index.saturating_mul(self.per_pod));
        let range = |index: u32| IdRange { first: first(index), length: self.per_pod };
        (start..self.ranges)
            .chain(0..start)
            .map(range)
            .find(|range| !taken.iter().any(|taken| taken.overlaps(*range)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(first: u32, length: u32) -> IdRange {
        IdRange { first, length }
    }

    #[test]
    fn the_ids_of_user_kubelet_must_form_whole_ranges_for_all_pods() {
        let check = |of: Option<IdRange>, per_pod: u32, expected: Result<u32, &str>| {
            let pool =
                IdPool::new(of, per_pod, 110).map(|pool| pool.ranges).map_err(|error| error.to_string());
            match (&pool, expected) {
                (Ok(ranges), Ok(expected)) => assert_eq!(*ranges, expected, "{of:?}"),
                (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
                _ => panic!("{of:?} {per_pod}: {pool:?}"),
            }
        };
        check(None, UNIT, Ok(65_534));
        check(None, 2 * UNIT, Ok(32_766));
        check(None, 3 * UNIT, Ok(21_844));
        check(None, 1 << 31, Err("for 0 pods, and maxPods is 110"));
        check(Some(range(u32::MAX - 110 * UNIT + 1, 110 * UNIT)), UNIT, Err("for 109 pods"));
        check(Some(range(u32::MAX - 111 * UNIT + 1, 111 * UNIT)), UNIT, Ok(110));
        check(Some(range(u32::MAX - UNIT + 1, 200 * UNIT)), UNIT, Err("for 0 pods"));
        check(None, 0, Err("must be a multiple of 65536"));
        check(None, 65_537, Err("must be a multiple of 65536"));
        check(Some(range(UNIT, 110 * UNIT)), UNIT, Ok(110));
        check(Some(range(UNIT, 109 * UNIT)), UNIT, Err("for 109 pods, and maxPods is 110"));
        check(Some(range(0, 200 * UNIT)), UNIT, Err("first subordinate id"));
        check(Some(range(100_000, 200 * UNIT)), UNIT, Err("first subordinate id"));
        check(Some(range(UNIT, 7_208_961)), UNIT, Err("not a multiple"));
    }

    #[test]
    fn no_two_pods_share_an_id() {
        let pool = IdPool::new(Some(range(UNIT, 3 * UNIT)), UNIT, 3).unwrap();
        let mut taken = Vec::new();
        for uid in ["a", "b", "c"] {
            let chosen = pool.choose(uid, &taken).unwrap();
            assert!(taken.iter().all(|other: &IdRange| !other.overlaps(chosen)), "{taken:?} {chosen:?}");
            assert_eq!((chosen.first % UNIT, chosen.length), (0, UNIT));
            taken.push(chosen);
        }
        assert_eq!(pool.choose("d", &taken), None);
        assert_eq!(pool.choose("d", &taken[1..]), Some(taken[0]));
        // Ranges of another length, from before a change of the configuration, are avoided, too.
        assert_eq!(pool.choose("d", &[range(UNIT, 2 * UNIT)]), Some(range(3 * UNIT, UNIT)));
        assert_eq!(pool.choose("d", &[range(4 * UNIT - 1, 1), range(UNIT, 2 * UNIT)]), None);
    }

    #[test]
    fn the_last_id_is_never_used() {
        let pool = IdPool::new(None, UNIT, 110).unwrap();
        let last = range(u32::MAX - 2 * UNIT + 1, UNIT);
        let others = range(UNIT, u32::MAX - 3 * UNIT + 1);
        assert_eq!(pool.choose("a", &[others]), Some(last));
        assert_eq!(pool.choose("a", &[others, last]), None);
    }

    proptest! {
        #[test]
        fn every_allocated_id_is_valid(first: u32, length: u32, units in 1..=u32::MAX / UNIT, uid: String) {
            let per_pod = units * UNIT;
            let given = range(first / per_pod * per_pod, length / per_pod * per_pod);
            for of in [None, Some(given)] {
                let Ok(pool) = IdPool::new(of, per_pod, 1) else { continue };
                let chosen = pool.choose(&uid, &[]).unwrap();
                prop_assert!(chosen.ids().end <= u64::from(u32::MAX), "{chosen:?} of {of:?}");
                prop_assert!(chosen.first >= per_pod);
            }
        }
    }
}
