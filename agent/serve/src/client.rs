//! Clients of other people's servers on unix sockets: plugins.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Time that a plugin gets to take a connection: the kubelet's.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// No connection to a plugin.
#[derive(Debug, thiserror::Error)]
#[error("failed to dial plugin at {}: {why}", .socket.display())]
pub struct DialError {
    /// Its socket.
    pub socket: PathBuf,
    /// Why.
    pub why: String,
}

/// A channel to a unix socket. It dials again at the next call after the connection broke.
///
/// # Errors
/// Nobody answers there.
pub async fn dial(socket: &Path) -> Result<Channel, DialError> {
    let path: PathBuf = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // A socket's path is no authority: servers in other languages refuse it too.
    let endpoint = Endpoint::from_static("http://localhost").connect_timeout(CONNECT_TIMEOUT);
    let dialled = tokio::time::timeout(CONNECT_TIMEOUT, endpoint.connect_with_connector(connector)).await;
    let why = match dialled {
        Ok(Ok(channel)) => return Ok(channel),
        Ok(Err(error)) => cause(&error),
        Err(_) => "it didn't answer in time".to_owned(),
    };
    Err(DialError { socket: socket.to_owned(), why })
}

/// The last cause, which is what a person wants to know.
#[must_use]
pub fn cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
