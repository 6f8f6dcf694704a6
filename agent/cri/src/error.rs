//! The errors between the agent and the container runtime. Each is a sentence for the person who repairs the
//! node: the operation, its object, the cause and the remedy.

use std::error::Error as _;
use std::fmt;
use std::io;
use std::time::Duration;

use tonic::{Code, Status};

use super::operation::Operation;

/// The length limit of a runtime's text that an error quotes, in characters.
const MAX_QUOTE: usize = 1000;

/// The kind of a failure: the only field that a caller may base a decision on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The runtime can't be reached, or the connection broke before it answered. The runtime may have carried
    /// out the operation: the caller must read the state before it repeats the call.
    Unavailable,
    /// The runtime did not answer within the deadline, but may still carry out the operation.
    Timeout,
    /// The runtime doesn't know the sandbox, container or image.
    NotFound,
    /// The runtime has a sandbox, container or image of that name already.
    AlreadyExists,
    /// The runtime lacks the call.
    Unimplemented,
    /// Any other error that the runtime returns.
    Other,
}

/// A call to the runtime that failed. Displayed, it is a whole sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The operation that failed.
    pub operation: Operation,
    /// The object of the operation: "container web of pod default/web", "image busybox:1.36"; empty if the
    /// call concerns the runtime itself.
    pub subject: String,
    /// The kind of the failure.
    pub kind: Kind,
    /// The cause, and the remedy where there is one.
    pub message: String,
    /// The error as a kubelet prints it, for answers that programs parse: `rpc error: code = … desc = …`.
    pub rpc: String,
}

impl Error {
    /// Returns true if the runtime couldn't be reached or didn't answer in time, so the same call may succeed
    /// later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, Kind::Unavailable | Kind::Timeout)
    }

    /// Returns true if the runtime doesn't know the sandbox, container or image.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.kind == Kind::NotFound
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.operation.phrase())?;
        if !self.subject.is_empty() {
            write!(f, " {}", self.subject)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for Error {}

/// The reason why the connector could not connect to the runtime's socket. [`Failure::from_status`] finds it
/// by its type in the chain of causes that tonic returns.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {path}: {cause}")]
pub(super) struct ConnectError {
    pub(super) path: String,
    #[source]
    pub(super) cause: io::Error,
}

/// A failed attempt, before it becomes an [`Error`].
pub(super) enum Failure {
    /// The runtime did not answer in time.
    Deadline(Duration),
    /// The socket does not exist, or no process listens on it.
    Connect { cause: String, permission: bool },
    /// The connection existed and broke.
    Broken(String),
    /// The runtime answered with an error.
    Answer(Status),
}

impl Failure {
    pub(super) fn from_status(status: Status) -> Self {
        // Only a failure on our side of the connection has a source; an answer of the runtime has none.
        let Some(source) = status.source() else { return Failure::Answer(status) };
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(source);
        let mut innermost = source.to_string();
        while let Some(error) = cause {
            if let Some(connect) = error.downcast_ref::<ConnectError>() {
                let permission = connect.cause.kind() == io::ErrorKind::PermissionDenied;
                return Failure::Connect { cause: connect.cause.to_string(), permission };
            }
            innermost = error.to_string();
            cause = error.source();
        }
        Failure::Broken(innermost)
    }

    /// Returns true if the connection broke, so a new connection may help at once.
    pub(super) fn is_broken_connection(&self) -> bool {
        matches!(self, Failure::Broken(_))
    }

    /// Returns the error as Go's gRPC prints it.
    pub(super) fn rpc(&self) -> String {
        let (code, text) = match self {
            Failure::Deadline(_) => (Code::DeadlineExceeded, "context deadline exceeded".to_owned()),
            Failure::Connect { cause, .. } | Failure::Broken(cause) => (Code::Unavailable, quote(cause)),
            Failure::Answer(status) => (status.code(), quote(status.message())),
        };
        let code = if code == Code::Cancelled { "Canceled".to_owned() } else { format!("{code:?}") };
        format!("rpc error: code = {code} desc = {text}")
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Failure::Deadline(_) => Kind::Timeout,
            Failure::Connect { .. } | Failure::Broken(_) => Kind::Unavailable,
            Failure::Answer(status) => match status.code() {
                Code::Unavailable => Kind::Unavailable,
                Code::DeadlineExceeded => Kind::Timeout,
                Code::NotFound => Kind::NotFound,
                Code::AlreadyExists => Kind::AlreadyExists,
                Code::Unimplemented => Kind::Unimplemented,
                _ => Kind::Other,
            },
        }
    }

    /// Returns the cause and the remedy. `endpoint` is the runtime's socket.
    pub(super) fn message(&self, endpoint: &str) -> String {
        match self {
            Failure::Deadline(after) => format!(
                "the container runtime at {endpoint} did not answer within {after:?}; read its log for the \
                 cause, or raise runtimeRequestTimeout"
            ),
            Failure::Connect { permission: true, .. } => {
                format!("no permission to open the container runtime's socket {endpoint}; run beelet as root")
            }
            Failure::Connect { cause, .. } => format!(
                "the container runtime at {endpoint} can't be reached: {cause}; start it, or set \
                 containerRuntimeEndpoint to its socket"
            ),
            Failure::Broken(cause) => format!(
                "the connection to the container runtime at {endpoint} broke: {}; the runtime may be restarting",
                quote(cause)
            ),
            Failure::Answer(status) => answer(status, endpoint),
        }
    }
}

