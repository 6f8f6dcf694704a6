//! Who had the CPUs while containers waited for them: what the programs noted (`HOLDERS`), all CPUs added up.

use super::KernelError;
use super::measures::Measures;
use beelet_ebpf_abi::{Counters, HELD_HALF_LIFE_BITS, Holders, PRESSURE_FLOOR_NS};
use std::collections::BTreeMap;

/// Who had the CPUs while a container's threads waited for them, in about the last minute: what is older
/// than 34 s counts half, and so on. Waits below 100 µs are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitedFor {
    /// Time waited, over all threads, nanoseconds.
    pub waited_ns: u64,
    /// Time that this is of, nanoseconds: the quotient is how many threads waited on average.
    pub over_ns: u64,
    /// The cgroup2 ids of those that had the CPU meanwhile ([`super::NOBODY`]: none had, so a quota held the
    /// threads back), and for how long, nanoseconds; the most first. The sum may be less than what was
    /// waited: a thread may have been moved, and each CPU remembers only its last sixteen changes.
    pub held: Vec<(u64, u64)>,
    /// Up to when it was halved.
    epoch: u64,
}

impl WaitedFor {
    /// A value as it is made elsewhere: for tests of those that read it.
    #[must_use]
    pub fn of(waited_ns: u64, over_ns: u64, held: Vec<(u64, u64)>) -> WaitedFor {
        WaitedFor { waited_ns, over_ns, held, epoch: 0 }
    }

    pub(super) fn none(now_ns: u64) -> WaitedFor {
        WaitedFor { over_ns: over_ns(now_ns), epoch: now_ns >> HELD_HALF_LIFE_BITS, ..WaitedFor::default() }
    }

    /// Adds what one CPU noted.
    pub(super) fn add(&mut self, cpu: &Holders, now_ns: u64) {
        let passed = (now_ns >> HELD_HALF_LIFE_BITS).saturating_sub(cpu.epoch);
        self.waited_ns = self.waited_ns.saturating_add(halved(cpu.waited_ns, passed));
        for held in cpu.held.iter().filter(|held| held.cgroup_id != 0) {
            let held_ns = halved(held.held_ns, passed);
            match self.held.iter_mut().find(|(id, _)| *id == held.cgroup_id) {
                Some((_, sum)) => *sum = sum.saturating_add(held_ns),
                None if held_ns > 0 => self.held.push((held.cgroup_id, held_ns)),
                None => {}
            }
        }
    }

    /// The most first.
    pub(super) fn sort(&mut self) {
        self.held.sort_by_key(|(id, held_ns)| (std::cmp::Reverse(*held_ns), *id));
    }

    /// As it counts at a later time, if nothing was waited since.
    fn at(&self, now_ns: u64) -> WaitedFor {
        let epoch = now_ns >> HELD_HALF_LIFE_BITS;
        let passed = epoch.saturating_sub(self.epoch);
        let held = self.held.iter().map(|(id, held_ns)| (*id, halved(*held_ns, passed)));
        WaitedFor {
            waited_ns: halved(self.waited_ns, passed),
            over_ns: over_ns(now_ns),
            held: held.filter(|(_, held_ns)| *held_ns > 0).collect(),
            epoch,
        }
    }
}

/// The time that counts: this half-life's so far, and half of each before, which makes one whole.
fn over_ns(now_ns: u64) -> u64 {
    (1 << HELD_HALF_LIFE_BITS) + (now_ns & ((1 << HELD_HALF_LIFE_BITS) - 1))
}

fn halved(value: u64, times: u64) -> u64 {
    u32::try_from(times).ok().and_then(|times| value.checked_shr(times)).unwrap_or(0)
}

/// The first bucket of [`Counters::run_queue_waits`] with waits that may be of [`PRESSURE_FLOOR_NS`].
fn long_waits(counters: &Counters) -> u64 {
    let first = super::measures::wait_bucket(PRESSURE_FLOOR_NS);
    counters.run_queue_waits[first..].iter().fold(0, |sum, count| sum.wrapping_add(*count))
}

