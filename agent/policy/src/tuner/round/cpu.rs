//! CPU: restricts other pods for a complaint, and loosens the restrictions later.

use super::{Complaint, LEAST_CAP, LEAST_GROWTH, Round, grow, shrink};
use crate::resources::qos::QosClass;
use crate::tuner::{CpuCaps, Knob, KnobKind, PodSample, words};

impl<'a> Round<'a> {
    /// Restricts turns first, which costs no CPU time that is free: those of BestEffort pods, then of
    /// Burstable ones above their request. Restricts CPU time next, in the same order.
    pub(super) fn squeeze_cpu(&mut self, complaint: &Complaint<'a>) {
        let is_best_effort_busy = self.node.seen.best_effort_used > self.node.quiet();
        if is_best_effort_busy && self.restrict_best_efforts_turn(complaint) {
            return;
        }
        let mut over: Vec<&PodSample> = self
            .node
            .seen
            .pods
            .iter()
            .filter(|pod| {
                pod.name != complaint.pod.name && self.node.is_greedier(pod, complaint.pod, &self.hand)
            })
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
        let held = |kind| self.hand.held(&pod.cgroup, kind).is_some();
        let fell_short = self.state.fell_short.get(&pod.cgroup);
        // Both are settings of one file: one is released in the tick before the other is held.
        if !self.node.seen.supports.weights || held(KnobKind::Idle) || fell_short == Some(&0) {
            return false;
        }
        let may_be = |cgroup: &str| {
            !self.hand.blocked.contains(&Knob { cgroup: cgroup.to_owned(), kind: KnobKind::Idle })
        };
        let may_be_idle = self.node.seen.supports.idle
            && fell_short.is_none()
            && !held(KnobKind::Weight)
            && may_be(&pod.cgroup)
            && may_be(&self.node.seen.best_effort);
        let (kind, value, turn) = match self.node.least_weight(pod) {
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
        self.hand.hold(&pod.cgroup, kind, value, &words)
    }

    /// Restores the turn of an idle Burstable pod that gets less than it requests for some consecutive ticks,
    /// as the CPU time left by others no longer suffices; and of all idle pods if another process has made
    /// BestEffort pods no longer idle, which would run first. A pod then keeps its turn for a while.
    pub(super) fn free_who_falls_short(&mut self) {
        let (seen, law) = (self.node.seen, self.node.law);
        self.state.fell_short.retain(|_, ticks| {
            *ticks += 1;
            *ticks < law.retry_ticks
        });
        let idle = |cgroup: &str| Knob { cgroup: cgroup.to_owned(), kind: KnobKind::Idle };
        let comes_last = self.hand.blocked.contains(&idle(&seen.best_effort));
        let before = std::mem::take(&mut self.state.falling_short);
        for pod in seen.pods.iter().filter(|pod| pod.class == QosClass::Burstable) {
            let knob = idle(&pod.cgroup);
            if !self.hand.held.contains_key(&knob) {
                continue;
            }
            let words = if comes_last {
                format!("{} would run after BestEffort pods, which are no longer idle", pod.name)
            } else if self.node.falls_short(pod) {
                let ticks = before.get(&pod.cgroup).copied().unwrap_or(0) + 1;
                if ticks < law.hot_ticks {
                    self.state.falling_short.insert(pod.cgroup.clone(), ticks);
                    continue;
                }
                format!("{} gets less than the {} it requests", pod.name, words::cpus(pod.cpu_request))
            } else {
                continue;
            };
            self.hand.set(&knob, None, &words);
            self.state.fell_short.insert(pod.cgroup.clone(), 0);
        }
    }

    /// Restricts the turn of BestEffort pods; returns false if it was restricted already.
    fn restrict_best_efforts_turn(&mut self, complaint: &Complaint<'_>) -> bool {
        let seen = self.node.seen;
        let first = if seen.supports.idle { KnobKind::Idle } else { KnobKind::Weight };
        let words = match first {
            KnobKind::Idle => "BestEffort pods run only on otherwise idle CPUs",
            _ => "BestEffort pods get the lowest weight",
        };
        self.hand.hold(&seen.best_effort, first, 1, &format!("{}: {words}", complaint.words))
    }

    /// Lowers the cap of BestEffort pods; returns false if it is at its floor.
    fn cap_best_effort(&mut self, complaint: &Complaint<'_>) -> bool {
        let seen = self.node.seen;
        let floor = (seen.cpus * u64::from(self.node.law.best_effort_floor_percent) / 100).max(LEAST_CAP);
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
        let is_of_use = self.node.seen.supports.harmless_caps && !self.node.seen.supports.idle;
        if self.node.law.cpu_caps == CpuCaps::Auto && !is_of_use {
            return false;
        }
        let now = self.hand.held(cgroup, KnobKind::CpuCap).unwrap_or(used);
        let next = shrink(now, self.node.law.cpu_step_percent).max(floor);
        let words = format!("{}: {whose}, capped at {}", complaint.words, words::cpus(next));
        next < now && self.hand.hold(cgroup, KnobKind::CpuCap, next, &words)
    }

    /// Relaxes the restrictions in reverse order: caps of Burstable pods, the cap of BestEffort ones,
    /// cpu.idle.
    pub(super) fn relax_cpu(&mut self) {
        let best_effort = self.node.seen.best_effort.clone();
        let caps: Vec<Knob> =
            self.hand.held.keys().filter(|knob| knob.kind == KnobKind::CpuCap).cloned().collect();
        let of_pods = caps.iter().find(|knob| knob.cgroup != best_effort);
        if let Some(knob) = of_pods.or(caps.first()) {
            let cap = self.hand.held.get(knob).copied().unwrap_or(0);
            let next = grow(cap, self.node.law.cpu_step_percent).max(cap + LEAST_GROWTH);
            let to = Some(next).filter(|next| *next < self.node.seen.cpus);
            self.hand.set(knob, to, "no protected pod waits for a CPU any more");
            return;
        }
        self.restore_turns();
        let has_only_best_effort = self.node.seen.pods.iter().all(|pod| pod.class == QosClass::BestEffort);
        let is_pods_idle = |knob: &Knob| knob.kind == KnobKind::Idle && knob.cgroup != best_effort;
        // cpu.idle costs a BestEffort pod nothing but its turn: it stays while they use much CPU, and while a
        // Burstable pod is idle, which they would otherwise run before.
        if self.node.seen.best_effort_used > self.node.quiet() && !has_only_best_effort
            || self.hand.held.keys().any(is_pods_idle)
        {
            return;
        }
        for kind in [KnobKind::Idle, KnobKind::Weight] {
            let knob = Knob { cgroup: best_effort.clone(), kind };
            if self.hand.held.contains_key(&knob) {
                self.hand.set(&knob, None, "BestEffort pods use little CPU, or there are no pods to protect");
            }
        }
    }

    /// Restores turns. A lost turn costs the pod nothing else: it stays while the pod uses more than it
    /// requests and another protected pod exists.
    fn restore_turns(&mut self) {
        let seen = self.node.seen;
        let is_turn = |knob: &&Knob| matches!(knob.kind, KnobKind::Idle | KnobKind::Weight);
        let held: Vec<Knob> = self.hand.held.keys().filter(is_turn).cloned().collect();
        for knob in held {
            let Some(pod) = seen.pods.iter().find(|pod| pod.cgroup == knob.cgroup) else { continue };
            let is_protected = |other: &PodSample| other.class != QosClass::BestEffort;
            let alone = !seen.pods.iter().any(|other| is_protected(other) && other.cgroup != pod.cgroup);
            if alone || pod.cpu_used.unwrap_or(0) <= pod.cpu_request.saturating_add(self.node.quiet()) {
                let words =
                    format!("{} uses no more than it requests, or there are no pods to protect", pod.name);
                self.hand.set(&knob, None, &words);
            }
        }
    }
}
