//! The engine, which samples, decides and acts at each tick. Blocking; the caller passes in the time.

mod report;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use beelet_base::clock::After as _;
use beelet_policy::tuner::{self as policy, Knob, KnobKind, Observed, Supports, TunerStep};
use jiff::Timestamp;
use tracing::{debug, info, warn};

use super::{
    Settings,
    history::History,
    journal::{self, Journal},
    knobs::{self, Setting},
    metrics::Metrics,
    quiet::Quiet,
    rung::{Rung, StartScheduler},
    sample::{KernelHalf, Sampler},
    targets::Target,
    throttled::Throttled,
    view::{Outcome, TunerRecord, View},
};
use beelet_cgroups::{Cgroups, Version};
use beelet_policy::tuner::TunerMode;
use beelet_state::State;

/// Default cgroup of all BestEffort pods, from the cgroup root, if this agent owns the pods; both drivers use
/// this name.
const BEST_EFFORT: &str = "/kubepods/besteffort";
/// Time for which the list of a cgroup's files is cached.
const SUPPORTS_HOLD: Duration = Duration::from_secs(10);

/// Restores the settings of an agent that ended without doing so. Must run at the start, before anything else
/// writes cgroups: the kernel refuses a weight while a cgroup is idle. Returns the number of restored
/// settings.
pub fn recover(cgroups: &Cgroups, state: &State) -> usize {
    let mut journal = Journal::load(state);
    if journal.is_empty() {
        return 0;
    }
    let restored = journal.restore(cgroups);
    if let Err(error) = journal.store(state) {
        warn!(%error, "cannot write the tuner's journal; the next start will restore these settings again");
    }
    info!(settings = restored, "restored cgroup settings that an earlier agent's tuner had left");
    restored
}

/// The reason for holding a knob, and the time since it is held.
struct Why {
    since: Timestamp,
    reason: String,
}

/// A knob to leave alone.
struct Block {
    until: Instant,
    reason: String,
}

/// The engine, which holds cgroup settings as `policy::tuner` decides, tick by tick.
pub struct Engine {
    cgroups: Arc<Cgroups>,
    durable: Arc<State>,
    kernel: Option<KernelHalf>,
    settings: Settings,
    metrics: Metrics,
    sampler: Sampler,
    quiet: Quiet,
    /// See [`Engine::is_quiet`].
    is_quiet: bool,
    throttled: Throttled,
    best_effort: String,
    /// The supported settings, and the time of that check.
    supports: Option<(Instant, Supports)>,
    /// True if the cgroups belong to a kubelet.
    is_guest: bool,
    rung: Rung,
    state: policy::State,
    journal: Journal,
    why: BTreeMap<Knob, Why>,
    /// In the mode `advise`: the current advice, to avoid repeating it at each tick.
    advised: BTreeMap<Knob, u64>,
    blocked: BTreeMap<Knob, Block>,
    history: History,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("state", &self.state)
            .field("journal", &self.journal)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Creates an engine that holds nothing. [`recover`] must have handled the journal of an earlier one.
    #[must_use]
    pub fn new(
        cgroups: Arc<Cgroups>,
        durable: Arc<State>,
        kernel: Option<KernelHalf>,
        settings: Settings,
        metrics: Metrics,
    ) -> Self {
        Self {
            journal: Journal::load(&durable),
            history: History::load(&durable),
            cgroups,
            durable,
            kernel,
            settings,
            metrics,
            sampler: Sampler::default(),
            quiet: Quiet::default(),
            is_quiet: false,
            throttled: Throttled::default(),
            best_effort: BEST_EFFORT.to_owned(),
            supports: None,
            is_guest: false,
            rung: Rung::Unused,
            state: policy::State::default(),
            why: BTreeMap::new(),
            advised: BTreeMap::new(),
            blocked: BTreeMap::new(),
        }
    }

