//! The line that explains why a pod is not ready, from its status and its events.

use beelet_client::Client;
use beelet_model::labels::ANNOTATION_WAITS_FOR;
use beelet_policy::pod::why::{Warning, waits_for_deleted, why};
use beelet_proto::beelet as proto;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

/// Recorded warnings of all pods.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Vec<proto::Event>);

impl Warnings {
    /// Keeps the warnings among these events.
    pub(crate) fn of(events: impl IntoIterator<Item = proto::Event>) -> Self {
        Self(events.into_iter().filter(|event| event.r#type == "Warning").collect())
    }

    /// Reads all warnings that the agent has recorded.
    pub(crate) async fn read(client: &mut Client) -> anyhow::Result<Self> {
        Ok(Self::of(client.events.kept(proto::ListEventsRequest::default()).await?))
    }

    /// Returns the reason why the pod is not ready, or None.
    pub(crate) fn why(&self, pod: &Pod, now: Timestamp) -> Option<String> {
        let metadata = &pod.metadata;
        let before = metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_WAITS_FOR));
        match before {
            Some(before) => Some(waits_for_deleted(&self.of_uid(before))),
            None => why(pod, &self.of_uid(metadata.uid.as_deref().unwrap_or_default()), now),
        }
    }

    /// Returns true if no warning is about this pod.
    pub(crate) fn lack(&self, pod: &Pod) -> bool {
        self.of_uid(pod.metadata.uid.as_deref().unwrap_or_default()).is_empty()
    }

    fn of_uid(&self, uid: &str) -> Vec<Warning<'_>> {
        let own = self.0.iter().filter(|event| event.uid == uid);
        own.map(|event| Warning {
            container: &event.container,
            reason: &event.reason,
            message: &event.message,
            at: Timestamp::from_nanosecond(event.last_ns.into()).unwrap_or_default(),
        })
        .collect()
    }
}
