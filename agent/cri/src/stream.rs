//! A command in a container with its streams: Kubernetes' remote command protocol, version 4, over SPDY, with
//! the runtime's streaming server at the address that CRI's `Exec` returns.

use std::io;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::spdy::{self, Frame, HEAD, Writer};

/// The protocol's name.
const PROTOCOL: &str = "v4.channel.k8s.io";
/// The time limit for the streaming server to accept.
const CONNECT: Duration = Duration::from_secs(30);
/// The limit of bytes of the server's first answer.
const ANSWER_MAX: usize = 16 << 10;
/// The limit of bytes of a frame that the server sends; real frames have a few KiB.
const FRAME_MAX: usize = 4 << 20;
/// The limit of bytes of a command's final status.
const STATUS_MAX: usize = 64 << 10;
/// The limit of queued answers to pings.
const PONGS: usize = 16;

/// An input of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Bytes for the standard input.
    Stdin(Vec<u8>),
    /// The end of the standard input.
    StdinClosed,
    /// A new size of the terminal.
    Resize {
        /// The number of characters in a line.
        columns: u32,
        /// The number of lines.
        rows: u32,
    },
}

/// An output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Bytes from the standard output; for a command with a terminal, all its output.
    Stdout(Vec<u8>),
    /// Bytes from the standard error.
    Stderr(Vec<u8>),
    /// The exit code of the command, as the last output.
    Exit(i32),
}

/// The streams that a command has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Standard input.
    pub stdin: bool,
    /// A terminal instead of separate outputs.
    pub tty: bool,
}

/// The reason why a command's streams ended before the command, or why its exit code is unknown. Its text is
/// a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The server's address does not use plain HTTP.
    #[error("the runtime's streaming server is at {0}, but only http:// is supported")]
    Scheme(String),
    /// The server can't be reached.
    #[error("the runtime's streaming server at {host}: {cause}")]
    Server {
        /// The server's address.
        host: String,
        /// The cause.
        cause: io::Error,
    },
    /// The server does not answer.
    #[error("the runtime's streaming server at {host} did not answer within {} s", .after.as_secs())]
    Timeout {
        /// The server's address.
        host: String,
        /// The time that the client waited.
        after: Duration,
    },
    /// The server refuses the command.
    #[error("the runtime's streaming server at {host} {what}")]
    Refused {
        /// The server's address.
        host: String,
        /// The server's behaviour.
        what: String,
    },
    /// The connection broke.
    #[error("the connection to the runtime's streaming server broke: {0}")]
    Broken(io::Error),
    /// The server speaks another protocol.
    #[error("the runtime's streaming server does not speak SPDY/3.1")]
    NotSpdy,
    /// The status is too long.
    #[error("the runtime's status of the command is longer than {} bytes", STATUS_MAX)]
    EndlessStatus,
    /// The status is missing.
    #[error("the runtime ended the streams without a status of the command")]
    NoStatus,
    /// The status is malformed.
    #[error("the runtime's status of the command can't be read: {0}")]
    UnreadableStatus(String),
    /// The runtime could not run the command; the text is the runtime's own.
    #[error("{0}")]
    Command(String),
}

impl StreamError {
    fn server(host: &str, cause: io::Error) -> Self {
        Self::Server { host: host.to_owned(), cause }
    }

    fn refused(host: &str, what: impl Into<String>) -> Self {
        Self::Refused { host: host.to_owned(), what: what.into() }
    }
}

/// Runs the command that the runtime prepared at `url` until it has ended or the receiver of `outputs` is
/// dropped.
///
/// # Errors
/// The server can't be reached, speaks another protocol, or could not start the command.
pub async fn stream(
    url: &str,
    streams: Streams,
    inputs: mpsc::Receiver<Input>,
    outputs: mpsc::Sender<Output>,
) -> Result<(), StreamError> {
    let (socket, rest) = connect(url, PROTOCOL).await?;
    let (from, to) = socket.into_split();
    Session::new(streams).run(io::Cursor::new(rest).chain(from), to, inputs, outputs).await
}

/// Connects to the streaming server at `url` with `protocol` over SPDY; returns the connection and the bytes
/// that the server has sent after its answer.
pub(super) async fn connect(url: &str, protocol: &str) -> Result<(TcpStream, Vec<u8>), StreamError> {
    let address = url.strip_prefix("http://").ok_or_else(|| StreamError::Scheme(url.to_owned()))?;
    let (host, path) = address.split_once('/').unwrap_or((address, ""));
    let failed = |e: io::Error| StreamError::server(host, e);
    let connected = tokio::time::timeout(CONNECT, async {
        let mut socket = TcpStream::connect(host).await.map_err(failed)?;
        socket.set_nodelay(true).map_err(failed)?;
        let rest = upgrade(&mut socket, host, path, protocol).await?;
        Ok((socket, rest))
    });
    let timeout = |_| Err(StreamError::Timeout { host: host.to_owned(), after: CONNECT });
    connected.await.unwrap_or_else(timeout)
}

