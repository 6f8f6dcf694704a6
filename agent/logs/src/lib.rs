//! Containers' logs: `<logs>/<namespace>_<pod>_<uid>/<container>/<attempt>.log`, written by the runtime with
//! lines of the form `<time> <stdout|stderr> <P|F> <text>` (P: the next line continues this one). This crate
//! rotates the logs ([`rotate`]) and reads them ([`read`]); they are removed with their pod.
//!
//! The content comes from containers: any bytes, any length. Code here must not rely on the form of a line.

mod changes;
mod error;
pub mod links;
pub mod read;
pub mod rotate;
mod written;

pub use self::error::Error;

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use beelet_base::own_file;

/// Output stream of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// A line of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// Time of the write, RFC 3339 with nanoseconds, verbatim.
    pub time: &'a str,
    /// Output stream.
    pub stream: Stream,
    /// True if the next line continues the container's line.
    pub partial: bool,
    /// Text without the end of the line.
    pub text: &'a [u8],
}

/// Parses a line, with or without its line end. Returns None for any other form.
pub fn parse(line: &[u8]) -> Option<Line<'_>> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let mut parts = line.splitn(4, |b| *b == b' ');
    let time = std::str::from_utf8(parts.next()?).ok()?;
    let stream = match parts.next()? {
        b"stdout" => Stream::Out,
        b"stderr" => Stream::Err,
        _ => return None,
    };
    // Further tags are reserved for later versions of the format.
    let tag = parts.next()?.split(|b| *b == b':').next()?;
    let partial = match tag {
        b"F" => false,
        b"P" => true,
        _ => return None,
    };
    Some(Line { time, stream, partial, text: parts.next()? })
}

/// Returns the last lines of a log as the container wrote them, at most `lines` lines and `bytes` bytes, or
/// None without any.
pub fn end_of(path: &Path, lines: usize, bytes: usize) -> Option<String> {
    let mut file = own_file::read(path).ok()?;
    // Each line has some 40 bytes in addition to the container's text.
    let most = u64::try_from(bytes + lines * 64).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most))).ok()?;
    let mut tail = Vec::new();
    file.take(most).read_to_end(&mut tail).ok()?;
    // A line that was cut in the middle does not parse.
    let mut last: Vec<&[u8]> = tail.split_inclusive(|b| *b == b'\n').rev().take(lines).collect();
    last.reverse();
    let mut text = Vec::new();
    for line in last.into_iter().filter_map(parse) {
        text.extend_from_slice(line.text);
        if !line.partial {
            text.push(b'\n');
        }
    }
    let cut = text.len().saturating_sub(bytes);
    let text = lossy(&text[cut..], bytes);
    (!text.is_empty()).then_some(text)
}

/// Removes anything but a regular file at a container's log path, so that the runtime opens a regular file:
/// opening a FIFO without a reader would block the runtime forever. Blocking.
pub fn clear(folder: &Path, attempt: u32) -> Result<(), Error> {
    let log = folder.join(format!("{attempt}.log"));
    own_file::clear(&log).map_err(|cause| Error::Clear { log, cause })
}

/// Converts a container's bytes to text of at most `most` bytes.
pub fn lossy(bytes: &[u8], most: usize) -> String {
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_the_runtime_writes_them() {
        let time = "2026-11-21T19:00:00.123456789Z";
        let check = |line: &str, expected: Option<(Stream, bool, &str)>| {
            let read = parse(line.as_bytes());
            assert_eq!(
                read.map(|l| (l.stream, l.partial, std::str::from_utf8(l.text).unwrap())),
                expected,
                "{line:?}"
            );
            assert!(read.is_none_or(|l| l.time == time));
        };
        check(&format!("{time} stdout F hello world\n"), Some((Stream::Out, false, "hello world")));
        check(&format!("{time} stderr P part"), Some((Stream::Err, true, "part")));
        check(&format!("{time} stdout F:x  two\n"), Some((Stream::Out, false, " two")));
        check(&format!("{time} stdout F \n"), Some((Stream::Out, false, "")));
        check(&format!("{time} stdout F\n"), None);
        check(&format!("{time} stdin F x\n"), None);
        check(&format!("{time} stdout X x\n"), None);
        check("", None);
        check("\n", None);
        assert_eq!(parse(b"\xff stdout F x"), None);
    }

    #[test]
    fn text_is_cut_at_a_whole_character() {
        assert_eq!(lossy("aé".as_bytes(), 2), "a");
        assert_eq!(lossy("aé".as_bytes(), 3), "aé");
        assert_eq!(lossy(b"\xff", 2), "");
    }

    #[test]
    fn the_end_of_a_long_line_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        let text = format!(
            "2026-11-21T19:00:00Z stdout P {}\n2026-11-21T19:00:00Z stdout F {}\n",
            "a".repeat(100),
            "b".repeat(90)
        );
        std::fs::write(&log, text).unwrap();
        assert_eq!(end_of(&log, 5, 100), Some(format!("{}{}\n", "a".repeat(9), "b".repeat(90))));
        assert_eq!(end_of(&dir.path().join("none"), 5, 100), None);
    }
}
