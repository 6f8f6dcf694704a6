//! Whether what is taken from others helps the one who complains: a container whose own threads compete for
//! its CPUs waits just as long however little others get. Steps that have not helped are given back, and no
//! more are made for it until its complaint is another one.

use std::collections::BTreeMap;

use super::{Knob, KnobKind, Law, TunerStep};

/// What became of the steps that were made for one container's complaint. Ratios are in thousandths of the
/// bound.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Help {
    /// The least it came down to, or began with.
    best: Option<u32>,
    /// Its ratios since the last try: their sum, and how many.
    sum: u64,
    ticks: u32,
    /// Tries since one helped.
    tries: u32,
    /// One has.
    helped: bool,
    /// A step was made at all: there may be nothing that can be taken from anybody.
    stepped: bool,
    /// What the knobs that were tightened since were held at before; None: their owner's value stood.
    taken: BTreeMap<Knob, Option<u64>>,
    given_up: Option<GivenUp>,
    /// Ticks in a row far below the bound.
    calm: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GivenUp {
    /// What it complained of then.
    ratio: u32,
    /// How long ago.
    ticks: u32,
    /// Ticks in a row in which it was much worse.
    worse: u32,
}

/// What to do when it is time for a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    GoOn,
    /// The last so many tries haven't helped: these knobs go back to these values.
    GiveUp(u32, BTreeMap<Knob, Option<u64>>),
}

/// How a container's complaint counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ComplaintState {
    /// Something can be done about it, as far as is known.
    Open,
    /// What has helped it is kept, and no more is taken.
    Kept,
    /// Nothing has helped it: it counts as if it weren't there.
    Void,
}

impl Help {
    /// Takes one tick's ratio into account; false if there is nothing to remember any more: it is well, it
    /// complains of something much worse, or it was given up long ago.
    pub(super) fn tick(&mut self, law: &Law, ratio: u32) -> bool {
        self.sum += u64::from(ratio);
        self.ticks += 1;
        self.calm = if ratio < law.release_percent * 10 { self.calm + 1 } else { 0 };
        if let Some(given) = &mut self.given_up {
            given.ticks += 1;
            given.worse = if much_worse(ratio, given.ratio) { given.worse + 1 } else { 0 };
            // Where nothing was there to be taken, nothing was tried: something may be there soon.
            let lasts = if self.stepped { law.retry_ticks } else { law.calm_ticks.max(1) };
            if given.ticks >= lasts || given.worse >= law.hot_ticks.max(1) {
                return false;
            }
        }
        self.calm < law.calm_ticks.max(1)
    }

    /// Judges whether another step is worth it, when it is time for one. `now` is this tick's ratio.
    pub(super) fn judge(&mut self, law: &Law, now: u32) -> Judgement {
        let mean = u32::try_from(self.sum / u64::from(self.ticks.max(1))).unwrap_or(u32::MAX);
        let now = if self.ticks == 0 { now } else { mean };
        (self.sum, self.ticks) = (0, 0);
        match self.best {
            Some(best)
                if u64::from(now) * 100 <= u64::from(best) * u64::from(100 - law.gain_percent.min(100)) =>
            {
                (self.helped, self.tries) = (true, 0);
                self.taken.clear();
                self.best = Some(now);
            }
            Some(best) if !much_worse(now, best) => self.tries += 1,
            // The first, or another complaint than the one that was measured.
            _ => (self.tries, self.best) = (0, Some(now)),
        }
        if law.helpless_steps == 0 || self.tries < law.helpless_steps {
            return Judgement::GoOn;
        }
        self.given_up = Some(GivenUp { ratio: now, ticks: 0, worse: 0 });
        Judgement::GiveUp(self.tries, std::mem::take(&mut self.taken))
    }

    /// Remembers what a step has taken. A turn after others costs nothing, so it isn't given back for this.
    pub(super) fn took(&mut self, step: &TunerStep) {
        self.stepped = true;
        if !matches!(step.knob.kind, KnobKind::Idle | KnobKind::Weight) {
            self.taken.entry(step.knob.clone()).or_insert(step.from);
        }
    }

