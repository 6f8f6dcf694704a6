//! Names of objects in the API server (`k8s.io/apimachinery/pkg/util/validation`). Admission accepts any text
//! where a pod names another object, even an impossible name.

/// Length of the longest name, in bytes.
pub const LONGEST: usize = 253;

/// Returns true for letters in lower case, digits and hyphens, with a letter or a digit at each end: a part
/// of a DNS name (RFC 1123), of any length.
#[must_use]
pub fn is_label(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Returns true for a DNS subdomain (`IsDNS1123Subdomain`): labels between dots.
#[must_use]
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= LONGEST && text.split('.').all(is_label)
}

/// Returns the reason why no API server can have an object of this name; None for a possible name. For kinds
/// whose names are DNS subdomains (`NameIsDNSSubdomain`), such as ConfigMaps and Secrets.
#[must_use]
pub fn impossible(name: &str) -> Option<&'static str> {
    if is_subdomain(name) {
        return None;
    }
    Some(match name.len() {
        0 => "the name is empty",
        1..=LONGEST => {
            "a name has only a-z, 0-9, '-' and '.', and each part begins and ends with a letter or digit"
        }
        _ => "no name is longer than 253 bytes",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_dns_subdomain_names_an_object() {
        let check = |name: &str, expected: bool| {
            assert_eq!(impossible(name).is_none(), expected, "{name:?}");
        };
        for name in ["web", "web-1.a", "1", "kube-root-ca.crt", &"a".repeat(LONGEST)] {
            check(name, true);
        }
        for name in [
            "",
            "Web",
            "-web",
            "web-",
            "web.",
            ".web",
            "a..b",
            "a_b",
            "a b",
            "a/b",
            "../secrets",
            "a%2fb",
            "a?watch=1",
            "é",
            "a\0",
            &"a".repeat(LONGEST + 1),
            &"a".repeat(300_000),
        ] {
            check(name, false);
        }
    }
}
