//! The connection to a runtime's unix socket: the first call opens it, and the next call after a break
//! reopens it. A simulation replaces the socket by a connection in memory.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use beelet_base::simulation::Stream;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use super::error::ConnectError;

/// A connection that is being opened.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;

/// Opens a connection to a runtime.
#[derive(Clone)]
pub struct Connect(pub Arc<dyn Fn() -> Connecting + Send + Sync>);

impl fmt::Debug for Connect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connect")
    }
}

impl Connect {
    fn to(path: PathBuf) -> Self {
        Self(Arc::new(move || {
            let path = path.clone();
            Box::pin(async move { Ok(Box::new(UnixStream::connect(&path).await?) as Box<dyn Stream>) })
        }))
    }
}

/// The socket of the runtime, and the channel to it after the first call.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) path: PathBuf,
    connect: Connect,
    // A channel starts a task and so needs an async runtime: the first call creates it.
    channel: OnceLock<Channel>,
}

impl Socket {
    pub(super) fn new(path: PathBuf) -> Self {
        let connect = Connect::to(path.clone());
        Self::over(path, connect)
    }

    /// Returns a socket of this name that is reached by `connect`.
    pub(super) fn over(path: PathBuf, connect: Connect) -> Self {
        Socket { path, connect, channel: OnceLock::new() }
    }

    /// Returns the channel. The channel holds one HTTP/2 connection and replaces a broken one at the next
    /// call. tonic does not wait in between, so the agent is connected again as soon as the runtime is up.
    pub(super) fn channel(&self) -> Channel {
        self.channel.get_or_init(|| self.connect_lazily()).clone()
    }

    fn connect_lazily(&self) -> Channel {
        let (path, connect) = (self.path.clone(), self.connect.clone());
        // Go's server refuses a request with an invalid authority, and a socket's path is not a valid
        // authority.
        let endpoint = Endpoint::from_static("http://localhost");
        endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
            let (path, connecting) = (path.clone(), (connect.0)());
            async move {
                match connecting.await {
                    Ok(stream) => Ok(TokioIo::new(stream)),
                    Err(cause) => Err(ConnectError { path: path.display().to_string(), cause }),
                }
            }
        }))
    }
}

/// Returns the path of the socket from `unix:///path` or `/path`.
pub(super) fn socket_path(endpoint: &str) -> Result<PathBuf, EndpointError> {
    let error = |cause| EndpointError { endpoint: endpoint.to_owned(), cause };
    let path = match endpoint.strip_prefix("unix://") {
        Some(path) => path,
        None if endpoint.contains("://") => return Err(error("only unix sockets are supported")),
        None => endpoint.strip_prefix("unix:").unwrap_or(endpoint),
    };
    if !path.starts_with('/') {
        return Err(error("the path must be absolute"));
    }
    // sockaddr_un has room for 107 bytes and a NUL.
    if path.len() > 107 || path.contains('\0') {
        return Err(error("a unix socket's path has at most 107 bytes"));
    }
    Ok(PathBuf::from(path))
}

/// An endpoint that does not name a unix socket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{endpoint:?} is not a runtime endpoint: {cause}; write it like unix:///run/containerd/containerd.sock"
)]
pub struct EndpointError {
    endpoint: String,
    cause: &'static str,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn check(endpoint: &str, expected: Result<&str, &str>) {
        match (socket_path(endpoint), expected) {
            (Ok(path), Ok(expected)) => assert_eq!(path, Path::new(expected), "{endpoint}"),
            (Err(error), Err(expected)) => assert_eq!(error.cause, expected, "{endpoint}"),
            (got, expected) => panic!("{endpoint}: {got:?}, not {expected:?}"),
        }
    }

    #[test]
    fn an_endpoint_is_a_unix_socket() {
        check("unix:///run/containerd/containerd.sock", Ok("/run/containerd/containerd.sock"));
        check("/run/containerd/containerd.sock", Ok("/run/containerd/containerd.sock"));
        check("unix:/run/c.sock", Ok("/run/c.sock"));
        check("tcp://127.0.0.1:1", Err("only unix sockets are supported"));
        check("npipe:////./pipe/x", Err("only unix sockets are supported"));
        check("run/c.sock", Err("the path must be absolute"));
        check("", Err("the path must be absolute"));
        check(&format!("/{}", "x".repeat(107)), Err("a unix socket's path has at most 107 bytes"));
        check(&format!("/{}", "x".repeat(106)), Ok(&format!("/{}", "x".repeat(106))));
    }
}
