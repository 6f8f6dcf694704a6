//! Checks the words of docs/style.md that a machine can find, in the comments of sources and in pages.

use super::Violation;
use anyhow::{Context as _, Result};
use regex::Regex;

/// Maximum width of a comment line, the same as that of code (rustfmt.toml's `max_width`).
const WIDEST: usize = 110;

/// The page that shows bad examples.
const STYLE: &str = "docs/style.md";

/// A page that a command generates from texts that are checked in their sources.
const MADE: &str = "docs/kernels.md";

/// The amount of a rate: a number in words or digits.
const NUMBERS: &str =
    "one|two|three|four|five|six|seven|eight|nine|ten|twenty|hundreds?|thousands?|[0-9][0-9,.]*";

/// The units after "once a": "once a second" is a rate, "once a connection was made" is not.
const TIMES: &str = "second|minute|hour|day|week|month|year|tick|round|period|probe";

/// The units of a rate, which follow its "a".
const UNITS: &str = "second|minute|hour|day|week|month|year|tick|round|period|step|change|call|look|probe|scrape|\
    pod|container|sandbox|worker|runtime|node|plugin|device|resource|volume|image|cgroup|namespace|process|thread|\
    CPU|core|machine|user|subscriber|connection|socket|request|message|event|file|folder|line|row|page|entry|record|\
    document|object|key|field|item|case|test|command|subcommand|kind|commit";

/// Words that cannot be the noun of a rate before its "a": "one of a pod", "one that has a file".
const NO_NOUN: &[&str] = &[
    "about", "after", "all", "and", "are", "as", "at", "be", "become", "becomes", "been", "before", "behind",
    "beside", "below", "between", "but", "by", "can", "for", "from", "gets", "gives", "had", "has", "have",
    "having", "holds", "if", "in", "inside", "into", "is", "keeps", "leaves", "like", "makes", "means",
    "names", "needs", "no", "not", "of", "on", "only", "or", "over", "says", "sees", "share", "such",
    "takes", "than", "that", "them", "then", "through", "to", "under", "until", "upon", "uses", "was",
    "wants", "were", "what", "when", "where", "which", "while", "who", "whose", "with", "within", "without",
];

/// The compiled rules.
pub(super) struct Words {
    /// "once a second", "100 a second".
    adverb: Regex,
    /// "one worker a pod", "50 bytes an entry"; the last word before "a" is the group.
    noun: Regex,
}

impl Words {
    pub(super) fn new() -> Result<Words> {
        let make =
            |pattern: String| Regex::new(&pattern).context("invalid regular expression in a rule of tidy");
        Ok(Words {
            adverb: make(format!(
                r"(?i)\b(?:once an? (?:{TIMES})|(?:twice|times|[0-9]+) an? (?:{UNITS}))\b"
            ))?,
            noun: make(format!(r"(?i)\b(?:{NUMBERS})(?: [\w/-]+)? ([\w/-]+) an? (?:{UNITS})\b"))?,
        })
    }

    /// Finds the violations in one file.
    pub(super) fn check(&self, file: &str, text: &str) -> Vec<Violation> {
        let is_source = file.ends_with(".rs");
        if !is_source && !file.ends_with(".md") || [STYLE, MADE].contains(&file) {
            return Vec::new();
        }
        let mut found = Vec::new();
        let mut fenced = false;
        for (index, line) in text.lines().enumerate() {
            fenced ^= !is_source && line.trim_start().starts_with("```");
            let words = match line.find("//") {
                _ if fenced => "",
                Some(start) if is_source => &line[start..],
                None if is_source => "",
                _ => line,
            };
            let mut say = |message: String| {
                found.push(Violation { file: file.to_owned(), line: index + 1, message });
            };
            if let Some(rate) = self.rate(words) {
                say(format!("{rate:?}: write \"per\" for a rate (docs/style.md)"));
            }
            for (pattern, instead) in RIDDLES {
                if words.contains(pattern) {
                    say(format!("{pattern:?}: {instead} (docs/style.md)"));
                }
            }
            if is_too_wide(file, line) {
                say(format!("a comment of {} columns; the maximum is {WIDEST}", line.chars().count()));
            }
        }
        found
    }

    /// Finds a rate with "a" instead of "per".
    fn rate<'a>(&self, words: &'a str) -> Option<&'a str> {
        let noun = self.noun.captures_iter(words).find(|found| {
            let last = found.get(1).map_or("", |word| word.as_str()).to_lowercase();
            !NO_NOUN.contains(&last.as_str())
        });
        let noun = noun.and_then(|found| found.get(0));
        self.adverb.find(words).or(noun).map(|found| found.as_str())
    }
}

/// Phrases with an unclear meaning, and the advice for each.
const RIDDLES: &[(&str, &str)] = &[
    ("to be had", "name the thing that is missing or cannot be read"),
    ("ee the module's head", "rustdoc shows the item alone: describe the item"),
    ("no harm if", "write \"harmless\""),
];

fn is_too_wide(file: &str, line: &str) -> bool {
    let is_comment = file.ends_with(".rs") && line.trim_start().starts_with("//");
    // A table's row and an address can't be broken.
    let text = line.trim_start().trim_start_matches(['/', '!', ' ']);
    is_comment && !text.starts_with('|') && !text.contains("://") && line.chars().count() > WIDEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_with_a_are_found_and_other_articles_ignored() {
        let words = Words::new().unwrap();
        let check = |text: &str, expected: Option<&str>| assert_eq!(words.rate(text), expected, "{text}");
        check("// It looks once a second.", Some("once a second"));
        check("one worker a pod", Some("one worker a pod"));
        check("some 50 bytes an entry", Some("50 bytes an entry"));
        check("one JSON object a line", Some("one JSON object a line"));
        check("a thousand times a second", Some("times a second"));
        check("once per second, one worker per pod", None);
        check("one that has a pod", None);
        check("the one of a container", None);
        check("give it a second", None);
        check("once a connection was made", None);
    }

    #[test]
    fn comments_and_pages_are_read_but_not_code_and_fences() {
        let words = Words::new().unwrap();
        let lines = |file: &str, text: &str| {
            words.check(file, text).into_iter().map(|violation| violation.line).collect::<Vec<_>>()
        };
        assert_eq!(lines("a.rs", "let x = \"once a second\"; // once a minute\n// once a day\n"), [1, 2]);
        assert_eq!(lines("a.rs", "let x = \"once a second\";\n"), [0; 0]);
        assert_eq!(lines("a.md", "once a day\n```\nonce a day\n```\nis not to be had\n"), [1, 5]);
        assert_eq!(lines("a.toml", "# once a day\n"), [0; 0]);
        let wide = |text: &str| format!("    // {text}\n");
        assert_eq!(lines("a.rs", &wide(&"x".repeat(WIDEST - 7))), [0; 0]);
        assert_eq!(lines("a.rs", &wide(&"x".repeat(WIDEST - 6))), [1]);
        assert_eq!(lines("a.rs", &wide(&format!("https://{}", "x".repeat(WIDEST)))), [0; 0]);
    }
}
