//! CPU: restricts other pods for a complaint, and loosens the restrictions later.

use super::{Complaint, LEAST_CAP, LEAST_GROWTH, Round, grow, shrink, wait_for_others};
use crate::resources::cgroups::{millis_to_shares, shares_to_weight_linear};
use crate::resources::qos::QosClass;
use crate::tuner::{CpuCaps, Knob, KnobKind, PodSample, words};
use beelet_units::bounds;

impl<'a> Round<'a> {
    /// Restricts turns first, which costs no CPU time that is free: those of BestEffort pods, then of
    /// Burstable ones above their request. Restricts CPU time next, in the same order.
    pub(super) fn squeeze_cpu(&mut self, complaint: &Complaint<'a>) {
        let is_best_effort_busy = self.seen.best_effort_used > self.quiet();
        if is_best_effort_busy && self.restrict_best_efforts_turn(complaint) {
            return;
        }
        let mut over: Vec<&PodSample> = self
            .seen
            .pods
            .iter()
            .filter(|pod| pod.name != complaint.pod.name && self.is_greedier(pod, complaint.pod))
            .collect();
        over.sort_by_key(|pod| std::cmp::Reverse(pod.cpu_used.unwrap_or(0).saturating_sub(pod.cpu_request)));
        if over.iter().any(|pod| self.restrict_turn(pod, complaint)) {
            return;
        }
        if is_best_effort_busy && self.cap_best_effort(complaint) {
            return;
        }
        for pod in over.into_iter().filter(|pod| pod.can_cap) {
            let floor = pod.cpu_request.max(LEAST_CAP);
            let words =
                format!("{} uses more than the {} it requests", pod.name, words::cpus(pod.cpu_request));
            if self.lower_cap(&pod.cgroup, pod.cpu_used.unwrap_or(0), floor, complaint, &words) {
                return;
            }
        }
    }

    /// Makes a Burstable pod above its request run after all others except BestEffort ones, which become idle
    /// with it: they would otherwise run before an idle pod. On a kernel without `cpu.idle`, or if the pod
    /// fell short of its request that way, reduces its weight to that of its request. Returns false if
    /// neither is possible.
    fn restrict_turn(&mut self, pod: &PodSample, complaint: &Complaint<'_>) -> bool {
        let held = |kind| self.held(&pod.cgroup, kind).is_some();
        let fell_short = self.state.fell_short.get(&pod.cgroup);
        // Both are settings of one file: one is released in the tick before the other is held.
        if !self.seen.supports.weights || held(KnobKind::Idle) || fell_short == Some(&0) {
            return false;
        }
        let may_be =
            |cgroup: &str| !self.blocked.contains(&Knob { cgroup: cgroup.to_owned(), kind: KnobKind::Idle });
        let may_be_idle = self.seen.supports.idle
            && fell_short.is_none()
            && !held(KnobKind::Weight)
            && may_be(&pod.cgroup)
            && may_be(&self.seen.best_effort);
        let (kind, value, turn) = match self.least_weight(pod) {
            _ if may_be_idle => (KnobKind::Idle, 1, "that it runs only on otherwise idle CPUs"),
            Some(weight) => (KnobKind::Weight, weight, "that it runs at the weight of its request"),
            None => return false,
        };
        let requests = words::cpus(pod.cpu_request);
        let words =
            format!("{}: {} uses more than the {requests} it requests, so {turn}", complaint.words, pod.name);
        if kind == KnobKind::Idle {
            self.restrict_best_efforts_turn(complaint);
        }
        self.hold(&pod.cgroup, kind, value, &words)
    }

    /// Restores the turn of an idle Burstable pod that gets less than it requests for some consecutive ticks,
    /// as the CPU time left by others no longer suffices; and of all idle pods if another process has made
    /// BestEffort pods no longer idle, which would run first. A pod then keeps its turn for a while.
    pub(super) fn free_who_falls_short(&mut self) {
        let (seen, law) = (self.seen, self.law);
        self.state.fell_short.retain(|_, ticks| {
            *ticks += 1;
            *ticks < law.retry_ticks
        });
        let idle = |cgroup: &str| Knob { cgroup: cgroup.to_owned(), kind: KnobKind::Idle };
        let comes_last = self.blocked.contains(&idle(&seen.best_effort));
        let before = std::mem::take(&mut self.state.falling_short);
        for pod in seen.pods.iter().filter(|pod| pod.class == QosClass::Burstable) {
            let knob = idle(&pod.cgroup);
            if !self.state.held.contains_key(&knob) {
                continue;
            }
            let words = if comes_last {
                format!("{} would run after BestEffort pods, which are no longer idle", pod.name)
            } else if self.falls_short(pod) {
                let ticks = before.get(&pod.cgroup).copied().unwrap_or(0) + 1;
                if ticks < law.hot_ticks {
                    self.state.falling_short.insert(pod.cgroup.clone(), ticks);
                    continue;
                }
                format!("{} gets less than the {} it requests", pod.name, words::cpus(pod.cpu_request))
            } else {
                continue;
            };
            self.set(&knob, None, &words);
            self.state.fell_short.insert(pod.cgroup.clone(), 0);
        }
    }

