//! Decompresses an archive in a format that its first bytes identify: gzip or zstd, as accepted by
//! containerd's own import. Must never need more memory than one zstd window (the decoder accepts at most 128
//! MiB), and must never let a small file fill the node's disk: the size of the content is limited in
//! proportion to the bytes read.

use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Bytes read from the archive at a time.
const PIECE: usize = 1 << 20;
/// Maximum ratio of content to archive size, beyond [`FREE`]. Programs and texts shrink to a third or a
/// tenth; the best ratio of gzip is about 1030.
const MOST_TIMES: u64 = 100;
/// Content size that any archive may have.
const FREE: u64 = 1 << 30;

/// First bytes of a gzip member (RFC 1952).
const GZIP: &[u8] = &[0x1f, 0x8b];
/// First bytes of a zstd frame (RFC 8878).
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Bytes after the first byte (0x50 to 0x5f) of a skippable zstd frame.
const SKIPPED: &[u8] = &[0x2a, 0x4d, 0x18];
/// First bytes and names of unsupported compressions.
const OTHERS: [(&[u8], &str); 3] =
    [(&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz"), (b"BZh", "bzip2"), (&[0x04, 0x22, 0x4d, 0x18], "lz4")];

/// Returns the content of `archive`, decompressed during reading.
///
/// # Errors
/// The archive cannot be read, or has an unsupported compression.
pub(super) fn decompressed(archive: impl Read + Send + 'static) -> io::Result<Box<dyn Read>> {
    let mut archive = BufReader::with_capacity(PIECE, archive);
    let begin = archive.fill_buf()?;
    if let Some((_, name)) = OTHERS.iter().find(|(magic, _)| begin.starts_with(magic)) {
        return Err(io::Error::other(format!("compressed by {name}; use gzip, zstd or no compression")));
    }
    let is_gzip = begin.starts_with(GZIP);
    let is_skipped = matches!(begin, [0x50..=0x5f, rest @ ..] if rest.starts_with(SKIPPED));
    if !is_gzip && !is_skipped && !begin.starts_with(ZSTD) {
        return Ok(Box::new(archive));
    }
    let taken = Rc::new(Cell::new(0));
    let counted = Counted { archive, taken: Rc::clone(&taken) };
    let unpacked: Box<dyn Read> =
        if is_gzip { Box::new(MultiGzDecoder::new(counted)) } else { Box::new(ZstdFrames::new(counted)) };
    Ok(Box::new(Bounded { unpacked, taken, given: 0, free: FREE }))
}

/// Counts the bytes that a decoder reads from an archive.
struct Counted<R> {
    archive: R,
    taken: Rc<Cell<u64>>,
}

impl<R: BufRead> Counted<R> {
    fn add(&self, count: usize) {
        self.taken.set(self.taken.get().saturating_add(count as u64));
    }
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.archive.read(into)?;
        self.add(count);
        Ok(count)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.archive.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.add(count);
        self.archive.consume(count);
    }
}

/// Reader of an archive's content that fails when the content is out of proportion to the archive.
struct Bounded {
    unpacked: Box<dyn Read>,
    taken: Rc<Cell<u64>>,
    given: u64,
    free: u64,
}

impl Read for Bounded {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.unpacked.read(into)?;
        self.given = self.given.saturating_add(count as u64);
        let most = self.taken.get().saturating_mul(MOST_TIMES).saturating_add(self.free);
        if self.given > most {
            let given = self.given;
            return Err(io::Error::other(format!(
                "refused: the content is more than {MOST_TIMES} times its size ({given} bytes so far); decompress the \
                 archive by hand if this is intended"
            )));
        }
        Ok(count)
    }
}

