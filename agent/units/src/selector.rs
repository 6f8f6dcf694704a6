//! Label selectors of a command line (`-l app=web,tier!=db`), with the grammar and the meaning of
//! `labels.Parse` in apimachinery's pkg/labels/selector.go.

use std::collections::BTreeMap;

/// Requirements on an object's labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

/// A requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Exists,
    Absent,
    In(Vec<String>),
    /// A missing label passes.
    NotIn(Vec<String>),
}

/// Error for a text that is not a selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid label requirement {0:?}: write key=value, key!=value, key in (a,b), key notin (a,b), key or !key; \
     separate several requirements with commas"
)]
pub struct SelectorError(String);

impl std::str::FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        requirements(text).into_iter().map(requirement).collect::<Result<_, _>>().map(Self)
    }
}

impl Selector {
    /// Returns true if an object's labels, which may be missing, meet the requirements.
    #[must_use]
    pub fn matches(&self, labels: Option<&BTreeMap<String, String>>) -> bool {
        self.0.iter().all(|one| {
            let value = labels.and_then(|labels| labels.get(&one.key));
            match &one.test {
                Test::Exists => value.is_some(),
                Test::Absent => value.is_none(),
                Test::In(values) => value.is_some_and(|value| values.contains(value)),
                Test::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            }
        })
    }

    /// Returns true if the selector has no requirements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Splits a text at the commas outside parentheses.
fn requirements(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut all) = (0_i32, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth = depth.saturating_add(1),
            ')' => depth = depth.saturating_sub(1),
            ',' if depth <= 0 => {
                all.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    all.push(&text[start..]);
    all
}

fn requirement(text: &str) -> Result<Requirement, SelectorError> {
    let wrong = || SelectorError(text.trim().to_owned());
    let (key, test) = if let Some((key, value)) = text.split_once("!=") {
        (key, Test::NotIn(vec![value.trim().to_owned()]))
    } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        (key, Test::In(vec![value.trim().to_owned()]))
    } else if let Some((words, values)) = text.split_once('(') {
        let values = values.trim_end().strip_suffix(')').ok_or_else(wrong)?;
        let values = values.split(',').map(|value| value.trim().to_owned()).collect();
        match words.trim().rsplit_once(char::is_whitespace) {
            Some((key, "in")) => (key, Test::In(values)),
            Some((key, "notin")) => (key, Test::NotIn(values)),
            _ => return Err(wrong()),
        }
    } else if let Some(key) = text.trim().strip_prefix('!') {
        (key, Test::Absent)
    } else {
        (text, Test::Exists)
    };
    let key = key.trim();
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let is_value = |value: &String| value.chars().all(is_part);
    let are_values = match &test {
        Test::In(values) | Test::NotIn(values) => values.iter().all(is_value),
        Test::Exists | Test::Absent => true,
    };
    if key.is_empty() || !key.chars().all(is_part) || !are_values {
        return Err(wrong());
    }
    Ok(Requirement { key: key.to_owned(), test })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(selector: &str, expected: bool) {
        let labels = [("app", "web"), ("example.com/tier", "front"), ("empty", "")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        assert_eq!(selector.parse::<Selector>().unwrap().matches(Some(&labels)), expected, "{selector}");
    }

    #[test]
    fn a_selector_is_read_as_kubectl_reads_it() {
        check("", true);
        check("app=web", true);
        check("app==web", true);
        check(" app = web , example.com/tier=front ", true);
        check("app=web,example.com/tier=back", false);
        check("app!=web", false);
        check("app!=db", true);
        check("none!=x", true);
        check("app in (db, web)", true);
        check("app in (db),app", false);
        check("app notin (db,web)", false);
        check("none notin (db,web)", true);
        check("app", true);
        check("none", false);
        check("!none", true);
        check("!app", false);
        check("empty=", true);
        check("app=", false);
    }

    #[test]
    fn what_is_no_selector_is_refused_with_the_part_that_is_wrong() {
        for (text, part) in [
            ("a=b,c d", "c d"),
            ("=b", "=b"),
            ("a in b,c)", "a in b"),
            ("a in (b", "a in (b"),
            (",", ""),
            ("a=b=c", "a=b=c"),
        ] {
            let error = text.parse::<Selector>().unwrap_err();
            assert_eq!(error, SelectorError(part.to_owned()), "{text}");
        }
        assert!("a of (b)".parse::<Selector>().unwrap_err().to_string().contains("key in (a,b)"));
    }
}