    /// Adapts the engine to cgroups that a kubelet writes: it then holds no setting that could make a write
    /// of the owner fail. The kernel refuses a weight while a cgroup is idle, a lower quota while it has a
    /// burst, and with version 1 per container's quota above its pod's.
    pub(crate) fn into_guest(mut self) -> Self {
        self.is_guest = true;
        self
    }

    /// Adds a scheduler, used in the mode `enforce`.
    #[must_use]
    pub fn with_scheduler(mut self, start: Option<StartScheduler>) -> Self {
        if let Some(start) = start.filter(|_| self.settings.mode == TunerMode::Enforce) {
            self.rung = Rung::Wanted(start);
        }
        self
    }

    /// Sets the cgroup of BestEffort pods, in place of `/kubepods/besteffort`.
    pub(crate) fn set_best_effort(&mut self, cgroup: String) {
        if self.best_effort != cgroup {
            (self.best_effort, self.supports) = (cgroup, None);
        }
    }

    /// Samples the node with these pods at `now`, decides, and acts.
    pub fn tick(&mut self, pods: &[Target], now: Instant) -> View {
        self.metrics.ticks.inc();
        self.blocked.retain(|_, block| block.until > now);
        self.yield_overwritten(now);
        self.settle(now);
        self.rung.tick(&self.cgroups, pods, &self.metrics);
        let supports = self.supports(now);
        let all_pods = self.best_effort.rsplit_once('/').map_or("/", |(parent, _)| parent);
        let law = &self.settings.law;
        let looked = (all_pods, pods, self.state.is_at_rest());
        let source = self.kernel.as_ref().map(|kernel| &kernel.counters);
        let waits = self.quiet.tick(&self.cgroups, looked, source, law, now);
        let throttled = self.throttled.tick(&self.cgroups, pods, &self.state.held, law, now);
        let sampled = if waits.is_some() { pods.iter().collect() } else { throttled };
        self.is_quiet = sampled.is_empty() && self.state.is_at_rest();
        if self.is_quiet {
            // There is nothing to decide: the usage of BestEffort pods does not matter.
            self.sampler = Sampler::default();
            return self.act(&Observed { supports, ..Observed::default() }, now);
        }
        let kernel = (waits.unwrap_or_default(), self.kernel.as_ref());
        let mut seen = self.sampler.sample(&self.cgroups, kernel, &self.best_effort, supports, &sampled, now);
        let is_moot = self.rung.is_loaded();
        if is_moot || self.is_guest && self.cgroups.version() != Version::V2 {
            seen.pods.iter_mut().for_each(|pod| pod.can_cap = false);
        }
        seen.supports.weights &= !is_moot;
        self.act(&seen, now)
    }

