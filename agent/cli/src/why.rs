//! The line that says why a pod isn't as it should be, from its status and its events.

use beelet_client::Client;
use beelet_policy::pod::why::{Warning, why};
use beelet_proto::beelet as proto;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

/// The warnings that the agent keeps, of any pods.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Vec<proto::Event>);

impl Warnings {
    /// Of these events those that are warnings.
    pub(crate) fn of(events: impl IntoIterator<Item = proto::Event>) -> Self {
        Self(events.into_iter().filter(|event| event.r#type == "Warning").collect())
    }

    /// All that the agent keeps.
    pub(crate) async fn read(client: &mut Client) -> anyhow::Result<Self> {
        Ok(Self::of(client.kept_events(proto::ListEventsRequest::default()).await?))
    }

    /// Why this pod isn't as it should be; None if it is.
    pub(crate) fn why(&self, pod: &Pod, now: Timestamp) -> Option<String> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let own = self.0.iter().filter(|event| event.uid == uid);
        let warnings: Vec<Warning<'_>> = own
            .map(|event| Warning {
                container: &event.container,
                reason: &event.reason,
                message: &event.message,
                at: Timestamp::from_nanosecond(event.last_ns.into()).unwrap_or_default(),
            })
            .collect();
        why(pod, &warnings, now)
    }
}
