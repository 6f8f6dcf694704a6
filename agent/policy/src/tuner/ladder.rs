//! Hysteresis in time: trouble must last before a step, and calm must last longer before a step back.

use super::Law;

/// A measurement relative to its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Heat {
    /// Well below the bound, or without a pod to protect.
    Calm,
    /// In between: nothing changes.
    Warm,
    /// Above the bound.
    Hot,
}

/// A ladder's decision at a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Move {
    Tighten,
    Stay,
    GiveBack,
}

/// The patience with one kind of trouble. A step back that brought the trouble back doubles the wait before
/// the next one, so that the tuner does not oscillate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ladder {
    hot: u32,
    calm: u32,
    /// Number of times that the wait before a step back has doubled.
    patience: u32,
    /// Ticks since the last step back.
    since_back: Option<u32>,
}

/// Maximum number of doublings of the wait.
const MOST_PATIENCE: u32 = 6;

impl Ladder {
    /// Records one tick's heat.
    pub(super) fn tick(&mut self, law: &Law, heat: Heat) -> Move {
        self.since_back = self.since_back.map(|ticks| ticks.saturating_add(1));
        match heat {
            Heat::Hot => self.hot(law),
            Heat::Warm => {
                (self.hot, self.calm) = (0, 0);
                Move::Stay
            }
            Heat::Calm => self.calm(law),
        }
    }

    fn hot(&mut self, law: &Law) -> Move {
        self.calm = 0;
        self.hot += 1;
        if self.hot < law.hot_ticks {
            return Move::Stay;
        }
        self.hot = 0;
        if self.since_back.take().is_some_and(|ticks| ticks <= self.wait(law)) {
            self.patience = (self.patience + 1).min(MOST_PATIENCE);
        }
        Move::Tighten
    }

    fn calm(&mut self, law: &Law) -> Move {
        self.hot = 0;
        self.calm += 1;
        if self.calm < self.wait(law) {
            return Move::Stay;
        }
        self.calm = 0;
        if self.since_back.is_some() {
            // The last step back was harmless.
            self.patience = self.patience.saturating_sub(1);
        }
        self.since_back = Some(0);
        Move::GiveBack
    }

    /// Returns true if the last tick was calm.
    #[must_use]
    pub fn is_calm(&self) -> bool {
        self.hot == 0 && (self.calm > 0 || self.since_back == Some(0))
    }

    /// Returns the number of calm ticks before a step back.
    fn wait(&self, law: &Law) -> u32 {
        law.calm_ticks.max(1).saturating_mul(1 << self.patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the moves for a run of heats: `+` tighten, `-` give back, `.` stay.
    fn moves(law: &Law, ladder: &mut Ladder, heats: &str) -> String {
        let one = |heat| match heat {
            'h' => Heat::Hot,
            'w' => Heat::Warm,
            _ => Heat::Calm,
        };
        let said = |said| match said {
            Move::Tighten => '+',
            Move::Stay => '.',
            Move::GiveBack => '-',
        };
        heats.chars().map(|heat| said(ladder.tick(law, one(heat)))).collect()
    }

    #[track_caller]
    fn check(heats: &str, expected: &str) {
        let law = Law { hot_ticks: 2, calm_ticks: 3, ..Law::default() };
        assert_eq!(moves(&law, &mut Ladder::default(), heats), expected, "{heats}");
    }

    #[test]
    fn trouble_and_calm_must_last() {
        check("hchch", ".....");
        check("hhhh", ".+.+");
        check("hwhh", "...+");
        check("cccccc", "..-..-");
        check("ccwccc", ".....-");
    }

    #[test]
    fn a_step_back_that_brought_trouble_back_doubles_the_next_wait() {
        check("hhccchhcccccc", ".+..-.+.....-");
        // Trouble long after a step back does not count.
        check("hhcccwwwwwhhccc", ".+..-......+..-");
    }

    #[test]
    fn patience_shrinks_again_after_harmless_steps_back() {
        let law = Law { hot_ticks: 1, calm_ticks: 1, ..Law::default() };
        let mut ladder = Ladder::default();
        for _ in 0..20 {
            // Every step back is too early.
            while ladder.tick(&law, Heat::Calm) != Move::GiveBack {}
            assert_eq!(ladder.tick(&law, Heat::Hot), Move::Tighten);
        }
        assert_eq!(ladder.patience, MOST_PATIENCE);
        let calm = moves(&law, &mut ladder, &"c".repeat(1000));
        assert_eq!(ladder.patience, 0);
        assert!(calm.ends_with("----"), "{calm}");
    }
}