    /// Returns true if no container could suffer at the last tick, and nothing was held.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_quiet
    }

    /// Returns the supported settings. Checks them again after a while, and at each tick until the cgroup
    /// exists.
    fn supports(&mut self, now: Instant) -> Supports {
        if let Some((at, supports)) = self.supports
            && now.saturating_duration_since(at) < SUPPORTS_HOLD
        {
            return supports;
        }
        let mut supports = knobs::supports(&self.cgroups, &self.best_effort);
        let is_there = supports.idle || supports.burst || supports.memory_high;
        if self.is_guest {
            (supports.idle, supports.burst, supports.weights) = (false, false, false);
        }
        self.supports = is_there.then_some((now, supports));
        supports
    }

    /// Decides for this observation and acts: a tick without the sampling.
    pub fn act(&mut self, seen: &Observed, now: Instant) -> View {
        let mut blocked: BTreeSet<Knob> = self.blocked.keys().cloned().collect();
        if self.is_guest {
            // A kubelet gives BestEffort pods the lowest weight anyway.
            blocked.insert(Knob { cgroup: self.best_effort.clone(), kind: KnobKind::Weight });
        }
        if self.rung.is_loaded() {
            // The kernel ignores these under the loaded scheduler.
            let kinds = [KnobKind::Idle, KnobKind::Weight, KnobKind::CpuCap];
            blocked.extend(kinds.map(|kind| Knob { cgroup: self.best_effort.clone(), kind }));
        }
        let decision = policy::decide(&self.settings.law, &self.state, seen, &blocked);
        if self.settings.mode == TunerMode::Enforce {
            self.forget_the_gone(&decision);
            self.state = decision.state;
            self.enforce(decision.steps, now);
        } else {
            self.advise(decision.state, decision.steps);
        }
        self.metrics.hold(&self.state.held.keys().map(|knob| &knob.kind));
        self.history.keep(&self.durable);
        self.view(decision.findings, seen.supports, now)
    }

    /// Restores all held settings. Returns their number.
    pub fn restore(&mut self) -> usize {
        self.rung.stop();
        let restored = self.journal.restore(&self.cgroups);
        self.state = policy::State::default();
        self.why.clear();
        if let Err(error) = self.journal.store(&self.durable) {
            warn!(%error, "cannot write the tuner's journal; the next start will restore these settings again");
        }
        self.metrics.restored.inc_by(restored as u64);
        self.metrics.hold(&self.state.held.keys().map(|knob| &knob.kind));
        restored
    }

    // ---- Changes by others ----

    /// Gives up settings that another process has overwritten.
    fn yield_overwritten(&mut self, now: Instant) {
        let mut lost = Vec::new();
        for (knob, value) in &self.state.held {
            for setting in knobs::settings(&self.cgroups, knob, *value) {
                let Some(entry) = self.journal.entry(&knob.cgroup, setting.file) else { continue };
                let Some(found) = self.cgroups.read(&knob.cgroup, setting.file) else { continue };
                let owners_again =
                    entry.ours.last().is_some_and(|ours| *ours != found) && found == entry.owners;
                if !journal::is_ours(setting.file, &found, entry) || owners_again {
                    lost.push((knob.clone(), setting.file, found));
                    break;
                }
            }
        }
        let any = !lost.is_empty();
        for (knob, file, found) in lost {
            let reason = format!(
                "another process has set {file} to {found:?}; the tuner leaves the setting alone for a while"
            );
            warn!(cgroup = knob.cgroup, reason, "another process overwrote a setting of the tuner");
            let held = self.state.held.remove(&knob);
            self.why.remove(&knob);
            for setting in knobs::settings(&self.cgroups, &knob, held.unwrap_or(0)) {
                // Files that were only protected are restored; overwritten ones stay.
                if setting.value.is_none()
                    && let Some(entry) = self.journal.entry(&knob.cgroup, setting.file).cloned()
                    && let Err(error) = journal::restore(&self.cgroups, &knob.cgroup, setting.file, &entry)
                {
                    debug!(%error, "cannot restore the file");
                }
                self.cgroups.let_go(&knob.cgroup, setting.file);
                self.journal.forget(&knob.cgroup, setting.file);
            }
            self.metrics.overwritten(knob.kind);
            let from = held.map(|value| knob.kind.show(value));
            self.remember(&knob, from, None, reason.clone(), Outcome::Overwritten(found));
            // A lowered quota reduces its burst: that is not a conflict.
            if knob.kind != KnobKind::Burst {
                self.blocked.insert(knob, Block { until: now.after(self.settings.back_off), reason });
            }
        }
        if any {
            self.keep_journal();
        }
    }

    /// Drops the records of removed cgroups.
    fn forget_the_gone(&mut self, decision: &policy::Decision) {
        let stepped: BTreeSet<&Knob> = decision.steps.iter().map(|step| &step.knob).collect();
        let gone: Vec<(Knob, u64)> = self
            .state
            .held
            .iter()
            .filter(|(knob, _)| !decision.state.held.contains_key(*knob) && !stepped.contains(*knob))
            .map(|(knob, value)| (knob.clone(), *value))
            .collect();
        for (knob, value) in &gone {
            self.why.remove(knob);
            if let Err(error) = self.undo(knob, *value) {
                debug!(error, "cannot restore a setting of a removed cgroup");
            }
        }
        if !gone.is_empty() {
            self.keep_journal();
        }
    }

    /// Restores settings whose earlier restoration failed, in [`recover`] or later: those in the journal that
    /// are not held. Settings left alone for a while wait until that has ended.
    fn settle(&mut self, now: Instant) {
        if self.journal.is_empty() {
            return;
        }
        let held = self.state.held.iter().map(|(knob, value)| (knob, *value));
        let left_alone = self.blocked.keys().map(|knob| (knob, 0));
        let spoken_for: BTreeSet<(String, &str)> = held
            .chain(left_alone)
            .flat_map(|(knob, value)| {
                let settings = knobs::settings(&self.cgroups, knob, value);
                settings.into_iter().map(|setting| (knob.cgroup.clone(), setting.file))
            })
            .collect();
        let owed = self.journal.without(&spoken_for);
        for (cgroup, file, entry) in &owed {
            let Some(kind) = knobs::kind_of(file) else { continue };
            let knob = Knob { cgroup: cgroup.clone(), kind };
            match journal::restore(&self.cgroups, cgroup, file, entry) {
                Ok(_) => {
                    self.journal.forget(cgroup, file);
                    info!(cgroup, file, "restored cgroup setting (an earlier attempt had failed)");
                    self.metrics.step(kind, true, "done");
                    let reason = "an earlier attempt to restore it had failed".to_owned();
                    self.remember(&knob, None, None, reason, Outcome::Done);
                }
                Err(error) => {
                    warn!(cgroup, file, %error, "still cannot restore a cgroup setting of the tuner");
                    self.metrics.step(kind, true, "failed");
                    let reason = format!("cannot restore it: {error}");
                    self.blocked.insert(knob, Block { until: now.after(self.settings.back_off), reason });
                }
            }
        }
        if !owed.is_empty() {
            self.keep_journal();
        }
    }

    // ---- Actions ----

    fn enforce(&mut self, steps: Vec<TunerStep>, now: Instant) {
        if steps.is_empty() {
            return;
        }
        let planned: Vec<(TunerStep, Vec<Setting>)> = steps
            .into_iter()
            .map(|step| {
                let settings = knobs::settings(&self.cgroups, &step.knob, step.to.or(step.from).unwrap_or(0));
                (step, settings)
            })
            .collect();
        // The journal comes first, with all steps at once; only then the files.
        for (step, settings) in planned.iter().filter(|(step, _)| step.to.is_some()) {
            for setting in settings {
                let owners = self.cgroups.owners_value(&step.knob.cgroup, setting.file).unwrap_or_default();
                self.journal.record(&step.knob.cgroup, setting.file, &owners, setting.value.as_deref());
            }
        }
        if let Err(error) = self.journal.store(&self.durable) {
            for (step, _) in planned {
                self.failed(&step, &format!("cannot record how to undo it: {error}"), now);
            }
            return;
        }
        for (step, settings) in planned {
            self.carry_out(&step, &settings, now);
        }
        self.keep_journal();
    }

    fn carry_out(&mut self, step: &TunerStep, settings: &[Setting], now: Instant) {
        let (knob, kind) = (&step.knob, step.knob.kind);
        let Some(to) = step.to else {
            let done = self.undo(knob, step.from.unwrap_or(0));
            self.why.remove(knob);
            match done {
                Ok(()) => self.done(step),
                Err(error) => self.failed(step, &error, now),
            }
            return;
        };
        for setting in settings {
            let owners = self.journal.entry(&knob.cgroup, setting.file).map(|entry| entry.owners.clone());
            let owners = owners.unwrap_or_default();
            let held = self.cgroups.hold(&knob.cgroup, setting.file, &owners, setting.value.as_deref());
            if let Err(error) = held {
                let mut why = error.to_string();
                if let Err(undone) = self.undo(knob, to) {
                    why = format!("{why}; {undone}");
                }
                self.failed(step, &why, now);
                return;
            }
        }
        info!(
            cgroup = knob.cgroup,
            setting = kind.as_str(),
            value = kind.show(to),
            reason = step.reason,
            "tuned"
        );
        let since = self.why.get(knob).map_or_else(Timestamp::now, |why| why.since);
        self.why.insert(knob.clone(), Why { since, reason: step.reason.clone() });
        self.done(step);
    }

    /// Restores the owner's values of a knob's files.
    fn undo(&mut self, knob: &Knob, value: u64) -> Result<(), String> {
        let mut failed = Vec::new();
        for setting in knobs::settings(&self.cgroups, knob, value) {
            let Some(entry) = self.journal.entry(&knob.cgroup, setting.file).cloned() else { continue };
            match journal::restore(&self.cgroups, &knob.cgroup, setting.file, &entry) {
                Ok(_) => self.journal.forget(&knob.cgroup, setting.file),
                // The entry stays in the journal for another attempt: see `settle`.
                Err(error) => failed.push(error.to_string()),
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
    }

    fn done(&mut self, step: &TunerStep) {
        if step.to.is_none() {
            info!(
                cgroup = step.knob.cgroup,
                setting = step.knob.kind.as_str(),
                reason = step.reason,
                "restored cgroup setting"
            );
        }
        self.metrics.step(step.knob.kind, step.to.is_none(), "done");
        self.remember_step(step, Outcome::Done);
    }

    /// Blocks a step that the kernel refuses, so that it is not repeated at each tick.
    fn failed(&mut self, step: &TunerStep, error: &str, now: Instant) {
        warn!(
            cgroup = step.knob.cgroup,
            setting = step.knob.kind.as_str(),
            error,
            "a step of the tuner failed"
        );
        self.metrics.step(step.knob.kind, step.to.is_none(), "failed");
        self.state.held.remove(&step.knob);
        self.why.remove(&step.knob);
        let reason = format!("cannot set it: {error}");
        self.blocked.insert(step.knob.clone(), Block { until: now.after(self.settings.back_off), reason });
        self.remember_step(step, Outcome::Failed(error.to_owned()));
    }

    fn keep_journal(&self) {
        // A superfluous record is harmless: its file holds its owner's value, or another process's.
        if let Err(error) = self.journal.store(&self.durable) {
            warn!(%error, "cannot update the tuner's journal");
        }
    }

    // ---- Advice ----

    /// Advises without changing anything: only the first step is advised, once while it stands.
    fn advise(&mut self, state: policy::State, steps: Vec<TunerStep>) {
        // Advice has no effect to measure.
        let (held, helps) = (BTreeMap::new(), BTreeMap::new());
        self.state = policy::State { held, cpu_help: helps.clone(), memory_help: helps, ..state };
        for step in steps {
            let Some(to) = step.to else { continue };
            self.why.insert(step.knob.clone(), Why { since: Timestamp::now(), reason: step.reason.clone() });
            if self.advised.insert(step.knob.clone(), to).is_none() {
                info!(
                    cgroup = step.knob.cgroup,
                    setting = step.knob.kind.as_str(),
                    value = step.knob.kind.show(to),
                    reason = step.reason,
                    "the tuner would change this setting (allow it with `tuner.mode: enforce`)"
                );
                self.metrics.step(step.knob.kind, false, "advised");
                self.remember_step(&step, Outcome::Advised);
            }
        }
        let state = &self.state;
        self.advised.retain(|knob, _| !state.is_calm_for(knob));
        self.why.retain(|knob, _| !state.is_calm_for(knob));
    }

    // ---- Presentation ----

    fn remember_step(&mut self, step: &TunerStep, outcome: Outcome) {
        let show = |value: Option<u64>| value.map(|value| step.knob.kind.show(value));
        self.remember(&step.knob, show(step.from), show(step.to), step.reason.clone(), outcome);
    }

    fn remember(
        &mut self,
        knob: &Knob,
        from: Option<String>,
        to: Option<String>,
        reason: String,
        outcome: Outcome,
    ) {
        let at = Timestamp::now();
        self.history.add(TunerRecord { at, knob: knob.clone(), from, to, reason, outcome });
    }
}
