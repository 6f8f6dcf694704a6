//! The deletion of a pod, and the pod that waits for it.

use std::{sync::Arc, time::Duration};

use beelet_model::{labels::ANNOTATION_WAITS_FOR, pod::grace_period, table::PodEntry};
use beelet_units::bounds;
use k8s_openapi::api::core::v1 as core;

/// The deletion of a pod whose object is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deletion {
    /// Time that its containers have to end by themselves.
    pub(super) grace: Duration,
    /// None of its containers runs any more.
    pub(super) stopped: bool,
    /// Only its logs are left.
    pub(super) cleared: bool,
}

impl Deletion {
    /// The deletion that the API server asks for, if it does.
    pub(super) fn of(pod: &core::Pod) -> Option<Self> {
        pod.metadata.deletion_timestamp.as_ref()?;
        let seconds = pod.metadata.deletion_grace_period_seconds;
        let grace = seconds.map_or_else(|| grace_period(pod), bounds::grace);
        Some(Self { grace, stopped: false, cleared: false })
    }
}

/// The pod that waits until one that was deleted by force is gone.
#[derive(Debug)]
pub(super) struct Successor {
    /// The pod as it is desired.
    pub(super) pod: Arc<core::Pod>,
    /// The pod as it is shown.
    pub(super) entry: Arc<PodEntry>,
}

impl Successor {
    /// The pod that waits for the one of the UID `before`.
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
    fn the_api_server_says_how_long_a_deleted_pod_gets() {
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