/// Reads consecutive zstd frames: parallel compressors write several, with skippable frames between them.
struct ZstdFrames<R> {
    archive: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> ZstdFrames<R> {
    fn new(archive: R) -> Self {
        Self { archive, decoder: FrameDecoder::new(), in_frame: false }
    }

    /// Advances to the next frame with content; returns false at the end of the archive.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.archive.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.archive) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = io::copy(&mut (&mut self.archive).take(length.into()), &mut io::sink())?;
                    if skipped < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(broken(&error)),
            }
        }
        Ok(false)
    }

    /// Verifies the checksum of the frame that ends here.
    fn check_sum(&self) -> io::Result<()> {
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(written), Some(read)) if written != read => Err(broken(&"the checksum differs")),
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame {
                self.in_frame = !bytes.is_empty() && self.next_frame()?;
                if !self.in_frame {
                    return Ok(0);
                }
            }
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(bytes);
            }
            if self.decoder.is_finished() {
                self.check_sum()?;
                self.in_frame = false;
                continue;
            }
            let decoded = self.decoder.decode_blocks(&mut self.archive, BlockDecodingStrategy::UptoBlocks(1));
            decoded.map_err(|error| broken(&error))?;
        }
    }
}

fn broken(error: &dyn fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("broken zstd frame: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn content(archive: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        decompressed(io::Cursor::new(archive))?.read_to_end(&mut content)?;
        Ok(content)
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        compress_to_vec(text, CompressionLevel::Fastest)
    }

    #[test]
    fn the_first_bytes_say_how_an_archive_is_compressed() {
        let text = b"an archive".repeat(100_000);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&text).unwrap();
        assert_eq!(content(text.clone()).unwrap(), text);
        assert_eq!(content(gzip.finish().unwrap()).unwrap(), text);
        assert_eq!(content(zstd(&text)).unwrap(), text);
        assert_eq!(content(Vec::new()).unwrap(), b"");
    }

    #[test]
    fn zstd_frames_follow_each_other_and_some_are_skipped() {
        let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
        let frames = [&skipped[..], &zstd(b"one"), &skipped, &zstd(b""), &zstd(b"two")].concat();
        assert_eq!(content(frames).unwrap(), b"onetwo");
    }

    #[test]
    fn a_broken_archive_is_an_error() {
        let whole = zstd(&b"an archive".repeat(1000));
        let check = |bytes: &[u8]| assert!(content(bytes.to_vec()).is_err(), "{} bytes", bytes.len());
        for length in [4, 5, 8, whole.len() - 1] {
            check(&whole[..length]);
        }
        check(&[&whole[..], b"and more"].concat());
        check(&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, b'a']);
    }

    #[test]
    fn a_bomb_is_refused_and_an_archive_is_not() {
        let gzip = |text: &[u8]| {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            packed.write_all(text).unwrap();
            packed.finish().unwrap()
        };
        let unpacked = |packed: &[u8], free: u64| {
            let taken = Rc::new(Cell::new(0));
            let counted = Counted { archive: io::Cursor::new(packed.to_vec()), taken: Rc::clone(&taken) };
            let unpacked: Box<dyn Read> = if packed.starts_with(GZIP) {
                Box::new(MultiGzDecoder::new(counted))
            } else {
                Box::new(ZstdFrames::new(counted))
            };
            let mut text = Vec::new();
            Bounded { unpacked, taken, given: 0, free }.read_to_end(&mut text)
        };
        let text: Vec<u8> = (0..200_000_u32).flat_map(|number| format!("{number} ").into_bytes()).collect();
        for pack in [gzip, zstd] {
            let zeros = pack(&vec![0; 1 << 20]);
            let refused = unpacked(&zeros, 0).unwrap_err().to_string();
            assert!(refused.contains("more than 100 times its size"), "{refused}");
            // The bound covers all frames together.
            assert!(unpacked(&[zeros.clone(), zeros.clone()].concat(), 1 << 20).is_err());
            assert_eq!(unpacked(&zeros, 1 << 20).unwrap(), 1 << 20);
            assert_eq!(unpacked(&pack(&text), 0).unwrap(), text.len());
        }
    }

    #[test]
    fn another_compression_is_named() {
        let check = |begin: &[u8], expected: &str| {
            let error = content([begin, &[0; 100]].concat()).unwrap_err().to_string();
            assert_eq!(error, expected);
        };
        check(b"\xfd7zXZ\0", "compressed by xz; use gzip, zstd or no compression");
        check(b"BZh9", "compressed by bzip2; use gzip, zstd or no compression");
        check(b"\x04\x22\x4d\x18", "compressed by lz4; use gzip, zstd or no compression");
    }
}
