//! Proactive reclaim: takes cold pages from pods while no container waits, as Meta's senpai (TMO, ASPLOS'22)
//! and Katalyst's reclaim do.
//!
//! The size of a pod's working set cannot be read, only found: the tuner takes a small part of the pod's
//! memory, and watches whether the pod reads it again (refaults) or waits for it (PSI). Without such a sign
//! the part was cold, and the next step follows. After a sign the pod is left alone for a while, which
//! doubles with each sign, and the steps become smaller. So a pod loses about one step of memory that it
//! needs, per back-off.
//!
//! Decides only. The kernel chooses the pages, and keeps nothing of a request, so that a request needs no
//! undoing.

use std::{cmp::Reverse, collections::BTreeMap, time::Duration};

use beelet_units::moment::Moment;

use crate::resources::qos::QosClass;

/// Bounds, step sizes and patience of proactive reclaim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdLaw {
    /// Minimum time between two steps.
    pub interval: Duration,
    /// Largest step, in thousandths of the pod's memory that the step may take.
    pub step_permille: u32,
    /// Share of time in which a pod may stall for memory.
    pub stall_permille: u32,
    /// Share of the last step that a pod may read again, in percent.
    pub refault_percent: u32,
    /// Time for which a new or growing pod is left alone.
    pub settle: Duration,
    /// Time for which a pod is left alone after its first sign. Doubles with each further one.
    pub back_off: Duration,
    /// Bytes that any pod keeps.
    pub floor: u64,
    /// Bytes that all steps together may take per second.
    pub bytes_per_second: u64,
    /// Bytes that may be written to swap per second, averaged over a minute: flash memory wears out.
    pub swap_bytes_per_second: u64,
}

impl Default for ColdLaw {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            step_permille: 10,
            stall_permille: 1,
            refault_percent: 10,
            settle: Duration::from_secs(60),
            back_off: Duration::from_secs(300),
            floor: 64 << 20,
            bytes_per_second: 32 << 20,
            swap_bytes_per_second: 1 << 20,
        }
    }
}

impl ColdLaw {
    /// Returns the step for a pod that may lose `memory` bytes and has shown this number of signs.
    fn step(&self, memory: u64, signs: u32) -> u64 {
        (part(memory, self.step_permille.into(), 1000) >> signs).max(LEAST)
    }
}

/// Steps below this number of bytes are not worth a request.
const LEAST: u64 = 256 << 10;
/// Maximum number of doublings of the back-off.
const MOST_SIGNS: u32 = 5;
/// Time over which the swap budget is averaged.
const SWAP_WINDOW: Duration = Duration::from_secs(60);

/// A pod's memory now, in bytes. Counters begin with the pod's cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColdSample {
    /// The pod's cgroup.
    pub cgroup: String,
    /// The pod's class: pods without requests come first.
    pub class: QosClass,
    /// All memory charged to the pod.
    pub usage: u64,
    /// File pages that the kernel can drop without writing them.
    pub clean_file: u64,
    /// Anonymous memory.
    pub anon: u64,
    /// False if the limits of the pod's containers keep all its memory out of swap; true if they are unknown.
    pub may_swap: bool,
    /// Counter of bytes read again after the kernel had taken them.
    pub refaulted: u64,
    /// Counter of the time in which some task stalled for memory.
    pub stalled: Duration,
}

/// The node now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ColdSeen {
    /// The running pods.
    pub pods: Vec<ColdSample>,
    /// Free swap in bytes.
    pub free_swap: u64,
    /// Counter of bytes written to swap by the whole machine.
    pub swapped_out: u64,
}

/// A step: pages to take from a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColdStep {
    /// The pod's cgroup.
    pub cgroup: String,
    /// Bytes to take.
    pub bytes: u64,
    /// True if anonymous pages may move to swap.
    pub may_swap: bool,
}

/// A pod's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ColdPod {
    at: Moment,
    usage: u64,
    refaulted: u64,
    stalled: Duration,
    /// Bytes taken by the last step.
    taken: u64,
    /// Time until which the pod is left alone.
    until: Moment,
    /// Signs so far, less the harmless steps.
    signs: u32,
    /// Bytes taken since the pod was first seen.
    given_back: u64,
    /// Bytes of them that the pod read again.
    read_again: u64,
}

/// The state between two steps. Losing it costs time, nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ColdState {
    pods: BTreeMap<String, ColdPod>,
    last: Option<Moment>,
    swapped_out: u64,
    /// Bytes that may be written to swap now; negative after too many.
    swap_credit: i64,
}

/// Effect of proactive reclaim on a pod so far, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ColdEffect {
    /// Bytes taken.
    pub given_back: u64,
    /// Bytes of them that the pod read again.
    pub read_again: u64,
}

impl ColdState {
    /// Returns true if the next step is due.
    #[must_use]
    pub fn is_due(&self, law: &ColdLaw, now: Moment) -> bool {
        self.last.is_none_or(|last| now.since(last) >= law.interval)
    }

