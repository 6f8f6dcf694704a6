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
mod containers;
mod door;
mod error;
mod events;
pub mod forward;
mod images;
mod metrics;
mod operation;
mod ours;
mod pid;
mod sandbox_image;
mod sandboxes;
pub mod spdy;
pub mod stream;
mod streams;
mod subject;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use beelet_proto::cri;
use beelet_units::cgroup_driver::CgroupDriver;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

pub use self::channel::{Connect, Connecting, EndpointError};
pub use self::containers::Containers;
pub use self::error::{Error, Kind};
pub use self::events::ContainerEvents;
pub use self::images::Images;
pub use self::operation::Operation;
pub use self::pid::pid_of;
pub use self::sandbox_image::sandbox_image;
pub use self::sandboxes::Sandboxes;
pub use self::streams::Streams;

use self::call::Call;
use self::channel::{Socket, socket_path};
use self::door::Door;
use self::metrics::Metrics;
use self::ours::Ours;

/// The size limit of a message in either direction, in bytes: the kubelet's own limit (`maxMsgSize`), which
/// runtimes know.
const MAX_MESSAGE: usize = 16 << 20;

/// The pause of `wait_ready` between two attempts: the first one and the longest one.
const READY_RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));

/// The time that `wait_ready` waits for an answer before it sends the next request.
const READY_DEADLINE: Duration = Duration::from_secs(10);

/// The container runtime of this node, with a value per group of calls. Clones share the connection and the
/// metrics.
#[derive(Clone, Debug)]
pub struct Runtime {
    door: Arc<Door>,
    /// The pod sandboxes.
    pub sandboxes: Sandboxes,
    /// The containers.
    pub containers: Containers,
    /// Commands, attachments and ports.
    pub streams: Streams,
    /// The images.
    pub images: Images,
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
        let (runtime, metrics) = (Arc::clone(&socket), Metrics::new());
        Ok(Self::through(Door { runtime, images: socket, request_timeout, metrics, ours: Ours::default() }))
    }

    fn through(door: Door) -> Self {
        let door = Arc::new(door);
        Runtime {
            sandboxes: Sandboxes(Arc::clone(&door)),
            containers: Containers(Arc::clone(&door)),
            streams: Streams(Arc::clone(&door)),
            images: Images(Arc::clone(&door)),
            door,
        }
    }

    /// Returns a client of a simulated runtime that is reached by `connect`. `name` replaces the socket's
    /// path in messages.
    #[must_use]
    pub fn over(name: &Path, connect: Connect, request_timeout: Duration) -> Self {
        let socket = Arc::new(Socket::over(name.to_owned(), connect));
        let (runtime, metrics) = (Arc::clone(&socket), Metrics::new());
        Self::through(Door { runtime, images: socket, request_timeout, metrics, ours: Ours::default() })
    }

    /// Returns the same client with another socket for images.
    ///
    /// # Errors
    /// `endpoint` does not name a unix socket.
    pub fn with_image_endpoint(self, endpoint: &str) -> Result<Self, EndpointError> {
        let path = socket_path(endpoint)?;
        if path == self.door.runtime.path {
            return Ok(self);
        }
        let Door { runtime, request_timeout, metrics, .. } = &*self.door;
        let (runtime, metrics) = (Arc::clone(runtime), metrics.clone());
        let images = Arc::new(Socket::new(path));
        let request_timeout = *request_timeout;
        Ok(Self::through(Door { runtime, images, request_timeout, metrics, ours: Ours::default() }))
    }

    /// Returns the runtime's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.door.runtime.path
    }

    /// Adds `kubelet_runtime_operations_*` to `registry`.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.door.metrics.register(registry);
    }

    /// Waits without a limit until the runtime answers; returns None if `cancel` fires first. Logs the reason
    /// for the wait once, logs it again if the reason changes, and logs the end of the wait.
    pub async fn wait_ready(&self, cancel: &CancellationToken) -> Option<cri::VersionResponse> {
        let (mut pause, longest) = READY_RETRY;
        let mut said: Option<Kind> = None;
        let deadline = self.door.request_timeout.min(READY_DEADLINE);
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
        self.version_within(self.door.request_timeout).await
    }

    async fn version_within(&self, deadline: Duration) -> Result<cri::VersionResponse, Error> {
        let request = cri::VersionRequest { version: "v1".to_owned() };
        let call = Call { deadline: Some(deadline), ..self.door.call(Operation::Version, String::new()) };
        call.runtime(request, |mut client, request| async move { client.version(request).await }).await
    }

    /// Returns the runtime's conditions (RuntimeReady, NetworkReady); with `verbose`, its configuration too.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn status(&self, verbose: bool) -> Result<cri::StatusResponse, Error> {
        self.door
            .call(Operation::Status, String::new())
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
            .door
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
        self.door
            .call(Operation::UpdateRuntimeConfig, String::new())
            .runtime(
                request,
                |mut client, request| async move { client.update_runtime_config(request).await },
            )
            .await
            .map(drop)
    }
}
