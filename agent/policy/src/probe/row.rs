//! Equal outcomes in a row, and the state that a probe publishes after enough of them.

use std::time::Duration;

use super::{Outcome, ProbeParams, ProbeResult, Transition};

/// The published state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Published(pub(super) ProbeResult);

impl Published {
    /// Changes the state. Returns None if nothing changes and no restart is required.
    pub(super) fn change(&mut self, at: Duration, result: ProbeResult, restart: bool) -> Option<Transition> {
        let is_new = self.0 != result || restart;
        self.0 = result;
        is_new.then_some(self.transition(at, restart))
    }

    pub(super) const fn transition(self, at: Duration, restart: bool) -> Transition {
        Transition { at, result: self.0, restart }
    }
}

/// Equal outcomes in a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// The last outcome that counted.
    pub(super) last: Outcome,
    /// The number of times it came in a row.
    pub(super) length: u32,
}

impl Row {
    /// Adds an outcome. Returns true if the row has met the threshold.
    pub(super) fn add(&mut self, outcome: Outcome, params: &ProbeParams) -> bool {
        self.length = if self.last == outcome { self.length.saturating_add(1) } else { 1 };
        self.last = outcome;
        let threshold = match outcome {
            Outcome::Success => params.success_threshold,
            _ => params.failure_threshold,
        };
        self.length >= threshold
    }
}
