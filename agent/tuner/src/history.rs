//! The tuner's last few hundred steps and advice, kept over restarts of the agent.

use std::{collections::VecDeque, sync::Arc};

use tracing::warn;

use super::view::TunerRecord;
use beelet_state::{Loaded, State};

/// The name of the durable record.
const NAME: &str = "tuner-history";
/// Maximum number of steps; the oldest are dropped.
const MOST: usize = 500;

/// Steps, oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    records: VecDeque<TunerRecord>,
    /// Copy for readers, rebuilt when a step is added.
    shown: Arc<Vec<TunerRecord>>,
    is_kept: bool,
}

impl History {
    /// Loads the history of an earlier agent. No decision depends on it: an unreadable history is only
    /// missing.
    pub(super) fn load(state: &State) -> Self {
        let records = match state.load::<VecDeque<TunerRecord>>(NAME) {
            Ok(Loaded::Value { value, .. }) => value,
            Ok(Loaded::Absent) => VecDeque::new(),
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(?moved_to, %reason, "the tuner's history was damaged; moved it aside");
                VecDeque::new()
            }
            Err(error) => {
                warn!(%error, "cannot read the tuner's history");
                VecDeque::new()
            }
        };
        let shown = Arc::new(records.iter().cloned().collect());
        Self { records, shown, is_kept: true }
    }

    pub(super) fn add(&mut self, record: TunerRecord) {
        while self.records.len() >= MOST {
            self.records.pop_front();
        }
        self.records.push_back(record);
        self.shown = Arc::new(self.records.iter().cloned().collect());
        self.is_kept = false;
    }

    pub(super) fn shown(&self) -> Arc<Vec<TunerRecord>> {
        Arc::clone(&self.shown)
    }

    /// Stores new steps. Does not wait for the disk: a power cut may lose them, and no decision depends on
    /// them.
    pub(super) fn keep(&mut self, state: &State) {
        if std::mem::replace(&mut self.is_kept, true) {
            return;
        }
        if let Err(error) = state.store_for_this_boot(NAME, &self.records) {
            warn!(%error, "cannot store the tuner's history");
        }
    }
}

#[cfg(test)]
mod tests {
    use beelet_policy::tuner::{Knob, KnobKind};
    use jiff::Timestamp;

    use super::*;
    use crate::Outcome;

    fn record(number: usize) -> TunerRecord {
        TunerRecord {
            at: Timestamp::from_second(i64::try_from(number).unwrap()).unwrap(),
            knob: Knob { cgroup: "/kubepods/besteffort".to_owned(), kind: KnobKind::Idle },
            from: None,
            to: Some("1".to_owned()),
            reason: "others wait".to_owned(),
            outcome: Outcome::Failed("busy".to_owned()),
        }
    }

    #[test]
    fn the_last_steps_survive_a_restart_up_to_the_maximum() {
        let dir = tempfile::tempdir().unwrap();
        let open = || State::open(dir.path()).unwrap();
        let mut history = History::load(&open());
        (0..MOST + 3).for_each(|number| history.add(record(number)));
        history.keep(&open());
        let again = History::load(&open());
        assert_eq!((again.shown(), again.shown().len()), (history.shown(), MOST));
        assert_eq!(again.shown().first(), Some(&record(3)));
    }

    #[test]
    fn a_damaged_history_counts_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tuner-history.json"), "rubbish").unwrap();
        assert!(History::load(&State::open(dir.path()).unwrap()).shown().is_empty());
    }
}
