//! Limit of concurrent creations of sandboxes and containers in the runtime: higher while the runtime answers
//! at full speed, lower once calls only wait for each other.
//!
//! The law is TCP Vegas's (Brakmo and Peterson, TCP Vegas: End to End Congestion Avoidance, 1995), with calls
//! for packets: the excess of a call's time over the fastest of its kind shows the share of calls in progress
//! that wait for others. A few waiting calls keep the machine busy; more only delay everything else: probes,
//! exits, the running pods. Must never know the pod of a call.

use std::time::Duration;

/// The calls that create a pod, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// `RunPodSandbox`, including the network's setup.
    RunSandbox,
    /// `CreateContainer`, including the container's root file system.
    CreateContainer,
    /// `StartContainer`.
    StartContainer,
}

/// Number of kinds of calls.
const CALLS: usize = 3;
/// Initial limit: low, as the first calls become the fastest known ones even if they waited for each other.
const FIRST: f64 = 4.0;
/// Minimum limit: a call that hangs holds back at most a quarter of the starts.
const LEAST: f64 = 4.0;
/// Maximum limit, above the concurrency of any runtime.
const MOST: f64 = 256.0;
/// Number of waiting calls below which the limit rises by one: the machine may have room.
const FEW_WAIT: f64 = 4.0;
/// Number of waiting calls above which the limit falls.
const MANY_WAIT: f64 = 8.0;
/// Decrease per call; an increase is one. So the limit doubles within a round, and takes two to halve.
const STEP_BACK: f64 = 0.5;
/// Growth per call by which the fastest time is forgotten: it doubles within 14,000 calls.
const FORGET: f64 = 1.00005;

/// The limit, and the measurements behind it.
#[derive(Debug, Clone, PartialEq)]
pub struct StartLimit {
    limit: f64,
    /// Fastest time of each kind, in seconds.
    fastest: [Option<f64>; CALLS],
}

impl Default for StartLimit {
    fn default() -> Self {
        Self { limit: FIRST, fastest: [None; CALLS] }
    }
}

impl StartLimit {
    /// Returns the maximum number of concurrent calls.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between LEAST and MOST
    pub fn calls(&self) -> usize {
        self.limit as usize
    }

    /// Learns from a call's duration and the number of calls in progress when it began, itself included. A
    /// failed call does not show the machine's speed, only that it may be too busy.
    pub fn learn(&mut self, call: Call, took: Duration, under_way: usize, failed: bool) {
        if failed {
            self.limit = (self.limit - STEP_BACK).max(LEAST);
            return;
        }
        let took = took.as_secs_f64().max(1e-6);
        let fastest = &mut self.fastest[call as usize];
        let best = fastest.map_or(took, |known| (known * FORGET).min(took));
        *fastest = Some(best);
        let under_way = under_way as f64;
        let waiting = under_way * (1.0 - best / took);
        if waiting > MANY_WAIT {
            self.limit = (self.limit - STEP_BACK).max(LEAST);
        } else if waiting < FEW_WAIT && under_way + 1.0 >= self.limit {
            // With fewer calls in progress than allowed, the limit is not the bottleneck.
            self.limit = (self.limit + 1.0).min(MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a machine that serves `cpus` calls at once, each in `alone`; more calls share it. Returns
    /// the final limit, and the share of the machine's rate in use at the end.
    fn on_a_machine(limit: &mut StartLimit, cpus: f64, alone: f64, calls: usize) -> (usize, f64) {
        let mut rate = 0.0;
        for _ in 0..calls {
            let under_way = limit.calls();
            let took = alone * (under_way as f64 / cpus).max(1.0);
            rate = under_way as f64 / took / (cpus / alone);
            limit.learn(Call::RunSandbox, Duration::from_secs_f64(took), under_way, false);
        }
        (limit.calls(), rate)
    }

    #[test]
    fn the_limit_is_the_machines_concurrency_and_a_few_waiting_calls() {
        for (cpus, alone) in [(2.0, 0.04), (4.0, 0.2), (16.0, 0.04), (64.0, 0.01), (200.0, 1.0)] {
            let mut limit = StartLimit::default();
            let (calls, rate) = on_a_machine(&mut limit, cpus, alone, 1000);
            // Over a thousand calls the fastest time grows by a twentieth.
            let most = cpus.max(FIRST) * 1.1 + MANY_WAIT + 1.0;
            assert!((cpus..=most).contains(&(calls as f64)), "{cpus} CPUs: {calls}");
            assert!(rate >= 0.95, "{cpus} CPUs: {rate} of the rate");
        }
    }

    #[test]
    fn the_limit_follows_a_machine_that_becomes_slower_and_faster_again() {
        let mut limit = StartLimit::default();
        assert!(on_a_machine(&mut limit, 32.0, 0.05, 500).0 >= 32);
        // Other processes use most of the machine.
        let (calls, _) = on_a_machine(&mut limit, 4.0, 0.05, 500);
        assert!((4..=13).contains(&calls), "{calls}");
        assert!(on_a_machine(&mut limit, 32.0, 0.05, 500).0 >= 32);
    }

    #[test]
    fn kinds_of_calls_are_not_compared_with_each_other() {
        let mut limit = StartLimit::default();
        for _ in 0..50 {
            for (call, millis) in
                [(Call::RunSandbox, 300), (Call::CreateContainer, 40), (Call::StartContainer, 5)]
            {
                limit.learn(call, Duration::from_millis(millis), limit.calls(), false);
            }
        }
        assert!(limit.calls() > 100, "none waits for another: {limit:?}");
    }

    #[test]
    fn a_trickle_keeps_the_limit_and_failures_lead_to_the_minimum() {
        let mut limit = StartLimit::default();
        for _ in 0..100 {
            limit.learn(Call::StartContainer, Duration::from_millis(5), 1, false);
        }
        assert_eq!(limit.calls(), StartLimit::default().calls());
        for _ in 0..100 {
            limit.learn(Call::StartContainer, Duration::from_secs(120), limit.calls(), true);
        }
        assert!((limit.calls() as f64 - LEAST).abs() < 0.1, "{limit:?}");
    }

    proptest::proptest! {
        #[test]
        fn the_limit_stays_within_its_bounds(
            calls in proptest::collection::vec((0..3_usize, 0..u64::MAX, 0..1000_usize, proptest::bool::ANY), 0..300),
        ) {
            let mut limit = StartLimit::default();
            for (kind, nanos, under_way, failed) in calls {
                let call = [Call::RunSandbox, Call::CreateContainer, Call::StartContainer][kind];
                limit.learn(call, Duration::from_nanos(nanos), under_way, failed);
                proptest::prop_assert!((LEAST..=MOST).contains(&(limit.calls() as f64)), "{:?}", limit);
            }
        }
    }
}
