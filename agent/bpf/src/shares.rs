//! Cgroups' shares of a resource in about the last minute: the records of each CPU ([`Shares`]), summed.

use beelet_ebpf_abi::{HALF_LIFE_BITS, Shares};

/// The sum over all CPUs. Amounts older than 34 s count half, and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    /// Total amount.
    pub(super) total: u64,
    /// Cgroup2 ids and the amount of each. Their sum may be less than `total`, or more.
    pub(super) parts: Vec<(u64, u64)>,
    /// Half-life up to which the amounts were halved.
    epoch: u64,
}

impl Sum {
    pub(super) fn none(now_ns: u64) -> Sum {
        Sum { epoch: now_ns >> HALF_LIFE_BITS, ..Sum::default() }
    }

    /// Adds the record of one CPU.
    pub(super) fn add(&mut self, cpu: &Shares, now_ns: u64) {
        let passed = (now_ns >> HALF_LIFE_BITS).saturating_sub(cpu.epoch);
        self.total = self.total.saturating_add(halved(cpu.total, passed));
        for part in cpu.parts.iter().filter(|part| part.cgroup_id != 0) {
            let amount = halved(part.amount, passed);
            match self.parts.iter_mut().find(|(id, _)| *id == part.cgroup_id) {
                Some((_, sum)) => *sum = sum.saturating_add(amount),
                None if amount > 0 => self.parts.push((part.cgroup_id, amount)),
                None => {}
            }
        }
    }

    /// Sorts the parts in descending order of their amounts.
    pub(super) fn sort(&mut self) {
        self.parts.sort_by_key(|(id, amount)| (std::cmp::Reverse(*amount), *id));
    }

    /// Returns the sum as weighted at a later time, if nothing was added since.
    pub(super) fn at(&self, now_ns: u64) -> Sum {
        let epoch = now_ns >> HALF_LIFE_BITS;
        let passed = epoch.saturating_sub(self.epoch);
        let parts = self.parts.iter().map(|(id, amount)| (*id, halved(*amount, passed)));
        Sum {
            total: halved(self.total, passed),
            parts: parts.filter(|(_, amount)| *amount > 0).collect(),
            epoch,
        }
    }
}

/// Returns the weighted length of the period in nanoseconds: the current half-life so far, plus the earlier
/// ones, each halved once more than the next, which sum up to one whole half-life.
pub(super) fn over_ns(now_ns: u64) -> u64 {
    (1 << HALF_LIFE_BITS) + (now_ns & ((1 << HALF_LIFE_BITS) - 1))
}

fn halved(value: u64, times: u64) -> u64 {
    u32::try_from(times).ok().and_then(|times| value.checked_shr(times)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_ebpf_abi::{MAX_PARTS, Part};

    const HALF_LIFE: u64 = 1 << HALF_LIFE_BITS;

    fn cpu(epoch: u64, total: u64, parts: &[(u64, u64)]) -> Shares {
        let mut all = [Part::default(); MAX_PARTS];
        for (place, (cgroup_id, amount)) in all.iter_mut().zip(parts) {
            *place = Part { cgroup_id: *cgroup_id, amount: *amount };
        }
        Shares { cgroup_id: 1, epoch, total, parts: all }
    }

    #[test]
    fn all_cpus_are_summed_and_older_amounts_count_half() {
        let now_ns = 5 * HALF_LIFE + 7;
        let mut sum = Sum::none(now_ns);
        sum.add(&cpu(5, 1000, &[(20, 600), (30, 300)]), now_ns);
        sum.add(&cpu(4, 1000, &[(30, 800), (40, 1)]), now_ns);
        sum.add(&cpu(0, 16, &[(50, 16)]), now_ns);
        sum.sort();
        assert_eq!((sum.total, over_ns(now_ns)), (1500, HALF_LIFE + 7));
        assert_eq!(sum.parts, [(30, 700), (20, 600)]);
    }

    #[test]
    fn an_earlier_sum_is_halved_with_time() {
        let read = Sum { total: 800, parts: vec![(20, 600), (30, 1)], epoch: 3 };
        let later = read.at(4 * HALF_LIFE);
        assert_eq!((later.total, &later.parts[..]), (400, &[(20, 300)][..]));
        assert_eq!(read.at(3 * HALF_LIFE).parts, read.parts);
        assert_eq!(read.at(u64::MAX).total, 0);
    }
}
