//! JSON as Go's encoder writes it (encoding/json, `Marshal`), for digests over that text.

use std::fmt::Write as _;

/// Returns JSON with the characters escaped that Go escapes for HTML, and that other writers leave as they
/// are. These characters can stand only inside of strings.
#[must_use]
pub fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                // Writing to a String can't fail.
                let _ = write!(text, "\\u{:04x}", u32::from(character));
            }
            other => text.push(other),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_characters_that_go_escapes_are_escaped() {
        let check = |text: &str, expected: &str| {
            assert_eq!(escaped(&serde_json::Value::from(text).to_string()), expected);
        };
        check("a<b&c>", r#""a\u003cb\u0026c\u003e""#);
        check("\u{2028}\u{2029}", r#""\u2028\u2029""#);
        check("\"\\\n\u{8}\u{1}ä\u{7f}", "\"\\\"\\\\\\n\\b\\u0001ä\u{7f}\"");
    }
}
