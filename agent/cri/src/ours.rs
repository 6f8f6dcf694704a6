//! The sandboxes and containers that are the agent's: those that it created, by its label, and those of the
//! pods that it has adopted from a kubelet. The agent acts on no others.

use std::{
    collections::{BTreeSet, HashMap},
    sync::OnceLock,
};

use beelet_model::labels::{MANAGED_BY, MANAGED_BY_BEELET, POD_UID, is_own};

/// The agent's own objects in the runtime.
#[derive(Debug, Default)]
pub(super) struct Ours {
    /// UIDs of adopted pods. CRI cannot change the labels of what exists.
    adopted: OnceLock<BTreeSet<String>>,
}

impl Ours {
    /// Sets the adopted pods. Only the first call counts: the agent adopts pods before it lists any.
    pub(super) fn adopt(&self, pods: BTreeSet<String>) {
        let _ = self.adopted.set(pods);
    }

    /// Returns the labels for a list of all objects, or of those of one pod. The list may contain more.
    pub(super) fn labels(&self, pod: Option<&str>) -> HashMap<String, String> {
        let of_all = || (MANAGED_BY.to_owned(), MANAGED_BY_BEELET.to_owned());
        let of_pod = |uid: &str| (POD_UID.to_owned(), uid.to_owned());
        match pod {
            None if self.any() => HashMap::new(),
            None => HashMap::from([of_all()]),
            Some(uid) if self.has_adopted(uid) => HashMap::from([of_pod(uid)]),
            Some(uid) => HashMap::from([of_all(), of_pod(uid)]),
        }
    }

    /// Returns true if an object with these labels is the agent's.
    pub(super) fn has(&self, labels: &HashMap<String, String>) -> bool {
        is_own(labels) || labels.get(POD_UID).is_some_and(|uid| self.has_adopted(uid))
    }

    fn any(&self) -> bool {
        self.adopted.get().is_some_and(|pods| !pods.is_empty())
    }

    fn has_adopted(&self, uid: &str) -> bool {
        self.adopted.get().is_some_and(|pods| pods.contains(uid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn only_labelled_objects_and_those_of_adopted_pods_are_the_agents() {
        let (own, of_a, of_b) = ((MANAGED_BY, MANAGED_BY_BEELET), (POD_UID, "a"), (POD_UID, "b"));
        let ours = Ours::default();
        assert!(ours.has(&labels(&[own, of_a])) && !ours.has(&labels(&[of_a])) && !ours.has(&labels(&[])));
        assert!(!ours.has(&labels(&[(MANAGED_BY, "another"), of_a])));
        assert_eq!(ours.labels(None), labels(&[own]));
        assert_eq!(ours.labels(Some("a")), labels(&[own, of_a]));
        ours.adopt(["a".to_owned()].into());
        assert!(ours.has(&labels(&[of_a])) && !ours.has(&labels(&[of_b])) && ours.has(&labels(&[own, of_b])));
        assert_eq!(ours.labels(None), labels(&[]));
        assert_eq!(ours.labels(Some("a")), labels(&[of_a]));
        assert_eq!(ours.labels(Some("b")), labels(&[own, of_b]));
        // A later call adopts nothing more.
        ours.adopt(["b".to_owned()].into());
        assert!(!ours.has(&labels(&[of_b])));
    }
}
