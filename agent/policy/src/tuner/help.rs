//! Effect of the steps on the container that they are for: a container whose own threads compete for its CPUs
//! waits just as long even if others get less. The tuner reverts steps without effect, and takes no more for
//! the container until its complaint changes.

use std::collections::BTreeMap;

use super::{Knob, KnobKind, Law, TunerStep};

/// The effect of the steps for one container's complaint. Ratios are in thousandths of the bound.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Help {
    /// The lowest ratio reached, or the first one.
    best: Option<u32>,
    /// Sum and number of the ratios since the last try.
    sum: u64,
    ticks: u32,
    /// Tries since the last one that helped.
    tries: u32,
    /// True once a try has helped.
    helped: bool,
    /// True once any step was taken: possibly no pod has anything to take.
    stepped: bool,
    /// Values of the knobs that were tightened since, before that; `None` for their owner's value.
    taken: BTreeMap<Knob, Option<u64>>,
    given_up: Option<GivenUp>,
    /// Consecutive ticks far below the bound.
    calm: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GivenUp {
    /// The ratio at that time.
    ratio: u32,
    /// Ticks since then.
    ticks: u32,
    /// Consecutive ticks with a much worse ratio.
    worse: u32,
}

/// The decision when a step is due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    GoOn,
    /// The last tries, this many, have not helped: the knobs return to these values.
    GiveUp(u32, BTreeMap<Knob, Option<u64>>),
}

/// The weight of a container's complaint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ComplaintState {
    /// Steps may help, as far as is known.
    Open,
    /// Earlier steps have helped and stay, but no more follow.
    Kept,
    /// No step has helped: the complaint is ignored.
    Void,
}

impl Help {
    /// Records one tick's ratio. Returns false if the state can be dropped: the container is well, its
    /// complaint is much worse, or the tuner gave up on it long ago.
    pub(super) fn tick(&mut self, law: &Law, ratio: u32) -> bool {
        self.sum += u64::from(ratio);
        self.ticks += 1;
        self.calm = if ratio < law.release_percent * 10 { self.calm + 1 } else { 0 };
        if let Some(given) = &mut self.given_up {
            given.ticks += 1;
            given.worse = if much_worse(ratio, given.ratio) { given.worse + 1 } else { 0 };
            // If no pod had anything to take, no step was tried: one may have something soon.
            let lasts = if self.stepped { law.retry_ticks } else { law.calm_ticks.max(1) };
            if given.ticks >= lasts || given.worse >= law.hot_ticks.max(1) {
                return false;
            }
        }
        self.calm < law.calm_ticks.max(1)
    }

    /// Judges whether a due step is worthwhile. `now` is this tick's ratio.
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
            // The first complaint, or one that differs from the measured one.
            _ => (self.tries, self.best) = (0, Some(now)),
        }
        if law.helpless_steps == 0 || self.tries < law.helpless_steps {
            return Judgement::GoOn;
        }
        self.given_up = Some(GivenUp { ratio: now, ticks: 0, worse: 0 });
        Judgement::GiveUp(self.tries, std::mem::take(&mut self.taken))
    }

    /// Records a step. A turn costs other pods nothing and so is not reverted for lack of effect.
    pub(super) fn took(&mut self, step: &TunerStep) {
        self.stepped = true;
        if !matches!(step.knob.kind, KnobKind::Idle | KnobKind::Weight) {
            self.taken.entry(step.knob.clone()).or_insert(step.from);
        }
    }

    /// Returns true if no pod had anything to take.
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

/// Returns true if `now` exceeds `than` by half.
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

    /// Plays one tick and returns the judgement.
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
    fn steps_without_effect_are_reverted_after_some_tries_except_the_turn() {
        assert_eq!(given_up().standing(), ComplaintState::Void);
    }

    #[test]
    fn a_complaint_without_any_step_is_tried_again_soon() {
        let mut help = Help::default();
        for _ in 0..3 {
            assert_eq!(next(&mut help, 4000), Judgement::GoOn);
        }
        assert_eq!(next(&mut help, 4000), Judgement::GiveUp(3, BTreeMap::new()));
        assert_eq!((1..=9).find(|_| !help.tick(&law(), 4000)), Some(law().calm_ticks));
    }

    #[test]
    fn small_gains_add_up_and_only_steps_after_a_gain_are_reverted() {
        let mut help = Help::default();
        for ratio in [4000, 3800, 3590, 3400, 3230, 3000] {
            assert_eq!(next(&mut help, ratio), Judgement::GoOn, "{ratio}");
            help.took(&step(None, KnobKind::CpuCap));
        }
        // The last gain was at 3230: two tries have followed.
        assert_eq!(next(&mut help, 3000), Judgement::GoOn);
        assert_eq!(help.standing(), ComplaintState::Open);
        help.took(&step(Some(5), KnobKind::CpuCap));
        assert!(matches!(next(&mut help, 2990), Judgement::GiveUp(3, back) if back.len() == 1));
        assert_eq!(help.standing(), ComplaintState::Kept);
    }

    #[test]
    fn a_changed_complaint_is_tried_again() {
        let forgotten = |ratio: u32, ticks: u32| {
            let mut help = given_up();
            (1..=ticks).find(|_| !help.tick(&law(), ratio))
        };
        assert_eq!(forgotten(4500, 4), None);
        assert_eq!(forgotten(4500, 9), Some(5), "long ago");
        assert_eq!(forgotten(6100, 9), Some(1), "much worse");
        assert_eq!(forgotten(100, 9), Some(2), "the container was well");
    }

    #[test]
    fn without_a_number_of_tries_the_tuner_never_gives_up() {
        let (law, mut help) = (Law { helpless_steps: 0, ..law() }, Help::default());
        for _ in 0..100 {
            assert_eq!(help.judge(&law, 4000), Judgement::GoOn);
        }
    }
}
