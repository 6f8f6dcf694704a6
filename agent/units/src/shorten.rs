//! Bounded quotes of text from outside.

/// Cuts a text of more than `most` bytes in its middle, between characters: the first words of a sentence
/// usually name the failure, the last ones the cause. The ellipsis counts too.
pub fn in_the_middle(text: &mut String, most: usize) {
    const LEFT_OUT: char = '…';
    if text.len() <= most {
        return;
    }
    let half = most.saturating_sub(LEFT_OUT.len_utf8()) / 2;
    let (end, start) =
        (text.floor_char_boundary(half), text.ceil_char_boundary(text.len().saturating_sub(half)));
    text.replace_range(end..start, "…");
}

/// Quotes a name from outside, with special characters escaped, and cut in its middle.
#[must_use]
pub fn quoted(name: &str) -> String {
    /// The longest name of an object is not cut.
    const MOST: usize = 256;
    let mut name = name.to_owned();
    in_the_middle(&mut name, MOST);
    format!("{name:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_keeps_its_beginning_and_its_end() {
        let check = |text: &str, most: usize, expected: &str| {
            let mut cut = text.to_owned();
            in_the_middle(&mut cut, most);
            assert_eq!(cut, expected, "{text} {most}");
            assert!(cut.len() <= most.max('…'.len_utf8()));
        };
        check("abcdefghij", 10, "abcdefghij");
        check("abcdefghij", 9, "abc…hij");
        check("ääääää", 11, "ää…ää");
        check("ääääää", 9, "ä…ä");
        check("abcdefghij", 0, "…");
        check("", 0, "");
    }

    #[test]
    fn a_name_is_quoted_in_a_bounded_length() {
        assert_eq!(quoted("a\"\nb"), "\"a\\\"\\nb\"");
        assert_eq!(quoted(&"a".repeat(253)).len(), 255);
        assert!(quoted(&"\u{1}".repeat(300_000)).len() < 2000);
    }
}