    /// Returns true if a pod gets less than it requests and is kept from running: it waits for most of the
    /// time in which it does not run. A pod that waits for a disk or has nothing to do does not count.
    fn falls_short(&self, pod: &PodSample) -> bool {
        let used = pod.cpu_used.unwrap_or(u64::MAX);
        let not_running = 1000_u64.saturating_sub(used);
        let waits = |container| {
            let wait = wait_for_others(container);
            wait.is_none_or(|wait| wait > self.law.cpu_wait_permille && u64::from(wait) * 2 >= not_running)
        };
        used < pod.cpu_request && pod.containers.iter().any(waits)
    }

    /// Returns the lowest CPU weight with which a Burstable pod still gets its request while all others use
    /// all that they can, if that is far below its own weight. While CPUs are free, the lower weight costs
    /// the pod nothing; otherwise the pod gets fewer turns, and a thread of another pod that wakes up still
    /// waits for the end of one.
    fn least_weight(&self, pod: &PodSample) -> Option<u64> {
        let requested = |class: QosClass| -> u64 {
            let of_class = self.seen.pods.iter().filter(|other| other.class == class);
            let others = of_class.filter(|other| other.cgroup != pod.cgroup);
            bounds::total(others.map(|other| other.cpu_request))
        };
        // Guaranteed pods use no more than they request. A quarter is left to the machine's daemons.
        let all = (self.seen.cpus * 3 / 4).checked_sub(requested(QosClass::Guaranteed))?;
        let beyond = all.checked_sub(pod.cpu_request).filter(|beyond| *beyond > 0)?;
        // request = all * weight / (weight + the others' weights), where weights are proportional to
        // requests.
        let product = u128::from(pod.cpu_request) * u128::from(requested(QosClass::Burstable));
        let enough = u64::try_from(product.div_ceil(u128::from(beyond))).unwrap_or(u64::MAX);
        let worth_it = enough.saturating_mul(2) < pod.cpu_request;
        // Rounded up, as weights are coarse.
        worth_it
            .then(|| 1 + shares_to_weight_linear(millis_to_shares(i64::try_from(enough).unwrap_or(i64::MAX))))
    }

    /// Restricts the turn of BestEffort pods; returns false if it was restricted already.
    fn restrict_best_efforts_turn(&mut self, complaint: &Complaint<'_>) -> bool {
        let seen = self.seen;
        let first = if seen.supports.idle { KnobKind::Idle } else { KnobKind::Weight };
        let words = match first {
            KnobKind::Idle => "BestEffort pods run only on otherwise idle CPUs",
            _ => "BestEffort pods get the lowest weight",
        };
        self.hold(&seen.best_effort, first, 1, &format!("{}: {words}", complaint.words))
    }

    /// Lowers the cap of BestEffort pods; returns false if it is at its floor.
    fn cap_best_effort(&mut self, complaint: &Complaint<'_>) -> bool {
        let seen = self.seen;
        let floor = (seen.cpus * u64::from(self.law.best_effort_floor_percent) / 100).max(LEAST_CAP);
        let used = seen.best_effort_used.min(seen.cpus);
        self.lower_cap(&seen.best_effort, used, floor, complaint, "BestEffort pods")
    }