/// Reads [`WaitedFor`] of those containers that waited long since the last time, and remembers it of the
/// others: on a quiet node no call is made.
#[derive(Debug)]
pub struct Interference {
    measures: Measures,
    /// By cgroup2 id: long waits that were counted when it was read, and what was read.
    known: BTreeMap<u64, (u64, Option<WaitedFor>)>,
}

impl Interference {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(measures: Measures) -> Interference {
        Interference { measures, known: BTreeMap::new() }
    }

    /// Who had the CPUs while these cgroups waited, of those that did; `counters` are those of
    /// [`Measures::snapshot`] of just now.
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn read(
        &mut self,
        counters: &BTreeMap<u64, Counters>,
    ) -> Result<BTreeMap<u64, WaitedFor>, KernelError> {
        let waits: BTreeMap<u64, u64> = counters.iter().map(|(id, of)| (*id, long_waits(of))).collect();
        self.known.retain(|id, _| waits.contains_key(id));
        let is_new = |id: u64| {
            let count = waits.get(&id).copied().unwrap_or(0);
            count > 0 && self.known.get(&id).is_none_or(|(before, _)| *before != count)
        };
        let mut found = if waits.keys().any(|id| is_new(*id)) {
            self.measures.waited_for(is_new)?
        } else {
            BTreeMap::new()
        };
        let now_ns = super::monotonic_ns();
        for (id, count) in waits {
            let known = self.known.entry(id).or_default();
            if known.0 != count {
                *known = (count, found.remove(&id));
            }
        }
        let known = self.known.iter().filter_map(|(id, (_, known))| Some((*id, known.as_ref()?.at(now_ns))));
        Ok(known.filter(|(_, waited)| waited.waited_ns > 0).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_ebpf_abi::{Held, MAX_HELD};

    const HALF_LIFE: u64 = 1 << HELD_HALF_LIFE_BITS;

    fn cpu(epoch: u64, waited_ns: u64, held: &[(u64, u64)]) -> Holders {
        let mut all = [Held::default(); MAX_HELD];
        for (place, (cgroup_id, held_ns)) in all.iter_mut().zip(held) {
            *place = Held { cgroup_id: *cgroup_id, held_ns: *held_ns };
        }
        Holders { cgroup_id: 1, epoch, waited_ns, held: all }
    }

    #[test]
    fn all_cpus_are_added_up_and_what_is_older_counts_half() {
        let now_ns = 5 * HALF_LIFE + 7;
        let mut sum = WaitedFor::none(now_ns);
        sum.add(&cpu(5, 1000, &[(20, 600), (30, 300)]), now_ns);
        sum.add(&cpu(4, 1000, &[(30, 800), (40, 1)]), now_ns);
        sum.add(&cpu(0, 16, &[(50, 16)]), now_ns);
        sum.sort();
        assert_eq!((sum.waited_ns, sum.over_ns), (1500, HALF_LIFE + 7));
        assert_eq!(sum.held, [(30, 700), (20, 600)]);
    }

    #[test]
    fn what_was_read_before_grows_old() {
        let read = WaitedFor { waited_ns: 800, over_ns: 1, held: vec![(20, 600), (30, 1)], epoch: 3 };
        let later = read.at(4 * HALF_LIFE);
        assert_eq!((later.waited_ns, later.over_ns), (400, HALF_LIFE));
        assert_eq!(later.held, [(20, 300)]);
        assert_eq!(read.at(3 * HALF_LIFE).held, read.held);
        assert_eq!(read.at(u64::MAX).waited_ns, 0);
    }

    #[test]
    fn waits_that_may_be_long_are_told_from_short_ones() {
        let mut counters = Counters::default();
        counters.run_queue_waits[6] = 5;
        assert_eq!(long_waits(&counters), 0, "up to 65 µs");
        counters.run_queue_waits[7] = 1;
        counters.run_queue_waits[20] = 2;
        assert_eq!(long_waits(&counters), 3);
    }
}
