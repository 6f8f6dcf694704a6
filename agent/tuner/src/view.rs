//! What the tuner shows of itself.

use std::{sync::Arc, time::Duration};

use beelet_policy::tuner::Knob;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use beelet_policy::tuner::TunerMode;

/// How it stands, at the last tick.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// How far it goes; None before the first tick.
    pub mode: Option<TunerMode>,
    /// When it looked last.
    pub at: Option<Timestamp>,
    /// What it found, in words: of CPU, of memory.
    pub findings: Vec<String>,
    /// What can't be done here, and why.
    pub lacking: Vec<String>,
    /// Why a scheduler of its own that is wanted does not run.
    pub scheduler_lost: Option<String>,
    /// What it holds now; in the mode `advise`, what it would change.
    pub held: Vec<HeldSetting>,
    /// What it leaves to others for a while.
    pub blocked: Vec<Blocked>,
    /// What it did or advised, oldest first; the last few hundred.
    pub history: Arc<Vec<TunerRecord>>,
}

impl View {
    pub(super) fn off() -> Self {
        Self { mode: Some(TunerMode::Off), ..Self::default() }
    }
}

/// A setting that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldSetting {
    /// Which.
    pub knob: Knob,
    /// At what, with its unit.
    pub value: String,
    /// What its owner has there, as in the file; empty in the mode `advise`.
    pub owners: String,
    /// Since when.
    pub since: Timestamp,
    /// Why, in words.
    pub reason: String,
}

/// A setting that is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Which.
    pub knob: Knob,
    /// For how long still.
    pub left: Duration,
    /// Why, in words.
    pub reason: String,
}

/// Something that was done, or advised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunerRecord {
    /// When.
    pub at: Timestamp,
    /// To what.
    pub knob: Knob,
    /// What it was held at before, with its unit; None: its owner's value stood.
    pub from: Option<String>,
    /// What it was to be held at; None: its owner's value again.
    pub to: Option<String>,
    /// Why, in words.
    pub reason: String,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It was done.
    Done,
    /// It was only advised.
    Advised,
    /// It could not be done.
    Failed(String),
    /// Something else has overwritten the setting, which is left to it.
    Overwritten(String),
}
