//! Why a device plugin can't be registered or asked.

use std::io;
use std::path::PathBuf;

use beelet_policy::devices::registration::RegistrationError;
use tonic::Status;

use super::plugin::in_words;

/// A failure of a device plugin, or of the places where plugins register. Displayed, it is a whole sentence;
/// plugins are sent it too.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plugin speaks another version, or names no extended resource.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// The folder of plugins' sockets can't be made or cleared.
    #[error("cannot prepare the folder {}: {cause}", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The name of a socket that is none.
    #[error("bad endpoint {endpoint:?}: it must be the name of a socket in {}, without '..'", .dir.display())]
    Endpoint {
        /// As the plugin named it.
        endpoint: String,
        /// The folder that it should be in.
        dir: PathBuf,
    },
    /// A plugin that names the socket at which it registers.
    #[error("bad endpoint: {} is the agent's own socket", .0.display())]
    OwnSocket(PathBuf),
    /// A socket that can't be used.
    #[error("bad socketPath {}: {why}", .path.display())]
    Socket {
        /// As the plugin named it.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A socket without its folders.
    #[error("bad socketPath {}, must be an absolute path", .0.display())]
    Relative(PathBuf),
    /// There is no room for more plugins.
    #[error("{0} device plugins are registered; there is no room for more")]
    Full(usize),
    /// Another process serves the registration socket. It must not be taken away from it.
    #[error("another process, probably a kubelet, serves {}: stop it, or set another kubeletDir", .0.display())]
    InUse(PathBuf),
    /// The registration socket can't be made.
    #[error("{0:#}")]
    Listen(anyhow::Error),
    /// No connection to a plugin.
    #[error(transparent)]
    Dial(#[from] beelet_serve::client::DialError),
    /// A plugin of another kind that could not be taken in.
    #[error("{0}")]
    Refused(String),
    /// A plugin that does not say what it can do.
    #[error("failed to get device plugin options: {}", in_words(.0))]
    Options(Box<Status>),
    /// A plugin that refuses to say what it is.
    #[error("{}", in_words(.0))]
    Info(Box<Status>),
    /// A plugin that does not say what it is in time.
    #[error("it doesn't say what it is")]
    Silent,
    /// The agent's own work on a plugin broke off.
    #[error("asking it ended early: {0}")]
    Ended(#[from] tokio::task::JoinError),
    /// A plugin that does not let a container start.
    #[error("device plugin PreStartContainer rpc failed for {resource} with err: {}", in_words(.status))]
    PreStart {
        /// The resource.
        resource: String,
        /// Its answer.
        status: Box<Status>,
    },
}
