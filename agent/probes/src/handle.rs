//! The questions that other parts ask of the probes, and their answers.

use std::time::Duration;

use beelet_policy::probe::{Outcome, ProbeKind, ProbeResult};
use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot};

/// Commands under way to the probes. More are refused.
const COMMANDS: usize = 16;

/// What can be asked of the probes.
#[derive(Debug)]
pub enum Command {
    /// Every probe.
    List(oneshot::Sender<Vec<ProbeView>>),
    /// One look, now.
    Run {
        /// Of which container.
        wanted: Wanted,
        /// The answer, or why there is none.
        reply: oneshot::Sender<Result<Explained, AskError>>,
    },
}

/// Which probe.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The pod's namespace; empty for any.
    pub namespace: String,
    /// The pod's name, with or without the node's behind it.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The kind.
    pub kind: ProbeKind,
}

/// The receiving end of [`Handle`].
pub type Commands = mpsc::Receiver<Command>;

/// Asks the probes.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
}

/// Why a question to the probes has no answer: a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// There is no such probe, or more than one.
    #[error("{0}")]
    NotFound(String),
    /// The probes don't run, or have too much to do.
    #[error("the agent's probes don't answer: it is starting, stopping or overloaded; try again")]
    Unavailable,
}

/// Both ends of the line to the probes.
#[must_use]
pub fn handle() -> (Handle, Commands) {
    let (sender, receiver) = mpsc::channel(COMMANDS);
    (Handle { commands: sender }, receiver)
}

/// How long a question may wait until the probes take it.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);

impl Handle {
    /// Every probe.
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

    /// One look, now. Takes as long as the probe does.
    ///
    /// # Errors
    /// There is no such probe, or the probes don't run.
    pub async fn run(&self, wanted: Wanted) -> Result<Explained, AskError> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Run { wanted, reply })?;
        answer.await.unwrap_or(Err(AskError::Unavailable))
    }

    fn send(&self, command: Command) -> Result<(), AskError> {
        self.commands.try_send(command).map_err(|_| AskError::Unavailable)
    }
}

/// A probe, for people.
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
    /// What is looked at.
    pub target: String,
    /// How: `kernel`, `sock_diag`, `connect`, `http`, `https`, `grpc` or `exec`.
    pub mode: &'static str,
    /// Why the kernel doesn't answer, where it was to.
    pub fallback: Option<String>,
    /// What it says of the container.
    pub result: ProbeResult,
    /// Since when.
    pub since: Option<Timestamp>,
    /// The last look.
    pub last: Option<LookView>,
    /// Time between two looks.
    pub period: Duration,
    /// The longest wait for an answer.
    pub timeout: Duration,
    /// Why nothing counts at present.
    pub held: Option<String>,
    /// What of the pod's annotations can't be read.
    pub problems: Vec<String>,
    /// Looks at a stalled listener that count as successes.
    pub tolerated: Option<ToleratedView>,
}

/// Looks that a stricter rule (`stalled=fail`) would have failed, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToleratedView {
    /// Looks.
    pub looks: u64,
    /// Times that `failureThreshold` such looks came in a row.
    pub failures: u64,
    /// The time of the last one.
    pub last: Timestamp,
}

/// A look, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct LookView {
    /// How it ended.
    pub outcome: Outcome,
    /// What it found.
    pub detail: String,
    /// How long it took.
    pub latency: Duration,
    /// When.
    pub at: Timestamp,
}

/// One look, with all that led to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The probe as it was before.
    pub probe: ProbeView,
    /// What was found.
    pub look: LookView,
    /// The questions and their answers, in order.
    pub explanation: Vec<String>,
}
