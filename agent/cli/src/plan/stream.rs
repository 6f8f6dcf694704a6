//! Splits an input into scenarios and holds one at a time: a JSON array, JSON Lines (or consecutive JSON
//! values), or a YAML stream. The first character decides the format. This module only finds the end of a
//! scenario and must never interpret its content.

use std::io::{self, BufRead, Read};

/// Maximum bytes of a scenario: far beyond any real node, and well below the machine's memory.
pub(super) const LARGEST_SCENARIO: usize = 1 << 30;

/// U+FEFF, which some editors write before UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Text of a scenario, and its position in the input (counted from 1).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) text: Vec<u8>,
    pub(super) syntax: Syntax,
    pub(super) line: u64,
    pub(super) column: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syntax {
    Json,
    /// A document, which may be a list of scenarios.
    Yaml,
}

/// Reason why the rest of the input cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error("cannot read the input: {0}")]
    Io(#[from] io::Error),
    #[error("{line}:{column}: {message}")]
    Syntax { line: u64, column: u64, message: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Unknown,
    Values,
    Array { first: bool },
    Yaml,
    Done,
}

/// The scenarios of an input, one at a time.
pub(super) struct Scenarios<R> {
    input: R,
    mode: Mode,
    /// Bytes read ahead of the next line of a YAML stream.
    carry: Vec<u8>,
    line: u64,
    column: u64,
}

impl<R: BufRead> Scenarios<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, mode: Mode::Unknown, carry: Vec::new(), line: 1, column: 1 }
    }

    /// Returns the next scenario, or None at the end of the input.
    pub(super) fn next(&mut self) -> Result<Option<Chunk>, StreamError> {
        if self.mode == Mode::Unknown {
            self.skip_byte_order_mark()?;
            if !self.carry.is_empty() {
                self.mode = Mode::Yaml;
                return self.next_document();
            }
            self.mode = match self.skip_blanks()? {
                None => Mode::Done,
                Some(b'{') => Mode::Values,
                Some(b'[') => {
                    self.consume_byte();
                    Mode::Array { first: true }
                }
                Some(_) => {
                    // The indentation of the first line was skipped, but YAML needs it.
                    self.carry = vec![b' '; usize::try_from(self.column - 1).unwrap_or(0)];
                    Mode::Yaml
                }
            };
        }
        match self.mode {
            Mode::Values => self.next_value(),
            Mode::Array { first } => self.next_element(first),
            Mode::Yaml => self.next_document(),
            Mode::Unknown | Mode::Done => Ok(None),
        }
    }

    fn next_value(&mut self) -> Result<Option<Chunk>, StreamError> {
        match self.skip_blanks()? {
            None => Ok(None),
            Some(b'{') => self.read_value().map(Some),
            Some(_) => Err(self.error("expected `{` or the end of the input")),
        }
    }

    fn next_element(&mut self, first: bool) -> Result<Option<Chunk>, StreamError> {
        self.mode = Mode::Array { first: false };
        match (self.skip_blanks()?, first) {
            (Some(b']'), _) => {
                self.consume_byte();
                self.mode = Mode::Done;
                match self.skip_blanks()? {
                    None => return Ok(None),
                    Some(_) => return Err(self.error("unexpected text after the end of the array")),
                }
            }
            (Some(b','), false) => self.consume_byte(),
            (Some(_), true) => {}
            (None, _) => return Err(self.error("unterminated array; is the input truncated?")),
            (Some(_), false) => return Err(self.error("expected `,` or `]` after a scenario of the array")),
        }
        match self.skip_blanks()? {
            None => Err(self.error("unterminated array; is the input truncated?")),
            Some(_) => self.read_value().map(Some),
        }
    }

    /// Reads one value: up to the bracket that closes the first one, or, without brackets, up to a comma, a
    /// bracket or a blank.
    fn read_value(&mut self) -> Result<Chunk, StreamError> {
        let mut chunk =
            Chunk { text: Vec::new(), syntax: Syntax::Json, line: self.line, column: self.column };
        let mut scan = Scan::default();
        loop {
            let available = self.input.fill_buf()?;
            if available.is_empty() {
                return Ok(chunk); // truncated: the JSON reader has the better error
            }
            let used = available.iter().position(|byte| scan.ends_before(*byte)).unwrap_or(available.len());
            let ended = used < available.len();
            chunk.text.extend_from_slice(&available[..used]);
            advance(&mut self.line, &mut self.column, &available[..used]);
            self.input.consume(used);
            if chunk.text.len() > LARGEST_SCENARIO {
                return Err(self.error("a single scenario exceeds 1 GiB; split it"));
            }
            if ended {
                return Ok(chunk);
            }
        }
    }

    /// Reads the lines up to the next document marker. A line of content cannot begin with a marker (YAML
    /// 1.2, 9.1.2), so content is never mistaken for one.
    fn next_document(&mut self) -> Result<Option<Chunk>, StreamError> {
        let empty = |line| Chunk { text: Vec::new(), syntax: Syntax::Yaml, line, column: 1 };
        let mut chunk = empty(self.line);
        let mut has_content = false;
        while let Some(line) = self.next_line()? {
            let starts_document = is_marker(&line, b"---");
            if is_marker(&line, b"...") || (starts_document && has_content) {
                if starts_document {
                    self.line -= 1;
                    self.carry = line;
                }
                if has_content {
                    return Ok(Some(chunk));
                }
                chunk = empty(self.line);
                continue;
            }
            has_content |= is_content(&line, starts_document);
            chunk.text.extend_from_slice(&line);
            if chunk.text.len() > LARGEST_SCENARIO {
                return Err(self.error("a single document exceeds 1 GiB; split it"));
            }
        }
        Ok(has_content.then_some(chunk))
    }

    fn next_line(&mut self) -> Result<Option<Vec<u8>>, StreamError> {
        let mut line = std::mem::take(&mut self.carry);
        if !line.ends_with(b"\n") {
            self.input.by_ref().take(LARGEST_SCENARIO as u64).read_until(b'\n', &mut line)?;
        }
        if line.is_empty() {
            return Ok(None);
        }
        self.line += 1;
        Ok(Some(line))
    }

    /// Skips a byte order mark byte by byte, because a pipe may deliver it in pieces. Bytes that only begin
    /// like a mark are carried over.
    fn skip_byte_order_mark(&mut self) -> io::Result<()> {
        for (seen, byte) in BYTE_ORDER_MARK.iter().enumerate() {
            if self.input.fill_buf()?.first() != Some(byte) {
                self.carry.extend_from_slice(&BYTE_ORDER_MARK[..seen]);
                return Ok(());
            }
            self.input.consume(1);
        }
        Ok(())
    }

    /// Skips blanks and returns the next byte without consuming it.
    fn skip_blanks(&mut self) -> io::Result<Option<u8>> {
        loop {
            let available = self.input.fill_buf()?;
            if available.is_empty() {
                return Ok(None);
            }
            let blanks = available.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let next = available.get(blanks).copied();
            advance(&mut self.line, &mut self.column, &available[..blanks]);
            self.input.consume(blanks);
            if next.is_some() {
                return Ok(next);
            }
        }
    }

    fn consume_byte(&mut self) {
        self.input.consume(1);
        self.column += 1;
    }

    fn error(&self, message: &str) -> StreamError {
        StreamError::Syntax { line: self.line, column: self.column, message: message.to_owned() }
    }
}

