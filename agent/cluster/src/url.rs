//! Escapes and checks names in the paths and queries of requests. Names in manifests are untrusted text and
//! must never address another object or another part of the API.

use beelet_units::shorten::quoted;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Characters to escape: all except RFC 3986's unreserved ones.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Escapes a name for a path segment or a query value.
pub(crate) fn escaped(name: &str) -> String {
    utf8_percent_encode(name, RESERVED).to_string()
}

/// Returns the query parameter that selects objects whose `field` is `value`, escaped as in apimachinery's
/// `fields.EscapeValue`.
pub(crate) fn field_selector(field: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=");
    format!("fieldSelector={}", escaped(&format!("{field}={value}")))
}

/// Maximum length of a name in a path, in bytes. Most kinds allow 253; an event's name adds a time to the
/// name of its object.
const LONGEST: usize = 512;

/// Returns the reason why `path` is invalid: one of its segments is not a name (apimachinery's
/// `IsValidPathSegmentName`) or is too long.
pub(crate) fn wrong_part(path: &str) -> Option<String> {
    let path = path.split('?').next().unwrap_or(path);
    path.split('/').skip(1).find_map(|part| {
        let name = percent_decode_str(part).decode_utf8_lossy();
        let why = match &*name {
            "" => "is empty".to_owned(),
            "." | ".." => format!("may not be '{name}'"),
            name if name.len() > LONGEST => format!("is longer than {LONGEST} bytes"),
            name => format!("may not contain '{}'", name.chars().find(|c| matches!(c, '/' | '%'))?),
        };
        Some(format!("the name {} {why}", quoted(&name)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_part_of_a_path_or_refused() {
        let check = |name: &str, path: &str, wrong: Option<&str>| {
            let made = format!("/api/v1/secrets/{}", escaped(name));
            assert_eq!(made, format!("/api/v1/secrets/{path}"));
            assert_eq!(wrong_part(&made).as_deref(), wrong, "{name}");
        };
        check("web-1.a", "web-1.a", None);
        check("a b?c#d&é", "a%20b%3Fc%23d%26%C3%A9", None);
        check("a/b", "a%2Fb", Some("the name \"a/b\" may not contain '/'"));
        check("50%", "50%25", Some("the name \"50%\" may not contain '%'"));
        check(".", ".", Some("the name \".\" may not be '.'"));
        check("..", "..", Some("the name \"..\" may not be '..'"));
        check("", "", Some("the name \"\" is empty"));
        check(
            "../secrets?watch=1",
            "..%2Fsecrets%3Fwatch%3D1",
            Some("the name \"../secrets?watch=1\" may not contain '/'"),
        );
        check("..%2fsecrets", "..%252fsecrets", Some("the name \"..%2fsecrets\" may not contain '%'"));
        let longest = "a".repeat(LONGEST);
        check(&longest, &longest, None);
        let beyond = "a".repeat(300_000);
        let wrong = wrong_part(&format!("/api/v1/secrets/{beyond}")).unwrap();
        assert!(wrong.len() < 400 && wrong.ends_with("a\" is longer than 512 bytes"), "{wrong}");
        assert_eq!(wrong_part("/api/v1/pods?fieldSelector=a%3D%2F"), None);
    }

    #[test]
    fn a_field_selector_takes_any_value() {
        let check = |value: &str, expected: &str| {
            assert_eq!(field_selector("metadata.name", value), format!("fieldSelector={expected}"));
        };
        check("map", "metadata.name%3Dmap");
        check("a&b c", "metadata.name%3Da%26b%20c");
        check(r"a,b=c\", "metadata.name%3Da%5C%2Cb%5C%3Dc%5C%5C");
    }
}
