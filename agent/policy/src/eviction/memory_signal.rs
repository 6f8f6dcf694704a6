//! The choice of the number behind the memory signals, and the opt-in number `reclaimable`: page cache that
//! the kernel can drop without reading it again does not count as used memory
//! (kubernetes/kubernetes#43916).
//!
//! The kubelet counts active file pages as used: a node full of cache that no process reads any more evicts
//! pods. Dropping cache that is in use would only move the shortage to the disk. The kernel shows the
//! difference: it counts the file pages that were read again after it had dropped them
//! (`workingset_refault_file`, mm/workingset.c). Those pages are needed: their amount counts as used again,
//! and is forgotten by halves.
//!
//! Must never return less than the kubelet's number, and more than it only up to the kernel's own estimate
//! (`MemAvailable`).

use std::time::Duration;

use beelet_units::moment::Moment;
use serde::{Deserialize, Serialize};

/// The number behind `memory.available` and `allocatableMemory.available`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MemorySignal {
    /// Capacity minus the working set, as in the kubelet: all active file pages count as used.
    #[default]
    WorkingSet,
    /// As [`Self::WorkingSet`], plus active file pages that the kernel can drop without refaults.
    Reclaimable,
}

impl MemorySignal {
    /// Returns the part of a pod's working set that only the end of the pod frees.
    #[must_use]
    pub const fn used(self, working_set: u64, cache: &FileCache) -> u64 {
        match self {
            Self::WorkingSet => working_set,
            Self::Reclaimable => working_set.saturating_sub(cache.clean()),
        }
    }
}

/// The page cache of the machine or of a cgroup, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileCache {
    /// Active file pages: those used at least twice lately.
    pub active: u64,
    /// Dirty pages and pages under writeback, which the kernel must write before it can drop them.
    pub unwritten: u64,
    /// File pages read again after the kernel had dropped them, since the counter began; `None` if the kernel
    /// does not count them.
    pub refaulted: Option<u64>,
}

impl FileCache {
    /// Returns the active pages that need not be written first.
    const fn clean(&self) -> u64 {
        self.active.saturating_sub(self.unwritten)
    }
}

/// A reading of memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryReading {
    /// Memory that is not in the working set: the kubelet's number.
    pub available: u64,
    /// The page cache.
    pub cache: FileCache,
    /// The kernel's estimate of the available memory (`MemAvailable`); `None` for a cgroup.
    pub kernels_estimate: Option<u64>,
}

/// Time in which half of the refaulted amount is forgotten. Pages in use are read far more often.
const HALF_LIFE: Duration = Duration::from_secs(30);

/// The amount of cache in use, as refaults show it. Kept between readings of the same memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NeededCache {
    last: Option<Last>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Last {
    at: Moment,
    refaulted: u64,
    /// Bytes of needed cache.
    needed: u64,
}

impl NeededCache {
    /// Records a reading, and returns the available bytes.
    ///
    /// At the first reading no page counts as needed: otherwise each start of the agent would evict pods of a
    /// node full of idle cache. A node that needs its cache shows refaults by the next reading. A counter
    /// that went back is of another boot, and adds nothing. Without the counter the result is the kubelet's.
    pub fn available(&mut self, now: Moment, reading: &MemoryReading) -> u64 {
        let cache = &reading.cache;
        let Some(refaulted) = cache.refaulted else { return reading.available };
        let needed = self.last.map_or(0, |last| {
            let kept = halved(last.needed, now.since(last.at));
            kept.saturating_add(refaulted.saturating_sub(last.refaulted)).min(cache.active)
        });
        self.last = Some(Last { at: now, refaulted, needed });
        let wanted = reading.available.saturating_add(cache.clean().saturating_sub(needed));
        let most = reading.kernels_estimate.unwrap_or(u64::MAX).max(reading.available);
        wanted.min(most)
    }
}

