//! A single tick of the control law.

mod burst;
mod complaints;
mod cpu;
mod disk;
mod memory;

use std::collections::{BTreeMap, BTreeSet};

use self::burst::Bursts;
use super::{
    ContainerSample, Decision, Heat, Help, Knob, KnobKind, Law, Observed, PodSample, State, TunerStep,
    help::{ComplaintState, Judgement},
    ladder::Move,
};
use crate::resources::qos::QosClass;

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

/// The node at this tick, under the law.
#[derive(Clone, Copy)]
struct Node<'a> {
    law: &'a Law,
    seen: &'a Observed,
}

/// The settings that the tuner holds, and their changes in this tick.
struct Hand<'a> {
    blocked: &'a BTreeSet<Knob>,
    held: BTreeMap<Knob, u64>,
    steps: Vec<TunerStep>,
}

impl Hand<'_> {
    fn held(&self, cgroup: &str, kind: KnobKind) -> Option<u64> {
        self.held.get(&Knob { cgroup: cgroup.to_owned(), kind }).copied()
    }

    /// Holds a knob at a value; returns false if it is there already, or must be left alone.
    fn hold(&mut self, cgroup: &str, kind: KnobKind, value: u64, reason: &str) -> bool {
        let knob = Knob { cgroup: cgroup.to_owned(), kind };
        if self.blocked.contains(&knob) || self.held.get(&knob) == Some(&value) {
            return false;
        }
        self.set(&knob, Some(value), reason);
        true
    }

    fn set(&mut self, knob: &Knob, to: Option<u64>, reason: &str) {
        let from = match to {
            Some(value) => self.held.insert(knob.clone(), value),
            None => self.held.remove(knob),
        };
        self.steps.push(TunerStep { knob: knob.clone(), from, to, reason: reason.to_owned() });
    }

    /// Reverts steps without effect, as far as they are still in force.
    fn abandon(&mut self, complaint: &Complaint<'_>, tries: u32, taken: BTreeMap<Knob, Option<u64>>) {
        let words = format!("{}: the last {tries} steps have not helped", complaint.words);
        for (knob, before) in taken {
            let Some(now) = self.held.get(&knob).copied() else { continue };
            if before.is_none_or(|before| before > now) {
                self.set(&knob, before, &words);
            }
        }
    }
}

pub(super) struct Round<'a> {
    node: Node<'a>,
    hand: Hand<'a>,
    /// The state, except the held settings.
    state: State,
}

impl<'a> Round<'a> {
    pub(super) fn new(law: &'a Law, state: &State, seen: &'a Observed, blocked: &'a BTreeSet<Knob>) -> Self {
        let mut state = state.clone();
        let held = std::mem::take(&mut state.held);
        Self { node: Node { law, seen }, hand: Hand { blocked, held, steps: Vec::new() }, state }
    }

    pub(super) fn decide(mut self) -> Decision {
        self.forget_the_gone();
        self.free_who_falls_short();
        let node = self.node;
        let mut cpu = self.complaints(
            |container| node.cpu_complaint(container),
            &[KnobKind::Idle, KnobKind::Weight, KnobKind::CpuCap],
            "no protected pod waits for a CPU",
        );
        for complaint in &mut cpu.all {
            complaint.hopeless = node.is_hopeless(complaint, &self.hand);
            if let Some(whom) = node.waits_for(complaint).filter(|_| complaint.ratio > 1000) {
                complaint.words.push_str(&whom);
            }
        }
        let heat = self.heat(&cpu, |state| &mut state.cpu_help);
        match self.state.cpu.tick(node.law, heat) {
            Move::Tighten => self.tighten(&cpu, |state| &mut state.cpu_help, Self::squeeze_cpu),
            Move::GiveBack => self.relax_cpu(),
            Move::Stay => {}
        }
        let stalls = self.complaints(
            |container| node.memory_complaint(container),
            &[KnobKind::MemoryHigh],
            "no protected pod stalls for memory",
        );
        memory::free_what_stands_still(node, &mut self.hand, &mut self.state.standstill);
        let heat = self.heat(&stalls, |state| &mut state.memory_help);
        match self.state.memory.tick(node.law, heat) {
            Move::Tighten => self.tighten(&stalls, |state| &mut state.memory_help, memory::squeeze),
            Move::GiveBack => memory::relax(node, &mut self.hand),
            Move::Stay => {}
        }
        disk::yield_to_others(node, &mut self.hand);
        Bursts { node, hand: &mut self.hand, ladders: &mut self.state.throttled }.lend();
        let findings = vec![finding(&cpu, &self.state.cpu_help), finding(&stalls, &self.state.memory_help)];
        Decision { state: State { held: self.hand.held, ..self.state }, steps: self.hand.steps, findings }
    }

    /// Drops the state of removed cgroups.
    fn forget_the_gone(&mut self) {
        let seen = self.node.seen;
        let is_there = |cgroup: &str| {
            cgroup == seen.best_effort
                || seen.pods.iter().any(|pod| {
                    pod.cgroup == cgroup || pod.containers.iter().any(|container| container.cgroup == cgroup)
                })
        };
        let blocked = self.hand.blocked;
        self.hand.held.retain(|knob, _| is_there(&knob.cgroup) && !blocked.contains(knob));
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
        let is_held_back =
            |pod: &PodSample| by.iter().any(|kind| self.hand.held(&pod.cgroup, *kind).is_some());
        let pods = self.node.seen.pods.iter();
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
        let (law, helps) = (self.node.law, helps(&mut self.state));
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
        let (law, made) = (self.node.law, self.hand.steps.len());
        let Some(worst) = complaints.open(helps(&mut self.state)) else { return };
        let help = helps(&mut self.state).entry(worst.container.cgroup.clone()).or_default();
        match help.judge(law, worst.ratio) {
            Judgement::GoOn => squeeze(self, worst),
            Judgement::GiveUp(tries, taken) => self.hand.abandon(worst, tries, taken),
        }
        if let Some(help) = helps(&mut self.state).get_mut(&worst.container.cgroup) {
            // Steps back are not part of the attempt.
            let steps = self.hand.steps.get(made..).unwrap_or_default();
            steps.iter().filter(|step| step.to.is_some()).for_each(|step| help.took(step));
        }
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
