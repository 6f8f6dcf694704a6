//! Commands of other parts to the probes, and their results.

use std::time::Duration;

use beelet_policy::probe::{Outcome, ProbeKind, ProbeResult};
use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot};

/// Maximum number of queued commands. Further ones are refused.
const COMMANDS: usize = 16;

/// A command to the probes.
#[derive(Debug)]
pub enum Command {
    /// Lists every probe.
    List(oneshot::Sender<Vec<ProbeView>>),
    /// Runs a probe once, at once.
    Run {
        /// The probe.
        wanted: Wanted,
        /// Receiver of the result.
        reply: oneshot::Sender<Result<Explained, AskError>>,
    },
}

/// Identification of a probe.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The pod's namespace; empty for any.
    pub namespace: String,
    /// The pod's name; may omit the `-NODE` suffix of static pods.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The kind.
    pub kind: ProbeKind,
}

/// The receiving end of [`Handle`].
pub type Commands = mpsc::Receiver<Command>;

/// Sends commands to the probes.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
}

/// Failure of a command to the probes: a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// No probe matches, or more than one.
    #[error("{0}")]
    NotFound(String),
    /// The probes don't run, or are overloaded.
    #[error("the agent's probes don't answer: it is starting, stopping or overloaded; try again")]
    Unavailable,
}

/// Returns both ends of the channel to the probes.
#[must_use]
pub fn handle() -> (Handle, Commands) {
    let (sender, receiver) = mpsc::channel(COMMANDS);
    (Handle { commands: sender }, receiver)
}

/// Timeout of a list of the probes.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);

impl Handle {
    /// Lists every probe.
    ///
    /// # Errors
    /// The probes don't run.
    pub async fn list(&self) -> Result<Vec<ProbeView>, AskError> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::List(reply))?;
        match tokio::time::timeout(TAKEN_WITHIN, answer).await {
            Ok(Ok(list)) => Ok(list),
            _ => Err(AskError::Unavailable),
        }
    }

    /// Runs a probe once, at once. Takes as long as the probe does.
    ///
    /// # Errors
    /// No probe matches, or the probes don't run.
    pub async fn run(&self, wanted: Wanted) -> Result<Explained, AskError> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Run { wanted, reply })?;
        answer.await.unwrap_or(Err(AskError::Unavailable))
    }

    fn send(&self, command: Command) -> Result<(), AskError> {
        self.commands.try_send(command).map_err(|_| AskError::Unavailable)
    }
}

/// A probe as shown to the user.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeView {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The kind.
    pub kind: ProbeKind,
    /// Target of the probe.
    pub target: String,
    /// Mode: `kernel`, `sock_diag`, `connect`, `http`, `https`, `h2c`, `grpc`, `exec` or `direct` (a command
    /// that the helper runs).
    pub mode: &'static str,
    /// Reason why the kernel doesn't answer or the helper doesn't run the command, if it should.
    pub fallback: Option<String>,
    /// Result of the probe.
    pub result: ProbeResult,
    /// Time of the result's last change.
    pub since: Option<Timestamp>,
    /// The last check.
    pub last: Option<CheckView>,
    /// Time between two checks.
    pub period: Duration,
    /// Timeout of an answer.
    pub timeout: Duration,
    /// Reason why results don't count at present.
    pub held: Option<String>,
    /// Invalid annotations of the pod.
    pub problems: Vec<String>,
    /// Checks of a stalled listener that count as successes.
    pub tolerated: Option<ToleratedView>,
}

/// Checks that a stricter rule (`stalled=fail`) would have failed, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToleratedView {
    /// Number of these checks.
    pub checks: u64,
    /// Number of times that `failureThreshold` of these checks occurred in a row.
    pub failures: u64,
    /// Time of the most recent one.
    pub last: Timestamp,
}

/// A check as shown to the user.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckView {
    /// Outcome of the check.
    pub outcome: Outcome,
    /// Details of the outcome.
    pub detail: String,
    /// Duration of the check.
    pub latency: Duration,
    /// Time of the check.
    pub at: Timestamp,
}

/// A check with its explanation.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The probe before the check.
    pub probe: ProbeView,
    /// Result of the check.
    pub check: CheckView,
    /// The steps and their results, in order.
    pub explanation: Vec<String>,
}
