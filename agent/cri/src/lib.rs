//! The only client of the container runtime: CRI v1 over a unix socket.
//!
//! A [`Runtime`] is cheap to clone and never stale: it connects at the first call, and connects again at the
//! next call after the connection broke. Every call has a deadline, counts in the metrics, and fails with a
//! sentence. A pull has no deadline: the runtime itself aborts a pull that makes no progress.
//!
//! If the connection breaks during a call that only reads, the call is sent a second time at once. A call
//! that changes something is never repeated: its caller has to read the state first. Dropping a call's future
//! cancels the call in the runtime too.
//!
//! This module must never decide anything about pods, and nothing outside it may speak CRI.

pub mod cni;
pub mod mounts;
pub mod ownership;
pub mod store;

mod call;
mod channel;
mod error;
mod events;
mod exec;
pub mod forward;
mod metrics;
mod operation;
mod sandbox_image;
pub mod spdy;
pub mod stream;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use beelet_proto::cri;
use beelet_units::{
    bounds::{self, LONGEST_GRACE, LONGEST_GRACE_SECONDS},
    cgroup_driver::CgroupDriver,
};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

pub use self::channel::{Connect, Connecting, Connection, EndpointError};
pub use self::error::{Error, Kind};
pub use self::events::ContainerEvents;
pub use self::exec::pid_of;
pub use self::operation::Operation;
pub use self::sandbox_image::sandbox_image;

use self::call::Call;
use self::channel::{Socket, socket_path};
use self::metrics::Metrics;

/// The size limit of a message in either direction, in bytes: the kubelet's own limit (`maxMsgSize`), which
/// runtimes know.
const MAX_MESSAGE: usize = 16 << 20;

/// The pause of `wait_ready` between two attempts: the first one and the longest one.
const READY_RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));

/// The time that `wait_ready` waits for an answer before it sends the next request.
const READY_DEADLINE: Duration = Duration::from_secs(10);

/// The container runtime of this node. Clones share the connection and the metrics.
#[derive(Clone, Debug)]
pub struct Runtime {
    runtime: Arc<Socket>,
    images: Arc<Socket>,
    request_timeout: Duration,
    metrics: Metrics,
}

/// Returns true if `labels` contains all the `wanted` labels. The runtime filters by them too; but the agent
/// stops and removes the pods that it considers its own, and that must not depend on another program's
/// filter.
fn has_labels(labels: &HashMap<String, String>, wanted: &HashMap<String, String>) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

impl Runtime {
    /// Returns a client of the runtime that listens at `endpoint` (`unix:///path` or `/path`).
    /// `request_timeout` is the deadline of every call whose own documentation names no other. Does no I/O.
    ///
    /// # Errors
    /// `endpoint` does not name a unix socket.
    pub fn new(endpoint: &str, request_timeout: Duration) -> Result<Self, EndpointError> {
        let socket = Arc::new(Socket::new(socket_path(endpoint)?));
        Ok(Runtime { runtime: Arc::clone(&socket), images: socket, request_timeout, metrics: Metrics::new() })
    }

    /// Returns a client of a simulated runtime that is reached by `connect`. `name` replaces the socket's
    /// path in messages.
    #[must_use]
    pub fn over(name: &Path, connect: Connect, request_timeout: Duration) -> Self {
        let socket = Arc::new(Socket::over(name.to_owned(), connect));
        Runtime { runtime: Arc::clone(&socket), images: socket, request_timeout, metrics: Metrics::new() }
    }

    /// Returns the same client with another socket for images.
    ///
    /// # Errors
    /// `endpoint` does not name a unix socket.
    pub fn with_image_endpoint(mut self, endpoint: &str) -> Result<Self, EndpointError> {
        let path = socket_path(endpoint)?;
        if path != self.runtime.path {
            self.images = Arc::new(Socket::new(path));
        }
        Ok(self)
    }

