//! Which of the machine's user and group ids a pod of `hostUsers: false` gets (KEP-127;
//! `pkg/kubelet/userns`).
//!
//! A pod gets one range, in which its root is the first id; no two pods share an id, and none is the
//! machine's own. Must never look at who the ids belong to now: what is taken comes in.

use std::ops::Range;

/// The length of a range is a multiple of this (`userNsUnitLength`): 16 bits of ids, as POSIX has them at
/// least.
pub const UNIT: u32 = 65_536;

/// What is no id: the kernel's `INVALID_UID` and `INVALID_GID` (include/linux/uidgid.h), -1 for system calls.
/// A mapping that has it is refused (`map_write` in kernel/user_namespace.c; kubernetes #141345).
const NO_ID: u32 = u32::MAX;

/// Ids of the machine, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdRange {
    /// The first one: root in the namespace.
    pub first: u32,
    /// How many.
    pub length: u32,
}

impl IdRange {
    fn ids(self) -> Range<u64> {
        let first = u64::from(self.first);
        first..first.saturating_add(self.length.into())
    }

    /// Returns true if the kernel takes all of them for ids.
    #[must_use]
    pub fn is_usable(self) -> bool {
        self.ids().end <= u64::from(NO_ID)
    }

    fn overlaps(self, other: Self) -> bool {
        let (own, other) = (self.ids(), other.ids());
        own.start < other.end && other.start < own.end
    }
}

/// The ids that pods may get, cut into ranges of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdPool {
    first: u32,
    per_pod: u32,
    ranges: u32,
}

/// Why ids can't be given to pods (`MakeUserNsManager`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdPoolError {
    /// `userNamespaces.idsPerPod`.
    #[error("a pod's number of ids, {0}, must be a multiple of {UNIT}, and not 0")]
    PerPod(u32),
    /// The first id of the user `kubelet`.
    #[error(
        "the first subordinate id of the user kubelet, {first}, must be a multiple of {per_pod}, and not 0"
    )]
    First {
        /// What it is.
        first: u32,
        /// The ids of each pod.
        per_pod: u32,
    },
    /// The number of its ids.
    #[error("the user kubelet has {length} subordinate ids, which is not a multiple of {per_pod}")]
    Length {
        /// What it is.
        length: u32,
        /// The ids of each pod.
        per_pod: u32,
    },
    /// `maxPods`.
    #[error("the user kubelet has subordinate ids for {ranges} pods, and maxPods is {max_pods}")]
    TooFew {
        /// How many pods they are enough for.
        ranges: u32,
        /// How many there may be.
        max_pods: u32,
    },
}

impl IdPool {
    /// The ids of `of` in ranges of `per_pod`; without `of` all but the first such range, which is the
    /// machine's own.
    ///
    /// # Errors
    /// The ranges don't fit, or there are less than `max_pods`.
    pub fn new(of: Option<IdRange>, per_pod: u32, max_pods: u32) -> Result<Self, IdPoolError> {
        if per_pod == 0 || !per_pod.is_multiple_of(UNIT) {
            return Err(IdPoolError::PerPod(per_pod));
        }
        // All ids but the last, as the kubelet counts them since 1.38. Where the length of a range doesn't
        // divide that, the rest is nobody's.
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
        // A range that would reach the last id, or lie beyond it, is nobody's.
        let ranges = in_all(length.min(NO_ID.saturating_sub(first)));
        if ranges < max_pods {
            return Err(IdPoolError::TooFew { ranges, max_pods });
        }
        Ok(Self { first, per_pod, ranges })
    }

    /// A range for the pod with this UID that is free of all that is `taken`; None if there is none. Where to
    /// begin looking follows from the UID, so that the ids of a pod that is gone are not those of the next
    /// one.
    #[must_use]
    pub fn choose(&self, uid: &str, taken: &[IdRange]) -> Option<IdRange> {
        // FNV-1a: it only has to scatter.
        let hash =
            uid.bytes().fold(0x811c_9dc5_u32, |hash, b| (hash ^ u32::from(b)).wrapping_mul(0x0100_0193));
        let start = hash.checked_rem(self.ranges)?;
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
    fn what_the_user_kubelet_has_must_make_whole_ranges_for_all_pods() {
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
        // Ranges of another length, from before a change of the configuration, are kept clear of too.
        assert_eq!(pool.choose("d", &[range(UNIT, 2 * UNIT)]), Some(range(3 * UNIT, UNIT)));
        assert_eq!(pool.choose("d", &[range(4 * UNIT - 1, 1), range(UNIT, 2 * UNIT)]), None);
    }

    #[test]
    fn the_last_id_of_all_belongs_to_nobody() {
        let pool = IdPool::new(None, UNIT, 110).unwrap();
        let last = range(u32::MAX - 2 * UNIT + 1, UNIT);
        let others = range(UNIT, u32::MAX - 3 * UNIT + 1);
        assert_eq!(pool.choose("a", &[others]), Some(last));
        assert_eq!(pool.choose("a", &[others, last]), None);
    }

    proptest! {
        #[test]
        fn every_id_that_is_handed_out_is_one(first: u32, length: u32, units in 1..=u32::MAX / UNIT, uid: String) {
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