    /// Lowers a cap by a step, starting from the usage if there is none yet. Returns false if no step is
    /// left, or if caps would gain nothing (where turns can be restricted) or would do harm on this kernel.
    fn lower_cap(
        &mut self,
        cgroup: &str,
        used: u64,
        floor: u64,
        complaint: &Complaint<'_>,
        whose: &str,
    ) -> bool {
        let is_of_use = self.seen.supports.harmless_caps && !self.seen.supports.idle;
        if self.law.cpu_caps == CpuCaps::Auto && !is_of_use {
            return false;
        }
        let now = self.held(cgroup, KnobKind::CpuCap).unwrap_or(used);
        let next = shrink(now, self.law.cpu_step_percent).max(floor);
        let words = format!("{}: {whose}, capped at {}", complaint.words, words::cpus(next));
        next < now && self.hold(cgroup, KnobKind::CpuCap, next, &words)
    }

    /// Relaxes the restrictions in reverse order: caps of Burstable pods, the cap of BestEffort ones,
    /// cpu.idle.
    pub(super) fn relax_cpu(&mut self) {
        let best_effort = self.seen.best_effort.clone();
        let caps: Vec<Knob> =
            self.state.held.keys().filter(|knob| knob.kind == KnobKind::CpuCap).cloned().collect();
        let of_pods = caps.iter().find(|knob| knob.cgroup != best_effort);
        if let Some(knob) = of_pods.or(caps.first()) {
            let cap = self.state.held.get(knob).copied().unwrap_or(0);
            let next = grow(cap, self.law.cpu_step_percent).max(cap + LEAST_GROWTH);
            let to = Some(next).filter(|next| *next < self.seen.cpus);
            self.set(knob, to, "no protected pod waits for a CPU any more");
            return;
        }
        self.restore_turns();
        let nobody = self.seen.pods.iter().all(|pod| pod.class == QosClass::BestEffort);
        let is_pods_idle = |knob: &Knob| knob.kind == KnobKind::Idle && knob.cgroup != best_effort;
        // cpu.idle costs a BestEffort pod nothing but its turn: it stays while they use much CPU, and while a
        // Burstable pod is idle, which they would otherwise run before.
        if self.seen.best_effort_used > self.quiet() && !nobody || self.state.held.keys().any(is_pods_idle) {
            return;
        }
        for kind in [KnobKind::Idle, KnobKind::Weight] {
            let knob = Knob { cgroup: best_effort.clone(), kind };
            if self.state.held.contains_key(&knob) {
                self.set(&knob, None, "BestEffort pods use little CPU, or there are no pods to protect");
            }
        }
    }

    /// Restores turns. A lost turn costs the pod nothing else: it stays while the pod uses more than it
    /// requests and another protected pod exists.
    fn restore_turns(&mut self) {
        let seen = self.seen;
        let is_turn = |knob: &&Knob| matches!(knob.kind, KnobKind::Idle | KnobKind::Weight);
        let held: Vec<Knob> = self.state.held.keys().filter(is_turn).cloned().collect();
        for knob in held {
            let Some(pod) = seen.pods.iter().find(|pod| pod.cgroup == knob.cgroup) else { continue };
            let is_protected = |other: &PodSample| other.class != QosClass::BestEffort;
            let alone = !seen.pods.iter().any(|other| is_protected(other) && other.cgroup != pod.cgroup);
            if alone || pod.cpu_used.unwrap_or(0) <= pod.cpu_request.saturating_add(self.quiet()) {
                let words =
                    format!("{} uses no more than it requests, or there are no pods to protect", pod.name);
                self.set(&knob, None, &words);
            }
        }
    }

    /// Returns the usage below which a step is not worthwhile, in millicores.
    pub(super) fn quiet(&self) -> u64 {
        self.seen.cpus * u64::from(self.law.quiet_percent) / 100
    }

    // ---- Memory ----

    /// Restores the memory of pods that do nothing but reclaim.
    pub(super) fn free_what_stands_still(&mut self) {
        let seen = self.seen;
        for pod in &seen.pods {
            let held = self.held(&pod.cgroup, KnobKind::MemoryHigh).is_some();
            let mut standstill = self.state.standstill.get(&pod.cgroup).copied().unwrap_or_default();
            let give_back = standstill.tick(self.law, held, pod.memory_still_permille);
            if standstill.is_over() {
                self.state.standstill.remove(&pod.cgroup);
            } else {
                self.state.standstill.insert(pod.cgroup.clone(), standstill);
            }
            if give_back {
                let knob = Knob { cgroup: pod.cgroup.clone(), kind: KnobKind::MemoryHigh };
                let words = format!("{} makes no progress under the reduced memory.high", pod.name);
                self.set(&knob, None, &words);
            }
        }
    }
}
