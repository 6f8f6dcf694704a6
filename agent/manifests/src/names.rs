//! Rules for names, as in `k8s.io/apimachinery/pkg/util/validation`. Each check returns the problem, if any.

use beelet_codec::error::Problem;
use beelet_units::object_name::{is_label, is_subdomain};

/// Maximum length of a DNS label.
const LABEL_MAX: usize = 63;

/// Checks a DNS-1123 label: names of containers, volumes and namespaces.
pub(super) fn label(path: &str, name: &str) -> Option<Problem> {
    if name.is_empty() {
        return Some(Problem::new(path, "must be set"));
    }
    (!is_label(name) || name.len() > LABEL_MAX).then(|| {
        let rule = "is not a name: up to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit";
        Problem::new(path, format!("{} {rule}", quoted(name)))
    })
}

/// Checks a DNS-1123 subdomain: names of pods.
pub(super) fn subdomain(path: &str, name: &str) -> Option<Problem> {
    if name.is_empty() {
        return Some(Problem::new(path, "must be set"));
    }
    (!is_subdomain(name)).then(|| {
        let rule = "is not a name: up to 253 of a-z, 0-9, '-' and '.', each part beginning and ending with a letter or digit";
        Problem::new(path, format!("{} {rule}", quoted(name)))
    })
}

/// Checks a path inside a folder: relative, without `..`.
pub(super) fn inner_path(path: &str, inner: &str) -> Option<Problem> {
    let inside =
        !inner.starts_with('/') && !inner.contains('\0') && inner.split('/').all(|part| part != "..");
    (!inside).then(|| Problem::new(path, format!("{} must be relative and without '..'", quoted(inner))))
}

/// Returns true for a valid name part of a label's or annotation's key, which is also a valid value of a
/// label.
fn is_qualified_part(name: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    name.len() <= LABEL_MAX
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && ends(name.chars().next())
        && ends(name.chars().last())
}

/// Checks a key of a label or an annotation: `[prefix/]name`.
pub(super) fn qualified(path: &str, key: &str) -> Option<Problem> {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let prefix_ok = prefix.is_none_or(is_subdomain);
    (!prefix_ok || !is_qualified_part(name)).then(|| {
        let rule = "is not a key: [a DNS name/]up to 63 of letters, digits, '-', '_' and '.'";
        Problem::new(beelet_codec::field(path, key), format!("{} {rule}", quoted(key)))
    })
}

/// Checks the value of a label.
pub(super) fn label_value(path: &str, key: &str, value: &str) -> Option<Problem> {
    (!value.is_empty() && !is_qualified_part(value)).then(|| {
        let rule = "is not a label's value: up to 63 of letters, digits, '-', '_' and '.'";
        Problem::new(beelet_codec::field(path, key), format!("{} {rule}", quoted(value)))
    })
}

/// Checks the name of a port (RFC 6335).
pub(super) fn port(path: &str, name: &str) -> Option<Problem> {
    let ok = is_label(name)
        && name.len() <= 15
        && !name.contains("--")
        && name.bytes().any(|b| b.is_ascii_lowercase());
    (!ok).then(|| {
        let rule = "is not a port's name: up to 15 of a-z, 0-9 and '-', with a letter in it";
        Problem::new(path, format!("{} {rule}", quoted(name)))
    })
}

/// Checks the name of an environment variable: printable ASCII without `=`.
pub(super) fn variable(path: &str, name: &str) -> Option<Problem> {
    if name.is_empty() {
        return Some(Problem::new(path, "must be set"));
    }
    let ok = name.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'=');
    (!ok).then(|| {
        Problem::new(path, format!("{} is not a variable's name: printable ASCII without '='", quoted(name)))
    })
}

/// Checks a pod's UID, which becomes part of paths.
pub(super) fn uid(path: &str, uid: &str) -> Option<Problem> {
    (uid.len() > LABEL_MAX || !is_qualified_part(uid)).then(|| {
        let rule = "is not a UID: up to 63 of letters, digits, '-', '_' and '.'";
        Problem::new(path, format!("{} {rule}", quoted(uid)))
    })
}

/// Quotes an untrusted text and limits its length.
pub(super) fn quoted(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{:?}…", &text[..cut]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels() {
        let check = |name: &str, ok: bool| assert_eq!(label("x", name).is_none(), ok, "{name}");
        check("web", true);
        check("a-1", true);
        check("1", true);
        check(&"a".repeat(63), true);
        check(&"a".repeat(64), false);
        check("", false);
        check("-a", false);
        check("a-", false);
        check("A", false);
        check("a.b", false);
        check("é", false);
        check("../x", false);
    }

    #[test]
    fn subdomains() {
        let check = |name: &str, ok: bool| assert_eq!(subdomain("x", name).is_none(), ok, "{name}");
        check("web.example", true);
        check("web..example", false);
        check(".web", false);
        check(&"a.".repeat(127), false);
        check(&format!("{}b", "a.".repeat(126)), true);
        check(&format!("{}bb", "a.".repeat(126)), false);
    }

    #[test]
    fn keys_and_values() {
        let key = |name: &str, ok: bool| assert_eq!(qualified("x", name).is_none(), ok, "{name}");
        key("app", true);
        key("example.com/App_1.x", true);
        key("Example.com/app", false);
        key("/app", false);
        key("a/b/c", false);
        key("", false);
        key("-a", false);
        let value = |text: &str, ok: bool| assert_eq!(label_value("x", "k", text).is_none(), ok, "{text}");
        value("", true);
        value("v1.2_3", true);
        value("a b", false);
    }

    #[test]
    fn ports_variables_and_uids() {
        let check_port = |name: &str, ok: bool| assert_eq!(port("x", name).is_none(), ok, "{name}");
        check_port("http", true);
        check_port("80", false);
        check_port("a--b", false);
        check_port("a-very-long-name", false);
        let check_variable = |name: &str, ok: bool| assert_eq!(variable("x", name).is_none(), ok, "{name}");
        check_variable("PATH", true);
        check_variable("my.var-1", true);
        check_variable("a=b", false);
        check_variable("é", false);
        let check_uid = |text: &str, ok: bool| assert_eq!(uid("x", text).is_none(), ok, "{text}");
        check_uid("7c9b2f6e-0000-4000-8000-000000000000", true);
        check_uid("../../etc", false);
        check_uid("a/b", false);
        check_uid("..", false);
    }

    #[test]
    fn long_names_are_cut_in_messages() {
        assert_eq!(quoted(&"é".repeat(100)).chars().count(), 83);
    }
}
