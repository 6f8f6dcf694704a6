//! The published state of the tuner.

use std::{sync::Arc, time::Duration};

use beelet_policy::tuner::Knob;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use beelet_policy::tuner::TunerMode;

/// State at the last tick.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// Level of intervention; `None` before the first tick.
    pub mode: Option<TunerMode>,
    /// Time of the last tick.
    pub at: Option<Timestamp>,
    /// Findings: of CPU, of memory.
    pub findings: Vec<String>,
    /// Actions that the node does not support, with reasons.
    pub lacking: Vec<String>,
    /// Reason for the absence of a configured scheduler.
    pub scheduler_lost: Option<String>,
    /// Held settings; in the mode `advise`, the advised changes.
    pub held: Vec<HeldSetting>,
    /// Settings left to other processes for a while.
    pub blocked: Vec<Blocked>,
    /// Steps and advice, oldest first; the last few hundred.
    pub history: Arc<Vec<TunerRecord>>,
}

impl View {
    pub(super) fn off() -> Self {
        Self { mode: Some(TunerMode::Off), ..Self::default() }
    }
}

/// A held setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldSetting {
    /// The setting.
    pub knob: Knob,
    /// Value with its unit.
    pub value: String,
    /// Owner's value as in the file; empty in the mode `advise`.
    pub owners: String,
    /// Time since which it is held.
    pub since: Timestamp,
    /// Explanation for users.
    pub reason: String,
}

/// A setting to leave alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// The setting.
    pub knob: Knob,
    /// Remaining time.
    pub left: Duration,
    /// Explanation for users.
    pub reason: String,
}

/// A step, or advice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunerRecord {
    /// Time of the step.
    pub at: Timestamp,
    /// The setting.
    pub knob: Knob,
    /// Value held before, with its unit; `None` for the owner's value.
    pub from: Option<String>,
    /// New value; `None` for the owner's value.
    pub to: Option<String>,
    /// Explanation for users.
    pub reason: String,
    /// Result of the step.
    pub outcome: Outcome,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The step was taken.
    Done,
    /// The step was only advised.
    Advised,
    /// The step failed.
    Failed(String),
    /// Another process has overwritten the setting and keeps it.
    Overwritten(String),
}
