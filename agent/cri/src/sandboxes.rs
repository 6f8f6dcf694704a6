//! The calls about pod sandboxes.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use beelet_proto::cri;

use super::call::Call;
use super::door::Door;
use super::subject::{pod, sandbox};
use super::{Error, Operation, has_labels};

/// The pod sandboxes of the runtime.
#[derive(Clone, Debug)]
pub struct Sandboxes(pub(super) Arc<Door>);

impl Sandboxes {
    /// Returns the pod sandboxes, all or those that `filter` lets through.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn list(&self, filter: Option<cri::PodSandboxFilter>) -> Result<Vec<cri::PodSandbox>, Error> {
        let wanted = filter.as_ref().map_or_else(HashMap::new, |filter| filter.label_selector.clone());
        let response = self
            .0
            .call(Operation::ListSandboxes, String::new())
            .runtime(cri::ListPodSandboxRequest { filter }, |mut client, request| async move {
                client.list_pod_sandbox(request).await
            })
            .await?;
        Ok(response.items.into_iter().filter(|item| has_labels(&item.labels, &wanted)).collect())
    }

    /// Makes the sandboxes and containers of these pods, by UID, the agent's own: `ours` and `of_pod` list
    /// them too. Only the first call counts, which must precede all lists.
    pub fn adopt(&self, pods: BTreeSet<String>) {
        self.0.ours.adopt(pods);
    }

    /// Returns the agent's own pod sandboxes.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn ours(&self) -> Result<Vec<cri::PodSandbox>, Error> {
        self.own(None).await
    }

    /// Returns the agent's own sandboxes of the pod with this UID.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn of_pod(&self, uid: &str) -> Result<Vec<cri::PodSandbox>, Error> {
        self.own(Some(uid)).await
    }

    async fn own(&self, pod: Option<&str>) -> Result<Vec<cri::PodSandbox>, Error> {
        let label_selector = self.0.ours.labels(pod);
        let filter = cri::PodSandboxFilter { label_selector, ..Default::default() };
        let mut listed = self.list(Some(filter)).await?;
        listed.retain(|sandbox| self.0.ours.has(&sandbox.labels));
        Ok(listed)
    }

    /// Returns the status of a sandbox; with `verbose`, the runtime's own `info` too (its pid and netns among
    /// it).
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn status(&self, id: &str, verbose: bool) -> Result<cri::PodSandboxStatusResponse, Error> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose };
        self.0
            .call(Operation::SandboxStatus, sandbox(id))
            .runtime(request, |mut client, request| async move { client.pod_sandbox_status(request).await })
            .await
    }

    /// Creates and starts a sandbox with its network; returns its id. The deadline is twice the request
    /// timeout, as in the kubelet: the runtime may have to pull the pause image and wait for CNI.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn run(&self, config: cri::PodSandboxConfig, runtime_handler: &str) -> Result<String, Error> {
        let call = self.0.call(Operation::RunSandbox, pod(&config));
        let call = Call { deadline: Some(self.0.request_timeout.saturating_mul(2)), ..call };
        let request =
            cri::RunPodSandboxRequest { config: Some(config), runtime_handler: runtime_handler.to_owned() };
        let response = call
            .runtime(request, |mut client, request| async move { client.run_pod_sandbox(request).await })
            .await?;
        Ok(response.pod_sandbox_id)
    }

    /// Stops a sandbox, its containers and its network. Idempotent.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn stop(&self, id: &str) -> Result<(), Error> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.0
            .call(Operation::StopSandbox, sandbox(id))
            .runtime(request, |mut client, request| async move { client.stop_pod_sandbox(request).await })
            .await?;
        Ok(())
    }

    /// Removes a sandbox and its containers. Idempotent.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn remove(&self, id: &str) -> Result<(), Error> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.0
            .call(Operation::RemoveSandbox, sandbox(id))
            .runtime(request, |mut client, request| async move { client.remove_pod_sandbox(request).await })
            .await?;
        Ok(())
    }
}
