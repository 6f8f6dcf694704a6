//! A connection to a port of a pod: Kubernetes' port forwarding protocol over SPDY, with the
//! runtime's streaming server at the address that CRI's `PortForward` returns.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::spdy::{self, Frame, Writer};
use super::stream::{StreamError, connect, next};

/// The protocol's name.
const PROTOCOL: &str = "portforward.k8s.io";
/// The limit of bytes of the server's error message.
const ERROR_MAX: usize = 16 << 10;
/// The time in which a server that has ended the data may still send an error: when a connection is refused,
/// containerd ends the data before it writes the error.
const LAST_WORD: Duration = Duration::from_millis(500);
/// The limit of queued answers to pings.
const PONGS: usize = 16;

/// Connects the two channels with a port, through the server at `url`, until the other side ends or the
/// receiver of `output` is dropped.
///
/// # Errors
/// The server can't be reached, speaks another protocol, or no process listens on the port.
pub async fn forward(
    url: &str,
    port: u16,
    input: mpsc::Receiver<Vec<u8>>,
    output: mpsc::Sender<Vec<u8>>,
) -> Result<(), StreamError> {
    let (socket, rest) = connect(url, PROTOCOL).await?;
    let (from, to) = socket.into_split();
    Session::new(port).run(io::Cursor::new(rest).chain(from), to, input, output).await
}

/// The numbers of a connection's streams.
struct Session {
    opening: Vec<u8>,
    error: u32,
    data: u32,
}

impl Session {
    fn new(port: u16) -> Self {
        let (mut writer, port) = (Writer::default(), port.to_string());
        let mut open = |kind: &str| writer.open(&[("streamType", kind), ("port", &port), ("requestID", "0")]);
        let ((error, mut opening), (data, frame)) = (open("error"), open("data"));
        opening.extend(frame);
        // Only the server sends errors.
        opening.extend(spdy::data(error, &[], true));
        Self { opening, error, data }
    }

    async fn run(
        self,
        from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        mut input: mpsc::Receiver<Vec<u8>>,
        output: mpsc::Sender<Vec<u8>>,
    ) -> Result<(), StreamError> {
        to.write_all(&self.opening).await.map_err(StreamError::Broken)?;
        let (pongs, mut pinged) = mpsc::channel::<Vec<u8>>(PONGS);
        let data = self.data;
        let writing = async {
            let mut open = true;
            loop {
                let frames = tokio::select! {
                    bytes = input.recv(), if open => match bytes {
                        Some(bytes) if bytes.is_empty() => continue,
                        Some(bytes) => spdy::data(data, &bytes, false),
                        None => {
                            open = false;
                            spdy::data(data, &[], true)
                        }
                    },
                    ping = pinged.recv() => spdy::pong(&ping.unwrap_or_default()),
                };
                to.write_all(&frames).await?;
            }
        };
        let listener = output.clone();
        tokio::select! {
            read = self.read(from, &output, &pongs) => read,
            broken = writing => {
                let broken: io::Result<()> = broken;
                broken.map_err(StreamError::Broken)
            }
            () = listener.closed() => Ok(()),
        }
    }

    /// Reads until the connection has ended or the server has sent an error.
    async fn read(
        &self,
        mut from: impl AsyncRead + Unpin,
        output: &mpsc::Sender<Vec<u8>>,
        pongs: &mpsc::Sender<Vec<u8>>,
    ) -> Result<(), StreamError> {
        let mut error = Vec::new();
        let (mut errors_ended, mut data_ended) = (false, None);
        while let Some(frame) = before(data_ended, next(&mut from)).await? {
            match frame {
                Frame::Data { stream, bytes, last } if stream == self.error => {
                    let room = ERROR_MAX.saturating_sub(error.len());
                    error.extend(bytes.into_iter().take(room));
                    errors_ended |= last;
                    if last && (data_ended.is_some() || !error.is_empty()) {
                        break;
                    }
                }
                Frame::Data { stream, bytes, last } if stream == self.data => {
                    if !bytes.is_empty() && output.send(bytes).await.is_err() || last && errors_ended {
                        break;
                    }
                    if last {
                        data_ended = Some(Instant::now() + LAST_WORD);
                    }
                }
                Frame::Reset { stream } if stream == self.data && errors_ended => break,
                Frame::Reset { stream } if stream == self.data => {
                    data_ended = Some(Instant::now() + LAST_WORD);
                }
                Frame::GoAway => break,
                Frame::Ping(payload) => {
                    // When the queue is full, a further ping stays without an answer.
                    let _ = pongs.try_send(payload);
                }
                Frame::Data { .. } | Frame::Reset { .. } | Frame::Other => {}
            }
        }
        match error.is_empty() {
            true => Ok(()),
            false => Err(StreamError::Command(String::from_utf8_lossy(&error).into_owned())),
        }
    }
}

/// Returns the next frame; None if it does not arrive before `end`.
async fn before(
    end: Option<Instant>,
    frame: impl Future<Output = Result<Option<Frame>, StreamError>>,
) -> Result<Option<Frame>, StreamError> {
    match end {
        Some(end) => timeout_at(end, frame).await.unwrap_or(Ok(None)),
        None => frame.await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a session with a server that sends `answer` and hangs up; returns the result, the received bytes
    /// and the bytes that the server received.
    async fn session(answer: Vec<u8>) -> (Result<(), String>, Vec<u8>, Vec<u8>) {
        let (input, inputs) = mpsc::channel(8);
        input.send(b"hello".to_vec()).await.unwrap();
        let (output, mut outputs) = mpsc::channel(8);
        let (client, mut server) = tokio::io::duplex(1 << 20);
        let serving = tokio::spawn(async move {
            let mut got = Vec::new();
            while !got.ends_with(&spdy::data(3, b"hello", false))
                && server.read_buf(&mut got).await.unwrap() > 0
            {}
            server.write_all(&answer).await.unwrap();
            got
        });
        let (from, to) = tokio::io::split(client);
        let done = Session::new(8080).run(from, to, inputs, output).await;
        drop(input);
        let mut all = Vec::new();
        while let Some(bytes) = outputs.recv().await {
            all.extend(bytes);
        }
        (done.map_err(|error| error.to_string()), all, serving.await.unwrap())
    }

    #[tokio::test]
    async fn bytes_go_both_ways_until_the_other_side_ends() {
        let mut answer = spdy::data(3, b"wor", false);
        answer.extend(spdy::data(3, b"ld", true));
        let (done, got, sent) = session(answer).await;
        assert_eq!((done, got.as_slice()), (Ok(()), b"world".as_slice()));
        let named = |name: &[u8]| sent.windows(name.len()).any(|window| window == name);
        assert!(named(b"8080") && named(b"requestid") && named(b"streamtype"));
    }

    #[tokio::test]
    async fn a_port_without_a_listener_is_reported() {
        let (done, got, _) = session(spdy::data(1, b"connection refused", true)).await;
        assert_eq!((done, got.len()), (Err("connection refused".to_owned()), 0));
        // The data may end first.
        let mut answer = spdy::data(3, b"", true);
        answer.extend(spdy::data(1, b"connection ", false));
        answer.extend(spdy::data(1, b"refused", true));
        let (done, got, _) = session(answer).await;
        assert_eq!((done, got.len()), (Err("connection refused".to_owned()), 0));
    }
}
