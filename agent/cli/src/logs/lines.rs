//! Output of several containers on one standard output: whole lines, each with its container's name.

use std::io::{self, Write};

/// Maximum bytes to buffer; a longer line is printed in pieces.
const LINE_MAX: usize = 1 << 20;

/// Line buffer of a container.
#[derive(Debug)]
pub(super) struct Lines {
    /// Prefix of every line.
    prefix: String,
    /// An incomplete line.
    begun: Vec<u8>,
}

impl Lines {
    pub(super) fn new(prefix: String) -> Self {
        Self { prefix, begun: Vec::new() }
    }

    /// Writes the lines that this piece completes.
    pub(super) fn write(&mut self, piece: &[u8], out: &mut impl Write) -> io::Result<()> {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend_from_slice(part);
            if part.ends_with(b"\n") || self.begun.len() >= LINE_MAX {
                self.end(out)?;
            }
        }
        Ok(())
    }

    /// Writes the incomplete line at the end of the output.
    pub(super) fn end(&mut self, out: &mut impl Write) -> io::Result<()> {
        if self.begun.is_empty() {
            return Ok(());
        }
        if !self.begun.ends_with(b"\n") {
            self.begun.push(b'\n');
        }
        out.write_all(self.prefix.as_bytes())?;
        out.write_all(&self.begun)?;
        self.begun.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_written_whole_with_its_prefix() {
        let mut lines = Lines::new("[a] ".to_owned());
        let mut out = Vec::new();
        for piece in ["one\ntw", "o", "\n\nthree"] {
            lines.write(piece.as_bytes(), &mut out).unwrap();
        }
        assert_eq!(String::from_utf8_lossy(&out), "[a] one\n[a] two\n[a] \n");
        lines.end(&mut out).unwrap();
        lines.end(&mut out).unwrap();
        assert_eq!(String::from_utf8_lossy(&out), "[a] one\n[a] two\n[a] \n[a] three\n");
    }

    #[test]
    fn a_line_without_an_end_does_not_grow_for_ever() {
        let mut lines = Lines::new(String::new());
        let mut out = Vec::new();
        for _ in 0..5 {
            lines.write(&vec![b'x'; LINE_MAX / 2], &mut out).unwrap();
        }
        assert_eq!(out.len(), 2 * (LINE_MAX + 1));
        assert_eq!(lines.begun.len(), LINE_MAX / 2);
    }
}
