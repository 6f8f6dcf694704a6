//! The agent's side of the helper.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_base::{
    clock::After as _,
    process::{self, Moment},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::{Instant, timeout_at},
};

use crate::{
    plan::Described,
    wire::{self, MAX_REPLY, MAX_REQUEST, Reply, Request},
};

/// Time from the command's timeout to the agent's own: the helper kills the command and replies.
const FAREWELL: Duration = Duration::from_secs(15);

/// Failure to reach the helper.
#[derive(Debug, thiserror::Error)]
#[error("the helper `beelet-exec` does not answer at {socket}: {cause}")]
pub struct Away {
    socket: String,
    cause: String,
}

/// The helper at its socket.
#[derive(Clone, Debug)]
pub struct Helper {
    socket: PathBuf,
}

/// A container that commands can enter.
#[derive(Clone, Debug)]
pub struct Entrance {
    described: Arc<Described>,
    started: Moment,
}

impl Entrance {
    /// Remembers a container's first process, so that a later process with its pid is not taken for it;
    /// `None` if it has ended.
    #[must_use]
    pub fn of(described: Described) -> Option<Self> {
        let first = process::read(Path::new("/proc"), described.pid)?;
        Some(Self { described: Arc::new(described), started: first.started })
    }
}

impl Helper {
    /// Returns the helper that listens at this socket. Opens no connection.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Runs a command in a container. Dropping the future ends the command.
    ///
    /// # Errors
    /// The helper does not run or does not answer.
    pub async fn run(
        &self,
        container: &str,
        entrance: &Entrance,
        command: &[String],
        within: Duration,
    ) -> Result<Reply, Away> {
        let request = Request {
            container: container.to_owned(),
            pid: entrance.described.pid,
            started: entrance.started.0,
            plan: entrance.described.plan.clone(),
            command: command.to_vec(),
            within_ms: u64::try_from(within.as_millis()).unwrap_or(u64::MAX),
        };
        let away = |cause: String| Away { socket: self.socket.display().to_string(), cause };
        let message = wire::encode(&request).map_err(|error| away(error.to_string()))?;
        if message.len() > MAX_REQUEST {
            return Ok(Reply::UseRuntime(format!("its environment and command exceed {MAX_REQUEST} bytes")));
        }
        let deadline = Instant::now().after(within.saturating_add(FAREWELL));
        match timeout_at(deadline, self.exchange(&message)).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(away(error.to_string())),
            Err(_) => Err(away("no reply in time".to_owned())),
        }
    }

    async fn exchange(&self, message: &[u8]) -> std::io::Result<Reply> {
        let mut stream = UnixStream::connect(&self.socket).await?;
        stream.write_all(message).await?;
        let mut head = [0; 4];
        stream.read_exact(&mut head).await?;
        let length = wire::length(head, MAX_REPLY);
        let mut body = vec![0; length.ok_or_else(|| std::io::Error::other("its reply is too long"))?];
        stream.read_exact(&mut body).await?;
        serde_json::from_slice(&body).map_err(std::io::Error::other)
    }
}
