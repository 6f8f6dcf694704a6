//! Counts signs of sentences that break the language rule of docs/style.md: every sentence names its subject
//! with the field's noun and has an active verb. The tree has many of these sentences, so the rule is a
//! ratchet (`ratchet.rs`): counts only fall.

use super::text::{self, Block, Kind};

/// Pages that commands generate, and the page that shows bad examples.
const NOT_READ: &[&str] = &["docs/conformance.md", "docs/kernels.md", "docs/machines.md", "docs/style.md"];

/// Words that must not begin a doc comment, which begins with a noun or a verb.
const RELATIVES: &[&str] = &["what", "how", "where", "why", "who", "whose", "whom", "which", "whether"];
/// Words that must not begin a sentence, which begins with its subject.
const NO_SUBJECT: &[&str] = &["what", "whoever", "nobody", "it", "one"];
/// Words for people: parts of a program are not people.
const PEOPLE: &[&str] = &["nobody", "somebody", "whoever", "whatever"];
const TELL: &[&str] = &["tell", "tells", "told"];
/// Verbs that name no action of the field.
const VERBS: &[&str] = &["give", "look", "note", "put", "take", "tell", "told"];
/// Minimum number of words of a message; a shorter literal is a name or a format.
const MESSAGE: usize = 3;

/// A place that a pattern matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hit {
    pub(super) pattern: &'static str,
    pub(super) line: usize,
    /// The matching words and the words after them, up to five, to help a reader find the place.
    pub(super) words: String,
}

/// Finds the patterns in one file.
pub(super) fn hits(file: &str, text: &str) -> Vec<Hit> {
    let mut found = Vec::new();
    if file.ends_with(".rs") {
        let source = text::source(text);
        source.blocks.iter().for_each(|block| found.extend(of_block(block)));
        found.extend(of_functions(&source.code));
    } else if file.ends_with(".md") && !NOT_READ.contains(&file) {
        text::page(text).iter().for_each(|block| found.extend(of_block(block)));
    }
    found
}

/// Finds the functions whose names begin with one of [`VERBS`].
fn of_functions(code: &str) -> Vec<Hit> {
    let mut found = Vec::new();
    for (index, line) in code.lines().enumerate() {
        let names = line.match_indices("fn ").filter(|(at, _)| {
            !line[..*at].ends_with(|before: char| before.is_alphanumeric() || before == '_')
        });
        for (at, _) in names {
            let name: String =
                line[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if name.split('_').next().is_some_and(|verb| VERBS.contains(&verb)) {
                found.push(Hit { pattern: "function-verb", line: index + 1, words: name });
            }
        }
    }
    found
}

/// A word of a line.
struct Word<'a> {
    at: usize,
    word: &'a str,
    lower: String,
    /// True at the start of a sentence.
    begins: bool,
}

fn of_block(block: &Block) -> Vec<Hit> {
    let count: usize = block.lines.iter().map(|(_, line)| line.split_whitespace().count()).sum();
    if block.kind == Kind::Literal && count < MESSAGE {
        return Vec::new();
    }
    let mut found = Vec::new();
    let (mut begins, mut fenced, mut is_first) = (true, false, true);
    for (number, line) in &block.lines {
        if line.starts_with("```") {
            fenced = !fenced;
            begins = true;
        }
        if fenced || line.starts_with("```") {
            continue;
        }
        let text = without_code(line);
        let item = block.kind != Kind::Literal && line.starts_with(['-', '*', '#', '|', '<']);
        let words = words(&text, begins || item, block.kind);
        let mut add = |pattern: &'static str, at: usize| {
            let words: Vec<&str> = line[at..].split_whitespace().take(5).collect();
            found.push(Hit { pattern, line: *number, words: words.join(" ") });
        };
        for (index, word) in words.iter().enumerate() {
            let next = words.get(index + 1).map_or("", |next| next.lower.as_str());
            if is_first && block.kind == Kind::Doc && RELATIVES.contains(&word.lower.as_str()) {
                add("free-relative", word.at);
            }
            let is_capital = word.word.starts_with(char::is_uppercase);
            let is_start = word.begins && (is_capital || is_first && block.kind == Kind::Literal);
            if is_start && NO_SUBJECT.contains(&word.lower.as_str()) {
                add("sentence-start", word.at);
            }
            is_first = false;
            if let Some(pattern) = of_words(&word.lower, next) {
                add(pattern, word.at);
            }
        }
        begins = text.trim_end().ends_with(['.', '!', '?']) || text.trim().is_empty();
    }
    found
}

