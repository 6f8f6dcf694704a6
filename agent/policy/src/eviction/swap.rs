//! Swap before eviction (opt-in; kubernetes/kubernetes#120800): cold memory of pods that may swap moves to
//! free swap before a pod is evicted.
//!
//! The kernel swaps only when free memory is at its watermarks, which are below usual eviction thresholds:
//! without a request for reclaim a node evicts pods although its swap is empty.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Observation, Threshold, deficit, is_worth_it};
use beelet_units::quantity::Quantity;

/// The role of swap in eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EvictionSwap {
    /// Swap plays no role, as in the kubelet.
    #[default]
    Ignored,
    /// Free swap takes cold memory before a pod is evicted, and swapped memory counts in the ranking.
    Counted,
}

/// A request to move memory to swap, and its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapOut {
    /// Requested amount.
    pub asked: Quantity,
    /// Amount by which the pods' working set shrank.
    pub moved: Quantity,
    /// Time since the end of the request.
    pub age: Duration,
}

/// Time after a request with little effect during which another one is of no use: the pods have little cold
/// memory.
const USELESS: Duration = Duration::from_secs(30);
/// Maximum time for which a pod's end waits for swap: a node that moves the same pages in and out moves the
/// requested amounts without end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the amount to move to swap before a pod is evicted; `None` if eviction must not wait.
///
/// Eviction does not wait if less than half of the threshold is left (memory falls faster than pages move),
/// if the threshold has been actionable for half a minute (`actionable_for`), if the free swap cannot take a
/// worthwhile part of the missing amount, or if the last request moved less than half of its amount.
#[must_use]
pub fn swap_out(
    threshold: &Threshold,
    seen: &Observation,
    actionable_for: Duration,
    free: Quantity,
    last: Option<SwapOut>,
) -> Option<Quantity> {
    if !threshold.signal.is_memory() || actionable_for >= PATIENCE {
        return None;
    }
    let value = threshold.value.of(seen.capacity);
    if seen.available + seen.available < value {
        return None;
    }
    let is_useless = |last: &SwapOut| last.moved + last.moved < last.asked && last.age < USELESS;
    if last.as_ref().is_some_and(is_useless) {
        return None;
    }
    let missing = deficit(threshold, seen);
    let amount = missing.min(free);
    is_worth_it(amount, missing).then_some(amount)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::{Signal, ThresholdValue};

    fn mib(n: i64) -> Quantity {
        Quantity::from_units(n << 20)
    }

    #[track_caller]
    fn check(available: i64, free: i64, last: Option<SwapOut>, expected: Option<i64>) {
        check_after(0, available, free, last, expected);
    }

    #[track_caller]
    fn check_after(seconds: u64, available: i64, free: i64, last: Option<SwapOut>, expected: Option<i64>) {
        let value = ThresholdValue::threshold("100Mi").unwrap().unwrap();
        let min_reclaim = Some(ThresholdValue::min_reclaim("20Mi").unwrap());
        let threshold =
            Threshold { signal: Signal::MemoryAvailable, value, grace: Duration::ZERO, min_reclaim };
        let seen = Observation { available: mib(available), capacity: mib(4096) };
        let amount = swap_out(&threshold, &seen, Duration::from_secs(seconds), mib(free), last);
        assert_eq!(amount, expected.map(mib));
    }

    #[test]
    fn eviction_waits_for_swap_for_half_a_minute() {
        let last = Some(SwapOut { asked: mib(40), moved: mib(40), age: Duration::ZERO });
        check_after(29, 80, 1000, last, Some(40));
        check_after(30, 80, 1000, last, None);
    }

    #[test]
    fn free_swap_takes_the_missing_amount() {
        check(80, 1000, None, Some(40));
        check(80, 10, None, Some(10));
        check(80, 0, None, None);
    }

    #[test]
    fn eviction_does_not_wait_while_memory_falls_fast() {
        check(50, 1000, None, Some(70));
        check(49, 1000, None, None);
    }

    #[test]
    fn a_request_without_effect_is_not_repeated_at_once() {
        let last =
            |moved, age| Some(SwapOut { asked: mib(40), moved: mib(moved), age: Duration::from_secs(age) });
        check(80, 1000, last(20, 0), Some(40));
        check(80, 1000, last(19, 29), None);
        check(80, 1000, last(19, 30), Some(40));
    }

    #[test]
    fn other_resources_do_not_move_to_swap() {
        let value = ThresholdValue::threshold("100Mi").unwrap().unwrap();
        let threshold =
            Threshold { signal: Signal::NodeFsAvailable, value, grace: Duration::ZERO, min_reclaim: None };
        let seen = Observation { available: mib(80), capacity: mib(4096) };
        assert_eq!(swap_out(&threshold, &seen, Duration::ZERO, mib(1000), None), None);
    }
}