/// Search for the end of a JSON value.
#[derive(Default)]
struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
    closed: bool,
}

impl Scan {
    /// Processes the next byte and returns true if the value ended before it.
    fn ends_before(&mut self, byte: u8) -> bool {
        if self.closed {
            return true;
        }
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' if self.depth > 0 => {
                self.depth -= 1;
                self.closed = self.depth == 0;
            }
            b',' | b'}' | b']' => return self.depth == 0,
            _ => return self.depth == 0 && byte.is_ascii_whitespace(),
        }
        false
    }
}

fn is_marker(line: &[u8], marker: &[u8]) -> bool {
    line.strip_prefix(marker)
        .is_some_and(|rest| matches!(rest.first(), None | Some(b' ' | b'\t' | b'\n' | b'\r')))
}

/// Returns true for a line other than blanks, comments and directives.
fn is_content(line: &[u8], starts_document: bool) -> bool {
    let text = if starts_document { &line[3..] } else { line }.trim_ascii();
    !text.is_empty() && !text.starts_with(b"#") && (starts_document || !line.starts_with(b"%"))
}

fn advance(line: &mut u64, column: &mut u64, bytes: &[u8]) {
    for byte in bytes {
        if *byte == b'\n' {
            (*line, *column) = (*line + 1, 1);
        } else {
            *column += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use proptest::prelude::*;

    use super::*;

    /// Splits the text with every small buffer size: no result may depend on the buffer's boundaries.
    fn check(input: &str, expected: &[(&str, u64, u64)]) {
        for capacity in [1, 2, 3, 7, 8192] {
            let mut scenarios = Scenarios::new(BufReader::with_capacity(capacity, input.as_bytes()));
            let mut chunks = Vec::new();
            while let Some(chunk) = scenarios.next().unwrap() {
                chunks.push((String::from_utf8(chunk.text).unwrap(), chunk.line, chunk.column));
            }
            let expected: Vec<_> =
                expected.iter().map(|(text, line, column)| ((*text).to_owned(), *line, *column)).collect();
            assert_eq!(chunks, expected, "{input:?} by {capacity}");
        }
    }

    fn check_error(input: &str, message: &str) {
        let mut scenarios = Scenarios::new(BufReader::with_capacity(3, input.as_bytes()));
        let error = loop {
            match scenarios.next() {
                Ok(Some(_)) => {}
                Ok(None) => panic!("{input:?} was read to its end"),
                Err(error) => break error.to_string(),
            }
        };
        assert_eq!(error, message, "{input:?}");
    }

    #[test]
    fn json_values_in_a_row() {
        check("", &[]);
        check(" \n ", &[]);
        check(r#"{"a":1}"#, &[(r#"{"a":1}"#, 1, 1)]);
        check("{\"a\":1}\n{\"b\":[{}]}\n", &[(r#"{"a":1}"#, 1, 1), (r#"{"b":[{}]}"#, 2, 1)]);
        check("\u{feff}  {\n}{} \n", &[("{\n}", 1, 3), ("{}", 2, 2)]);
        check(r#"{"a":"}\"]\\"} {}"#, &[(r#"{"a":"}\"]\\"}"#, 1, 1), ("{}", 1, 16)]);
    }

    #[test]
    fn json_arrays() {
        check("[]", &[]);
        check(" [ ]\n", &[]);
        check("[{\"a\":[1,2]},\n {}]", &[("{\"a\":[1,2]}", 1, 2), ("{}", 2, 2)]);
        check("[1,\"x,]\",null]", &[("1", 1, 2), ("\"x,]\"", 1, 4), ("null", 1, 10)]);
    }

    #[test]
    fn yaml_streams() {
        check("a: 1\n", &[("a: 1\n", 1, 1)]);
        check("\n  a: 1\n  b: 2\n", &[("  a: 1\n  b: 2\n", 2, 1)]);
        check("---\na: 1\n---\nb: 2", &[("---\na: 1\n", 1, 1), ("---\nb: 2", 3, 1)]);
        check("# c\n---\n---\na: 1\n...\n# d\n", &[("# c\n---\n---\na: 1\n", 1, 1)]);
        check("a: 1\n...\n---\nb: 2\n", &[("a: 1\n", 1, 1), ("---\nb: 2\n", 3, 1)]);
        check("%YAML 1.2\n---\na: 1\n", &[("%YAML 1.2\n---\na: 1\n", 1, 1)]);
        check("--- {a: 1}\n--- # x\n", &[("--- {a: 1}\n", 1, 1)]);
        check("a: |\n  ---\n  x\n---x: 1\n", &[("a: |\n  ---\n  x\n---x: 1\n", 1, 1)]);
    }

    #[test]
    fn an_input_that_ends_or_goes_on_wrongly_is_said_so() {
        check_error("[{}", "1:4: unterminated array; is the input truncated?");
        check_error("[{},", "1:5: unterminated array; is the input truncated?");
        check_error("[{}\n{}]", "2:1: expected `,` or `]` after a scenario of the array");
        check_error("[{}] {}", "1:6: unexpected text after the end of the array");
        check_error("{}\nx", "2:1: expected `{` or the end of the input");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_go_round(bytes in prop::collection::vec(prop_oneof![Just(b'{'), Just(b'}'), Just(b'['), Just(b']'),
            Just(b'"'), Just(b'\\'), Just(b','), Just(b'-'), Just(b'\n'), Just(b' '), any::<u8>()], 0..80)) {
            let mut scenarios = Scenarios::new(BufReader::with_capacity(4, &bytes[..]));
            for _ in 0..200 {
                match scenarios.next() {
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return Ok(()),
                }
            }
            prop_assert!(false, "{bytes:?} has no end");
        }
    }
}
