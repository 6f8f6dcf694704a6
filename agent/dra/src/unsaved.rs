//! Pods that released claims since the record was last written. Until a write succeeds, an agent that starts
//! after this one still sees their claims.

use std::collections::BTreeMap;

/// Pods by UID, each with the number of its last change.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unsaved {
    pods: BTreeMap<String, u64>,
    next: u64,
}

impl Unsaved {
    /// Adds a pod that releases claims.
    pub(crate) fn add(&mut self, uid: &str) {
        self.pods.insert(uid.to_owned(), self.next);
        self.next += 1;
    }

    /// Removes the pods of `then`, the state that was written, except those changed later.
    pub(crate) fn saved(&mut self, then: &Self) {
        self.pods.retain(|uid, change| then.pods.get(uid) != Some(change));
    }

    /// Returns true if the record may still list claims of the pod.
    pub(crate) fn has(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// Returns the UIDs of all pods.
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
        unsaved.add("a");
        unsaved.add("b");
        let then = unsaved.clone();
        // The first pod released another claim during the write.
        unsaved.add("a");
        unsaved.add("c");
        assert!(unsaved.has("b"));
        unsaved.saved(&then);
        assert_eq!(unsaved.pods().collect::<Vec<_>>(), ["a", "c"]);
        let now = unsaved.clone();
        unsaved.saved(&now);
        assert!(!unsaved.has("a") && !unsaved.has("c"));
    }
}
