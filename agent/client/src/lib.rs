//! Client of the agent's gRPC socket, for the command line, the demo and the tests.

mod pods;
mod services;
pub mod signals;

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use beelet_codec::JsonError;
use beelet_proto::beelet::containers_client::ContainersClient;
use beelet_proto::beelet::devices_client::DevicesClient;
use beelet_proto::beelet::events_client::EventsClient;
use beelet_proto::beelet::garbage_client::GarbageClient;
use beelet_proto::beelet::images_client::ImagesClient;
use beelet_proto::beelet::manifests_client::ManifestsClient;
use beelet_proto::beelet::node_client::NodeClient;
use beelet_proto::beelet::probes_client::ProbesClient;
use beelet_proto::beelet::tuner_client::TunerClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

pub use self::pods::{Event, Pods, Watch};
pub use self::services::{Containers, Devices, Events, Garbage, Images, Manifests, Probes, Tuner};

/// Maximum size of a message, larger than any list of a node's pods.
pub const MAX_MESSAGE: usize = 256 << 20;

/// Keep-alive interval of a silent connection, and the maximum time for its answer. Calls have no deadline of
/// their own, because the agent limits its calls to the runtime.
const ASKED: Duration = Duration::from_secs(5);
const ANSWERS: Duration = Duration::from_secs(10);

/// A connection to a running agent, with a value per service.
#[derive(Debug, Clone)]
pub struct Client {
    /// The agent's pods.
    pub pods: Pods,
    /// The node's devices and resources.
    pub devices: Devices,
    /// The node's events.
    pub events: Events,
    /// The collection of unused images and dead containers.
    pub garbage: Garbage,
    /// The images of the runtime.
    pub images: Images,
    /// The tuner.
    pub tuner: Tuner,
    /// Containers: logs, streams, restarts.
    pub containers: Containers,
    /// The agent's manifest directory.
    pub manifests: Manifests,
    /// The probes of containers.
    pub probes: Probes,
}

/// Reason why the agent gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket.
    #[error(
        "no agent answers at {}: {}; is `beelet run` up? Set `--socket` or `BEELET_SOCKET` if its `runDir` is \
         not the default",
        .path.display(), .error
    )]
    NotRunning {
        /// The socket.
        path: PathBuf,
        /// Error of the connection. The text contains it, so it is not a source, which would be printed
        /// again.
        error: io::Error,
    },
    /// This user may not connect.
    #[error("permission denied for the agent's socket {}: run the command as root", .0.display())]
    Denied(PathBuf),
    /// The agent returned an error.
    #[error("the agent: {}", .0.message())]
    Status(Box<Status>),
    /// The connection ended before the answer.
    #[error(
        "the agent stopped or was restarted before it answered: run the command again (`journalctl -u beelet` has the log)"
    )]
    Gone,
    /// The agent does not answer.
    #[error(
        "the agent does not answer: it hangs, or the machine is overloaded; `systemctl status beelet` shows \
         its process, `journalctl -u beelet` its log"
    )]
    Hangs,
    /// The agent does not implement this call.
    #[error(
        "this agent does not support this command: `beelet observe` only measures \
         (`get pods`, `top` and `tune`); for the rest, use kubectl, or crictl on this machine"
    )]
    NotServed,
    /// The agent sent a malformed pod.
    #[error("cannot parse the agent's pod: {0}; does the agent have another version?")]
    Malformed(JsonError),
}

impl ClientError {
    /// Returns the reason why a container's log cannot be read yet, if the container has not started.
    #[must_use]
    pub fn not_started(&self) -> Option<&str> {
        match self {
            Self::Status(status) if status.code() == Code::FailedPrecondition => Some(status.message()),
            _ => None,
        }
    }

    /// Returns true if the same call may succeed later, after the agent has started or restarted.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::NotRunning { .. } | Self::Gone | Self::Hangs => true,
            Self::Status(status) => matches!(
                status.code(),
                Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Aborted | Code::DeadlineExceeded
            ),
            Self::Denied(_) | Self::Malformed(_) | Self::NotServed => false,
        }
    }
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        // An error from the agent has no source; a transport error has one.
        let mut source = status.source();
        if source.is_none() {
            let is_unknown_call = status.code() == Code::Unimplemented && status.message().is_empty();
            return if is_unknown_call { Self::NotServed } else { Self::Status(Box::new(status)) };
        }
        while let Some(error) = source {
            if error.to_string().contains("timed out") {
                return Self::Hangs;
            }
            source = error.source();
        }
        Self::Gone
    }
}

impl Client {
    /// Connects to the agent's socket at `path`.
    ///
    /// # Errors
    /// No process listens there, or this user may not connect.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let channel = connect(path).await?;
        Ok(Self {
            pods: Pods(NodeClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE)),
            devices: Devices(DevicesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE)),
            events: Events(EventsClient::new(channel.clone())),
            garbage: Garbage(GarbageClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE)),
            images: Images(ImagesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE)),
            tuner: Tuner(TunerClient::new(channel.clone())),
            containers: Containers(ContainersClient::new(channel.clone())),
            probes: Probes(ProbesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE)),
            manifests: Manifests(ManifestsClient::new(channel).max_decoding_message_size(MAX_MESSAGE)),
        })
    }
}

/// Connects to the agent's socket at `path`; every service can use the connection.
pub async fn connect(path: &Path) -> Result<Channel, ClientError> {
    // The transport's own error hides the cause, so a plain connection comes first.
    UnixStream::connect(path).await.map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => ClientError::Denied(path.to_owned()),
        _ => ClientError::NotRunning { path: path.to_owned(), error: source },
    })?;
    let socket = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The connector ignores this address.
    let channel = Endpoint::from_static("http://localhost")
        .http2_keep_alive_interval(ASKED)
        .keep_alive_timeout(ANSWERS)
        .connect_with_connector(connector)
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(channel)
}

#[cfg(test)]
mod tests {
    use beelet_codec::ApiType as _;
    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    #[test]
    fn sentences_have_no_gaps() {
        for error in [ClientError::Hangs, ClientError::NotServed, ClientError::Gone] {
            assert!(!error.to_string().contains("  "), "{error}");
        }
    }

    #[test]
    fn an_agent_that_is_away_may_come_back_and_one_that_refuses_does_not() {
        let path = PathBuf::from("/s");
        for (error, expected) in [
            (ClientError::from(Status::unavailable("it starts")), true),
            (ClientError::from(Status::not_found("no such pod")), false),
            (ClientError::from(Status::unimplemented("")), false),
            (ClientError::Gone, true),
            (ClientError::NotRunning { path: path.clone(), error: io::ErrorKind::NotFound.into() }, true),
            (ClientError::Denied(path), false),
        ] {
            assert_eq!(error.is_transient(), expected, "{error}");
        }
    }

    #[test]
    fn a_cause_is_said_once_when_all_causes_are_printed() {
        let path = PathBuf::from("/s");
        for error in [
            ClientError::from(Status::unavailable("it sleeps")),
            ClientError::NotRunning { path, error: io::ErrorKind::NotFound.into() },
            ClientError::Malformed(Pod::from_json(b"x").unwrap_err()),
        ] {
            let cause = match &error {
                ClientError::Status(status) => status.message().to_owned(),
                ClientError::NotRunning { error, .. } => error.to_string(),
                ClientError::Malformed(error) => error.to_string(),
                _ => continue,
            };
            let printed = format!("{:#}", anyhow::Error::from(error));
            assert_eq!(printed.matches(&cause).count(), 1, "{printed}");
            assert!(!printed.contains("status:"), "{printed}");
        }
    }
}
