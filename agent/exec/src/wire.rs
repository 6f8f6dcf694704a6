//! Messages between the agent and the helper: a length (32 bits, little endian), then JSON. A connection
//! carries one request and its reply.

use serde::{Deserialize, Serialize};

use crate::plan::Plan;

/// Maximum length of a request, in bytes: mostly the container's environment.
pub(crate) const MAX_REQUEST: usize = 4 << 20;
/// Maximum length of a reply, in bytes.
pub(crate) const MAX_REPLY: usize = 256 << 10;
/// Maximum bytes to keep of each of a command's two output streams (`maxRespBodyLength` in the kubelet's
/// pkg/probe). The helper reads and drops the rest.
pub(crate) const MAX_OUTPUT: usize = 10 << 10;

/// A command to run in a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The runtime's id of the container, a part of its cgroups' names.
    pub container: String,
    /// Pid of the container's first process, on the machine.
    pub pid: u32,
    /// Start time of that process, in clock ticks since boot.
    pub started: u64,
    /// Identity of the command's process.
    pub plan: Plan,
    /// The command with its arguments.
    pub command: Vec<String>,
    /// Time after which the command and its descendants are killed, in milliseconds.
    pub within_ms: u64,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The command ended by itself.
    Ended {
        /// Exit code; 128 plus the number of the signal that killed the command.
        code: i32,
        /// Start of the standard output.
        stdout: String,
        /// Start of the standard error output.
        stderr: String,
    },
    /// The command was killed with its descendants after the timeout.
    TimedOut,
    /// The container does not run any more.
    Gone,
    /// The command could not be started, as under the runtime: a missing program, too many processes.
    NotStarted(String),
    /// Only the runtime can run this container's commands.
    UseRuntime(String),
}

/// Returns a message with its length.
pub(crate) fn encode(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    Ok([length.to_le_bytes().as_slice(), &body].concat())
}

/// Returns the length of a message's body, if it is within `most`.
pub(crate) fn length(head: [u8; 4], most: usize) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(head)).ok().filter(|length| *length <= most)
}