/// Requests SPDY; returns the bytes that the server has sent after its answer.
async fn upgrade(
    socket: &mut TcpStream,
    host: &str,
    path: &str,
    protocol: &str,
) -> Result<Vec<u8>, StreamError> {
    let failed = |e: io::Error| StreamError::server(host, e);
    let request = format!(
        "POST /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         X-Stream-Protocol-Version: {protocol}\r\nContent-Length: 0\r\n\r\n"
    );
    socket.write_all(request.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    let end = loop {
        if let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if answer.len() > ANSWER_MAX {
            return Err(StreamError::refused(host, "sent too long an answer"));
        }
        if socket.read_buf(&mut answer).await.map_err(failed)? == 0 {
            return Err(StreamError::refused(host, "closed the connection"));
        }
    };
    let rest = answer.split_off(end);
    let head = String::from_utf8_lossy(&answer).into_owned();
    let status = head.split(' ').nth(1).unwrap_or_default();
    if status != "101" {
        let line = head.lines().next().unwrap_or_default();
        return Err(StreamError::refused(host, format!("refused the request: {line}")));
    }
    Ok(rest)
}

/// The numbers of a command's streams.
pub struct Session {
    opening: Vec<u8>,
    error: u32,
    stdin: Option<u32>,
    stdout: u32,
    stderr: Option<u32>,
    resize: Option<u32>,
}

impl Session {
    /// Returns a session that has sent nothing yet.
    pub fn new(streams: Streams) -> Self {
        let mut writer = Writer::default();
        let mut opening = Vec::new();
        let mut open = |kind: &str| {
            let (stream, frame) = writer.open(&[("streamType", kind)]);
            opening.extend(frame);
            stream
        };
        let error = open("error");
        let stdin = streams.stdin.then(|| open("stdin"));
        let stdout = open("stdout");
        let stderr = (!streams.tty).then(|| open("stderr"));
        let resize = streams.tty.then(|| open("resize"));
        Self { opening, error, stdin, stdout, stderr, resize }
    }

    async fn run(
        self,
        from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        mut inputs: mpsc::Receiver<Input>,
        outputs: mpsc::Sender<Output>,
    ) -> Result<(), StreamError> {
        let failed = StreamError::Broken;
        to.write_all(&self.opening).await.map_err(failed)?;
        let (pongs, mut pinged) = mpsc::channel::<Vec<u8>>(PONGS);
        let writing = async {
            let mut open = true;
            loop {
                let frames = tokio::select! {
                    input = inputs.recv(), if open => {
                        open = input.is_some();
                        // A client that has dropped its sender sends no more input, but may still read.
                        self.frames(input.unwrap_or(Input::StdinClosed))
                    }
                    ping = pinged.recv() => spdy::pong(&ping.unwrap_or_default()),
                };
                to.write_all(&frames).await?;
            }
        };
        let listener = outputs.clone();
        tokio::select! {
            read = self.read(from, &outputs, &pongs) => read,
            broken = writing => {
                let broken: io::Result<()> = broken;
                broken.map_err(failed)
            }
            () = listener.closed() => Ok(()),
        }
    }

    /// Returns the frames of an input; empty if the command lacks the input's stream.
    fn frames(&self, input: Input) -> Vec<u8> {
        match (input, self.stdin, self.resize) {
            (Input::Stdin(bytes), Some(stdin), _) if !bytes.is_empty() => spdy::data(stdin, &bytes, false),
            (Input::StdinClosed, Some(stdin), _) => spdy::data(stdin, &[], true),
            (Input::Resize { columns, rows }, _, Some(resize)) => {
                let size = serde_json::json!({ "Width": columns, "Height": rows });
                spdy::data(resize, format!("{size}\n").as_bytes(), false)
            }
            _ => Vec::new(),
        }
    }

    /// Reads frames until the other side ends the streams or sends an invalid frame.
    ///
    /// # Errors
    /// The connection broke, or the other side sent no exit code.
    pub async fn read(
        &self,
        mut from: impl AsyncRead + Unpin,
        outputs: &mpsc::Sender<Output>,
        pongs: &mpsc::Sender<Vec<u8>>,
    ) -> Result<(), StreamError> {
        let mut status = Vec::new();
        while let Some(frame) = next(&mut from).await? {
            let output = match frame {
                Frame::Data { stream, bytes, last } if stream == self.error => {
                    status.extend(bytes);
                    if status.len() > STATUS_MAX {
                        return Err(StreamError::EndlessStatus);
                    }
                    if !last {
                        continue;
                    }
                    break;
                }
                Frame::Data { stream, bytes, .. } if stream == self.stdout => Output::Stdout(bytes),
                Frame::Data { stream, bytes, .. } if Some(stream) == self.stderr => Output::Stderr(bytes),
                Frame::Ping(payload) => {
                    // When the queue is full, a further ping stays without an answer.
                    let _ = pongs.try_send(payload);
                    continue;
                }
                Frame::Reset { stream } if stream == self.error => break,
                Frame::GoAway => break,
                Frame::Data { .. } | Frame::Reset { .. } | Frame::Other => continue,
            };
            let empty = matches!(&output, Output::Stdout(bytes) | Output::Stderr(bytes) if bytes.is_empty());
            if !empty && outputs.send(output).await.is_err() {
                return Ok(());
            }
        }
        let code = exit_code(&status)?;
        // The receiver may have been dropped, which does not matter here.
        let _ = outputs.send(Output::Exit(code)).await;
        Ok(())
    }
}

/// Returns the next frame; None at the end.
pub(super) async fn next(from: &mut (impl AsyncRead + Unpin)) -> Result<Option<Frame>, StreamError> {
    let mut head = [0; HEAD];
    match from.read_exact(&mut head).await {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(StreamError::Broken(e)),
    }
    let head = spdy::head(head);
    if head.length > FRAME_MAX {
        return Err(StreamError::NotSpdy);
    }
    let mut bytes = vec![0; head.length];
    from.read_exact(&mut bytes).await.map_err(StreamError::Broken)?;
    Ok(Some(spdy::frame(head, bytes)))
}

/// The fields of a `metav1.Status` that contain the end of a command.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    status: String,
    message: String,
    reason: String,
    details: Details,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    causes: Vec<Cause>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Cause {
    reason: String,
    message: String,
}

fn exit_code(status: &[u8]) -> Result<i32, StreamError> {
    if status.is_empty() {
        return Err(StreamError::NoStatus);
    }
    let unreadable = || StreamError::UnreadableStatus(String::from_utf8_lossy(status).into_owned());
    let status: Status = serde_json::from_slice(status).map_err(|_| unreadable())?;
    if status.status == "Success" {
        return Ok(0);
    }
    let code = status.details.causes.iter().find(|cause| cause.reason == "ExitCode");
    match code.and_then(|cause| cause.message.parse().ok()) {
        Some(code) if status.reason == "NonZeroExitCode" => Ok(code),
        _ => Err(StreamError::Command(status.message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_contains_the_exit_code_of_a_command() {
        let check = |status: &str, expected: Result<i32, &str>| match (exit_code(status.as_bytes()), expected)
        {
            (Ok(code), Ok(expected)) => assert_eq!(code, expected, "{status}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, _) => panic!("{status}: {got:?}"),
        };
        check(r#"{"metadata":{},"status":"Success"}"#, Ok(0));
        check(
            r#"{"status":"Failure","message":"command terminated","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"3"}]}}"#,
            Ok(3),
        );
        check(r#"{"status":"Failure","message":"no such file"}"#, Err("no such file"));
        check("", Err("without a status"));
        check("what?", Err("can't be read: what?"));
    }

    /// Runs a session with a server that sends `answer` and then hangs up; returns the result, the outputs
    /// and the bytes that the server received.
    async fn session(
        streams: Streams,
        inputs: Vec<Input>,
        answer: Vec<u8>,
    ) -> (Result<(), StreamError>, Vec<Output>, Vec<u8>) {
        let (input, inputs_out) = mpsc::channel(8);
        for one in inputs {
            input.send(one).await.unwrap();
        }
        let (outputs, mut received) = mpsc::channel(8);
        let (client, mut server) = tokio::io::duplex(1 << 20);
        let serving = tokio::spawn(async move {
            let mut got = Vec::new();
            // The server reads everything from the client before its answer ends the session.
            while !got.ends_with(&spdy::data(3, &[], true)) && server.read_buf(&mut got).await.unwrap() > 0 {}
            server.write_all(&answer).await.unwrap();
            got
        });
        let (from, to) = tokio::io::split(client);
        let done = Session::new(streams).run(from, to, inputs_out, outputs).await;
        drop(input);
        let mut all = Vec::new();
        while let Some(output) = received.recv().await {
            all.push(output);
        }
        (done, all, serving.await.unwrap())
    }

    #[tokio::test]
    async fn a_commands_streams_and_its_exit_code() {
        let status = br#"{"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#;
        let mut answer = spdy::pong(&[0, 0, 0, 2]);
        answer.extend(spdy::data(5, b"out", false));
        answer.extend(spdy::data(7, b"err", false));
        answer.extend(spdy::data(5, b"", true));
        answer.extend(spdy::data(1, status, true));
        let inputs =
            vec![Input::Stdin(b"in".to_vec()), Input::Resize { columns: 80, rows: 24 }, Input::StdinClosed];
        let (done, outputs, got) = session(Streams { stdin: true, tty: false }, inputs, answer).await;
        done.unwrap();
        let expected = [Output::Stdout(b"out".to_vec()), Output::Stderr(b"err".to_vec()), Output::Exit(7)];
        assert_eq!(outputs, expected);
        let end = [spdy::data(3, b"in", false), spdy::data(3, b"", true)].concat();
        assert!(got.ends_with(&end), "{got:?}");
    }

    #[tokio::test]
    async fn a_server_that_hangs_up_is_an_error() {
        let inputs = vec![Input::StdinClosed];
        let (done, outputs, _) =
            session(Streams { stdin: true, tty: true }, inputs, spdy::data(5, b"x", false)).await;
        assert!(matches!(done, Err(StreamError::NoStatus)), "{done:?}");
        assert_eq!(outputs, [Output::Stdout(b"x".to_vec())]);
    }
}
