//! What the tuner did or advised, over restarts of the agent: the last few hundred steps.

use std::{collections::VecDeque, sync::Arc};

use tracing::warn;

use super::view::TunerRecord;
use beelet_state::{Loaded, State};

/// The name of the durable record.
const NAME: &str = "tuner-history";
/// Steps that are remembered; the oldest are forgotten.
const MOST: usize = 500;

/// Oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    records: VecDeque<TunerRecord>,
    /// The same for readers, made anew when something is added.
    shown: Arc<Vec<TunerRecord>>,
    is_kept: bool,
}

impl History {
    /// What an earlier agent left. It decides nothing: what can't be read is only missing.
    pub(super) fn load(state: &State) -> Self {
        let records = match state.load::<VecDeque<TunerRecord>>(NAME) {
            Ok(Loaded::Value { value, .. }) => value,
            Ok(Loaded::Absent) => VecDeque::new(),
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(?moved_to, %reason, "the tuner's history was damaged and set aside");
                VecDeque::new()
            }
            Err(error) => {
                warn!(%error, "the tuner's history can't be read");
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

    /// Keeps what is new. Not waiting for the disk: a power cut may take it, and nothing depends on it.
    pub(super) fn keep(&mut self, state: &State) {
        if std::mem::replace(&mut self.is_kept, true) {
            return;
        }
        if let Err(error) = state.store_for_this_boot(NAME, &self.records) {
            warn!(%error, "the tuner's history can't be kept");
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
    fn the_last_steps_are_there_again_after_a_restart_and_no_more_of_them() {
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
    fn a_damaged_history_is_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tuner-history.json"), "rubbish").unwrap();
        assert!(History::load(&State::open(dir.path()).unwrap()).shown().is_empty());
    }
}
