//! A single tick of the control law.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ContainerSample, CpuCaps, Decision, Heat, Help, Knob, KnobKind, Law, Observed, PodSample, Standstill,
    State, TunerStep,
    help::{ComplaintState, Judgement},
    ladder::Move,
    words,
};
use crate::resources::{
    cgroups::{millis_to_shares, shares_to_weight_linear},
    qos::QosClass,
};
use beelet_units::bounds;

/// Minimum cap of a pod, in millicores: the kernel's shortest quota in a period of 100 ms.
const LEAST_CAP: u64 = 10;
/// Minimum share of a wait (in thousandths) for a pod to be named as its cause.
const WORTH_NAMING: u32 = 100;
/// Minimum growth of a cap that is loosened, in millicores.
const LEAST_GROWTH: u64 = 50;

/// A protected container's measurement relative to its bound.
struct Complaint<'a> {
    pod: &'a PodSample,
    container: &'a ContainerSample,
    /// Thousandths of the bound.
    ratio: u32,
    /// The full explanation.
    words: String,
    /// True if no pod that may be restricted used the resource.
    hopeless: bool,
}

/// The complaints of all protected containers.
struct Complaints<'a> {
    /// Sorted, the furthest above its bound first.
    all: Vec<Complaint<'a>>,
    /// True if some container is not measured yet.
    unmeasured: bool,
    /// Explanation in the absence of complaints.
    none: &'static str,
}

/// A function that restricts other pods for a complaint.
type Squeeze<'a> = fn(&mut Round<'a>, &Complaint<'a>);
/// The place that records the effect of steps.
type Helps = fn(&mut State) -> &mut BTreeMap<String, Help>;

pub(super) struct Round<'a> {
    law: &'a Law,
    seen: &'a Observed,
    blocked: &'a BTreeSet<Knob>,
    state: State,
    steps: Vec<TunerStep>,
}

impl<'a> Round<'a> {
    pub(super) fn new(law: &'a Law, state: &State, seen: &'a Observed, blocked: &'a BTreeSet<Knob>) -> Self {
        Self { law, seen, blocked, state: state.clone(), steps: Vec::new() }
    }

    pub(super) fn decide(mut self) -> Decision {
        self.forget_the_gone();
        self.free_who_falls_short();
        let mut cpu = self.complaints(
            |container| self.cpu_complaint(container),
            &[KnobKind::Idle, KnobKind::Weight, KnobKind::CpuCap],
            "no protected pod waits for a CPU",
        );
        for complaint in &mut cpu.all {
            complaint.hopeless = self.is_hopeless(complaint);
            if let Some(whom) = self.waits_for(complaint).filter(|_| complaint.ratio > 1000) {
                complaint.words.push_str(&whom);
            }
        }
        let heat = self.heat(&cpu, |state| &mut state.cpu_help);
        match self.state.cpu.tick(self.law, heat) {
            Move::Tighten => self.tighten(&cpu, |state| &mut state.cpu_help, Self::squeeze_cpu),
            Move::GiveBack => self.relax_cpu(),
            Move::Stay => {}
        }
        let memory = self.complaints(
            |container| self.memory_complaint(container),
            &[KnobKind::MemoryHigh],
            "no protected pod stalls for memory",
        );
        self.free_what_stands_still();
        let heat = self.heat(&memory, |state| &mut state.memory_help);
        match self.state.memory.tick(self.law, heat) {
            Move::Tighten => self.tighten(&memory, |state| &mut state.memory_help, Self::squeeze_memory),
            Move::GiveBack => self.relax_memory(),
            Move::Stay => {}
        }
        self.lend_bursts();
        let findings = vec![finding(&cpu, &self.state.cpu_help), finding(&memory, &self.state.memory_help)];
        Decision { state: self.state, steps: self.steps, findings }
    }

