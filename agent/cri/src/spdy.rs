//! The part of SPDY/3.1 that Kubernetes' streaming protocol needs, client side: open streams, send and
//! receive data, answer pings. Every CRI runtime's streaming server speaks SPDY, and unlike the protocol's
//! WebSocket form (before v5) SPDY can signal the end of standard input. The module is pure: it converts
//! bytes to frames and back.
//!
//! SPDY compresses the headers of a stream with zlib. The client writes its headers as *stored* blocks, which
//! need no compressor, and ignores the server's headers.
//!
//! Sources: the SPDY/3.1 draft (Chromium), sections 2.2 and 2.6; RFC 1950, RFC 1951 section 3.2.4.

/// The length of a frame's head in bytes. The head contains the length of the rest.
pub const HEAD: usize = 8;
/// The limit of bytes of data in a frame that the client sends.
const DATA_MAX: usize = 32 << 10;

const VERSION: u16 = 3;
const FIN: u8 = 1;
const SYN_STREAM: u16 = 1;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;

/// A frame's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    kind: Kind,
    flags: u8,
    /// The number of bytes that follow.
    pub length: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data { stream: u32 },
    Control { kind: u16 },
}

/// The content of a frame, as far as the streaming protocol needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Data of a stream; `last` if the stream ends with this frame.
    Data {
        /// The stream.
        stream: u32,
        /// The data.
        bytes: Vec<u8>,
        /// True if the stream ends with this frame.
        last: bool,
    },
    /// The other side aborted a stream.
    Reset {
        /// The stream.
        stream: u32,
    },
    /// A ping, whose content the answer repeats unchanged.
    Ping(Vec<u8>),
    /// The other side ends the connection.
    GoAway,
    /// Any other frame.
    Other,
}

/// Parses a head.
pub fn head(bytes: [u8; HEAD]) -> Head {
    let word = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let (first, second) = (word(0), word(4));
    let kind = if first & 0x8000_0000 == 0 {
        Kind::Data { stream: first }
    } else {
        Kind::Control { kind: (first & 0xffff) as u16 }
    };
    Head { kind, flags: bytes[4], length: (second & 0x00ff_ffff) as usize }
}

/// Makes a frame from its head and the bytes after the head.
pub fn frame(head: Head, bytes: Vec<u8>) -> Frame {
    let stream = |bytes: &[u8]| -> u32 {
        let word = bytes.first_chunk::<4>().map_or(0, |word| u32::from_be_bytes(*word));
        word & 0x7fff_ffff
    };
    match head.kind {
        Kind::Data { stream } => Frame::Data { stream, bytes, last: head.flags & FIN != 0 },
        Kind::Control { kind: PING } => Frame::Ping(bytes),
        Kind::Control { kind: RST_STREAM } => Frame::Reset { stream: stream(&bytes) },
        Kind::Control { kind: GOAWAY } => Frame::GoAway,
        Kind::Control { .. } => Frame::Other,
    }
}

/// The writer of the client's frames.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// The zlib stream of all headers has begun.
    begun: bool,
    streams: u32,
}

impl Writer {
    /// Opens a stream with these headers; returns its number and the frame.
    pub(super) fn open(&mut self, headers: &[(&str, &str)]) -> (u32, Vec<u8>) {
        // A client's streams have odd numbers.
        let stream = self.streams * 2 + 1;
        self.streams += 1;
        let mut payload = Vec::new();
        payload.extend(stream.to_be_bytes());
        payload.extend(0u32.to_be_bytes()); // belongs to no other stream
        payload.extend([0, 0]); // priority and credential slot
        payload.extend(self.header_block(headers));
        (stream, control(SYN_STREAM, 0, &payload))
    }

    /// Returns names and values as zlib that is stored, not compressed.
    fn header_block(&mut self, headers: &[(&str, &str)]) -> Vec<u8> {
        let mut plain = Vec::new();
        let number = |number: usize, plain: &mut Vec<u8>| {
            plain.extend(u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes());
        };
        number(headers.len(), &mut plain);
        for (name, value) in headers {
            for text in [name.to_lowercase().as_bytes(), value.as_bytes()] {
                number(text.len(), &mut plain);
                plain.extend_from_slice(text);
            }
        }
        let mut block = Vec::new();
        if !self.begun {
            self.begun = true;
            block.extend([0x78, 0x01]); // deflate, a window of 32 KiB, no dictionary
        }
        stored(&plain, &mut block);
        // An empty block flushes the headers: the reader gets them all without waiting for the next block.
        stored(&[], &mut block);
        block
    }
}

