//! HTTP/2 from clients whose `:authority` is the path of a unix socket, for a server that refuses that.
//!
//! gRPC in Go (up to 2022), C++ and Java send the socket's path, plain or percent-encoded, as `:authority`.
//! RFC 3986 has no such authority, so `h2` (0.4.20 still) resets the stream, and the device plugin could
//! never register. [`AnyAuthority`] stands between the socket and the server: it copies frames as they come,
//! and only header blocks are decoded and written again, with `localhost` in the place of whatever
//! `:authority` said. The other direction is untouched.
//!
//! The HPACK state of the client's side ends here; what goes on to the server uses no state (literals without
//! indexing). Must never hold more than one frame's worth of memory, or panic, whatever a client sends.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use loona_hpack::Decoder;
use loona_hpack::encoder::encode_integer_into;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// Every client begins with this (RFC 9113 §3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame's header (RFC 9113 §4.1).
pub const FRAME_HEADER: usize = 9;
/// The largest frame a client may send to a server that allows no larger ones, as ours
/// (SETTINGS_MAX_FRAME_SIZE).
pub const MAX_FRAME: usize = 16_384;
/// The most that a header block may be, encoded and decoded. A gRPC call's is some hundred bytes.
const MAX_BLOCK: usize = 16_384;
/// The largest dynamic table a client may use with a server that says nothing else, as ours.
const MAX_TABLE: usize = 4096;
/// What every request's authority becomes.
pub const AUTHORITY: &[u8] = b"localhost";

/// Frame type (RFC 9113, 6.2).
pub const HEADERS: u8 = 1;
/// Frame type (6.10).
pub const CONTINUATION: u8 = 9;
/// Flag: the header block ends with this frame.
pub const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
/// Flag: five bytes of priority come before the header block.
pub const PRIORITY: u8 = 0x20;

/// What a client sent is not HTTP/2, or more than a client of ours ever needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a client's HTTP/2 frames can't be read: {0}")]
pub struct Malformed(&'static str);

/// A header block that isn't complete yet.
#[derive(Debug)]
struct Block {
    /// The frame's flags that stay.
    flags: u8,
    stream: [u8; 4],
    priority: Vec<u8>,
    fragments: Vec<u8>,
}

/// What comes next in the stream.
#[derive(Debug)]
enum At {
    /// So many bytes of the preface have been seen.
    Preface(usize),
    /// A frame's header.
    Frame,
    /// So many bytes of a frame that is passed on as it is.
    Passing(usize),
}

/// Rewrites one client's bytes. Pure: bytes in, bytes out.
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
    /// Takes in what the client sent.
    pub fn push(&mut self, input: &[u8]) {
        self.pending.extend_from_slice(input);
    }

    /// Appends to `out` what goes on to the server, a frame at most. False once more must be pushed first.
    ///
    /// # Errors
    /// The client must be given up.
    pub fn pull(&mut self, out: &mut Vec<u8>) -> Result<bool, Malformed> {
        if self.pending.is_empty() {
            return Ok(false);
        }
        match self.at {
            At::Preface(seen) => {
                let count = (PREFACE.len() - seen).min(self.pending.len());
                if self.pending[..count] != PREFACE[seen..seen + count] {
                    return Err(Malformed("it doesn't begin as HTTP/2 does"));
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
            return Err(Malformed("a frame is larger than was allowed"));
        }
        match (kind, &self.block) {
            (HEADERS, None) | (CONTINUATION, Some(_)) => {}
            (CONTINUATION, None) => return Err(Malformed("a CONTINUATION continues nothing")),
            (_, Some(_)) => return Err(Malformed("a header block is interrupted by another frame")),
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
                return Err(Malformed("a CONTINUATION belongs to another stream"));
            }
            block.fragments.extend(payload);
        }
        if self.block.as_ref().is_some_and(|block| block.fragments.len() > MAX_BLOCK) {
            return Err(Malformed("a header block is too large"));
        }
        if flags & END_HEADERS != 0
            && let Some(block) = self.block.take()
        {
            self.finish(&block, out)?;
        }
        Ok(true)
    }

    /// Writes a complete header block again.
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
        decoded.map_err(|_| Malformed("a header block isn't HPACK"))?;
        if size > MAX_BLOCK {
            return Err(Malformed("a header block is too large"));
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
            // At most MAX_FRAME: three bytes are enough.
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

/// A HEADERS frame without its padding (RFC 9113 §6.2).
fn begin(flags: u8, stream: [u8; 4], payload: &[u8]) -> Result<Block, Malformed> {
    let short = Malformed("a HEADERS frame is too short");
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

/// A literal header field without indexing, with a new name (RFC 7541 §6.2.2).
fn literal(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.push(0);
    for text in [name, value] {
        // Writing to a vector can't fail.
        let _ = encode_integer_into(text.len(), 7, 0, out);
        out.extend_from_slice(text);
    }
}

/// A connection with any `:authority`. Holds `T` as long as it lives (a permit).
#[derive(Debug)]
pub struct AnyAuthority<S, T = ()> {
    stream: S,
    rewriter: Rewriter,
    /// What was rewritten and not read yet, and how much of it was read.
    ready: (Vec<u8>, usize),
    _held: T,
}

impl<S, T> AnyAuthority<S, T> {
    /// Around a connection that nothing was read from yet.
    pub(crate) fn new(stream: S, held: T) -> Self {
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
