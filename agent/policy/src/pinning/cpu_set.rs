//! A set of CPUs: bits in words, so that counting and intersecting have a negligible cost.

use std::fmt;

use serde::{Serialize, Serializer};

use beelet_units::cpu_list;

const BITS: u32 = u64::BITS;

/// CPUs by number, parsed and printed in the format of the kernel's lists (`0-3,8`; the empty text for no
/// CPU).
#[derive(Clone, PartialEq, Eq, Default, PartialOrd, Ord)]
pub struct CpuSet {
    /// Words without trailing zeros, so that equal sets are equal.
    words: Vec<u64>,
}

/// Returns the position of a CPU: its word, and its bit in the word.
fn place(cpu: u32) -> (usize, u64) {
    ((cpu / BITS) as usize, 1_u64.wrapping_shl(cpu % BITS))
}

impl CpuSet {
    /// Parses a list; returns None if the text is not a list, or names a CPU above any machine's.
    #[must_use]
    pub fn parse(list: &str) -> Option<Self> {
        if list.is_empty() {
            return Some(Self::default());
        }
        Some(cpu_list::parse(list)?.into_iter().collect())
    }

    /// Adds a CPU to the set.
    pub fn insert(&mut self, cpu: u32) {
        let (word, bit) = place(cpu);
        if self.words.len() <= word {
            self.words.resize(word.saturating_add(1), 0);
        }
        self.words[word] |= bit;
    }

    /// Returns true if the CPU is in the set.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        let (word, bit) = place(cpu);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Returns the number of CPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns true if the set has no CPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the CPUs, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0_u32..).zip(&self.words).flat_map(|(index, word)| {
            let bits = (0..BITS).filter(move |bit| word.wrapping_shr(*bit) & 1 == 1);
            bits.map(move |bit| index.saturating_mul(BITS).saturating_add(bit))
        })
    }

    /// Returns the CPUs of either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let length = self.words.len().max(other.words.len());
        self.combine(other, length, |a, b| a | b)
    }

    /// Returns the CPUs of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.combine(other, self.words.len().min(other.words.len()), |a, b| a & b)
    }

    /// Returns the CPUs that the other set lacks.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        self.combine(other, self.words.len(), |a, b| a & !b)
    }

    /// Returns the number of CPUs that both sets have.
    #[must_use]
    pub fn common(&self, other: &Self) -> usize {
        self.words.iter().zip(&other.words).map(|(a, b)| (a & b).count_ones() as usize).sum()
    }

    /// Returns true if the other set has all CPUs of this one.
    #[must_use]
    pub fn is_subset(&self, other: &Self) -> bool {
        self.common(other) == self.len()
    }

    /// Returns the first `count` CPUs.
    #[must_use]
    pub fn first(&self, count: usize) -> Self {
        self.iter().take(count).collect()
    }

    fn combine(&self, other: &Self, length: usize, word: impl Fn(u64, u64) -> u64) -> Self {
        let of = |set: &Self, index: usize| set.words.get(index).copied().unwrap_or(0);
        let mut words: Vec<u64> = (0..length).map(|index| word(of(self, index), of(other, index))).collect();
        let used = words.iter().rposition(|word| *word != 0).map_or(0, |last| last.saturating_add(1));
        words.truncate(used);
        Self { words }
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<T: IntoIterator<Item = u32>>(cpus: T) -> Self {
        let mut set = Self::default();
        cpus.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&cpu_list::format(self.iter()))
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

impl Serialize for CpuSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn pinning_sets_are_sets(a in prop::collection::btree_set(0_u32..200, 0..40), b in prop::collection::btree_set(0_u32..200, 0..40)) {
            let of = |set: &BTreeSet<u32>| set.iter().copied().collect::<CpuSet>();
            let back = |set: CpuSet| set.iter().collect::<BTreeSet<u32>>();
            let (x, y) = (of(&a), of(&b));
            prop_assert_eq!(back(x.union(&y)), &a | &b);
            prop_assert_eq!(back(x.intersection(&y)), &a & &b);
            prop_assert_eq!(back(x.difference(&y)), &a - &b);
            prop_assert_eq!(x.common(&y), (&a & &b).len());
            prop_assert_eq!(x.difference(&y).union(&x.intersection(&y)), x.clone());
            prop_assert_eq!(x.is_subset(&y), a.is_subset(&b));
            prop_assert_eq!(CpuSet::parse(&x.to_string()), Some(x));
        }
    }
}
