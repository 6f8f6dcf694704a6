//! One tick of the control law.

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

/// No pod is capped below this, in millicores: the kernel's shortest quota in a period of 100 ms.
const LEAST_CAP: u64 = 10;
/// Whom a container waits for less than this part of the time is not named, in thousandths.
const WORTH_NAMING: u32 = 100;
/// A cap that is loosened grows by this at least, in millicores, however small it is.
const LEAST_GROWTH: u64 = 50;

/// How a protected container stands to a bound.
struct Complaint<'a> {
    pod: &'a PodSample,
    container: &'a ContainerSample,
    /// In thousandths of the bound.
    ratio: u32,
    /// The whole in words.
    words: String,
    /// Nobody whom something can be taken from had what it waits for.
    hopeless: bool,
}

/// How all of them do together.
struct Complaints<'a> {
    /// The furthest above its bound first.
    all: Vec<Complaint<'a>>,
    /// Of some nothing is known yet.
    unmeasured: bool,
    /// What to say where there is none.
    none: &'static str,
}

/// What squeezes others for a complaint.
type Squeeze<'a> = fn(&mut Round<'a>, &Complaint<'a>);
/// Where it is kept whether that helps.
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
            Move::GiveBack => self.give_back_cpu(),
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
            Move::GiveBack => self.give_back_memory(),
            Move::Stay => {}
        }
        self.lend_bursts();
        let findings = vec![finding(&cpu, &self.state.cpu_help), finding(&memory, &self.state.memory_help)];
        Decision { state: self.state, steps: self.steps, findings }
    }

    /// What was held of a cgroup that is gone is gone with it.
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

    // ---- How things stand ----

    /// How all protected containers stand to a bound. A pod that is held back by any of `by` is left out: it
    /// waits because others were to be protected from it, so nothing is taken from those for it.
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

    /// How the worst of those stands for whom something can be done.
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
            // Somebody to protect, but no measurement: nothing changes. Nobody to protect: all is given back.
            _ if complaints.unmeasured => Heat::Warm,
            _ => Heat::Calm,
        }
    }

    /// Takes a step for the worst of those for whom something can be done, unless the last ones have not
    /// helped it.
    fn tighten(&mut self, complaints: &Complaints<'a>, helps: Helps, squeeze: Squeeze<'a>) {
        let (law, made) = (self.law, self.steps.len());
        let Some(worst) = complaints.open(helps(&mut self.state)) else { return };
        let help = helps(&mut self.state).entry(worst.container.cgroup.clone()).or_default();
        match help.judge(law, worst.ratio) {
            Judgement::GoOn => squeeze(self, worst),
            Judgement::GiveUp(tries, taken) => self.give_up(worst, tries, taken),
        }
        if let Some(help) = helps(&mut self.state).get_mut(&worst.container.cgroup) {
            // Those that give back are no reason to do it again.
            let steps = self.steps.get(made..).unwrap_or_default();
            steps.iter().filter(|step| step.to.is_some()).for_each(|step| help.took(step));
        }
    }

    /// Takes back what has not helped, as far as it is still held tighter.
    fn give_up(&mut self, complaint: &Complaint<'_>, tries: u32, taken: BTreeMap<Knob, Option<u64>>) {
        let words = format!("{}: the last {tries} steps have not helped", complaint.words);
        for (knob, before) in taken {
            let Some(now) = self.state.held.get(&knob).copied() else { continue };
            if before.is_none_or(|before| before > now) {
                self.set(&knob, before, &words);
            }
        }
    }

    /// How far a container's wait for a CPU is on its way to the bound, in thousandths, and in words. The
    /// time that its own quota held it back is no one else's doing.
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
                "waits {} for a CPU once in 100 times ({} at most)",
                words::millis(wait),
                words::millis(bound)
            );
            (ratio(wait, bound), words)
        });
        share.into_iter().chain(p99).max_by_key(|(ratio, _)| *ratio)
    }

    /// Returns true if it is known beforehand that no step helps: those that had the CPUs meanwhile are its
    /// own threads, the machine's, Guaranteed pods, or keep to what they requested. All that could be taken
    /// from others would not be the gain that steps are asked for.
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

    /// For whom it waits most, in words; None if that is not measured, or nobody stands out.
    fn waits_for(&self, complaint: &Complaint<'_>) -> Option<String> {
        let held_by = complaint.container.held_by.as_ref()?;
        let (cgroup, permille) = held_by.iter().max_by_key(|(_, permille)| **permille)?;
        let whom = match self.seen.pods.iter().find(|pod| pod.cgroup == *cgroup)? {
            pod if pod.cgroup == complaint.pod.cgroup => "its own threads",
            pod => pod.name.as_str(),
        };
        (*permille >= WORTH_NAMING).then(|| format!(", {} of that for {whom}", words::percent(*permille)))
    }

    /// Returns true if a Burstable pod uses more than it requests, and more of it than the one that
    /// complains, which has no better right to what is left. A little more than it requests is not worth a
    /// cap, which would hold it back in each of its own bursts.
    fn is_greedier(&self, pod: &PodSample, than: &PodSample) -> bool {
        let (used, theirs) = (pod.cpu_used.unwrap_or(0), than.cpu_used.unwrap_or(0));
        // used / request > theirs / request, of one that requests nothing as of one that requests next to it.
        let uses_more = used > pod.cpu_request.saturating_add(self.quiet())
            && u128::from(used) * u128::from(than.cpu_request.max(1))
                > u128::from(theirs) * u128::from(pod.cpu_request.max(1));
        pod.class == QosClass::Burstable
            // Or nothing can be taken from it.
            && (self.seen.supports.weights || pod.can_cap)
            // One that is capped is kept from it.
            && (uses_more || self.held(&pod.cgroup, KnobKind::CpuCap).is_some())
    }

    /// The same for memory. A container at its own limit stalls for its own reasons.
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

    /// First turns, which cost nobody CPU time that is free: of BestEffort pods, then of Burstable ones above
    /// their request. Then time, in the same order.
    fn squeeze_cpu(&mut self, complaint: &Complaint<'a>) {
        let is_best_effort_busy = self.seen.best_effort_used > self.quiet();
        if is_best_effort_busy && self.take_best_efforts_turn(complaint) {
            return;
        }
        let mut over: Vec<&PodSample> = self
            .seen
            .pods
            .iter()
            .filter(|pod| pod.name != complaint.pod.name && self.is_greedier(pod, complaint.pod))
            .collect();
        over.sort_by_key(|pod| std::cmp::Reverse(pod.cpu_used.unwrap_or(0).saturating_sub(pod.cpu_request)));
        if over.iter().any(|pod| self.take_turn(pod, complaint)) {
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

    /// Lets a Burstable pod above its request run after all others but BestEffort ones, which are made idle
    /// with it: before an idle pod they would come. Where the kernel has no `cpu.idle`, or the pod fell short
    /// of its request that way, it runs by the weight of its request alone. Returns false if there is nothing
    /// to take.
    fn take_turn(&mut self, pod: &PodSample, complaint: &Complaint<'_>) -> bool {
        let held = |kind| self.held(&pod.cgroup, kind).is_some();
        let fell_short = self.state.fell_short.get(&pod.cgroup);
        // Both are settings of one file: one is given back a tick before the other is held.
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
            _ if may_be_idle => (KnobKind::Idle, 1, "it runs when nobody else wants the CPU"),
            Some(weight) => (KnobKind::Weight, weight, "it gets its turn by those alone"),
            None => return false,
        };
        let requests = words::cpus(pod.cpu_request);
        let words =
            format!("{}: {} uses more than the {requests} it requests, so {turn}", complaint.words, pod.name);
        if kind == KnobKind::Idle {
            self.take_best_efforts_turn(complaint);
        }
        self.hold(&pod.cgroup, kind, value, &words)
    }

    /// Gives its turn back to a Burstable pod that without it gets less than it requests for some ticks in a
    /// row, as what others leave is no longer enough; and to all where somebody else has given BestEffort
    /// pods theirs, which would come first. A pod keeps its turn for a while.
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
                format!("{} would run after BestEffort pods, which were given their turn back", pod.name)
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

    /// Returns true if a pod gets less than it requests and is kept from running: it waits for nearly all of
    /// the time in which it doesn't run. One that waits for a disk, or has nothing to do, doesn't.
    fn falls_short(&self, pod: &PodSample) -> bool {
        let used = pod.cpu_used.unwrap_or(u64::MAX);
        let not_running = 1000_u64.saturating_sub(used);
        let waits = |container| {
            let wait = wait_for_others(container);
            wait.is_none_or(|wait| wait > self.law.cpu_wait_permille && u64::from(wait) * 2 >= not_running)
        };
        used < pod.cpu_request && pod.containers.iter().any(waits)
    }

    /// The least CPU weight with which a Burstable pod still gets what it requests while all others want all
    /// that they can have, where that is far below its own. It takes nothing from the pod while CPUs are
    /// free, and leaves it fewer turns beside others; a thread that wakes up still waits for the end of one.
    fn least_weight(&self, pod: &PodSample) -> Option<u64> {
        let requested = |class: QosClass| -> u64 {
            let of_class = self.seen.pods.iter().filter(|other| other.class == class);
            let others = of_class.filter(|other| other.cgroup != pod.cgroup);
            bounds::total(others.map(|other| other.cpu_request))
        };
        // Guaranteed pods have no more than they request. A quarter is left to the machine's daemons.
        let all = (self.seen.cpus * 3 / 4).checked_sub(requested(QosClass::Guaranteed))?;
        let beyond = all.checked_sub(pod.cpu_request).filter(|beyond| *beyond > 0)?;
        // request = all * weight / (weight + the others' weights), which are as what they request.
        let product = u128::from(pod.cpu_request) * u128::from(requested(QosClass::Burstable));
        let enough = u64::try_from(product.div_ceil(u128::from(beyond))).unwrap_or(u64::MAX);
        let worth_it = enough.saturating_mul(2) < pod.cpu_request;
        // Rounded up: a weight is coarse.
        worth_it
            .then(|| 1 + shares_to_weight_linear(millis_to_shares(i64::try_from(enough).unwrap_or(i64::MAX))))
    }

    /// Returns true if BestEffort pods still had their turn.
    fn take_best_efforts_turn(&mut self, complaint: &Complaint<'_>) -> bool {
        let seen = self.seen;
        let first = if seen.supports.idle { KnobKind::Idle } else { KnobKind::Weight };
        let words = match first {
            KnobKind::Idle => "BestEffort pods run only when nobody else wants the CPU",
            _ => "BestEffort pods get the least weight",
        };
        self.hold(&seen.best_effort, first, 1, &format!("{}: {words}", complaint.words))
    }

    /// Returns true if there was still CPU time to take from the BestEffort pods.
    fn cap_best_effort(&mut self, complaint: &Complaint<'_>) -> bool {
        let seen = self.seen;
        let floor = (seen.cpus * u64::from(self.law.best_effort_floor_percent) / 100).max(LEAST_CAP);
        let used = seen.best_effort_used.min(seen.cpus);
        self.lower_cap(&seen.best_effort, used, floor, complaint, "BestEffort pods")
    }

    /// Takes a step from a cap, or from what is used where there is no cap yet. Returns false if there is
    /// none to take, or caps would do no good, where turns can be taken, or harm, on this kernel.
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

    /// Gives back what was taken last: caps of Burstable pods, the cap of BestEffort ones, cpu.idle.
    fn give_back_cpu(&mut self) {
        let best_effort = self.seen.best_effort.clone();
        let caps: Vec<Knob> =
            self.state.held.keys().filter(|knob| knob.kind == KnobKind::CpuCap).cloned().collect();
        let of_pods = caps.iter().find(|knob| knob.cgroup != best_effort);
        if let Some(knob) = of_pods.or(caps.first()) {
            let cap = self.state.held.get(knob).copied().unwrap_or(0);
            let next = grow(cap, self.law.cpu_step_percent).max(cap + LEAST_GROWTH);
            let to = Some(next).filter(|next| *next < self.seen.cpus);
            self.set(knob, to, "all protected pods get their CPUs in time again");
            return;
        }
        self.give_back_turns();
        let nobody = self.seen.pods.iter().all(|pod| pod.class == QosClass::BestEffort);
        let is_pods_idle = |knob: &Knob| knob.kind == KnobKind::Idle && knob.cgroup != best_effort;
        // cpu.idle takes nothing from a BestEffort pod but its turn before others: it stays while they want
        // many, and while a Burstable pod is idle, before which they would come.
        if self.seen.best_effort_used > self.quiet() && !nobody || self.state.held.keys().any(is_pods_idle) {
            return;
        }
        for kind in [KnobKind::Idle, KnobKind::Weight] {
            let knob = Knob { cgroup: best_effort.clone(), kind };
            if self.state.held.contains_key(&knob) {
                self.set(&knob, None, "BestEffort pods ask for little CPU, or nobody is there to protect");
            }
        }
    }

    /// This takes nothing from a pod but its turn before others: it stays while the pod uses more than it
    /// requests, and somebody is there to wait for it.
    fn give_back_turns(&mut self) {
        let seen = self.seen;
        let is_turn = |knob: &&Knob| matches!(knob.kind, KnobKind::Idle | KnobKind::Weight);
        let held: Vec<Knob> = self.state.held.keys().filter(is_turn).cloned().collect();
        for knob in held {
            let Some(pod) = seen.pods.iter().find(|pod| pod.cgroup == knob.cgroup) else { continue };
            let is_protected = |other: &PodSample| other.class != QosClass::BestEffort;
            let alone = !seen.pods.iter().any(|other| is_protected(other) && other.cgroup != pod.cgroup);
            if alone || pod.cpu_used.unwrap_or(0) <= pod.cpu_request.saturating_add(self.quiet()) {
                let words = format!("{} uses what it requests, or nobody is there to protect", pod.name);
                self.set(&knob, None, &words);
            }
        }
    }

    /// Less than this is not worth a step, in millicores.
    fn quiet(&self) -> u64 {
        self.seen.cpus * u64::from(self.law.quiet_percent) / 100
    }

    // ---- Memory ----

    /// Gives back what was taken from pods that do nothing any more but look for memory.
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
                let words = format!("{} stands still without the memory that was taken from it", pod.name);
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
        // Who grows takes again at once what anybody else is made to give.
        let growth = |pod: &PodSample| pod.memory_growth_permille.unwrap_or(0);
        order.sort_by_key(|pod| {
            (pod.class, std::cmp::Reverse(growth(pod)), std::cmp::Reverse(pod.working_set))
        });
        for pod in order {
            let request = if pod.class == QosClass::Burstable { pod.memory_request } else { 0 };
            let now = self.held(&pod.cgroup, KnobKind::MemoryHigh).unwrap_or(pod.memory_used);
            // Never below what is really needed now: each step takes what the one before made it let go.
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

    /// Raises every memory.high that is held; one that holds nobody back any more is taken away.
    fn give_back_memory(&mut self) {
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
            // Twice what it uses: it doesn't press against it.
            let to = Some(next).filter(|next| *next < used.saturating_mul(2));
            self.set(&knob, to, "no protected pod stalls for memory any more");
        }
    }

    // ---- Bursts ----

    /// A protected container that its own quota throttles may use what it saved in earlier periods, and so
    /// may its pod.
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

    /// A pod's own quota must not hold back what its containers were lent.
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

    /// A burst without a quota, or of a pod that is not protected (any more), has no reason.
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
            self.set(knob, None, "there is no quota to exceed any more");
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
            // The kernel takes no burst above the quota, which has been lowered.
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
        // What was saved before costs nobody anything until it is needed, and then it is needed at once.
        let patient = Law { calm_ticks: self.law.retry_ticks, ..*self.law };
        let ladder = self.state.throttled.entry(container.cgroup.clone()).or_default();
        match ladder.tick(&patient, heat) {
            Move::Tighten => {
                // The kernel adds up the CPUs.
                let part = words::percent(throttled.min(1000));
                let words = format!(
                    "{} ({}) is held back by its own quota {part} of the time: it may burst by {}",
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

    /// Holds a knob at a value; false if it is there already, or must be left alone.
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
    /// The worst of those for whom something can be done, as far as is known.
    fn open(&self, helps: &BTreeMap<String, Help>) -> Option<&Complaint<'a>> {
        self.all.iter().find(|complaint| standing(helps, complaint) == ComplaintState::Open)
    }
}

fn standing(helps: &BTreeMap<String, Help>, complaint: &Complaint<'_>) -> ComplaintState {
    let tried = helps.get(&complaint.container.cgroup).map_or(ComplaintState::Open, Help::standing);
    match tried {
        // What was taken before, and is within reach no more because of that, stays taken.
        ComplaintState::Open if complaint.hopeless && helps.contains_key(&complaint.container.cgroup) => {
            ComplaintState::Kept
        }
        ComplaintState::Open if complaint.hopeless => ComplaintState::Void,
        _ => tried,
    }
}

/// The worst in words, for whom something can be done if it needs that.
fn finding(complaints: &Complaints<'_>, helps: &BTreeMap<String, Help>) -> String {
    let open = complaints.open(helps).filter(|complaint| complaint.ratio > 1000);
    let Some(worst) = open.or(complaints.all.first()) else { return complaints.none.to_owned() };
    match standing(helps, worst) {
        ComplaintState::Open => worst.words.clone(),
        _ if worst.hopeless => format!(
            "{}; those that had the CPUs meanwhile are none that anything can be taken from, so nothing is",
            worst.words
        ),
        ComplaintState::Kept => {
            format!("{}; more steps have not helped it, so no more are made", worst.words)
        }
        ComplaintState::Void if helps.get(&worst.container.cgroup).is_some_and(Help::found_nothing) => {
            format!("{}; nobody has anything that can be taken for it now", worst.words)
        }
        ComplaintState::Void => {
            format!("{}; taking from others has not helped it, so it is left at that", worst.words)
        }
    }
}

/// How much of the time a container waited for a CPU beyond what its own quota took; None: not measured.
fn wait_for_others(container: &ContainerSample) -> Option<u32> {
    Some(container.cpu_wait_permille?.saturating_sub(container.throttled_permille.unwrap_or(0)))
}

/// `value` in thousandths of `bound`; a bound of 0 is any value's.
fn ratio(value: u64, bound: u64) -> u32 {
    u32::try_from(value.saturating_mul(1000) / bound.max(1)).unwrap_or(u32::MAX)
}

fn shrink(value: u64, percent: u32) -> u64 {
    let left = 100 - u128::from(percent.min(100));
    u64::try_from(u128::from(value) * left / 100).unwrap_or(u64::MAX)
}

/// The reverse of [`shrink`].
fn grow(value: u64, percent: u32) -> u64 {
    let left = 100 - u128::from(percent.clamp(1, 99));
    u64::try_from(u128::from(value) * 100 / left).unwrap_or(u64::MAX)
}
