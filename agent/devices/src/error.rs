//! Errors of device plugins.

use std::io;
use std::path::PathBuf;

use beelet_model::plugins::RegistrationRefusal;
use beelet_policy::devices::registration::RegistrationError;
use tonic::Status;

use super::plugin::in_words;

/// Error of a device plugin or of plugin registration. Its text is a whole sentence and is also sent to
/// plugins.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plugin has an unsupported API version or an invalid resource name.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// The folder of plugin sockets cannot be created or cleared.
    #[error("cannot prepare the folder {}: {cause}", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// The socket name is invalid.
    #[error("bad endpoint {endpoint:?}: it must be the name of a socket in {}, without '..'", .dir.display())]
    Endpoint {
        /// Name in the registration.
        endpoint: String,
        /// Folder that must contain the socket.
        dir: PathBuf,
    },
    /// The plugin names the agent's own registration socket.
    #[error("bad endpoint: {} is the agent's own socket", .0.display())]
    OwnSocket(PathBuf),
    /// The socket cannot be used.
    #[error("bad socketPath {}: {why}", .path.display())]
    Socket {
        /// Path in the registration.
        path: PathBuf,
        /// Cause.
        why: String,
    },
    /// The socket path is relative.
    #[error("bad socketPath {}, must be an absolute path", .0.display())]
    Relative(PathBuf),
    /// The maximum number of plugins is registered.
    #[error("too many device plugins: {0} are registered")]
    Full(usize),
    /// Another process serves the registration socket, which must not be taken over.
    #[error("another process, probably a kubelet, serves {}: stop it, or set another kubeletDir", .0.display())]
    InUse(PathBuf),
    /// The registration socket cannot be created.
    #[error("{0:#}")]
    Listen(anyhow::Error),
    /// The connection to a plugin failed.
    #[error(transparent)]
    Dial(#[from] beelet_serve::client::DialError),
    /// The handler of another kind of plugin refused the plugin.
    #[error(transparent)]
    Refused(#[from] RegistrationRefusal),
    /// The plugin did not return its options.
    #[error("failed to get device plugin options: {}", in_words(.0))]
    Options(Box<Status>),
    /// The plugin did not return its registration info.
    #[error("{}", in_words(.0))]
    Info(Box<Status>),
    /// The plugin did not return its registration info, or did not accept the notification, in time.
    #[error("the plugin did not answer in time")]
    Silent,
    /// The plugin cannot be notified of its registration.
    #[error("failed to send registration status: {}", in_words(.0))]
    Notification(Box<Status>),
    /// The task that serves the plugin failed.
    #[error("device plugin call was interrupted: {0}")]
    Ended(#[from] tokio::task::JoinError),
    /// The plugin refused the start of a container.
    #[error("device plugin PreStartContainer rpc failed for {resource} with err: {}", in_words(.status))]
    PreStart {
        /// The resource.
        resource: String,
        /// Answer of the plugin.
        status: Box<Status>,
    },
}
