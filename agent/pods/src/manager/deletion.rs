//! The deletion of a pod, and the pod that waits for the deletion.

use std::{sync::Arc, time::Duration};

use beelet_model::{labels::ANNOTATION_WAITS_FOR, pod::grace_period, table::PodEntry};
use beelet_units::bounds;
use k8s_openapi::api::core::v1 as core;

/// The deletion of a pod whose object still exists in the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deletion {
    /// Grace period of the pod's containers.
    pub(super) grace: Duration,
    /// All containers of the pod have stopped.
    pub(super) stopped: bool,
    /// The pod is removed except for its logs.
    pub(super) cleared: bool,
}

impl Deletion {
    /// Returns the deletion that the API server requests, if any.
    pub(super) fn of(pod: &core::Pod) -> Option<Self> {
        pod.metadata.deletion_timestamp.as_ref()?;
        let seconds = pod.metadata.deletion_grace_period_seconds;
        let grace = seconds.map_or_else(|| grace_period(pod), bounds::grace);
        Some(Self { grace, stopped: false, cleared: false })
    }
}

/// The pod that waits for the removal of a force-deleted pod of the same name.
#[derive(Debug)]
pub(super) struct Successor {
    /// The desired pod.
    pub(super) pod: Arc<core::Pod>,
    /// The published entry of the pod.
    pub(super) entry: Arc<PodEntry>,
}

impl Successor {
    /// Returns the successor of the force-deleted pod with the UID `before`.
    pub(super) fn new(pod: Arc<core::Pod>, before: &str) -> Self {
        let mut shown = (*pod).clone();
        let annotations = shown.metadata.annotations.get_or_insert_default();
        annotations.insert(ANNOTATION_WAITS_FOR.to_owned(), before.to_owned());
        shown.status = Some(core::PodStatus { phase: Some("Pending".to_owned()), ..Default::default() });
        Self { pod, entry: Arc::new(PodEntry::of(shown)) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_api_server_sets_the_grace_period_of_a_deleted_pod() {
        let check = |metadata: serde_json::Value, expected: Option<u64>| {
            let spec = json!({"terminationGracePeriodSeconds": 7, "containers": []});
            let pod: core::Pod = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
            assert_eq!(Deletion::of(&pod).map(|deletion| deletion.grace.as_secs()), expected);
        };
        let now = "2026-01-01T00:00:00Z";
        check(json!({}), None);
        check(json!({"deletionGracePeriodSeconds": 3}), None);
        check(json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 3}), Some(3));
        check(json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": -3}), Some(0));
        check(json!({"deletionTimestamp": now}), Some(7));
        check(
            json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": i64::MAX}),
            Some(366 * 24 * 3600),
        );
    }
}
