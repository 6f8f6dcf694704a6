//! `$(VAR)` references in commands, arguments and environment variables, by the rules of Kubernetes'
//! `third_party/forked/golang/expansion`: `$(NAME)` is replaced if NAME is defined and unchanged otherwise;
//! `$$` is a plain `$`, so `$$(NAME)` is never a reference.
//!
//! A value may refer to earlier values, so that a few lines of manifest can expand to more bytes than a
//! machine has. Every expansion has a [`Budget`], and fails once that is used up.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::EnvVar;

/// Maximum length of texts, in bytes. Linux refuses longer ones: a single argument or variable has at most 32
/// pages (`MAX_ARG_STRLEN`), all together 6 MiB (`bprm_stack_limits` in `fs/exec.c`), and a path 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Maximum of one text.
    text: usize,
    /// Maximum of all texts together.
    all: usize,
    /// Bytes left of that.
    left: usize,
}

impl Budget {
    /// Budget of a container's environment, command and arguments.
    pub const CONTAINER: Self = Self::new(1 << 20, 16 << 20);
    /// Budget of a probe's command: the agent keeps it while the container runs.
    pub const PROBE: Self = Self::new(1 << 20, 1 << 20);
    /// Budget of a path.
    pub const PATH: Self = Self::new(4096, 4096);

    const fn new(text: usize, all: usize) -> Self {
        Self { text, all, left: all }
    }

    /// Subtracts bytes of existing texts.
    ///
    /// # Errors
    /// Fewer bytes are left.
    pub fn spend(&mut self, bytes: usize) -> Result<(), TooLong> {
        self.left = self.left.checked_sub(bytes).ok_or(TooLong::Together { most: self.all })?;
        Ok(())
    }

    /// Returns the maximum length of the next text, and the error for a longer one.
    fn room(&self) -> (usize, TooLong) {
        if self.text <= self.left {
            (self.text, TooLong::Text { most: self.text })
        } else {
            (self.left, TooLong::Together { most: self.all })
        }
    }
}

/// An expanded text that is too long. The message follows the text's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooLong {
    /// The text alone is too long.
    #[error("is longer than {most} bytes once its references are replaced")]
    Text {
        /// Maximum bytes of one text.
        most: usize,
    },
    /// The text and those before it are too long together.
    #[error("makes the total longer than {most} bytes")]
    Together {
        /// Maximum bytes of all texts.
        most: usize,
    },
}

/// Replaces the references in `text` by the values of `value_of`.
///
/// # Errors
/// The result would exceed `budget`; memory use never does.
pub fn expand<'v>(
    text: &str,
    mut value_of: impl FnMut(&str) -> Option<Cow<'v, str>>,
    budget: &mut Budget,
) -> Result<String, TooLong> {
    let (most, too_long) = budget.room();
    let mut out = String::new();
    let mut push = |piece: &str| {
        let fits = piece.len() <= most - out.len();
        fits.then(|| out.push_str(piece)).ok_or(too_long)
    };
    let (mut rest, mut may_end) = (text, true);
    while let Some((before, after)) = rest.split_once('$') {
        push(before)?;
        if let Some(after) = after.strip_prefix('$') {
            push("$")?;
            rest = after;
            continue;
        }
        // Without a closing parenthesis here, none follows: searching for each reference again would be
        // quadratic.
        let reference = after.strip_prefix('(').filter(|_| may_end);
        match reference.map(|reference| reference.split_once(')')) {
            Some(Some((name, after))) => {
                match value_of(name) {
                    Some(value) => push(&value)?,
                    None => ["$(", name, ")"].into_iter().try_for_each(&mut push)?,
                }
                rest = after;
            }
            unclosed => {
                may_end &= unclosed.is_none();
                push("$")?;
                rest = after;
            }
        }
    }
    push(rest)?;
    budget.spend(out.len())?;
    Ok(out)
}

/// An error in expanding a text. The message follows the text's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unexpanded {
    /// The text refers to an undefined variable.
    #[error("refers to the variable {0}, which the container does not have")]
    Undefined(String),
    /// The result is too long.
    #[error(transparent)]
    TooLong(#[from] TooLong),
}

/// Works like [`expand`], but fails on an undefined reference. For `subPathExpr`.
///
/// # Errors
/// The first name that `value_of` does not know; or the result is too long.
pub fn expand_strict<'v>(
    text: &str,
    mut value_of: impl FnMut(&str) -> Option<Cow<'v, str>>,
    budget: &mut Budget,
) -> Result<String, Unexpanded> {
    let mut missing = None;
    let value_of = |name: &str| {
        let value = value_of(name);
        if value.is_none() {
            missing.get_or_insert_with(|| name.to_owned());
        }
        value
    };
    let expanded = expand(text, value_of, budget);
    missing.map_or_else(|| Ok(expanded?), |name| Err(Unexpanded::Undefined(name)))
}

