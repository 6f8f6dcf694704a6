//! The readings from which windows are computed: every reading of the last seconds, and one every ten seconds
//! of the last minute. Pure; times are `CLOCK_MONOTONIC` nanoseconds.

use std::collections::VecDeque;
use std::time::Duration;

use super::model::{Counters, Rates, WINDOWS};
use super::rates::rates;

/// Age up to which all readings are kept.
const FINE: u64 = 11_000_000_000;
/// Minimum distance of older readings.
const COARSE: u64 = 9_500_000_000;
/// Maximum age of a reading.
const OLDEST: u64 = 75_000_000_000;
/// Divisor of a window's length: a window may be this part shorter, since ticks come a little early or late.
const SLACK: u64 = 20;
/// Minimum distance of all readings but the last two, independent of the rate of reading.
const SPACING: u64 = 200_000_000;

/// Some of the readings of the last minute, oldest first.
#[derive(Debug, Clone)]
pub(super) struct History<T> {
    readings: VecDeque<(u64, T)>,
}

impl<T> Default for History<T> {
    fn default() -> Self {
        Self { readings: VecDeque::new() }
    }
}

impl<T> History<T> {
    /// Adds a reading and drops those that no window needs any more. Ignores a reading that is not newer than
    /// the last.
    pub(super) fn push(&mut self, at_ns: u64, reading: T) {
        if self.readings.back().is_some_and(|(last, _)| *last >= at_ns) {
            return;
        }
        if let [.., before, last] = self.readings.make_contiguous()
            && last.0 - before.0 < SPACING
        {
            self.readings.pop_back();
        }
        self.readings.push_back((at_ns, reading));
        let mut kept: Option<u64> = None;
        let newest = self.readings.len();
        let mut index = 0;
        self.readings.retain(|(at, _)| {
            index += 1;
            let age = at_ns - at;
            let keep = index == newest
                || age <= OLDEST && (age <= FINE || kept.is_none_or(|kept| at - kept >= COARSE));
            if keep {
                kept = Some(*at);
            }
            keep
        });
    }

    /// Returns the first reading of the window of this length: the youngest that is old enough, else the
    /// oldest. `None` with fewer than two readings.
    #[must_use]
    pub(super) fn base(&self, window: Duration) -> Option<&(u64, T)> {
        let (newest, _) = self.readings.back()?;
        let length = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX);
        let enough = length - length / SLACK;
        let before = || self.readings.iter().rev().skip(1);
        before().find(|(at, _)| newest - at >= enough).or_else(|| before().last())
    }

    /// Returns the newest reading.
    #[must_use]
    pub(super) fn newest(&self) -> Option<&(u64, T)> {
        self.readings.back()
    }

    /// Applies `of` to each window's two readings and the time between them.
    pub(super) fn windows<R>(&self, of: impl Fn(&T, &T, Duration) -> R) -> [Option<R>; 3] {
        WINDOWS.map(|window| {
            let (now, newest) = self.newest()?;
            let (then, base) = self.base(window)?;
            Some(of(base, newest, Duration::from_nanos(now - then)))
        })
    }
}

impl History<Counters> {
    /// Returns the rates over every window.
    #[must_use]
    pub(super) fn rates(&self) -> [Option<Rates>; 3] {
        self.windows(rates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn cpu(cpu_ns: u64) -> Counters {
        Counters { cpu_ns, ..Counters::default() }
    }

    #[test]
    fn windows_have_their_length_once_enough_readings_exist() {
        let mut history = History::default();
        for second in 0..200u64 {
            // A tick is never exactly on time.
            history.push(second * SECOND + second % 7 * 3_000_000, cpu(second * SECOND / 2));
            assert!(history.readings.len() < 22, "{} readings", history.readings.len());
            let [short, ten, minute] = history.rates();
            assert_eq!(short.is_some(), second > 0);
            if second > 62 {
                for (rates, least, most) in [(short, 0.95, 1.1), (ten, 9.5, 10.6), (minute, 57.0, 71.0)] {
                    let rates = rates.unwrap();
                    let seconds = rates.over_ns as f64 / SECOND as f64;
                    assert!((least..most).contains(&seconds), "{seconds} s");
                    assert!((rates.cpu - 0.5).abs() < 0.02, "{} CPUs over {seconds} s", rates.cpu);
                }
            }
        }
    }

    #[test]
    fn readings_in_between_do_not_change_the_rates() {
        let check = |seconds: &[u64]| {
            let mut history = History::default();
            seconds.iter().for_each(|second| history.push(second * SECOND, cpu(second * second * SECOND)));
            history.rates()[1].unwrap()
        };
        let all: Vec<u64> = (0..=60).collect();
        assert_eq!(check(&all), check(&[40, 50, 60]));
        assert_eq!(check(&all), rates(&cpu(2500 * SECOND), &cpu(3600 * SECOND), Duration::from_secs(10)));
    }

    #[test]
    fn with_few_readings_the_oldest_is_used() {
        let mut history = History::default();
        history.push(10 * SECOND, cpu(0));
        assert_eq!(history.rates(), [None, None, None]);
        history.push(13 * SECOND, cpu(3 * SECOND));
        assert_eq!(history.rates().map(|rates| rates.unwrap().over_ns), [3 * SECOND; 3]);
        history.push(13 * SECOND, cpu(9 * SECOND));
        assert!((history.rates()[0].unwrap().cpu - 1.0).abs() < 1e-9, "a reading of the same moment");
        // A reading every quarter of an hour gives no rate over the last minute.
        history.push(900 * SECOND, cpu(900 * SECOND));
        assert_eq!(history.rates(), [None, None, None]);
    }

    #[test]
    fn a_hundred_readings_per_second_do_not_fill_the_memory() {
        let mut history = History::default();
        for tick in 0..10_000u64 {
            history.push(tick * SECOND / 100, cpu(tick * SECOND / 100));
            assert!(history.readings.len() < 66);
        }
        let [short, ten, _] = history.rates().map(Option::unwrap);
        assert!(short.over_ns < 2 * SECOND && ten.over_ns > 9 * SECOND, "{} {}", short.over_ns, ten.over_ns);
    }
}
