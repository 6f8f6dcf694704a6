//! Schedules admissions: those without a common resource run concurrently, the others in order. So a plugin
//! that hangs delays only pods that want its devices.
//!
//! A pod that wants several resources waits for all of them and holds none in the meantime: later pods that
//! want only one of them pass it. They cannot pass it forever, since each pod asks once.

use std::collections::{BTreeSet, VecDeque};

/// Names of resources.
pub(super) type Resources = BTreeSet<String>;

/// Queue for resources: those in use, and the waiting pods.
#[derive(Debug)]
pub(super) struct Turns<T> {
    busy: Resources,
    waiting: VecDeque<(Resources, T)>,
}

impl<T> Turns<T> {
    pub(super) fn new() -> Self {
        Self { busy: Resources::new(), waiting: VecDeque::new() }
    }

    /// Returns the number of waiting pods.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Queues a pod that wants these resources.
    pub(super) fn add(&mut self, resources: Resources, who: T) {
        self.waiting.push_back((resources, who));
    }

    /// Removes pods that no longer wait.
    pub(super) fn retain(&mut self, still: impl Fn(&T) -> bool) {
        self.waiting.retain(|(_, who)| still(who));
    }

    /// Returns the first pod whose resources are all idle, and marks these as busy until [`Turns::done`].
    pub(super) fn next(&mut self) -> Option<(Resources, T)> {
        let at = self.waiting.iter().position(|(wanted, _)| wanted.is_disjoint(&self.busy))?;
        let (resources, who) = self.waiting.remove(at)?;
        self.busy.extend(resources.iter().cloned());
        Some((resources, who))
    }

    /// Marks these resources as idle.
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

    /// Checks which pods start at once and after each end; `asked` has names and resources.
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
            &[("first", "a"), ("two", "b"), ("three", "a"), ("four", "c")],
            &["a"],
            &["first two four", "three"],
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
    fn a_removed_pod_has_no_turn() {
        let mut turns = Turns::new();
        ["one", "two", "three"].into_iter().for_each(|who| turns.add(resources("a"), who));
        assert_eq!(turns.next().map(|(_, who)| who), Some("one"));
        turns.retain(|who| *who != "two");
        assert_eq!(turns.waiting(), 1);
        turns.done(&resources("a"));
        assert_eq!(turns.next().map(|(_, who)| who), Some("three"));
    }
}