/// Expands the command of an exec probe, which knows only the static environment: a variable from another
/// source (`valueFrom`) is empty, as with the kubelet (`ExpandContainerCommandOnlyStatic`).
///
/// # Errors
/// An argument, or all together, would be too long.
pub fn expand_probe_command(command: &[String], env: &[EnvVar]) -> Result<Vec<String>, TooLong> {
    let values: BTreeMap<&str, &str> = env
        .iter()
        .map(|variable| (variable.name.as_str(), variable.value.as_deref().unwrap_or_default()))
        .collect();
    let value_of = |name: &str| values.get(name).map(|value| Cow::Borrowed(*value));
    let mut budget = Budget::PROBE;
    command.iter().map(|argument| expand(argument, value_of, &mut budget)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value_of(name: &str) -> Option<Cow<'static, str>> {
        match name {
            "A" => Some("1".into()),
            "B" => Some("$(A)".into()),
            "EMPTY" => Some("".into()),
            _ => None,
        }
    }

    fn expand_one(text: &str) -> Result<String, TooLong> {
        expand(text, value_of, &mut { Budget::CONTAINER })
    }

    #[test]
    fn references() {
        let check = |text: &str, expect: &str| assert_eq!(expand_one(text).as_deref(), Ok(expect), "{text}");
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
        check("$(NO$$(A", "$(NO$(A");
    }

    #[test]
    fn strictly_an_undefined_reference_is_an_error() {
        let strictly = |text: &str| expand_strict(text, value_of, &mut { Budget::PATH });
        assert_eq!(strictly("a/$(A)/$$(X)"), Ok("a/1/$(X)".to_owned()));
        assert_eq!(strictly("$(NONE)/$(OTHER)"), Err(Unexpanded::Undefined("NONE".to_owned())));
        assert_eq!(strictly(&"x$(A)".repeat(2048)).map(|path| path.len()), Ok(4096));
        let too_long = Err(TooLong::Text { most: 4096 }.into());
        assert_eq!(strictly(&"x$(A)".repeat(2049)), too_long);
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
        let expected = ["test", "2--$(C)"].map(str::to_owned).to_vec();
        assert_eq!(expand_probe_command(&command, &env), Ok(expected));
    }

    #[test]
    fn a_doubling_value_ends_at_the_budget_and_not_at_the_end_of_memory() {
        // Sixteen bytes, doubled 33 times, are 128 GiB.
        let mut budget = Budget::CONTAINER;
        let mut last = "0123456789abcdef".to_owned();
        let doubled = (1..=33).find_map(|_| {
            let (before, value) = (last.clone(), |_: &str| Some(Cow::Borrowed(last.as_str())));
            let result = expand("$(V)$(V)", value, &mut budget);
            result.map(|value| last = value).err().map(|error| (error, before.len()))
        });
        assert_eq!(doubled, Some((TooLong::Text { most: 1 << 20 }, 1 << 20)));
    }

    #[test]
    fn one_level_of_many_references_ends_at_the_budget() {
        let long = "x".repeat(750_000);
        let (value_of, text) = (|_: &str| Some(Cow::Borrowed(long.as_str())), "$(A)".repeat(190_000));
        let mut budget = Budget::CONTAINER;
        assert_eq!(expand(&text, value_of, &mut budget), Err(TooLong::Text { most: 1 << 20 }));
        // Each text fits alone; the twenty-third exceeds the total.
        let fit = (0..40).take_while(|_| expand("$(A)", value_of, &mut budget).is_ok()).count();
        assert_eq!(fit, (16 << 20) / 750_000);
        assert_eq!(expand("$(A)", value_of, &mut budget), Err(TooLong::Together { most: 16 << 20 }));
        assert_eq!(expand("short", value_of, &mut budget), Ok("short".to_owned()));
    }

    #[test]
    fn a_probes_command_ends_at_its_budget() {
        let variable = EnvVar { name: "A".to_owned(), value: Some("x".repeat(8 << 10)), value_from: None };
        let check = |arguments: usize, references: usize, expected: Result<usize, TooLong>| {
            let command = vec!["$(A)".repeat(references); arguments];
            let found = expand_probe_command(&command, std::slice::from_ref(&variable));
            assert_eq!(found.map(|all| all.iter().map(String::len).sum()), expected);
        };
        check(1, 128, Ok(1 << 20));
        check(1, 129, Err(TooLong::Text { most: 1 << 20 }));
        check(128, 1, Ok(1 << 20));
        check(129, 1, Err(TooLong::Together { most: 1 << 20 }));
        check(1, 190_000, Err(TooLong::Text { most: 1 << 20 }));
    }

    #[test]
    fn half_a_million_references_that_never_close_stay_as_they_are() {
        // A quadratic scan would read 2^38 bytes.
        let text = "$(".repeat(1 << 19);
        assert_eq!(expand_one(&text), Ok(text.clone()));
        let closed_at_first = format!("$(A){}$$", "$(".repeat(1000));
        assert_eq!(expand_one(&closed_at_first), Ok(format!("1{}$", "$(".repeat(1000))));
    }

    proptest! {
        #[test]
        fn text_without_a_dollar_stays_as_it_is(text in "[^$]*") {
            prop_assert_eq!(expand_one(&text), Ok(text.clone()));
        }

        #[test]
        fn any_text_can_be_expanded(text in ".*") {
            prop_assert!(expand_one(&text).is_ok());
        }
    }
}
