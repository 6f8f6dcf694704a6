//! Escapes untrusted text for a terminal: last words of containers, names in manifests, answers of a runtime.
//! Control characters are escaped, because they could move the cursor, hide lines, or imitate another column
//! or line.

use std::borrow::Cow;

/// Escapes text for one line; newlines appear as `\n`.
pub(super) fn line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// Escapes text but keeps its line breaks.
pub(super) fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c == '\n')
}

fn escaped(text: &str, is_kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_bad = |c: char| is_unseen(c) && !is_kept(c);
    if !text.contains(is_bad) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_bad(c) {
            plain.extend(c.escape_default());
        } else {
            plain.push(c);
        }
    }
    Cow::Owned(plain)
}

/// Returns true for ASCII and Latin-1 controls, Unicode line separators, and characters that change the
/// writing direction.
fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_steers_a_terminal_gets_through() {
        let check = |text: &str, expected: &str| assert_eq!(line(text), expected);
        check("exit 3: \u{e9}\u{2192} ok", "exit 3: \u{e9}\u{2192} ok");
        check("\u{1b}[2Jgone", "\\u{1b}[2Jgone");
        check("a\nb\tc\r", "a\\nb\\tc\\r");
        check("\u{9b}31m\u{7f}\0", "\\u{9b}31m\\u{7f}\\u{0}");
        check("a\u{202e}b\u{2028}c", "a\\u{202e}b\\u{2028}c");
        assert_eq!(lines("a\n\u{1b}b"), "a\n\\u{1b}b");
        // Plain text is unchanged.
        assert_eq!(line(&line("a\nb")), "a\\nb");
        assert!(matches!(line("plain"), Cow::Borrowed(_)));
    }
}
