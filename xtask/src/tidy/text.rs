//! Splits a Rust source into blocks of comments, string literals, and the code without both. A rule about
//! words must not read code, and a rule about code must not read words.

/// The kind of a block of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A doc comment: `///` or `//!`.
    Doc,
    /// Any other comment.
    Comment,
    /// A string literal.
    Literal,
    /// A paragraph of a page.
    Page,
}

/// Consecutive lines of the same kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) kind: Kind,
    /// Line numbers with their texts, without comment markers.
    pub(super) lines: Vec<(usize, String)>,
}

/// The parts of a source.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub(super) blocks: Vec<Block>,
    /// The code with its line breaks, with `""` for each literal and without comments.
    pub(super) code: String,
    line: usize,
}

/// Splits a Rust source into its parts.
pub(super) fn source(text: &str) -> Source {
    let mut source = Source { line: 1, ..Source::default() };
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = source.token(rest, first);
        rest = rest.get(length..).unwrap_or_default();
    }
    source
}

impl Source {
    /// Parses the token at the start of `rest`. Returns the token's length.
    fn token(&mut self, rest: &str, first: char) -> usize {
        if rest.starts_with("//") {
            return self.comment(rest);
        }
        if rest.starts_with("/*") {
            let length = block_comment(rest);
            self.push(Kind::Comment, &rest[..length]);
            return length;
        }
        if let Some((open, length)) = self.literal(rest) {
            self.code.push_str("\"\"");
            let inner = rest[open..length].trim_end_matches('#');
            self.push(Kind::Literal, inner.strip_suffix('"').unwrap_or(inner));
            return length;
        }
        let length = if first == '\'' { character(rest) } else { first.len_utf8() };
        self.line += usize::from(first == '\n');
        self.code.push_str(if length > 1 && first == '\'' { "' '" } else { &rest[..length] });
        length
    }

    /// Parses a line comment and returns its length. A comment that follows a comment of the same kind on the
    /// line before joins its block.
    fn comment(&mut self, rest: &str) -> usize {
        let length = rest.find('\n').unwrap_or(rest.len());
        let text = &rest[..length];
        let is_doc = text.starts_with("//!") || text.starts_with("///") && !text.starts_with("////");
        let kind = if is_doc { Kind::Doc } else { Kind::Comment };
        let words = text.trim_start_matches('/').trim_start_matches('!').trim().to_owned();
        let alone = self.code.rsplit('\n').next().is_some_and(|line| line.trim().is_empty());
        match self.blocks.last_mut() {
            Some(block)
                if alone
                    && block.kind == kind
                    && block.lines.last().is_some_and(|(line, _)| line + 1 == self.line) =>
            {
                block.lines.push((self.line, words));
            }
            _ => self.blocks.push(Block { kind, lines: vec![(self.line, words)] }),
        }
        length
    }

    /// Adds a separate block, which may have several lines.
    fn push(&mut self, kind: Kind, text: &str) {
        let lines = text.lines().enumerate().map(|(index, line)| {
            (self.line + index, line.trim_end_matches('\\').trim_matches(['/', '*', ' ']).to_owned())
        });
        self.blocks.push(Block { kind, lines: lines.collect() });
        let breaks = text.matches('\n').count();
        self.line += breaks;
        self.code.extend(std::iter::repeat_n('\n', breaks));
    }

    /// Returns the lengths of a string literal's opening and of the whole literal, if `rest` begins with one.
    fn literal(&self, rest: &str) -> Option<(usize, usize)> {
        if rest.starts_with('"') {
            return Some((1, quoted(rest)));
        }
        let in_word = self.code.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let raw = ["r", "br", "cr"].iter().find_map(|prefix| rest.strip_prefix(prefix));
        let raw = raw.filter(|_| !in_word)?;
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let inner = raw[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", "#".repeat(hashes));
        let open = rest.len() - inner.len();
        Some((open, inner.find(&end).map_or(rest.len(), |at| open + at + end.len())))
    }
}

/// Returns the length of a quoted string.
fn quoted(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            _ => escaped = c == '\\' && !escaped,
        }
    }
    rest.len()
}