fn answer(status: &Status, endpoint: &str) -> String {
    let said = match without_ids(&quote(status.message())) {
        said if said.is_empty() => {
            format!("the container runtime answered {:?} without a message", status.code())
        }
        said => match sandbox_image(&said) {
            Some(image) => {
                format!(
                    "the image for sandboxes, {image}, is not on the node; import it with `beelet images \
                     import` ({said})"
                )
            }
            None => said,
        },
    };
    match status.code() {
        Code::Unimplemented => format!(
            "the container runtime at {endpoint} does not have this call ({said}); beelet needs CRI v1 \
             (containerd 1.6 or newer), with the CRI plugin enabled"
        ),
        Code::OutOfRange | Code::ResourceExhausted => format!(
            "{said} (the answer of the container runtime at {endpoint} may exceed {} MiB; remove dead \
             containers and unused images)",
            super::MAX_MESSAGE >> 20
        ),
        _ => said,
    }
}

/// Returns the name of the sandbox image if `said` reports that the runtime lacks it.
fn sandbox_image(said: &str) -> Option<&str> {
    let (image, why) = said.split_once("failed to get sandbox image \"")?.1.split_once('"')?;
    why.contains("failed to pull image").then_some(image)
}

/// Returns the text without the identifiers of sandboxes and commands that the runtime failed to create: they
/// identify nothing, and with them each attempt would be a separate event.
fn without_ids(said: &str) -> String {
    /// The number of hexadecimal digits of an identifier of containerd.
    const ID: usize = 64;
    let mut text = String::with_capacity(said.len());
    let mut rest = said;
    while let Some((before, after)) = rest.split_once(" \"") {
        text.push_str(before);
        let is_failed = before.ends_with("sandbox") || before.ends_with("exec");
        let id = after
            .split_once('"')
            .filter(|(id, _)| is_failed && id.len() == ID && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
        rest = match id {
            Some((_, rest)) => rest,
            None => {
                text.push_str(" \"");
                after
            }
        };
    }
    text + rest
}

/// Returns a text of another program as a single line of limited length.
fn quote(text: &str) -> String {
    let mut line: String =
        text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_QUOTE).collect();
    if text.trim().chars().nth(MAX_QUOTE).is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(failure: &Failure) -> String {
        let (kind, message, rpc) = (failure.kind(), failure.message("/run/x.sock"), failure.rpc());
        Error { operation: Operation::StartContainer, subject: "container web".into(), kind, message, rpc }
            .to_string()
    }

    #[test]
    fn a_missing_sandbox_image_is_named_first_and_every_attempt_has_the_same_message() {
        let said = |id: char| {
            let id = String::from(id).repeat(64);
            format!(
                "failed to start sandbox \"{id}\": failed to get sandbox image \"pause:3.10\": failed to pull \
                 image \"pause:3.10\": failed to resolve image: connection refused"
            )
        };
        let expected = "cannot start container web: the image for sandboxes, pause:3.10, is not on the node; \
                        import it with `beelet images import` (failed to start sandbox: failed to get sandbox \
                        image \"pause:3.10\": failed to pull image \"pause:3.10\": failed to resolve image: \
                        connection refused)";
        for id in ['a', '5'] {
            check_answer(Code::Unknown, &said(id), Kind::Other, expected);
        }
    }

    #[test]
    fn only_identifiers_of_failed_creations_are_removed() {
        let id = "0d87c6c6b3ff08d7".repeat(4);
        let check = |text: &str, expected: &str| {
            assert_eq!(without_ids(&text.replace("ID", &id)), expected.replace("ID", &id));
        };
        check("network for sandbox \"ID\": no address", "network for sandbox: no address");
        check("failed to start exec \"ID\": \"x\" not found", "failed to start exec: \"x\" not found");
        check("container \"ID\" not found", "container \"ID\" not found");
        check("sandbox \"web\" and sandbox \"ID", "sandbox \"web\" and sandbox \"ID");
        check("", "");
    }

    fn check_answer(code: Code, text: &str, kind: Kind, expected: &str) {
        let failure = Failure::from_status(Status::new(code, text));
        assert_eq!(failure.kind(), kind, "{code:?}");
        assert!(error(&failure).contains(expected), "{}", error(&failure));
    }

    #[test]
    fn an_answer_of_the_runtime_becomes_a_kind_and_a_sentence() {
        check_answer(Code::NotFound, "no such id", Kind::NotFound, "cannot start container web: no such id");
        check_answer(Code::AlreadyExists, "name is reserved", Kind::AlreadyExists, "name is reserved");
        check_answer(Code::Unavailable, "closing", Kind::Unavailable, "closing");
        check_answer(Code::DeadlineExceeded, "slow", Kind::Timeout, "slow");
        check_answer(Code::Unknown, "", Kind::Other, "answered Unknown without a message");
        check_answer(Code::Unimplemented, "unknown service", Kind::Unimplemented, "CRI plugin enabled");
        check_answer(Code::OutOfRange, "too large", Kind::Other, "16 MiB");
        check_answer(Code::Internal, "two\nlines\u{1b}[31m", Kind::Other, "two lines [31m");
    }

    #[test]
    fn a_long_answer_is_cut() {
        let long = "é".repeat(5000);
        let text = Failure::from_status(Status::unknown(long)).message("x");
        assert_eq!(text.chars().count(), MAX_QUOTE + 1);
    }

    #[test]
    fn a_deadline_names_the_setting_that_raises_it() {
        let text = error(&Failure::Deadline(Duration::from_secs(120)));
        assert!(text.contains("within 120s") && text.contains("runtimeRequestTimeout"), "{text}");
    }
}
