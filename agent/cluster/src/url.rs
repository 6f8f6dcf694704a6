//! Names within the paths and queries of requests. Names of pods' manifests are anybody's text: one must
//! never reach another object, or another part of the API, than the one it names.

use beelet_units::shorten::quoted;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// RFC 3986's unreserved characters stay.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A name as one part of a path, or as a value of a query.
pub(crate) fn escaped(name: &str) -> String {
    utf8_percent_encode(name, RESERVED).to_string()
}

/// A query's part that selects objects whose `field` is `value`, whatever it has in it (`fields.EscapeValue`
/// of apimachinery).
pub(crate) fn field_selector(field: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=");
    format!("fieldSelector={}", escaped(&format!("{field}={value}")))
}

/// Bytes of the longest name in a path. Those of most kinds of objects have 253 at most; that of an event has
/// a time behind the name of what it is about.
const LONGEST: usize = 512;

/// Why nobody may ask for `path`: one of its parts can't be a name (`IsValidPathSegmentName` of
/// apimachinery), or is longer than any.
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
