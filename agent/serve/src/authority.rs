//! Accepts HTTP/2 clients whose `:authority` is the path of a unix socket, for a server that rejects such a
//! value.
//!
//! gRPC in Go (up to 2022), C++ and Java send the socket's path, plain or percent-encoded, as `:authority`.
//! RFC 3986 does not allow this authority, so `h2` (0.4.20 still) resets the stream, and the device plugin
//! could never register. [`AnyAuthority`] wraps the socket: frames are copied unchanged, except header
//! blocks, which are decoded and encoded again with `localhost` as `:authority`. The other direction is
//! unchanged.
//!
//! The HPACK state of the client ends here; blocks for the server need no state (literals without indexing).
//! The rewriter must never hold more than one frame, and must never panic, for any input.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use loona_hpack::Decoder;
use loona_hpack::encoder::encode_integer_into;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// The client's connection preface (RFC 9113 §3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame header (RFC 9113 §4.1).
pub const FRAME_HEADER: usize = 9;
/// Maximum frame of a client if the server does not allow larger ones, as ours does not
/// (SETTINGS_MAX_FRAME_SIZE).
pub const MAX_FRAME: usize = 16_384;
/// Maximum bytes of a header block, encoded and decoded. A gRPC call needs some hundred bytes.
const MAX_BLOCK: usize = 16_384;
/// Maximum dynamic table of a client with a server that keeps the default, as ours does.
const MAX_TABLE: usize = 4096;
/// The authority of every rewritten request.
pub const AUTHORITY: &[u8] = b"localhost";

/// Frame type (RFC 9113, 6.2).
pub const HEADERS: u8 = 1;
/// Frame type (6.10).
pub const CONTINUATION: u8 = 9;
/// Flag: the header block ends with this frame.
pub const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
/// Flag: five bytes of priority precede the header block.
pub const PRIORITY: u8 = 0x20;

/// The client's bytes are not HTTP/2, or exceed the limits above.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed HTTP/2 from a client: {0}")]
pub struct Malformed(&'static str);

/// An incomplete header block.
#[derive(Debug)]
struct Block {
    /// Flags to keep.
    flags: u8,
    stream: [u8; 4],
    priority: Vec<u8>,
    fragments: Vec<u8>,
}

/// Position in the stream.
#[derive(Debug)]
enum At {
    /// Within the preface, after this number of bytes.
    Preface(usize),
    /// At a frame header.
    Frame,
    /// Within a frame that is copied; this number of bytes is left.
    Passing(usize),
}

/// Rewriter of one client's bytes, without I/O.
pub struct Rewriter {
    decoder: Decoder<'static>,
    at: At,
    pending: Vec<u8>,
    block: Option<Block>,
}

impl std::fmt::Debug for Rewriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rewriter").field("at", &self.at).field("block", &self.block).finish_non_exhaustive()
    }
}

impl Default for Rewriter {
    fn default() -> Self {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(MAX_TABLE);
        Self { decoder, at: At::Preface(0), pending: Vec::new(), block: None }
    }
}

impl Rewriter {
    /// Adds bytes from the client.
    pub fn push(&mut self, input: &[u8]) {
        self.pending.extend_from_slice(input);
    }