    /// Returns the runtime's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.runtime.path
    }

    /// Adds `kubelet_runtime_operations_*` to `registry`.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.metrics.register(registry);
    }

    /// Waits without a limit until the runtime answers; returns None if `cancel` fires first. Logs the reason
    /// for the wait once, logs it again if the reason changes, and logs the end of the wait.
    pub async fn wait_ready(&self, cancel: &CancellationToken) -> Option<cri::VersionResponse> {
        let (mut pause, longest) = READY_RETRY;
        let mut said: Option<Kind> = None;
        let deadline = self.request_timeout.min(READY_DEADLINE);
        loop {
            let attempt = self.version_within(deadline);
            let error = match cancel.run_until_cancelled(attempt).await? {
                Ok(version) => {
                    if said.is_some() {
                        tracing::info!(runtime = %version.runtime_name, version = %version.runtime_version,
                            "the container runtime answers");
                    }
                    return Some(version);
                }
                Err(error) => error,
            };
            if said.replace(error.kind) != Some(error.kind) {
                tracing::warn!("{error}; waiting for the container runtime");
            }
            cancel.run_until_cancelled(tokio::time::sleep(pause)).await?;
            pause = (pause * 2).min(longest);
        }
    }

    /// Returns the runtime's name and version.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn version(&self) -> Result<cri::VersionResponse, Error> {
        self.version_within(self.request_timeout).await
    }

    async fn version_within(&self, deadline: Duration) -> Result<cri::VersionResponse, Error> {
        let request = cri::VersionRequest { version: "v1".to_owned() };
        let call = Call { deadline: Some(deadline), ..self.call(Operation::Version, String::new()) };
        call.runtime(request, |mut client, request| async move { client.version(request).await }).await
    }

    /// Returns the runtime's conditions (RuntimeReady, NetworkReady); with `verbose`, its configuration too.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn status(&self, verbose: bool) -> Result<cri::StatusResponse, Error> {
        self.call(Operation::Status, String::new())
            .runtime(cri::StatusRequest { verbose }, |mut client, request| async move {
                client.status(request).await
            })
            .await
    }

    /// Returns the driver with which the runtime creates cgroups. Returns None if the runtime lacks the call
    /// (containerd below 2.0) or names an unknown driver.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn runtime_config(&self) -> Result<Option<CgroupDriver>, Error> {
        let answer = self
            .call(Operation::RuntimeConfig, String::new())
            .runtime(cri::RuntimeConfigRequest {}, |mut client, request| async move {
                client.runtime_config(request).await
            })
            .await;
        match answer {
            // An unknown number means that the driver is not known. (The generated getter would return
            // systemd for it.)
            Ok(response) => Ok(response.linux.and_then(|linux| match linux.cgroup_driver.try_into() {
                Ok(cri::CgroupDriver::Systemd) => Some(CgroupDriver::Systemd),
                Ok(cri::CgroupDriver::Cgroupfs) => Some(CgroupDriver::Cgroupfs),
                Err(_) => None,
            })),
            Err(error) if error.kind == Kind::Unimplemented => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Passes the range of pod addresses to the runtime, for its network plugin.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn update_runtime_config(&self, pod_cidr: &str) -> Result<(), Error> {
        let network_config = Some(cri::NetworkConfig { pod_cidr: pod_cidr.to_owned() });
        let request =
            cri::UpdateRuntimeConfigRequest { runtime_config: Some(cri::RuntimeConfig { network_config }) };
        self.call(Operation::UpdateRuntimeConfig, String::new())
            .runtime(
                request,
                |mut client, request| async move { client.update_runtime_config(request).await },
            )
            .await
            .map(drop)
    }

    /// Returns the file systems that hold images and containers, with their use in bytes and inodes.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn image_fs_info(&self) -> Result<cri::ImageFsInfoResponse, Error> {
        self.call(Operation::ImageFsInfo, String::new())
            .images(cri::ImageFsInfoRequest {}, |mut client, request| async move {
                client.image_fs_info(request).await
            })
            .await
    }

    /// Returns the pod sandboxes, all or those that `filter` lets through.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn list_sandboxes(
        &self,
        filter: Option<cri::PodSandboxFilter>,
    ) -> Result<Vec<cri::PodSandbox>, Error> {
        let wanted = filter.as_ref().map_or_else(HashMap::new, |filter| filter.label_selector.clone());
        let response = self
            .call(Operation::ListSandboxes, String::new())
            .runtime(cri::ListPodSandboxRequest { filter }, |mut client, request| async move {
                client.list_pod_sandbox(request).await
            })
            .await?;
        Ok(response.items.into_iter().filter(|item| has_labels(&item.labels, &wanted)).collect())
    }

    /// Returns the status of a sandbox; with `verbose`, the runtime's own `info` too (its pid and netns among
    /// it).
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn sandbox_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<cri::PodSandboxStatusResponse, Error> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose };
        self.call(Operation::SandboxStatus, sandbox(id))
            .runtime(request, |mut client, request| async move { client.pod_sandbox_status(request).await })
            .await
    }

    /// Creates and starts a sandbox with its network; returns its id. The deadline is twice the request
    /// timeout, as in the kubelet: the runtime may have to pull the pause image and wait for CNI.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn run_sandbox(
        &self,
        config: cri::PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<String, Error> {
        let call = self.call(Operation::RunSandbox, pod(&config));
        let call = Call { deadline: Some(self.request_timeout.saturating_mul(2)), ..call };
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
    pub async fn stop_sandbox(&self, id: &str) -> Result<(), Error> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.call(Operation::StopSandbox, sandbox(id))
            .runtime(request, |mut client, request| async move { client.stop_pod_sandbox(request).await })
            .await?;
        Ok(())
    }

    /// Removes a sandbox and its containers. Idempotent.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn remove_sandbox(&self, id: &str) -> Result<(), Error> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.call(Operation::RemoveSandbox, sandbox(id))
            .runtime(request, |mut client, request| async move { client.remove_pod_sandbox(request).await })
            .await?;
        Ok(())
    }

    /// Returns the containers, all or those that `filter` lets through.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn list_containers(
        &self,
        filter: Option<cri::ContainerFilter>,
    ) -> Result<Vec<cri::Container>, Error> {
        let wanted = filter.as_ref().map_or_else(HashMap::new, |filter| filter.label_selector.clone());
        let response = self
            .call(Operation::ListContainers, String::new())
            .runtime(cri::ListContainersRequest { filter }, |mut client, request| async move {
                client.list_containers(request).await
            })
            .await?;
        Ok(response.containers.into_iter().filter(|item| has_labels(&item.labels, &wanted)).collect())
    }

    /// Returns the status of a container; with `verbose`, the runtime's own `info` too (its pid among it).
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn container_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<cri::ContainerStatusResponse, Error> {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose };
        self.call(Operation::ContainerStatus, container(id))
            .runtime(request, |mut client, request| async move { client.container_status(request).await })
            .await
    }

    /// Creates a container in a sandbox; returns its id.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn create_container(
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
            .call(Operation::CreateContainer, subject)
            .runtime(request, |mut client, request| async move { client.create_container(request).await })
            .await?;
        Ok(response.container_id)
    }

    /// Starts a container.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn start_container(&self, id: &str) -> Result<(), Error> {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        self.call(Operation::StartContainer, container(id))
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
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), Error> {
        let grace = grace.min(LONGEST_GRACE);
        let timeout = i64::try_from(grace.as_secs()).unwrap_or(LONGEST_GRACE_SECONDS);
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout };
        let call = self.call(Operation::StopContainer, container(id));
        Call { deadline: Some(self.request_timeout.saturating_add(grace)), ..call }
            .runtime(request, |mut client, request| async move { client.stop_container(request).await })
            .await?;
        Ok(())
    }

    /// Removes a container. Idempotent.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn remove_container(&self, id: &str) -> Result<(), Error> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        self.call(Operation::RemoveContainer, container(id))
            .runtime(request, |mut client, request| async move { client.remove_container(request).await })
            .await?;
        Ok(())
    }

    /// Returns the resources that the containers matched by `filter` use, their writable layers included.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn list_container_stats(
        &self,
        filter: cri::ContainerStatsFilter,
    ) -> Result<Vec<cri::ContainerStats>, Error> {
        let request = cri::ListContainerStatsRequest { filter: Some(filter) };
        let response = self
            .call(Operation::ListContainerStats, String::new())
            .runtime(request, |mut client, request| async move { client.list_container_stats(request).await })
            .await?;
        Ok(response.stats)
    }

    /// Changes the resource limits of a container. A limit that is 0 or empty in `resources` stays unchanged.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn update_container_resources(
        &self,
        id: &str,
        resources: cri::LinuxContainerResources,
    ) -> Result<(), Error> {
        let request = cri::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources),
            ..Default::default()
        };
        self.call(Operation::UpdateContainer, container(id))
            .runtime(request, |mut client, request| async move {
                client.update_container_resources(request).await
            })
            .await?;
        Ok(())
    }

    /// Returns all images on this node.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn list_images(&self) -> Result<Vec<cri::Image>, Error> {
        let response = self
            .call(Operation::ListImages, String::new())
            .images(cri::ListImagesRequest { filter: None }, |mut client, request| async move {
                client.list_images(request).await
            })
            .await?;
        Ok(response.images)
    }

    /// Returns an image by name, digest or id; None where the node doesn't have it.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn image_status(&self, image: &str) -> Result<Option<cri::Image>, Error> {
        let request = cri::ImageStatusRequest { image: Some(image_spec(image)), verbose: false };
        let response = self
            .call(Operation::ImageStatus, image_subject(image))
            .images(request, |mut client, request| async move { client.image_status(request).await })
            .await?;
        Ok(response.image)
    }

    /// Makes the runtime reopen a container's log by its name, after the log was renamed.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn reopen_container_log(&self, id: &str) -> Result<(), Error> {
        let request = cri::ReopenContainerLogRequest { container_id: id.to_owned() };
        self.call(Operation::ReopenContainerLog, container(id))
            .runtime(request, |mut client, request| async move { client.reopen_container_log(request).await })
            .await?;
        Ok(())
    }

    /// Prepares a command in a container; returns the address of its streams, which works once.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn exec(&self, request: cri::ExecRequest) -> Result<String, Error> {
        let subject = container(&request.container_id);
        let response = self
            .call(Operation::Exec, subject)
            .runtime(request, |mut client, request| async move { client.exec(request).await })
            .await?;
        Ok(response.url)
    }

    /// Prepares to attach to a container's first process; returns the address of its streams,
    /// which works once.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn attach(&self, request: cri::AttachRequest) -> Result<String, Error> {
        let subject = container(&request.container_id);
        let response = self
            .call(Operation::Attach, subject)
            .runtime(request, |mut client, request| async move { client.attach(request).await })
            .await?;
        Ok(response.url)
    }

    /// Prepares to forward ports of a sandbox; returns the address of their streams, which works once.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn port_forward(&self, id: &str, ports: Vec<i32>) -> Result<String, Error> {
        let request = cri::PortForwardRequest { pod_sandbox_id: id.to_owned(), port: ports };
        let response = self
            .call(Operation::PortForward, sandbox(id))
            .runtime(request, |mut client, request| async move { client.port_forward(request).await })
            .await?;
        Ok(response.url)
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
        let call = self.call(Operation::Checkpoint, container(id));
        let deadline = (!timeout.is_zero()).then(|| self.request_timeout.saturating_add(timeout));
        Call { deadline: deadline.or(call.deadline), ..call }
            .runtime(request, |mut client, request| async move { client.checkpoint_container(request).await })
            .await?;
        Ok(())
    }

    /// Pulls an image for a pod, with `auth` or anonymously; returns the reference by which a container runs
    /// it. The call has no deadline: the runtime aborts a pull that makes no progress. Dropping the future
    /// aborts it earlier.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn pull_image(
        &self,
        image: &str,
        auth: Option<cri::AuthConfig>,
        sandbox_config: &cri::PodSandboxConfig,
    ) -> Result<String, Error> {
        let request = cri::PullImageRequest {
            image: Some(image_spec(image)),
            auth,
            sandbox_config: Some(sandbox_config.clone()),
        };
        let subject = match &sandbox_config.metadata {
            Some(_) => format!("{} for {}", image_subject(image), pod(sandbox_config)),
            None => image_subject(image),
        };
        let call = self.call(Operation::PullImage, subject);
        let response = Call { deadline: None, ..call }
            .images(request, |mut client, request| async move { client.pull_image(request).await })
            .await?;
        Ok(response.image_ref)
    }

    /// Removes an image with all its names. Idempotent.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn remove_image(&self, image: &str) -> Result<(), Error> {
        let request = cri::RemoveImageRequest { image: Some(image_spec(image)) };
        self.call(Operation::RemoveImage, image_subject(image))
            .images(request, |mut client, request| async move { client.remove_image(request).await })
            .await?;
        Ok(())
    }

    fn call(&self, operation: Operation, subject: String) -> Call<'_> {
        Call { door: self, operation, subject, deadline: Some(self.request_timeout) }
    }
}

fn image_spec(image: &str) -> cri::ImageSpec {
    cri::ImageSpec {
        image: image.to_owned(),
        user_specified_image: image.to_owned(),
        ..cri::ImageSpec::default()
    }
}

/// Shortens an id to its first 13 characters, as `crictl` shows it.
fn short(id: &str) -> &str {
    id.get(..13).unwrap_or(id)
}

fn sandbox(id: &str) -> String {
    format!("sandbox {}", short(id))
}

fn container(id: &str) -> String {
    format!("container {}", short(id))
}

fn image_subject(image: &str) -> String {
    format!("image {image}")
}

fn pod(config: &cri::PodSandboxConfig) -> String {
    match &config.metadata {
        Some(metadata) => format!("pod {}/{}", metadata.namespace, metadata.name),
        None => "a pod without a name".to_owned(),
    }
}
