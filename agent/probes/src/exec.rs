//! One exec probe: a command in the container, by the runtime. Exit code 0 is a success.
//!
//! A probe that is out of time must not leave its processes in the container: a runtime kills the command it
//! started, but not what that has started (and may then wait for their output for ever). So the deadline is
//! kept here, the whole tree is ended here (`stragglers.rs`), and the runtime's own timeout, in whole
//! seconds, is the net below.

use std::time::Duration;

use beelet_base::clock::After as _;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use super::{
    answer::{Answer, MAX_OUTPUT},
    stragglers,
};
use beelet_base::process::Moment;
use beelet_cri::{Kind, Runtime};

/// How much later than the probe's own deadline the runtime gives up.
const NET: Duration = Duration::from_secs(2);
/// How long the runtime may take to notice that the command it waits for is dead. Meanwhile the probe keeps
/// its slot.
const FAREWELL: Duration = Duration::from_secs(10);

/// Runs `command` in a container.
pub(super) async fn run(
    runtime: &Runtime,
    container_id: &str,
    command: &[String],
    within: Duration,
) -> Answer {
    let (started, deadline) = (Moment::now(), Instant::now().after(within));
    let (door, id, argv) = (runtime.clone(), container_id.to_owned(), command.to_vec());
    let mut call = AbortOnDropHandle::new(tokio::spawn(async move {
        door.exec_sync(&id, argv, within.saturating_add(NET)).await
    }));
    let output = match timeout_at(deadline, &mut call).await {
        Ok(Ok(output)) => output,
        Ok(Err(broken)) => return Answer::error(format!("the call to the runtime broke: {broken}")),
        Err(_) => {
            end(runtime, container_id, command, started).await;
            if timeout(FAREWELL, call).await.is_err() {
                warn!(container_id, "the runtime still waits for an exec probe that was ended");
            }
            return Answer::failure(format!(
                "command {command:?} timed out after {} s",
                within.as_secs_f64()
            ));
        }
    };
    match output {
        Ok(output) => {
            // The runtime hands on megabytes; the same part is kept as of any answer.
            let said: Vec<u8> = output.stdout.into_iter().chain(output.stderr).take(MAX_OUTPUT).collect();
            let said = String::from_utf8_lossy(&said).into_owned();
            match output.exit_code {
                0 => Answer::success(said),
                _ if said.is_empty() => Answer::failure(format!("exit code {}", output.exit_code)),
                _ => Answer::failure(said),
            }
        }
        Err(error) if error.kind == Kind::Timeout => Answer::failure(error.to_string()),
        // The command could not be started, or the runtime is away: nothing about the application.
        Err(error) => Answer::error(error.to_string()),
    }
}

/// Ends what a probe has started in a container.
async fn end(runtime: &Runtime, container_id: &str, command: &[String], started: Moment) {
    let init = match runtime.container_pid(container_id).await {
        Ok(Some(pid)) => pid,
        Ok(None) => {
            debug!(container_id, "the runtime names no process of the container; it ends the probe's itself");
            return;
        }
        Err(error) => {
            warn!(container_id, %error, "an exec probe is out of time, and its processes can't be found");
            return;
        }
    };
    let command = command.to_vec();
    let ended = tokio::task::spawn_blocking(move || stragglers::end(init, &command, started)).await;
    match ended {
        Ok(Ok(count)) => debug!(container_id, count, "ended the processes of an exec probe"),
        Ok(Err(error)) => warn!(container_id, %error, "processes of an exec probe may be left"),
        Err(error) => warn!(container_id, %error, "processes of an exec probe may be left"),
    }
}