    /// Drops the state of removed cgroups.
    fn forget_the_gone(&mut self) {
        let seen = self.seen;
        let is_there = |cgroup: &str| {
            cgroup == seen.best_effort
                || seen.pods.iter().any(|pod| {
                    pod.cgroup == cgroup || pod.containers.iter().any(|container| container.cgroup == cgroup)
                })
        };
        let blocked = self.blocked;
        self.state.held.retain(|knob, _| is_there(&knob.cgroup) && !blocked.contains(knob));
        self.state.throttled.retain(|cgroup, _| is_there(cgroup));
        self.state.cpu_help.retain(|cgroup, _| is_there(cgroup));
        self.state.memory_help.retain(|cgroup, _| is_there(cgroup));
        self.state.standstill.retain(|cgroup, _| is_there(cgroup));
        self.state.fell_short.retain(|cgroup, _| is_there(cgroup));
    }

    // ---- Assessment ----

    /// Returns all protected containers' measurements relative to a bound, without pods held back by any of
    /// `by`: they wait because others were to be protected from them, so no others are restricted for them.
    fn complaints(
        &self,
        judge: impl Fn(&ContainerSample) -> Option<(u32, String)>,
        by: &[KnobKind],
        none: &'static str,
    ) -> Complaints<'a> {
        let is_held_back = |pod: &PodSample| by.iter().any(|kind| self.held(&pod.cgroup, *kind).is_some());
        let pods = self.seen.pods.iter();
        let protected = pods.filter(|pod| pod.class != QosClass::BestEffort && !is_held_back(pod));
        let of_pod = |pod: &'a PodSample| pod.containers.iter().map(move |container| (pod, container));
        let (mut all, mut unmeasured) = (Vec::new(), false);
        for (pod, container) in protected.flat_map(of_pod) {
            match judge(container) {
                Some((ratio, words)) => {
                    let words = format!("{} ({}) {words}", pod.name, container.name);
                    all.push(Complaint { pod, container, ratio, words, hopeless: false });
                }
                None => unmeasured = true,
            }
        }
        all.sort_by_key(|complaint| std::cmp::Reverse(complaint.ratio));
        Complaints { all, unmeasured, none }
    }

    /// Returns the heat of the worst complaint that steps may help.
    fn heat(&mut self, complaints: &Complaints<'_>, helps: Helps) -> Heat {
        let (law, helps) = (self.law, helps(&mut self.state));
        for complaint in &complaints.all {
            let cgroup = &complaint.container.cgroup;
            if helps.get_mut(cgroup).is_some_and(|help| !help.tick(law, complaint.ratio)) {
                helps.remove(cgroup);
            }
        }
        let helps = &*helps;
        let worst =
            complaints.all.iter().find(|complaint| standing(helps, complaint) != ComplaintState::Void);
        match worst {
            Some(worst) if worst.ratio > 1000 => match standing(helps, worst) {
                ComplaintState::Open => Heat::Hot,
                _ if complaints.open(helps).is_some_and(|other| other.ratio > 1000) => Heat::Hot,
                _ => Heat::Warm,
            },
            Some(worst) if worst.ratio >= law.release_percent * 10 => Heat::Warm,
            // With unmeasured protected pods nothing changes. Without protected pods all settings are
            // restored.
            _ if complaints.unmeasured => Heat::Warm,
            _ => Heat::Calm,
        }
    }

    /// Takes a step for the worst complaint that steps may help, unless the last steps had no effect.
    fn tighten(&mut self, complaints: &Complaints<'a>, helps: Helps, squeeze: Squeeze<'a>) {
        let (law, made) = (self.law, self.steps.len());
        let Some(worst) = complaints.open(helps(&mut self.state)) else { return };
        let help = helps(&mut self.state).entry(worst.container.cgroup.clone()).or_default();
        match help.judge(law, worst.ratio) {
            Judgement::GoOn => squeeze(self, worst),
            Judgement::GiveUp(tries, taken) => self.abandon(worst, tries, taken),
        }
        if let Some(help) = helps(&mut self.state).get_mut(&worst.container.cgroup) {
            // Steps back are not part of the attempt.
            let steps = self.steps.get(made..).unwrap_or_default();
            steps.iter().filter(|step| step.to.is_some()).for_each(|step| help.took(step));
        }
    }

    /// Reverts steps without effect, as far as they are still in force.
    fn abandon(&mut self, complaint: &Complaint<'_>, tries: u32, taken: BTreeMap<Knob, Option<u64>>) {
        let words = format!("{}: the last {tries} steps have not helped", complaint.words);
        for (knob, before) in taken {
            let Some(now) = self.state.held.get(&knob).copied() else { continue };
            if before.is_none_or(|before| before > now) {
                self.set(&knob, before, &words);
            }
        }
    }

    /// Returns a container's CPU wait relative to the bound, in thousandths, and an explanation. Time in
    /// which its own quota throttled it does not count.
    fn cpu_complaint(&self, container: &ContainerSample) -> Option<(u32, String)> {
        let share = wait_for_others(container).map(|wait| {
            let bound = self.law.cpu_wait_permille;
            let words = format!(
                "waits for a CPU {} of the time ({} at most)",
                words::percent(wait),
                words::percent(bound)
            );
            (ratio(wait.into(), bound.into()), words)
        });
        let throttled = container.throttled_permille.is_some_and(|part| part > 0);
        let p99 = container.cpu_wait_p99_us.filter(|_| !throttled).map(|wait| {
            let bound = self.law.cpu_wait_p99_us;
            let words = format!(
                "waits {} for a CPU at the 99th percentile ({} at most)",
                words::millis(wait),
                words::millis(bound)
            );
            (ratio(wait, bound), words)
        });
        share.into_iter().chain(p99).max_by_key(|(ratio, _)| *ratio)
    }

    /// Returns true if no step can help: the CPUs were used by the container's own threads, the machine,
    /// Guaranteed pods, or pods within their requests. Restricting other pods could not yield the gain
    /// required of steps.
    fn is_hopeless(&self, complaint: &Complaint<'_>) -> bool {
        let Some(held_by) = complaint.container.held_by.as_ref().filter(|_| self.law.helpless_steps > 0)
        else {
            return false;
        };
        let others = self.seen.pods.iter().filter(|pod| pod.cgroup != complaint.pod.cgroup);
        let within_reach = others
            .filter(|pod| pod.class == QosClass::BestEffort || self.is_greedier(pod, complaint.pod))
            .filter_map(|pod| held_by.get(&pod.cgroup));
        within_reach.sum::<u32>() < self.law.gain_percent * 10
    }

    /// Names the main cause of the wait; `None` if not measured, or if no pod stands out.
    fn waits_for(&self, complaint: &Complaint<'_>) -> Option<String> {
        let held_by = complaint.container.held_by.as_ref()?;
        let (cgroup, permille) = held_by.iter().max_by_key(|(_, permille)| **permille)?;
        let whom = match self.seen.pods.iter().find(|pod| pod.cgroup == *cgroup)? {
            pod if pod.cgroup == complaint.pod.cgroup => "its own threads",
            pod => pod.name.as_str(),
        };
        (*permille >= WORTH_NAMING).then(|| format!(", {} of that for {whom}", words::percent(*permille)))
    }

    /// Returns true if a Burstable pod uses more than it requests, and exceeds its request by a larger factor
    /// than the complaining pod, which has no better claim to the rest. A small excess is not worth a cap,
    /// which would delay each of the pod's own bursts.
    fn is_greedier(&self, pod: &PodSample, than: &PodSample) -> bool {
        let (used, theirs) = (pod.cpu_used.unwrap_or(0), than.cpu_used.unwrap_or(0));
        // used / request > theirs / request, where a request of zero counts as a minimal one.
        let uses_more = used > pod.cpu_request.saturating_add(self.quiet())
            && u128::from(used) * u128::from(than.cpu_request.max(1))
                > u128::from(theirs) * u128::from(pod.cpu_request.max(1));
        pod.class == QosClass::Burstable
            // Otherwise nothing can be taken from the pod.
            && (self.seen.supports.weights || pod.can_cap)
            // A capped pod uses less because of its cap.
            && (uses_more || self.held(&pod.cgroup, KnobKind::CpuCap).is_some())
    }

    /// Returns the memory complaint likewise. A container at its own limit causes its stalls itself.
    fn memory_complaint(&self, container: &ContainerSample) -> Option<(u32, String)> {
        let stall = container.memory_stall_permille?;
        if container.at_memory_limit {
            return Some((0, "stalls at its own memory limit".to_owned()));
        }
        let bound = self.law.memory_stall_permille;
        let words = format!(
            "stalls for memory {} of the time ({} at most)",
            words::percent(stall),
            words::percent(bound)
        );
        Some((ratio(stall.into(), bound.into()), words))
    }

    // ---- CPU ----

    /// Restricts turns first, which costs no CPU time that is free: those of BestEffort pods, then of
    /// Burstable ones above their request. Restricts CPU time next, in the same order.
    fn squeeze_cpu(&mut self, complaint: &Complaint<'a>) {
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
    fn free_who_falls_short(&mut self) {
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
    fn relax_cpu(&mut self) {
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
    fn quiet(&self) -> u64 {
        self.seen.cpus * u64::from(self.law.quiet_percent) / 100
    }

    // ---- Memory ----

    /// Restores the memory of pods that do nothing but reclaim.
    fn free_what_stands_still(&mut self) {
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

    fn squeeze_memory(&mut self, complaint: &Complaint<'a>) {
        if !self.seen.supports.memory_high {
            return;
        }
        let may = |pod: &&PodSample| match pod.class {
            QosClass::BestEffort => true,
            QosClass::Burstable => pod.working_set > pod.memory_request && pod.name != complaint.pod.name,
            QosClass::Guaranteed => false,
        };
        let spared =
            |pod: &&PodSample| self.state.standstill.get(&pod.cgroup).is_some_and(Standstill::is_spared);
        let mut order: Vec<&PodSample> =
            self.seen.pods.iter().filter(may).filter(|pod| !spared(pod)).collect();
        // A growing pod would at once use memory that others release.
        let growth = |pod: &PodSample| pod.memory_growth_permille.unwrap_or(0);
        order.sort_by_key(|pod| {
            (pod.class, std::cmp::Reverse(growth(pod)), std::cmp::Reverse(pod.working_set))
        });
        for pod in order {
            let request = if pod.class == QosClass::Burstable { pod.memory_request } else { 0 };
            let now = self.held(&pod.cgroup, KnobKind::MemoryHigh).unwrap_or(pod.memory_used);
            // Never below the real need now: each step takes the memory that the previous one made the pod
            // release.
            let least = pod.working_set.max(request).max(self.law.memory_floor);
            let next = shrink(now, self.law.memory_step_percent).max(least);
            let grew = match growth(pod) {
                WORTH_NAMING.. => format!(", whose growth is {} of all,", words::percent(growth(pod))),
                _ => String::new(),
            };
            let words = format!(
                "{}: {} ({}){grew} is held at {}",
                complaint.words,
                pod.name,
                pod.class,
                words::bytes(next)
            );
            if next < now && self.hold(&pod.cgroup, KnobKind::MemoryHigh, next, &words) {
                return;
            }
        }
    }

    /// Raises every memory.high that is held, and removes those without effect.
    fn relax_memory(&mut self) {
        let held: Vec<(Knob, u64)> = self
            .state
            .held
            .iter()
            .filter(|(knob, _)| knob.kind == KnobKind::MemoryHigh)
            .map(|(knob, value)| (knob.clone(), *value))
            .collect();
        for (knob, high) in held {
            let used =
                self.seen.pods.iter().find(|pod| pod.cgroup == knob.cgroup).map_or(0, |p| p.memory_used);
            let next = grow(high, self.law.memory_step_percent).max(high + (1 << 20));
            // At twice its usage the limit has no effect on the pod.
            let to = Some(next).filter(|next| *next < used.saturating_mul(2));
            self.set(&knob, to, "no protected pod stalls for memory any more");
        }
    }

    // ---- Bursts ----

    /// Lends a burst to each protected container that its own quota throttles: the container, and its pod,
    /// may then use the quota saved in earlier periods.
    fn lend_bursts(&mut self) {
        self.end_pointless_bursts();
        if !self.seen.supports.burst || self.law.burst_percent == 0 {
            return;
        }
        for pod in self.seen.pods.iter().filter(|pod| pod.class != QosClass::BestEffort) {
            for container in &pod.containers {
                self.lend_burst(pod, container);
            }
            self.let_the_pod_burst(pod);
        }
    }

    /// Raises the pod's own burst, so that its quota does not hold back its containers' bursts.
    fn let_the_pod_burst(&mut self, pod: &PodSample) {
        let lent: u64 = pod.containers.iter().filter_map(|c| self.held(&c.cgroup, KnobKind::Burst)).sum();
        let to = pod.quota_us.map(|quota| lent.min(quota)).filter(|burst| *burst > 0);
        if self.held(&pod.cgroup, KnobKind::Burst) == to {
            return;
        }
        let knob = Knob { cgroup: pod.cgroup.clone(), kind: KnobKind::Burst };
        match to {
            Some(_) if self.blocked.contains(&knob) => {}
            Some(_) => self.set(&knob, to, &format!("containers of {} may burst", pod.name)),
            None => self.set(&knob, None, &format!("no container of {} bursts any more", pod.name)),
        }
    }

    /// Ends bursts without a quota, and those of pods that are not protected (any more).
    fn end_pointless_bursts(&mut self) {
        let seen = self.seen;
        let protected = seen.pods.iter().filter(|pod| pod.class != QosClass::BestEffort);
        let quotas = protected.flat_map(|pod| {
            let containers = pod.containers.iter().map(|container| (&container.cgroup, container.quota_us));
            containers.chain([(&pod.cgroup, pod.quota_us)])
        });
        let limited: BTreeSet<&str> =
            quotas.filter(|(_, quota)| quota.is_some()).map(|(cgroup, _)| cgroup.as_str()).collect();
        let may = seen.supports.burst && self.law.burst_percent > 0;
        let is_burst = |knob: &&Knob| knob.kind == KnobKind::Burst;
        let all: Vec<Knob> = self.state.held.keys().filter(is_burst).cloned().collect();
        for knob in all.iter().filter(|knob| !may || !limited.contains(knob.cgroup.as_str())) {
            self.set(knob, None, "the quota to exceed no longer exists");
        }
    }

    fn lend_burst(&mut self, pod: &PodSample, container: &ContainerSample) {
        let (Some(quota), Some(throttled)) = (container.quota_us, container.throttled_permille) else {
            return;
        };
        let burst = quota * u64::from(self.law.burst_percent.min(100)) / 100;
        let knob = Knob { cgroup: container.cgroup.clone(), kind: KnobKind::Burst };
        let held = self.state.held.get(&knob).copied();
        if held.is_some_and(|held| held > quota) {
            // The kernel refuses a burst above the quota, which has been lowered.
            self.set(
                &knob,
                Some(burst),
                &format!("the quota of {} ({}) is lower now", pod.name, container.name),
            );
        }
        let heat = match ratio(throttled.into(), self.law.throttled_permille.into()) {
            1001.. => Heat::Hot,
            calm if calm < self.law.release_percent * 10 => Heat::Calm,
            _ => Heat::Warm,
        };
        // Saved quota costs other pods nothing until it is needed, and then it is needed at once.
        let patient = Law { calm_ticks: self.law.retry_ticks, ..*self.law };
        let ladder = self.state.throttled.entry(container.cgroup.clone()).or_default();
        match ladder.tick(&patient, heat) {
            Move::Tighten => {
                // The kernel adds up the CPUs' throttled times.
                let part = words::percent(throttled.min(1000));
                let words = format!(
                    "{} ({}) is throttled by its own quota {part} of the time: it may burst by {}",
                    pod.name,
                    container.name,
                    KnobKind::Burst.show(burst)
                );
                self.hold(&container.cgroup, KnobKind::Burst, burst, &words);
            }
            Move::GiveBack if held.is_some() => {
                let words = format!("{} ({}) keeps within its quota", pod.name, container.name);
                self.set(&knob, None, &words);
            }
            Move::GiveBack | Move::Stay => {}
        }
    }

    // ---- Knobs ----

    fn held(&self, cgroup: &str, kind: KnobKind) -> Option<u64> {
        self.state.held.get(&Knob { cgroup: cgroup.to_owned(), kind }).copied()
    }

    /// Holds a knob at a value; returns false if it is there already, or must be left alone.
    fn hold(&mut self, cgroup: &str, kind: KnobKind, value: u64, reason: &str) -> bool {
        let knob = Knob { cgroup: cgroup.to_owned(), kind };
        if self.blocked.contains(&knob) || self.state.held.get(&knob) == Some(&value) {
            return false;
        }
        self.set(&knob, Some(value), reason);
        true
    }

    fn set(&mut self, knob: &Knob, to: Option<u64>, reason: &str) {
        let from = match to {
            Some(value) => self.state.held.insert(knob.clone(), value),
            None => self.state.held.remove(knob),
        };
        self.steps.push(TunerStep { knob: knob.clone(), from, to, reason: reason.to_owned() });
    }
}

impl<'a> Complaints<'a> {
    /// Returns the worst complaint that steps may help, as far as is known.
    fn open(&self, helps: &BTreeMap<String, Help>) -> Option<&Complaint<'a>> {
        self.all.iter().find(|complaint| standing(helps, complaint) == ComplaintState::Open)
    }
}

fn standing(helps: &BTreeMap<String, Help>, complaint: &Complaint<'_>) -> ComplaintState {
    let tried = helps.get(&complaint.container.cgroup).map_or(ComplaintState::Open, Help::standing);
    match tried {
        // Earlier steps may be the reason why no other pod is within reach now: they stay in force.
        ComplaintState::Open if complaint.hopeless && helps.contains_key(&complaint.container.cgroup) => {
            ComplaintState::Kept
        }
        ComplaintState::Open if complaint.hopeless => ComplaintState::Void,
        _ => tried,
    }
}

/// Explains the worst complaint; prefers one above its bound that steps may help.
fn finding(complaints: &Complaints<'_>, helps: &BTreeMap<String, Help>) -> String {
    let open = complaints.open(helps).filter(|complaint| complaint.ratio > 1000);
    let Some(worst) = open.or(complaints.all.first()) else { return complaints.none.to_owned() };
    match standing(helps, worst) {
        ComplaintState::Open => worst.words.clone(),
        _ if worst.hopeless => format!(
            "{}; no step is taken, as pods that may be restricted did not use the CPUs in that time",
            worst.words
        ),
        ComplaintState::Kept => {
            format!("{}; further steps have not helped, so no more are taken", worst.words)
        }
        ComplaintState::Void if helps.get(&worst.container.cgroup).is_some_and(Help::found_nothing) => {
            format!("{}; no pod has anything that may be taken now", worst.words)
        }
        ComplaintState::Void => {
            format!("{}; restricting other pods has not helped, so no more steps are taken", worst.words)
        }
    }
}

/// Returns the share of time that a container waited for a CPU in excess of its own quota's throttling;
/// `None`: not measured.
fn wait_for_others(container: &ContainerSample) -> Option<u32> {
    Some(container.cpu_wait_permille?.saturating_sub(container.throttled_permille.unwrap_or(0)))
}

/// Returns `value` in thousandths of `bound`; a bound of 0 counts as 1.
fn ratio(value: u64, bound: u64) -> u32 {
    u32::try_from(value.saturating_mul(1000) / bound.max(1)).unwrap_or(u32::MAX)
}

fn shrink(value: u64, percent: u32) -> u64 {
    let left = 100 - u128::from(percent.min(100));
    u64::try_from(u128::from(value) * left / 100).unwrap_or(u64::MAX)
}

/// Inverts [`shrink`].
fn grow(value: u64, percent: u32) -> u64 {
    let left = 100 - u128::from(percent.clamp(1, 99));
    u64::try_from(u128::from(value) * 100 / left).unwrap_or(u64::MAX)
}
