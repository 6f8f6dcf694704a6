//! Whose turn it is: admissions that have no resource in common go on side by side, of the others the first
//! goes first. So a plugin that hangs keeps those waiting who want its devices, and nobody else.
//!
//! Whoever wants several resources waits for all of them, and doesn't hold any meanwhile: those behind it
//! that want one of them go on. It can't be passed by for ever, since each pod asks once.

use std::collections::{BTreeSet, VecDeque};

/// Resources, by name.
pub(super) type Resources = BTreeSet<String>;

/// The queue for resources: those in use, and who waits for which.
#[derive(Debug)]
pub(super) struct Turns<T> {
    busy: Resources,
    waiting: VecDeque<(Resources, T)>,
}

impl<T> Turns<T> {
    pub(super) fn new() -> Self {
        Self { busy: Resources::new(), waiting: VecDeque::new() }
    }

    /// Number of pods that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Somebody wants to go on with these resources.
    pub(super) fn add(&mut self, resources: Resources, who: T) {
        self.waiting.push_back((resources, who));
    }

    /// Forgets those who don't wait any more.
    pub(super) fn retain(&mut self, still: impl Fn(&T) -> bool) {
        self.waiting.retain(|(_, who)| still(who));
    }

    /// The first whose resources are all idle; they are busy from now on, until [`Turns::done`].
    pub(super) fn next(&mut self) -> Option<(Resources, T)> {
        let at = self.waiting.iter().position(|(wanted, _)| wanted.is_disjoint(&self.busy))?;
        let (resources, who) = self.waiting.remove(at)?;
        self.busy.extend(resources.iter().cloned());
        Some((resources, who))
    }

    /// These are idle again.
    pub(super) fn done(&mut self, resources: &Resources) {
        self.busy.retain(|resource| !resources.contains(resource));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources(text: &str) -> Resources {
        text.chars().map(String::from).collect()
    }

    /// Which pods go on at once, and which after each end: `names resources`.
    fn check(asked: &[(&str, &str)], ends: &[&str], expected: &[&str]) {
        let mut turns = Turns::new();
        asked.iter().for_each(|(who, wanted)| turns.add(resources(wanted), *who));
        let mut rounds = Vec::new();
        let mut ends = ends.iter();
        loop {
            let going: Vec<&str> = std::iter::from_fn(|| turns.next()).map(|(_, who)| who).collect();
            rounds.push(going.join(" "));
            let Some(end) = ends.next() else { break };
            turns.done(&resources(end));
        }
        assert_eq!(rounds, expected, "{asked:?}");
    }

    #[test]
    fn those_with_nothing_in_common_go_on_side_by_side() {
        check(
            &[("one", "a"), ("two", "b"), ("three", "a"), ("four", "c")],
            &["a"],
            &["one two four", "three"],
        );
        check(&[("one", "a"), ("two", "a"), ("three", "a")], &["a", "a"], &["one", "two", "three"]);
        check(&[("one", "a"), ("both", "ab"), ("two", "b")], &["b", "a"], &["one two", "", "both"]);
        check(
            &[("both", "ab"), ("one", "a"), ("two", "b"), ("none", "")],
            &["ab"],
            &["both none", "one two"],
        );
    }

    #[test]
    fn who_has_gone_has_no_turn() {
        let mut turns = Turns::new();
        ["one", "two", "three"].into_iter().for_each(|who| turns.add(resources("a"), who));
        assert_eq!(turns.next().map(|(_, who)| who), Some("one"));
        turns.retain(|who| *who != "two");
        assert_eq!(turns.waiting(), 1);
        turns.done(&resources("a"));
        assert_eq!(turns.next().map(|(_, who)| who), Some("three"));
    }
}