/// Returns the pattern that a word and the next word match.
fn of_words(word: &str, next: &str) -> Option<&'static str> {
    match (word, next) {
        (word, _) if PEOPLE.contains(&word) => Some("person"),
        (word, _) if TELL.contains(&word) => Some("tell"),
        ("anew", _) => Some("anew"),
        ("so", "long" | "many") => Some("so-such"),
        ("such", next) if !["", "a", "an", "as", "that"].contains(&next) => Some("so-such"),
        ("is", "no") | ("are", "none") => Some("negated-noun"),
        _ => None,
    }
}

/// Returns the line with every byte between backticks replaced by an `x`.
fn without_code(line: &str) -> String {
    let mut inside = false;
    let blank = |c: char| {
        inside ^= c == '`';
        if inside && c != '`' { "x".repeat(c.len_utf8()) } else { c.to_string() }
    };
    line.chars().map(blank).collect()
}

/// Returns the words of a line. `begins` is true if the first word begins a sentence.
fn words(line: &str, begins: bool, kind: Kind) -> Vec<Word<'_>> {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '\'' | '-' | '_' | '’');
    let mut found: Vec<Word<'_>> = Vec::new();
    let (mut end, mut at) = (0, 0);
    while let Some(start) = line[at..].find(is_part).map(|offset| at + offset) {
        let length = line[start..].find(|c| !is_part(c)).unwrap_or(line.len() - start);
        let between = &line[end..start];
        let is_sentence = [". ", "! ", "? "].iter().any(|mark| between.contains(mark));
        let is_cell = kind == Kind::Page && between.contains('|');
        let word = &line[start..start + length];
        let begins = if found.is_empty() { begins } else { is_sentence || is_cell };
        found.push(Word { at: start, word, lower: word.to_lowercase(), begins });
        (end, at) = (start + length, start + length);
    }
    // "is no longer" negates the following verb, not a noun.
    if let Some(index) =
        found.windows(3).position(|three| three[1].lower == "no" && three[2].lower == "longer")
    {
        found.remove(index + 1);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(file: &str, text: &str, expected: &[(&str, usize)]) {
        let found: Vec<(&str, usize)> = hits(file, text).iter().map(|hit| (hit.pattern, hit.line)).collect();
        assert_eq!(found, expected, "{file}: {text}");
    }

    #[test]
    fn doc_comments_that_begin_with_a_relative_are_found() {
        check("a.rs", "/// How the pod ends.\nfn f() {}\n", &[("free-relative", 1)]);
        check("a.rs", "/// What is freed.\n/// How?\n", &[("free-relative", 1), ("sentence-start", 1)]);
        check("a.rs", "/// Returns what is freed.\n// How it ends.\n", &[]);
        check("a.rs", "/// Bytes.\n///\n/// ```\n/// What it is\n/// ```\n", &[]);
    }

    #[test]
    fn sentences_without_a_subject_are_found_over_lines() {
        check(
            "a.rs",
            "// A pod ends. It is\n// gone. One stays.\n",
            &[("sentence-start", 1), ("sentence-start", 2)],
        );
        check("a.rs", "// A pod ends.\n// It is gone, and it stays.\n", &[("sentence-start", 2)]);
        check("a.rs", "bail!(\"it needs root now\");\n", &[("sentence-start", 1)]);
        check("a.rs", "const ONE: &str = \"one\"; // the one\n", &[]);
        check(
            "docs/a.md",
            "| One | It |\n\n- What\n",
            &[("sentence-start", 1), ("sentence-start", 1), ("sentence-start", 3)],
        );
        check("docs/style.md", "What it is\n", &[]);
    }

    #[test]
    fn words_for_people_and_empty_phrases_are_found_outside_code() {
        check("a.rs", "// the manager tells nobody\n", &[("tell", 1), ("person", 1)]);
        check("a.rs", "// `tell` and `nobody`\nlet nobody = tell();\n", &[]);
        check(
            "a.rs",
            "// for so long, such labels, such a pod, such as\n",
            &[("so-such", 1), ("so-such", 1)],
        );
        check(
            "a.rs",
            "// there is no pod; are none; is no longer; made anew\n",
            &[("negated-noun", 1), ("negated-noun", 1), ("anew", 1)],
        );
        check("a.rs", "let x = \"nobody reads this pod\";\n", &[("sentence-start", 1), ("person", 1)]);
        check("README.md", "Nobody.\n", &[("sentence-start", 1), ("person", 1)]);
    }

    #[test]
    fn functions_with_empty_verbs_are_found() {
        check(
            "a.rs",
            "pub(super) fn take_pod() {}\nfn tell() {}\n",
            &[("function-verb", 1), ("function-verb", 2)],
        );
        check(
            "a.rs",
            "fn taken() {}\nfn look_up() {}\n// fn put()\nlet s = \"fn put\";\n",
            &[("function-verb", 2)],
        );
    }
}
