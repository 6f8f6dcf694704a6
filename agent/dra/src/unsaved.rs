//! Pods that gave back claims since the record was last written: as long as a write fails they have not done
//! so for an agent that starts after this one.

use std::collections::BTreeMap;

/// Pods by their UIDs, each with the number of its last change.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unsaved {
    pods: BTreeMap<String, u64>,
    next: u64,
}

impl Unsaved {
    /// A pod gives something back.
    pub(crate) fn note(&mut self, uid: &str) {
        self.pods.insert(uid.to_owned(), self.next);
        self.next += 1;
    }

    /// The record is as it was to be when this was `then`: all is on the disk but what came later.
    pub(crate) fn saved(&mut self, then: &Self) {
        self.pods.retain(|uid, change| then.pods.get(uid) != Some(change));
    }

    /// Returns true if the record may still have something of the pod.
    pub(crate) fn has(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// All of them.
    pub(crate) fn pods(&self) -> impl Iterator<Item = String> {
        self.pods.keys().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_saves_what_came_before_it_and_nothing_later() {
        let mut unsaved = Unsaved::default();
        unsaved.note("a");
        unsaved.note("b");
        let then = unsaved.clone();
        // The first gave back another claim while the disk was waited for.
        unsaved.note("a");
        unsaved.note("c");
        assert!(unsaved.has("b"));
        unsaved.saved(&then);
        assert_eq!(unsaved.pods().collect::<Vec<_>>(), ["a", "c"]);
        let now = unsaved.clone();
        unsaved.saved(&now);
        assert!(!unsaved.has("a") && !unsaved.has("c"));
    }
}
