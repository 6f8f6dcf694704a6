//! Commands in containers, and the processes behind containers.

use std::collections::HashMap;
use std::time::Duration;

use beelet_proto::cri;
use beelet_units::bounds;

use super::{Call, Error, Operation, Runtime, container};

impl Runtime {
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
        let deadline = (seconds > 0).then(|| self.request_timeout.saturating_add(timeout));
        Call { deadline, ..self.call(Operation::ExecSync, container(id)) }
            .runtime(request, |mut client, request| async move { client.exec_sync(request).await })
            .await
    }

    /// Returns the process id, on the host, of a container's first process, from the runtime's verbose status
    /// (containerd and CRI-O have the same). Returns None if the status contains none, or the container
    /// doesn't run.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn container_pid(&self, id: &str) -> Result<Option<u32>, Error> {
        let response = self.container_status(id, true).await?;
        Ok(pid_of(&response.info))
    }
}

/// Returns the process id in the `info` of a verbose status of a container or a sandbox.
#[must_use]
pub fn pid_of(info: &HashMap<String, String>) -> Option<u32> {
    info.get("info").and_then(|info| pid_in(info))
}

/// Returns `pid` from the JSON. 0 means that the process does not exist.
fn pid_in(info: &str) -> Option<u32> {
    // serde skips the other fields, tens of kilobytes.
    #[derive(serde::Deserialize)]
    struct Info {
        pid: u32,
    }
    let info: Info = serde_json::from_str(info).ok()?;
    Some(info.pid).filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_process_is_in_the_verbose_status() {
        assert_eq!(pid_in(r#"{"sandboxID":"s","pid":4711,"removing":false}"#), Some(4711));
        assert_eq!(pid_in(r#"{"pid":0}"#), None);
        assert_eq!(pid_in("not json"), None);
    }
}
