//! The settings that the tuner holds: sets and restores them, keeps the journal of undo records, and gives up
//! those that others overwrite. Must never decide on a setting: `policy::tuner` does.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use beelet_base::clock::After as _;
use beelet_cgroups::{Cgroups, held};
use beelet_policy::tuner::{self as policy, Knob, KnobKind, TunerStep};
use beelet_state::State;
use jiff::Timestamp;
use tracing::{debug, info, warn};

use super::{
    history::History,
    journal::{self, Journal},
    knobs::{self, Setting},
    metrics::Metrics,
    view::{Outcome, TunerRecord},
};

/// The reason for holding a knob, and the time since it is held.
pub(super) struct Why {
    pub(super) since: Timestamp,
    pub(super) reason: String,
}

/// A knob to leave alone.
pub(super) struct Block {
    pub(super) until: Instant,
    pub(super) reason: String,
}

/// Holds settings.
pub(super) struct Holder {
    pub(super) cgroups: Arc<Cgroups>,
    pub(super) durable: Arc<State>,
    metrics: Metrics,
    /// Time for which a knob is left alone after a failure or an overwritten setting.
    back_off: Duration,
    pub(super) journal: Journal,
    pub(super) history: History,
    pub(super) state: policy::State,
    pub(super) why: BTreeMap<Knob, Why>,
    pub(super) blocked: BTreeMap<Knob, Block>,
}

impl Holder {
    pub(super) fn new(
        cgroups: Arc<Cgroups>,
        durable: Arc<State>,
        metrics: Metrics,
        back_off: Duration,
    ) -> Self {
        Self {
            journal: Journal::load(&durable),
            history: History::load(&durable),
            cgroups,
            durable,
            metrics,
            back_off,
            state: policy::State::default(),
            why: BTreeMap::new(),
            blocked: BTreeMap::new(),
        }
    }

    /// Restores all held settings. Returns their number.
    pub(super) fn restore(&mut self) -> usize {
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

    /// Gives up settings that another process has overwritten.
    pub(super) fn yield_overwritten(&mut self, now: Instant) {
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
                held::let_go(&self.cgroups, &knob.cgroup, setting.file);
                self.journal.forget(&knob.cgroup, setting.file);
            }
            self.metrics.overwritten(knob.kind);
            let from = held.map(|value| knob.kind.show(value));
            self.remember(&knob, from, None, reason.clone(), Outcome::Overwritten(found));
            // A lowered quota reduces its burst: that is not a conflict.
            if knob.kind != KnobKind::Burst {
                self.blocked.insert(knob, Block { until: now.after(self.back_off), reason });
            }
        }
        if any {
            self.keep_journal();
        }
    }

    /// Drops the records of removed cgroups.
    pub(super) fn forget_the_gone(&mut self, decision: &policy::Decision) {
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
    pub(super) fn settle(&mut self, now: Instant) {
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
                    self.blocked.insert(knob, Block { until: now.after(self.back_off), reason });
                }
            }
        }
        if !owed.is_empty() {
            self.keep_journal();
        }
    }

    pub(super) fn enforce(&mut self, steps: Vec<TunerStep>, now: Instant) {
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
                let owners =
                    held::owners_value(&self.cgroups, &step.knob.cgroup, setting.file).unwrap_or_default();
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
            let held =
                held::hold(&self.cgroups, &knob.cgroup, setting.file, &owners, setting.value.as_deref());
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
        self.blocked.insert(step.knob.clone(), Block { until: now.after(self.back_off), reason });
        self.remember_step(step, Outcome::Failed(error.to_owned()));
    }

    fn keep_journal(&self) {
        // A superfluous record is harmless: its file holds its owner's value, or another process's.
        if let Err(error) = self.journal.store(&self.durable) {
            warn!(%error, "cannot update the tuner's journal");
        }
    }

    pub(super) fn remember_step(&mut self, step: &TunerStep, outcome: Outcome) {
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