    /// Returns true if there was nothing that could have been taken from anybody.
    pub(super) fn found_nothing(&self) -> bool {
        self.given_up.is_some() && !self.stepped
    }

    pub(super) fn standing(&self) -> ComplaintState {
        match (&self.given_up, self.helped) {
            (None, _) => ComplaintState::Open,
            (Some(_), true) => ComplaintState::Kept,
            (Some(_), false) => ComplaintState::Void,
        }
    }
}

/// By half.
fn much_worse(now: u32, than: u32) -> bool {
    u64::from(now) * 2 > u64::from(than) * 3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn law() -> Law {
        Law {
            hot_ticks: 1,
            calm_ticks: 2,
            helpless_steps: 3,
            gain_percent: 10,
            retry_ticks: 5,
            ..Law::default()
        }
    }

    fn step(from: Option<u64>, kind: KnobKind) -> TunerStep {
        let knob = Knob { cgroup: "/x".to_owned(), kind };
        TunerStep { knob, from, to: Some(1), reason: String::new() }
    }

    /// One tick, then the judgement.
    fn next(help: &mut Help, ratio: u32) -> Judgement {
        assert!(help.tick(&law(), ratio));
        help.judge(&law(), ratio)
    }

    fn given_up() -> Help {
        let mut help = Help::default();
        assert_eq!(next(&mut help, 4000), Judgement::GoOn);
        help.took(&step(None, KnobKind::Idle));
        assert_eq!(next(&mut help, 3900), Judgement::GoOn);
        help.took(&step(None, KnobKind::CpuCap));
        assert_eq!(next(&mut help, 4100), Judgement::GoOn);
        help.took(&step(Some(900), KnobKind::CpuCap));
        let back = BTreeMap::from([(step(None, KnobKind::CpuCap).knob, None)]);
        assert_eq!(next(&mut help, 4000), Judgement::GiveUp(3, back));
        help
    }

    #[test]
    fn steps_that_change_nothing_are_given_back_after_some_tries_all_but_the_turn() {
        assert_eq!(given_up().standing(), ComplaintState::Void);
    }

    #[test]
    fn where_nothing_could_be_taken_it_is_tried_again_soon() {
        let mut help = Help::default();
        for _ in 0..3 {
            assert_eq!(next(&mut help, 4000), Judgement::GoOn);
        }
        assert_eq!(next(&mut help, 4000), Judgement::GiveUp(3, BTreeMap::new()));
        assert_eq!((1..=9).find(|_| !help.tick(&law(), 4000)), Some(law().calm_ticks));
    }

    #[test]
    fn small_gains_add_up_and_only_what_came_after_a_gain_is_given_back() {
        let mut help = Help::default();
        for ratio in [4000, 3800, 3590, 3400, 3230, 3000] {
            assert_eq!(next(&mut help, ratio), Judgement::GoOn, "{ratio}");
            help.took(&step(None, KnobKind::CpuCap));
        }
        // The last gain was at 3230: since then it has been tried twice.
        assert_eq!(next(&mut help, 3000), Judgement::GoOn);
        assert_eq!(help.standing(), ComplaintState::Open);
        help.took(&step(Some(5), KnobKind::CpuCap));
        assert!(matches!(next(&mut help, 2990), Judgement::GiveUp(3, back) if back.len() == 1));
        assert_eq!(help.standing(), ComplaintState::Kept);
    }

    #[test]
    fn a_complaint_that_is_another_one_is_tried_again() {
        let forgotten = |ratio: u32, ticks: u32| {
            let mut help = given_up();
            (1..=ticks).find(|_| !help.tick(&law(), ratio))
        };
        assert_eq!(forgotten(4500, 4), None);
        assert_eq!(forgotten(4500, 9), Some(5), "long ago");
        assert_eq!(forgotten(6100, 9), Some(1), "much worse");
        assert_eq!(forgotten(100, 9), Some(2), "it was well");
    }

    #[test]
    fn without_a_number_of_tries_it_never_gives_up() {
        let (law, mut help) = (Law { helpless_steps: 0, ..law() }, Help::default());
        for _ in 0..100 {
            assert_eq!(help.judge(&law, 4000), Judgement::GoOn);
        }
    }
}