    /// Decides the steps at `now`. The caller reports the result of each step with [`Self::took`].
    pub fn decide(&mut self, law: &ColdLaw, now: Moment, seen: &ColdSeen) -> Vec<ColdStep> {
        let passed =
            self.last.map_or(Duration::ZERO, |last| now.since(last)).min(law.interval.saturating_mul(2));
        self.last = Some(now);
        let may_swap = self.pay_for_swap(law, passed, seen.swapped_out);
        self.pods.retain(|cgroup, _| seen.pods.iter().any(|pod| pod.cgroup == *cgroup));
        let mut order: Vec<&ColdSample> = seen.pods.iter().collect();
        order.sort_by_key(|pod| (pod.class, Reverse(pod.usage)));
        let (mut budget, mut free_swap) = (amount(law.bytes_per_second, passed), seen.free_swap);
        let mut steps = Vec::new();
        for pod in order {
            let Some(signs) = self.next(law, now, pod) else { continue };
            let spare = pod.usage.saturating_sub(law.floor);
            // A share of all memory could be the whole page cache of a pod whose other memory stays.
            let step = |most: u64| law.step(most, signs).min(most).min(spare);
            let all = pod.clean_file.saturating_add(pod.anon);
            // Half of the free swap stays for a shortage.
            let swaps = may_swap && pod.may_swap && step(all) <= free_swap / 2;
            let bytes = step(if swaps { all } else { pod.clean_file }).min(budget);
            if bytes < LEAST {
                continue;
            }
            budget = budget.saturating_sub(bytes);
            if swaps {
                free_swap = free_swap.saturating_sub(bytes);
            }
            steps.push(ColdStep { cgroup: pod.cgroup.clone(), bytes, may_swap: swaps });
        }
        steps
    }

    /// Records the bytes that a step took. A pod that had nothing to give is left alone for a while.
    pub fn took(&mut self, law: &ColdLaw, now: Moment, cgroup: &str, bytes: u64) {
        let Some(pod) = self.pods.get_mut(cgroup) else { return };
        pod.taken = bytes;
        pod.usage = pod.usage.saturating_sub(bytes);
        pod.given_back = pod.given_back.saturating_add(bytes);
        if bytes == 0 {
            pod.until = now.plus(law.back_off);
        }
    }

    /// Returns the effect on each pod, by its cgroup; pods without an effect are absent.
    pub fn effects(&self) -> impl Iterator<Item = (&str, ColdEffect)> {
        let effect = |pod: &ColdPod| ColdEffect { given_back: pod.given_back, read_again: pod.read_again };
        let all = self.pods.iter().map(move |(cgroup, pod)| (cgroup.as_str(), effect(pod)));
        all.filter(|(_, effect)| effect.given_back > 0)
    }

    /// Returns true if the budget of writes to swap is not used up.
    fn pay_for_swap(&mut self, law: &ColdLaw, passed: Duration, swapped_out: u64) -> bool {
        let whole = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let written = if passed.is_zero() { 0 } else { swapped_out.saturating_sub(self.swapped_out) };
        let most = whole(amount(law.swap_bytes_per_second, SWAP_WINDOW));
        let earned = whole(amount(law.swap_bytes_per_second, passed));
        self.swapped_out = swapped_out;
        let credit = self.swap_credit.saturating_add(earned).min(most).saturating_sub(whole(written));
        // A shortage long ago does not count for ever.
        self.swap_credit = credit.max(most.saturating_neg());
        self.swap_credit > 0
    }

    /// Records a pod's sample. Returns the signs that make its step smaller; `None` if the pod is to be left
    /// alone.
    fn next(&mut self, law: &ColdLaw, now: Moment, seen: &ColdSample) -> Option<u32> {
        let Some(pod) = self.pods.get_mut(&seen.cgroup) else {
            self.pods.insert(seen.cgroup.clone(), ColdPod::first(law, now, seen));
            return None;
        };
        let before = *pod;
        (pod.at, pod.usage, pod.taken) = (now, seen.usage, 0);
        (pod.refaulted, pod.stalled) = (seen.refaulted, seen.stalled);
        let refaulted = seen.refaulted.saturating_sub(before.refaulted);
        // A pod may read its memory again long after the step.
        let missing = pod.given_back.saturating_sub(pod.read_again);
        pod.read_again = pod.read_again.saturating_add(refaulted.min(missing));
        if before.is_short(law, now, seen, refaulted) {
            pod.until = now.plus(law.back_off.saturating_mul(1 << before.signs));
            pod.signs = before.signs.saturating_add(1).min(MOST_SIGNS);
            return None;
        }
        if before.taken > 0 {
            // The last step was harmless.
            pod.signs = before.signs.saturating_sub(1);
        }
        // A growing pod would at once need what it gives.
        if seen.usage > before.usage.saturating_add(law.step(seen.usage, before.signs)) {
            pod.until = pod.until.max(now.plus(law.settle));
            return None;
        }
        (now >= pod.until).then_some(before.signs)
    }
}

impl ColdPod {
    fn first(law: &ColdLaw, now: Moment, seen: &ColdSample) -> Self {
        Self {
            at: now,
            usage: seen.usage,
            refaulted: seen.refaulted,
            stalled: seen.stalled,
            taken: 0,
            until: now.plus(law.settle),
            signs: 0,
            given_back: 0,
            read_again: 0,
        }
    }

    /// Returns true if the pod has waited for memory since this sample, or read it again.
    fn is_short(&self, law: &ColdLaw, now: Moment, seen: &ColdSample, refaulted: u64) -> bool {
        let stalled = seen.stalled.saturating_sub(self.stalled).as_micros();
        let bound = now.since(self.at).as_micros().saturating_mul(u128::from(law.stall_permille)) / 1000;
        let allowed = part(self.taken, u64::from(law.refault_percent), 100).max(LEAST / 4);
        stalled > bound || refaulted > allowed
    }
}

/// Returns the amount of a rate per second in this time.
fn amount(per_second: u64, time: Duration) -> u64 {
    let bytes = u128::from(per_second).saturating_mul(time.as_millis()) / 1000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Returns `share` of `of` parts of `value`.
fn part(value: u64, share: u64, of: u64) -> u64 {
    let part = u128::from(value).saturating_mul(u128::from(share)) / u128::from(of.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