/// Returns the length of a character literal, or 1 for the quote of a lifetime.
fn character(rest: &str) -> usize {
    let mut inner = rest.char_indices().skip(1);
    let Some((_, first)) = inner.next() else { return 1 };
    if first == '\\' {
        inner.next();
        return inner.find(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 1);
    }
    inner.next().filter(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 1)
}

/// Returns the length of a block comment, including nested comments.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(c) = rest[at..].chars().next() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += c.len_utf8();
        }
    }
    rest.len()
}

/// Returns the paragraphs of a page, without code blocks. A list item, a heading or a table row is a
/// paragraph too.
pub(super) fn page(text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut fenced, mut indented, mut open) = (false, false, false);
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.starts_with("```") {
            (fenced, open) = (!fenced, false);
            continue;
        }
        indented = line.starts_with("    ") && (indented || !open) && !trimmed.is_empty();
        if fenced || indented || trimmed.is_empty() || trimmed.starts_with("<!--") {
            open = false;
            continue;
        }
        let words = trimmed.trim_start_matches(['-', '*', '#', '>', '|', ' ']);
        let begins = words.len() < trimmed.len() || trimmed.starts_with(|c: char| c.is_ascii_digit());
        match blocks.last_mut().filter(|_| open && !begins) {
            Some(block) => block.lines.push((index + 1, words.to_owned())),
            None => blocks.push(Block { kind: Kind::Page, lines: vec![(index + 1, words.to_owned())] }),
        }
        open = true;
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(text: &str) -> Vec<(Kind, usize, String)> {
        let join = |block: Block| {
            let texts: Vec<String> = block.lines.iter().map(|(_, text)| text.clone()).collect();
            (block.kind, block.lines[0].0, texts.join("|"))
        };
        source(text).blocks.into_iter().map(join).collect()
    }

    #[test]
    fn comments_are_blocks_of_consecutive_lines_of_one_kind() {
        let text = "//! A\n//! b.\n\n/// C\nfn f() {} // d\n// e\n/* f\n g */\n";
        let expected = [
            (Kind::Doc, 1, "A|b."),
            (Kind::Doc, 4, "C"),
            (Kind::Comment, 5, "d|e"),
            (Kind::Comment, 7, "f|g"),
        ];
        assert_eq!(blocks(text), expected.map(|(kind, line, text)| (kind, line, text.to_owned())));
        assert_eq!(source(text).code, "\n\n\n\nfn f() {} \n\n\n\n");
    }

    #[test]
    fn literals_are_distinguished_from_lifetimes_and_characters() {
        let check = |text: &str, expected: &[&str], code: &str| {
            let found: Vec<String> = blocks(text).into_iter().map(|(_, _, text)| text).collect();
            assert_eq!(found, expected, "{text}");
            assert_eq!(source(text).code, code, "{text}");
        };
        check(r#"f("a // b", "c\"d")"#, &["a // b", "c\\\"d"], r#"f("", "")"#);
        check("r#\"a \"b\" c\"#;x", &["a \"b\" c"], "\"\";x");
        check(
            "fn f<'a>(x: &'a str, c: char) { c == '\"' || c == '\\'' }",
            &[],
            "fn f<'a>(x: &'a str, c: char) { c == ' ' || c == ' ' }",
        );
        check("\"a \\\n   b\" // c", &["a|b", "c"], "\"\"\n ");
        check("bar\"x\"", &["x"], "bar\"\"");
    }

    #[test]
    fn pages_have_paragraphs_and_no_code() {
        let text = "# T\n\nA b\nc.\n- d\n  e\n\n    code\n    code\n\n```\ncode\n```\n| f | g |\n";
        let found: Vec<Vec<usize>> =
            page(text).iter().map(|block| block.lines.iter().map(|(line, _)| *line).collect()).collect();
        assert_eq!(found, [vec![1], vec![3, 4], vec![5, 6], vec![14]]);
    }
}
