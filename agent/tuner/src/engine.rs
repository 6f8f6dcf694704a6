//! The engine, which samples, decides and acts at each tick. Blocking; the caller passes in the time.

mod report;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use beelet_policy::tuner::{self as policy, Knob, KnobKind, Observed, Supports, TunerStep};
use jiff::Timestamp;
use tracing::{info, warn};

use super::{
    Settings,
    cold::Cold,
    holder::{Holder, Why},
    journal::Journal,
    knobs,
    metrics::Metrics,
    quiet::Quiet,
    rung::{Rung, StartScheduler},
    sample::{KernelHalf, Sampler},
    targets::Target,
    throttled::Throttled,
    view::{Outcome, View},
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

/// The engine, which holds cgroup settings as `policy::tuner` decides, tick by tick.
pub struct Engine {
    holder: Holder,
    kernel: Option<KernelHalf>,
    settings: Settings,
    metrics: Metrics,
    sampler: Sampler,
    quiet: Quiet,
    /// See [`Engine::is_quiet`].
    is_quiet: bool,
    throttled: Throttled,
    cold: Cold,
    best_effort: String,
    /// The supported settings, and the time of that check.
    supports: Option<(Instant, Supports)>,
    /// True if the cgroups belong to a kubelet.
    is_guest: bool,
    rung: Rung,
    /// In the mode `advise`: the current advice, to avoid repeating it at each tick.
    advised: BTreeMap<Knob, u64>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("state", &self.holder.state)
            .field("journal", &self.holder.journal)
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
            holder: Holder::new(cgroups, durable, metrics.clone(), settings.back_off),
            kernel,
            settings,
            metrics,
            sampler: Sampler::default(),
            quiet: Quiet::default(),
            is_quiet: false,
            throttled: Throttled::default(),
            cold: Cold::new(settings.cold, settings.mode),
            best_effort: BEST_EFFORT.to_owned(),
            supports: None,
            is_guest: false,
            rung: Rung::Unused,
            advised: BTreeMap::new(),
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
        self.holder.blocked.retain(|_, block| block.until > now);
        self.holder.yield_overwritten(now);
        self.holder.settle(now);
        self.rung.tick(&self.holder.cgroups, pods, &self.metrics);
        let supports = self.supports(now);
        let all_pods = self.best_effort.rsplit_once('/').map_or("/", |(parent, _)| parent);
        let law = &self.settings.law;
        let looked = (all_pods, pods, self.holder.state.is_at_rest());
        let source = self.kernel.as_ref().map(|kernel| &kernel.counters);
        let waits = self.quiet.tick(&self.holder.cgroups, looked, source, law, now);
        let throttled = self.throttled.tick(&self.holder.cgroups, pods, &self.holder.state.held, law, now);
        let sampled = if waits.is_some() { pods.iter().collect() } else { throttled };
        self.is_quiet = sampled.is_empty() && self.holder.state.is_at_rest();
        if self.is_quiet {
            self.cold.tick(&self.holder.cgroups, pods, &self.metrics, now);
            // There is nothing to decide: the usage of BestEffort pods does not matter.
            self.sampler = Sampler::default();
            let best_effort = self.best_effort.clone();
            return self.act(&Observed { supports, best_effort, ..Observed::default() }, now);
        }
        let kernel = (waits.unwrap_or_default(), self.kernel.as_ref());
        let mut seen =
            self.sampler.sample(&self.holder.cgroups, kernel, &self.best_effort, supports, &sampled, now);
        let is_moot = self.rung.is_loaded();
        if is_moot || self.is_guest && self.holder.cgroups.paths.version() != Version::V2 {
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
        let mut supports = knobs::supports(&self.holder.cgroups, &self.best_effort);
        let is_there = supports.idle || supports.burst || supports.memory_high;
        if self.is_guest {
            (supports.idle, supports.burst, supports.weights) = (false, false, false);
        }
        self.supports = is_there.then_some((now, supports));
        supports
    }

    /// Restores all held settings. Returns their number.
    pub fn restore(&mut self) -> usize {
        self.rung.stop();
        self.cold.end();
        self.holder.restore()
    }

    /// Decides for this observation and acts: a tick without the sampling.
    pub fn act(&mut self, seen: &Observed, now: Instant) -> View {
        let mut blocked: BTreeSet<Knob> = self.holder.blocked.keys().cloned().collect();
        if self.is_guest {
            // A kubelet gives BestEffort pods the lowest weight anyway.
            blocked.insert(Knob { cgroup: self.best_effort.clone(), kind: KnobKind::Weight });
        }
        if self.rung.is_loaded() {
            // The kernel ignores these under the loaded scheduler.
            let kinds = [KnobKind::Idle, KnobKind::Weight, KnobKind::CpuCap];
            blocked.extend(kinds.map(|kind| Knob { cgroup: self.best_effort.clone(), kind }));
        }
        let decision = policy::decide(&self.settings.law, &self.holder.state, seen, &blocked);
        if self.settings.mode == TunerMode::Enforce {
            self.holder.forget_the_gone(&decision);
            self.holder.state = decision.state;
            self.holder.enforce(decision.steps, now);
        } else {
            self.advise(decision.state, decision.steps);
        }
        self.metrics.hold(&self.holder.state.held.keys().map(|knob| &knob.kind));
        self.holder.history.keep(&self.holder.durable);
        self.view(decision.findings, seen.supports, now)
    }

    /// Advises without changing anything: only the first step is advised, once while it stands.
    fn advise(&mut self, state: policy::State, steps: Vec<TunerStep>) {
        // Advice has no effect to measure.
        let (held, helps) = (BTreeMap::new(), BTreeMap::new());
        self.holder.state = policy::State { held, cpu_help: helps.clone(), memory_help: helps, ..state };
        for step in steps {
            let Some(to) = step.to else { continue };
            self.holder
                .why
                .insert(step.knob.clone(), Why { since: Timestamp::now(), reason: step.reason.clone() });
            if self.advised.insert(step.knob.clone(), to).is_none() {
                info!(
                    cgroup = step.knob.cgroup,
                    setting = step.knob.kind.as_str(),
                    value = step.knob.kind.show(to),
                    reason = step.reason,
                    "the tuner would change this setting (allow it with `tuner.mode: enforce`)"
                );
                self.metrics.step(step.knob.kind, false, "advised");
                self.holder.remember_step(&step, Outcome::Advised);
            }
        }
        let state = &self.holder.state;
        self.advised.retain(|knob, _| !state.is_calm_for(knob));
        self.holder.why.retain(|knob, _| !state.is_calm_for(knob));
    }
}