    /// Appends at most one frame for the server to `out`. Returns false if more input is needed.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn pull(&mut self, out: &mut Vec<u8>) -> Result<bool, Malformed> {
        if self.pending.is_empty() {
            return Ok(false);
        }
        match self.at {
            At::Preface(seen) => {
                let count = (PREFACE.len() - seen).min(self.pending.len());
                if self.pending[..count] != PREFACE[seen..seen + count] {
                    return Err(Malformed("missing HTTP/2 preface"));
                }
                self.pass(count, out);
                let seen = seen + count;
                self.at = if seen == PREFACE.len() { At::Frame } else { At::Preface(seen) };
                Ok(true)
            }
            At::Passing(left) => {
                let count = left.min(self.pending.len());
                self.pass(count, out);
                self.at = if count == left { At::Frame } else { At::Passing(left - count) };
                Ok(true)
            }
            At::Frame => self.frame(out),
        }
    }

    fn pass(&mut self, count: usize, out: &mut Vec<u8>) {
        out.extend(self.pending.drain(..count));
    }

    fn frame(&mut self, out: &mut Vec<u8>) -> Result<bool, Malformed> {
        let Some(header) = self.pending.first_chunk::<FRAME_HEADER>().copied() else { return Ok(false) };
        let [a, b, c, kind, flags, stream @ ..] = header;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        if length > MAX_FRAME {
            return Err(Malformed("frame exceeds the maximum size"));
        }
        match (kind, &self.block) {
            (HEADERS, None) | (CONTINUATION, Some(_)) => {}
            (CONTINUATION, None) => return Err(Malformed("CONTINUATION without a header block")),
            (_, Some(_)) => return Err(Malformed("header block interrupted by another frame")),
            _ => {
                self.pass(FRAME_HEADER, out);
                self.at = if length == 0 { At::Frame } else { At::Passing(length) };
                return Ok(true);
            }
        }
        if self.pending.len() < FRAME_HEADER + length {
            return Ok(false);
        }
        let payload: Vec<u8> = self.pending.drain(..FRAME_HEADER + length).skip(FRAME_HEADER).collect();
        if kind == HEADERS {
            self.block = Some(begin(flags, stream, &payload)?);
        } else if let Some(block) = &mut self.block {
            if block.stream != stream {
                return Err(Malformed("CONTINUATION of another stream"));
            }
            block.fragments.extend(payload);
        }
        if self.block.as_ref().is_some_and(|block| block.fragments.len() > MAX_BLOCK) {
            return Err(Malformed("header block too large"));
        }
        if flags & END_HEADERS != 0
            && let Some(block) = self.block.take()
        {
            self.finish(&block, out)?;
        }
        Ok(true)
    }

    /// Encodes a complete header block.
    fn finish(&mut self, block: &Block, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let mut encoded = Vec::new();
        let mut size = 0_usize;
        let decoded = self.decoder.decode_with_cb(&block.fragments, |name, value| {
            let value = if *name == *b":authority" { AUTHORITY } else { &*value };
            size = size.saturating_add(name.len()).saturating_add(value.len()).saturating_add(32);
            if size <= MAX_BLOCK {
                literal(&mut encoded, &name, value);
            }
        });
        decoded.map_err(|_| Malformed("invalid HPACK in a header block"))?;
        if size > MAX_BLOCK {
            return Err(Malformed("header block too large"));
        }
        let mut rest = block.priority.clone();
        rest.extend(encoded);
        let (mut kind, mut flags) = (HEADERS, block.flags);
        loop {
            let count = rest.len().min(MAX_FRAME);
            let left = rest.split_off(count);
            if left.is_empty() {
                flags |= END_HEADERS;
            }
            // The count is at most MAX_FRAME, so three bytes suffice.
            out.extend_from_slice(&u32::try_from(count).unwrap_or(0).to_be_bytes()[1..]);
            out.extend_from_slice(&[kind, flags]);
            out.extend_from_slice(&block.stream);
            out.append(&mut rest);
            if left.is_empty() {
                return Ok(());
            }
            (kind, flags, rest) = (CONTINUATION, 0, left);
        }
    }
}

/// Parses a HEADERS frame and removes its padding (RFC 9113 §6.2).
fn begin(flags: u8, stream: [u8; 4], payload: &[u8]) -> Result<Block, Malformed> {
    let short = Malformed("HEADERS frame too short");
    let mut rest = payload;
    if flags & PADDED != 0 {
        let (padding, more) = rest.split_first().ok_or(short)?;
        let length = more.len().checked_sub(usize::from(*padding)).ok_or(short)?;
        rest = &more[..length];
    }
    let (priority, fragments) =
        rest.split_at_checked(if flags & PRIORITY == 0 { 0 } else { 5 }).ok_or(short)?;
    Ok(Block {
        flags: flags & !PADDED & !END_HEADERS,
        stream,
        priority: priority.to_vec(),
        fragments: fragments.to_vec(),
    })
}

/// Writes a literal header field without indexing, with a new name (RFC 7541 §6.2.2).
fn literal(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.push(0);
    for text in [name, value] {
        // Writing to a vector cannot fail.
        let _ = encode_integer_into(text.len(), 7, 0, out);
        out.extend_from_slice(text);
    }
}

/// A connection that accepts any `:authority`. `T` (a permit) is held until the connection is dropped.
#[derive(Debug)]
pub struct AnyAuthority<S, T = ()> {
    stream: S,
    rewriter: Rewriter,
    /// Rewritten bytes, and the number of bytes already read.
    ready: (Vec<u8>, usize),
    _held: T,
}

impl<S, T> AnyAuthority<S, T> {
    /// Wraps a connection from which no bytes were read yet.
    pub fn new(stream: S, held: T) -> Self {
        Self { stream, rewriter: Rewriter::default(), ready: (Vec::new(), 0), _held: held }
    }
}

impl<S: AsyncRead + Unpin, T: Unpin> AsyncRead for AnyAuthority<S, T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let (bytes, read) = &mut this.ready;
            if *read < bytes.len() {
                let count = (bytes.len() - *read).min(buf.remaining());
                buf.put_slice(&bytes[*read..*read + count]);
                *read += count;
                return Poll::Ready(Ok(()));
            }
            bytes.clear();
            *read = 0;
            let more = this.rewriter.pull(bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
            if more? {
                continue;
            }
            let mut room = [0; 4096];
            let mut incoming = ReadBuf::new(&mut room);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut incoming))?;
            if incoming.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.rewriter.push(incoming.filled());
        }
    }
}

impl<S: AsyncWrite + Unpin, T: Unpin> AsyncWrite for AnyAuthority<S, T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: Connected, T> Connected for AnyAuthority<S, T> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
mod tests;
