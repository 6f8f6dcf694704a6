//! The calls about containers.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use beelet_proto::cri;
use beelet_units::bounds::{self, LONGEST_GRACE, LONGEST_GRACE_SECONDS};

use super::call::Call;
use super::door::Door;
use super::subject::{container, pod};
use super::{Error, Operation, has_labels, pid_of};

/// The containers of the runtime.
#[derive(Clone, Debug)]
pub struct Containers(pub(super) Arc<Door>);

impl Containers {
    /// Returns the containers, all or those that `filter` lets through.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn list(&self, filter: Option<cri::ContainerFilter>) -> Result<Vec<cri::Container>, Error> {
        let wanted = filter.as_ref().map_or_else(HashMap::new, |filter| filter.label_selector.clone());
        let response = self
            .0
            .call(Operation::ListContainers, String::new())
            .runtime(cri::ListContainersRequest { filter }, |mut client, request| async move {
                client.list_containers(request).await
            })
            .await?;
        Ok(response.containers.into_iter().filter(|item| has_labels(&item.labels, &wanted)).collect())
    }

    /// Returns the agent's own containers.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn ours(&self) -> Result<Vec<cri::Container>, Error> {
        self.own(None).await
    }

    /// Returns the agent's own containers of the pod with this UID.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn of_pod(&self, uid: &str) -> Result<Vec<cri::Container>, Error> {
        self.own(Some(uid)).await
    }

    async fn own(&self, pod: Option<&str>) -> Result<Vec<cri::Container>, Error> {
        let label_selector = self.0.ours.labels(pod);
        let filter = cri::ContainerFilter { label_selector, ..Default::default() };
        let mut listed = self.list(Some(filter)).await?;
        listed.retain(|container| self.0.ours.has(&container.labels));
        Ok(listed)
    }

    /// Returns the status of a container; with `verbose`, the runtime's own `info` too (its pid among it).
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn status(&self, id: &str, verbose: bool) -> Result<cri::ContainerStatusResponse, Error> {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose };
        self.0
            .call(Operation::ContainerStatus, container(id))
            .runtime(request, |mut client, request| async move { client.container_status(request).await })
            .await
    }

    /// Creates a container in a sandbox; returns its id.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn create(
        &self,
        sandbox_id: &str,
        config: cri::ContainerConfig,
        sandbox_config: &cri::PodSandboxConfig,
    ) -> Result<String, Error> {
        let name = config.metadata.as_ref().map_or("", |metadata| metadata.name.as_str());
        let subject = format!("container {name} of {}", pod(sandbox_config));
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config.clone()),
        };
        let response = self
            .0
            .call(Operation::CreateContainer, subject)
            .runtime(request, |mut client, request| async move { client.create_container(request).await })
            .await?;
        Ok(response.container_id)
    }

    /// Starts a container.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn start(&self, id: &str) -> Result<(), Error> {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        self.0
            .call(Operation::StartContainer, container(id))
            .runtime(request, |mut client, request| async move { client.start_container(request).await })
            .await?;
        Ok(())
    }

    /// Stops a container: the runtime sends its stop signal, and SIGKILL after `grace` (in whole seconds, at
    /// most those of [`LONGEST_GRACE`]). Idempotent. The deadline is the request timeout plus `grace`, as in
    /// the kubelet.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn stop(&self, id: &str, grace: Duration) -> Result<(), Error> {
        let grace = grace.min(LONGEST_GRACE);
        let timeout = i64::try_from(grace.as_secs()).unwrap_or(LONGEST_GRACE_SECONDS);
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout };
        let call = self.0.call(Operation::StopContainer, container(id));
        Call { deadline: Some(self.0.request_timeout.saturating_add(grace)), ..call }
            .runtime(request, |mut client, request| async move { client.stop_container(request).await })
            .await?;
        Ok(())
    }

    /// Removes a container. Idempotent.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn remove(&self, id: &str) -> Result<(), Error> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        self.0
            .call(Operation::RemoveContainer, container(id))
            .runtime(request, |mut client, request| async move { client.remove_container(request).await })
            .await?;
        Ok(())
    }

    /// Returns the resources that the agent's own containers use, their writable layers included. With
    /// adopted pods, the answer also has other containers.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn stats_of_ours(&self) -> Result<Vec<cri::ContainerStats>, Error> {
        let label_selector = self.0.ours.labels(None);
        let filter = Some(cri::ContainerStatsFilter { label_selector, ..Default::default() });
        let response = self
            .0
            .call(Operation::ListContainerStats, String::new())
            .runtime(cri::ListContainerStatsRequest { filter }, |mut client, request| async move {
                client.list_container_stats(request).await
            })
            .await?;
        Ok(response.stats)
    }

    /// Changes the resource limits of a container. A limit that is 0 or empty in `resources` stays unchanged.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn update_resources(
        &self,
        id: &str,
        resources: cri::LinuxContainerResources,
    ) -> Result<(), Error> {
        let request = cri::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources),
            ..Default::default()
        };
        self.0
            .call(Operation::UpdateContainer, container(id))
            .runtime(request, |mut client, request| async move {
                client.update_container_resources(request).await
            })
            .await?;
        Ok(())
    }

    /// Makes the runtime reopen a container's log by its name, after the log was renamed.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn reopen_log(&self, id: &str) -> Result<(), Error> {
        let request = cri::ReopenContainerLogRequest { container_id: id.to_owned() };
        self.0
            .call(Operation::ReopenContainerLog, container(id))
            .runtime(request, |mut client, request| async move { client.reopen_container_log(request).await })
            .await?;
        Ok(())
    }

    /// Writes a running container's state into an archive at `location`. Zero as `timeout` means the
    /// runtime's own timeout.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn checkpoint(&self, id: &str, location: &Path, timeout: Duration) -> Result<(), Error> {
        let request = cri::CheckpointContainerRequest {
            container_id: id.to_owned(),
            location: location.to_string_lossy().into_owned(),
            timeout: bounds::whole_seconds(timeout),
        };
        let call = self.0.call(Operation::Checkpoint, container(id));
        let deadline = (!timeout.is_zero()).then(|| self.0.request_timeout.saturating_add(timeout));
        Call { deadline: deadline.or(call.deadline), ..call }
            .runtime(request, |mut client, request| async move { client.checkpoint_container(request).await })
            .await?;
        Ok(())
    }

    /// Runs a command in a container and waits for its end; returns its exit code and its output (up to some
    /// 16 MiB). After `timeout` (in whole seconds, rounded up) the runtime kills the command; zero means
    /// never. Dropping the future makes the runtime kill the command too, but not the processes that the
    /// command started.
    ///
    /// # Errors
    /// The call fails with an [`Error`], of [`super::Kind::Timeout`] if the command exceeded its timeout.
    pub async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Duration,
    ) -> Result<cri::ExecSyncResponse, Error> {
        let seconds = bounds::whole_seconds(timeout);
        let request = cri::ExecSyncRequest { container_id: id.to_owned(), cmd: command, timeout: seconds };
        let deadline = (seconds > 0).then(|| self.0.request_timeout.saturating_add(timeout));
        Call { deadline, ..self.0.call(Operation::ExecSync, container(id)) }
            .runtime(request, |mut client, request| async move { client.exec_sync(request).await })
            .await
    }

    /// Returns the process id, on the host, of a container's first process, from the runtime's verbose status
    /// (containerd and CRI-O have the same). Returns None if the status contains none, or the container
    /// doesn't run.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn pid(&self, id: &str) -> Result<Option<u32>, Error> {
        let response = self.status(id, true).await?;
        Ok(pid_of(&response.info))
    }
}
