//! `$(VAR)` references in commands, arguments and environment variables, by the rules of Kubernetes'
//! `third_party/forked/golang/expansion`: `$(NAME)` is replaced where NAME is defined and left as it stands
//! where it isn't; `$$` is a plain `$`, so `$$(NAME)` is never a reference.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::EnvVar;

/// `text` with its references replaced by what `value_of` knows.
pub fn expand(text: &str, value_of: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match value_of(name) {
                Some(value) => out.push_str(&value),
                None => out.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

/// A reference to a variable that isn't defined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("refers to the variable {0}, which the container does not have")]
pub struct Undefined(pub String);

/// As [`expand`], but a reference to what isn't defined is an error. For `subPathExpr`.
///
/// # Errors
/// The first name that `value_of` doesn't know.
pub fn expand_strict(text: &str, value_of: impl Fn(&str) -> Option<String>) -> Result<String, Undefined> {
    let missing = std::cell::RefCell::new(None);
    let expanded = expand(text, |name| {
        let value = value_of(name);
        if value.is_none() {
            missing.borrow_mut().get_or_insert_with(|| name.to_owned());
        }
        value
    });
    match missing.into_inner() {
        Some(name) => Err(Undefined(name)),
        None => Ok(expanded),
    }
}

/// Expands the command of an exec probe, which knows the static environment only: a variable from elsewhere
/// (`valueFrom`) is empty, as to the kubelet (`ExpandContainerCommandOnlyStatic`).
pub fn expand_probe_command(command: &[String], env: &[EnvVar]) -> Vec<String> {
    let values: BTreeMap<&str, &str> = env
        .iter()
        .map(|variable| (variable.name.as_str(), variable.value.as_deref().unwrap_or_default()))
        .collect();
    let value_of = |name: &str| values.get(name).map(|value| (*value).to_owned());
    command.iter().map(|argument| expand(argument, value_of)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value_of(name: &str) -> Option<String> {
        match name {
            "A" => Some("1".to_owned()),
            "B" => Some("$(A)".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    #[test]
    fn references() {
        let check = |text: &str, expect: &str| assert_eq!(expand(text, value_of), expect, "{text}");
        check("plain", "plain");
        check("$(A)", "1");
        check("x$(A)y$(A)z", "x1y1z");
        check("$(B)", "$(A)"); // a value isn't expanded again
        check("$(EMPTY)", "");
        check("$(NONE)", "$(NONE)");
        check("$$(A)", "$(A)");
        check("$$$(A)", "$1");
        check("$$$$(A)", "$$(A)");
        check("$(A", "$(A");
        check("$A", "$A");
        check("$", "$");
        check("$()", "$()");
        check("$(NO$(A))", "$(NO$(A))");
        check("grün$(A)", "grün1");
    }

    #[test]
    fn strictly_an_undefined_reference_is_an_error() {
        assert_eq!(expand_strict("a/$(A)/$$(X)", value_of), Ok("a/1/$(X)".to_owned()));
        assert_eq!(expand_strict("$(NONE)/$(OTHER)", value_of), Err(Undefined("NONE".to_owned())));
    }

    #[test]
    fn a_probe_sees_the_static_environment_only() {
        let variable = |name: &str, value: Option<&str>| EnvVar {
            name: name.to_owned(),
            value: value.map(str::to_owned),
            value_from: None,
        };
        let env = [variable("A", Some("1")), variable("B", None), variable("A", Some("2"))];
        let command = ["test".to_owned(), "$(A)-$(B)-$(C)".to_owned()];
        assert_eq!(expand_probe_command(&command, &env), ["test", "2--$(C)"]);
    }

    proptest! {
        #[test]
        fn text_without_a_dollar_stays_as_it_is(text in "[^$]*") {
            prop_assert_eq!(expand(&text, value_of), text);
        }

        #[test]
        fn any_text_can_be_expanded(text in ".*") {
            expand(&text, value_of);
        }
    }
}