/// Returns the part of `amount` that is left after `time`.
fn halved(amount: u64, time: Duration) -> u64 {
    let half_lives = time.as_secs_f64() / HALF_LIFE.as_secs_f64();
    (amount as f64 * (-half_lives).exp2()) as u64 // as: saturates, and neither factor is negative
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn reading(available: u64, active: u64, refaulted: u64) -> MemoryReading {
        let cache = FileCache { active, unwritten: 0, refaulted: Some(refaulted) };
        MemoryReading { available, cache, kernels_estimate: None }
    }

    fn at(seconds: u64) -> Moment {
        Moment::after_start(Duration::from_secs(seconds))
    }

    #[test]
    fn idle_cache_becomes_available_and_refaults_turn_it_back_into_use() {
        let mut needed = NeededCache::default();
        let mut check = |seconds, refaulted, expected: u64| {
            let seen = needed.available(at(seconds), &reading(GIB, 8 * GIB, refaulted));
            assert_eq!(seen, expected, "after {seconds} s");
        };
        // The refaults before the first reading may be of any time.
        check(0, 5 * GIB, 9 * GIB);
        check(30, 5 * GIB, 9 * GIB);
        // The kernel dropped 2 GiB that were in use.
        check(60, 7 * GIB, 7 * GIB);
        // The 2 GiB are half forgotten, one is new.
        check(90, 8 * GIB, 7 * GIB);
        // All of it is read again and again.
        check(91, 60 * GIB, GIB);
        check(92, 61 * GIB, GIB);
        check(122, 61 * GIB, 5 * GIB);
        // A counter that goes back is of another boot.
        check(152, 0, 7 * GIB);
        check(153, 60 * GIB, GIB);
    }

    #[test]
    fn a_reading_without_the_count_forgets_no_need() {
        let mut needed = NeededCache::default();
        needed.available(at(0), &reading(GIB, 8 * GIB, 0));
        assert_eq!(needed.available(at(1), &reading(GIB, 8 * GIB, 8 * GIB)), GIB);
        let uncounted = FileCache { active: 8 * GIB, unwritten: 0, refaulted: None };
        let failed = MemoryReading { available: GIB, cache: uncounted, kernels_estimate: None };
        assert_eq!(needed.available(at(2), &failed), GIB);
        assert_eq!(needed.available(at(31), &reading(GIB, 8 * GIB, 8 * GIB)), 5 * GIB);
    }

    #[test]
    fn without_the_kernels_count_the_number_is_the_kubelets() {
        let mut needed = NeededCache::default();
        let cache = FileCache { active: GIB, unwritten: 0, refaulted: None };
        let reading = MemoryReading { available: 7, cache, kernels_estimate: None };
        assert_eq!([0, 60, 600].map(|second| needed.available(at(second), &reading)), [7; 3]);
    }

    #[test]
    fn unwritten_pages_and_memory_beyond_the_kernels_estimate_do_not_count_as_available() {
        let check = |unwritten, estimate, expected| {
            let mut needed = NeededCache::default();
            let cache = FileCache { active: 8 * GIB, unwritten, refaulted: Some(0) };
            let reading = MemoryReading { available: GIB, cache, kernels_estimate: estimate };
            needed.available(at(0), &reading);
            assert_eq!(needed.available(at(3600), &reading), expected);
        };
        check(0, None, 9 * GIB);
        check(2 * GIB, None, 7 * GIB);
        check(20 * GIB, None, GIB);
        check(0, Some(4 * GIB), 4 * GIB);
        // Slab that the kernel cannot free: the kubelet's number stays.
        check(0, Some(GIB / 2), GIB);
    }

    #[test]
    fn a_pods_clean_cache_is_not_freed_by_its_end() {
        let cache = FileCache { active: 600, unwritten: 100, refaulted: Some(5) };
        assert_eq!(MemorySignal::WorkingSet.used(1000, &cache), 1000);
        assert_eq!(MemorySignal::Reclaimable.used(1000, &cache), 500);
        assert_eq!(MemorySignal::Reclaimable.used(300, &cache), 0);
    }

    proptest! {
        #[test]
        fn the_number_is_never_below_the_kubelets_nor_above_the_kernels(
            steps in prop::collection::vec(
                (any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<Option<u64>>(), any::<Option<u64>>()),
                1..20,
            ),
        ) {
            let (mut needed, mut now) = (NeededCache::default(), Moment::default());
            for (pause, available, active, unwritten, refaulted, kernels_estimate) in steps {
                now = now.plus(Duration::from_millis(u64::from(pause)));
                let cache = FileCache { active, unwritten, refaulted };
                let seen = needed.available(now, &MemoryReading { available, cache, kernels_estimate });
                let most = available.saturating_add(active.saturating_sub(unwritten));
                prop_assert!(seen >= available && seen <= most);
                prop_assert!(kernels_estimate.is_none_or(|estimate| seen <= estimate.max(available)));
            }
        }

        #[test]
        fn more_refaults_never_make_more_available(
            active in 0..GIB, less in 0..GIB, more in 0..GIB, seconds in 0..600_u64,
        ) {
            let after = |refaulted: u64| {
                let mut needed = NeededCache::default();
                needed.available(at(0), &reading(1, active, 0));
                needed.available(at(60), &reading(1, active, refaulted));
                needed.available(at(60 + seconds), &reading(1, active, refaulted))
            };
            prop_assert!(after(less.max(more)) <= after(less.min(more)));
        }
    }
}