/// Appends a stored block that is not marked as the last one.
fn stored(bytes: &[u8], block: &mut Vec<u8>) {
    let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    block.push(0);
    block.extend(length.to_le_bytes());
    block.extend((!length).to_le_bytes());
    block.extend_from_slice(&bytes[..usize::from(length)]);
}

fn control(kind: u16, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEAD + payload.len());
    frame.extend((VERSION | 0x8000).to_be_bytes());
    frame.extend(kind.to_be_bytes());
    frame.extend(flags_and_length(flags, payload.len()));
    frame.extend_from_slice(payload);
    frame
}

fn flags_and_length(flags: u8, length: usize) -> [u8; 4] {
    let [_, a, b, c] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [flags, a, b, c]
}

/// Returns the frames that carry the data of a stream; with `last`, the stream ends with the last frame.
pub fn data(stream: u32, bytes: &[u8], last: bool) -> Vec<u8> {
    let mut frames = Vec::new();
    let pieces: Vec<&[u8]> = if bytes.is_empty() { vec![bytes] } else { bytes.chunks(DATA_MAX).collect() };
    let count = pieces.len();
    for (index, piece) in pieces.into_iter().enumerate() {
        let flags = if last && index + 1 == count { FIN } else { 0 };
        frames.extend(stream.to_be_bytes());
        frames.extend(flags_and_length(flags, piece.len()));
        frames.extend_from_slice(piece);
    }
    frames
}

/// Returns the answer to a ping.
pub(super) fn pong(payload: &[u8]) -> Vec<u8> {
    control(PING, 0, payload)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn read(bytes: &[u8]) -> (Frame, usize) {
        let head = head(*bytes.first_chunk().unwrap());
        let end = HEAD + head.length;
        (frame(head, bytes[HEAD..end].to_vec()), end)
    }

    #[test]
    fn headers_are_zlib_that_any_reader_can_inflate() {
        let mut writer = Writer::default();
        let (first, a) = writer.open(&[("streamType", "error")]);
        let (second, b) = writer.open(&[("streamType", "stdin")]);
        assert_eq!((first, second), (1, 3));
        // 8 bytes of head, 10 of stream, association and priority.
        let zlib: Vec<u8> = a[18..].iter().chain(&b[18..]).copied().collect();
        let mut plain = Vec::new();
        // The zlib stream has no end mark, so reading it whole fails at its end.
        let _ = flate2::read::ZlibDecoder::new(zlib.as_slice()).read_to_end(&mut plain);
        let block = |value: &str| -> Vec<u8> {
            let mut block = vec![0, 0, 0, 1, 0, 0, 0, 10];
            block.extend(b"streamtype");
            block.extend([0, 0, 0, 5]);
            block.extend(value.as_bytes());
            block
        };
        assert_eq!(plain, [block("error"), block("stdin")].concat());
        assert_eq!(a[..4], [0x80, 3, 0, 1]);
        assert_eq!(read(&a).1, a.len());
    }

    #[test]
    fn data_comes_in_frames_and_the_last_one_ends_the_stream() {
        let bytes: Vec<u8> = (0..40_000u32).map(|i| i as u8).collect();
        let sent = data(5, &bytes, true);
        let (first, length) = read(&sent);
        let (second, _) = read(&sent[length..]);
        assert_eq!(first, Frame::Data { stream: 5, bytes: bytes[..DATA_MAX].to_vec(), last: false });
        assert_eq!(second, Frame::Data { stream: 5, bytes: bytes[DATA_MAX..].to_vec(), last: true });
        assert_eq!(read(&data(7, &[], true)).0, Frame::Data { stream: 7, bytes: vec![], last: true });
    }

    #[test]
    fn control_frames_are_distinguished() {
        assert_eq!(read(&pong(&[0, 0, 0, 2])).0, Frame::Ping(vec![0, 0, 0, 2]));
        assert_eq!(read(&control(RST_STREAM, 0, &[0, 0, 0, 3, 0, 0, 0, 1])).0, Frame::Reset { stream: 3 });
        assert_eq!(read(&control(GOAWAY, 0, &[0; 8])).0, Frame::GoAway);
        assert_eq!(read(&control(2, 0, &[0; 4])).0, Frame::Other);
    }
}
