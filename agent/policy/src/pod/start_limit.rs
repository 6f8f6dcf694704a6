//! How many sandboxes and containers the runtime is asked to make at once: more while it answers as fast as
//! it can, fewer when calls only wait for each other.
//!
//! The law is TCP Vegas's (Brakmo and Peterson, TCP Vegas: End to End Congestion Avoidance, 1995), with
//! calls for packets: of those under way, as many wait for others as the call takes longer than the fastest
//! of its kind. A few that wait keep the machine busy; more only make everything else late: probes, exits,
//! the pods that run already. Must never know which pod a call is for.

use std::time::Duration;

/// The calls that make a pod, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// `RunPodSandbox`: the network's setup is in it.
    RunSandbox,
    /// `CreateContainer`: the container's root file system.
    CreateContainer,
    /// `StartContainer`.
    StartContainer,
}

/// How many kinds there are.
const CALLS: usize = 3;
/// What it begins with: few, as the first calls are the fastest that are known, however much they waited for
/// each other.
const FIRST: f64 = 4.0;
/// A call that hangs holds back no more than a quarter of the starts.
const LEAST: f64 = 4.0;
/// More at once than any runtime answers.
const MOST: f64 = 256.0;
/// With fewer calls than this that wait for others there is one more: the machine may have room.
const FEW_WAIT: f64 = 4.0;
/// With more than this there are fewer.
const MANY_WAIT: f64 = 8.0;
/// What one call takes away; it adds one. So the number doubles within a round, and takes two to halve.
const STEP_BACK: f64 = 0.5;
/// How the fastest time is forgotten, per call: it doubles within 14,000.
const FORGET: f64 = 1.00005;

/// The limit, and what it was learned from.
#[derive(Debug, Clone, PartialEq)]
pub struct StartLimit {
    limit: f64,
    /// The fastest of each kind, in seconds.
    fastest: [Option<f64>; CALLS],
}

impl Default for StartLimit {
    fn default() -> Self {
        Self { limit: FIRST, fastest: [None; CALLS] }
    }
}

impl StartLimit {
    /// Calls that may be under way at once.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between LEAST and MOST
    pub fn calls(&self) -> usize {
        self.limit as usize
    }

    /// Learns from a call that took this long, and of how many it was one when it began. One that failed says
    /// nothing about how fast the machine is, only that it may be too busy.
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
            // Where fewer are under way than may be, it is not the limit that holds anything back.
            self.limit = (self.limit + 1.0).min(MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that makes so many at once, each in `alone`; more share it. What the limit comes to, and
    /// which part of its rate the machine was used for in the end.
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
    fn the_limit_is_what_the_machine_can_do_and_a_few_that_wait() {
        for (cpus, alone) in [(2.0, 0.04), (4.0, 0.2), (16.0, 0.04), (64.0, 0.01), (200.0, 1.0)] {
            let mut limit = StartLimit::default();
            let (calls, rate) = on_a_machine(&mut limit, cpus, alone, 1000);
            // In a thousand calls the fastest is forgotten by a twentieth.
            let most = cpus.max(FIRST) * 1.1 + MANY_WAIT + 1.0;
            assert!((cpus..=most).contains(&(calls as f64)), "{cpus} CPUs: {calls}");
            assert!(rate >= 0.95, "{cpus} CPUs: {rate} of the rate");
        }
    }

    #[test]
    fn it_follows_a_machine_that_becomes_slower_and_faster_again() {
        let mut limit = StartLimit::default();
        assert!(on_a_machine(&mut limit, 32.0, 0.05, 500).0 >= 32);
        // Others have most of it.
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
    fn a_trickle_changes_nothing_and_failures_lead_to_the_least() {
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
        fn it_stays_within_its_bounds(
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
