//! An exec probe: the runtime runs a command in the container. Exit code 0 is a success.
//!
//! A probe that times out must not leave its processes in the container: a runtime kills the command that it
//! started, but not the command's children (and may then wait for their output forever). So this module keeps
//! the deadline and ends the whole tree (`stragglers.rs`), and the runtime's own timeout, in whole seconds,
//! is only a fallback.

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

/// Time from the probe's own deadline to the runtime's.
const NET: Duration = Duration::from_secs(2);
/// Maximum wait for the runtime to notice the end of the command. During that time the probe keeps its slot.
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
        door.containers.exec_sync(&id, argv, within.saturating_add(NET)).await
    }));
    let output = match timeout_at(deadline, &mut call).await {
        Ok(Ok(output)) => output,
        Ok(Err(broken)) => return Answer::error(format!("the call to the runtime broke: {broken}")),
        Err(_) => {
            end(runtime, container_id, command, started).await;
            if timeout(FAREWELL, call).await.is_err() {
                warn!(container_id, "the runtime still waits for a killed exec probe");
            }
            return timed_out(command, within);
        }
    };
    match output {
        Ok(output) => {
            // The runtime may return megabytes; keep the same part as of any answer.
            let said: Vec<u8> = output.stdout.into_iter().chain(output.stderr).take(MAX_OUTPUT).collect();
            judge(output.exit_code, &String::from_utf8_lossy(&said))
        }
        Err(error) if error.kind == Kind::Timeout => Answer::failure(error.to_string()),
        // The command could not be started, or the runtime is unavailable: no verdict on the application.
        Err(error) => Answer::error(error.to_string()),
    }
}

/// Judges a command that ended with this exit code and output.
pub(super) fn judge(code: i32, said: &str) -> Answer {
    match code {
        0 => Answer::success(said),
        _ if said.is_empty() => Answer::failure(format!("exit code {code}")),
        _ => Answer::failure(said),
    }
}

/// Returns the failure of a command that was killed after its timeout.
pub(super) fn timed_out(command: &[String], within: Duration) -> Answer {
    Answer::failure(format!("command {command:?} timed out after {} s", within.as_secs_f64()))
}

/// Ends the processes that a probe has started in a container.
async fn end(runtime: &Runtime, container_id: &str, command: &[String], started: Moment) {
    let init = match runtime.containers.pid(container_id).await {
        Ok(Some(pid)) => pid,
        Ok(None) => {
            debug!(
                container_id,
                "the runtime reports no process of the container; it ends the probe's itself"
            );
            return;
        }
        Err(error) => {
            warn!(container_id, %error, "an exec probe timed out, and its processes can't be found");
            return;
        }
    };
    let command = command.to_vec();
    let ended = beelet_base::blocking::spawn_blocking(move || stragglers::end(init, &command, started)).await;
    match ended {
        Ok(Ok(count)) => debug!(container_id, count, "ended the processes of an exec probe"),
        Ok(Err(error)) => warn!(container_id, %error, "processes of an exec probe may be left"),
        Err(error) => warn!(container_id, %error, "processes of an exec probe may be left"),
    }
}
