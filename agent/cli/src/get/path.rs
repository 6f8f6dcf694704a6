//! kubectl's JSONPath (client-go's util/jsonpath): paths such as `.status.podIP`, `.spec.containers[*].image`
//! and `.status.conditions[?(@.type=="Ready")].status`, and templates such as `{.metadata.name}{"\n"}` with
//! `{range}`.

use std::cmp::Ordering;
use std::str::FromStr;

use serde_json::Value;

/// A path from a value to values inside of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Path(Vec<Step>);

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Every,
    Index(i64),
    Slice(Option<i64>, Option<i64>),
    /// The value itself and every value inside of it.
    Deep,
    /// Elements for which the path leads to a value, or to one that compares so with another.
    Where(Path, Option<(Compared, Value)>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Compared {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// Operators, the longer ones first.
const OPERATORS: [(&str, Compared); 6] = [
    ("==", Compared::Equal),
    ("!=", Compared::Unequal),
    ("<=", Compared::LessOrEqual),
    (">=", Compared::GreaterOrEqual),
    ("<", Compared::Less),
    (">", Compared::Greater),
];

/// Maximum number of filters inside of each other: parsing and following them uses the stack.
const MOST_FILTERS: usize = 32;

impl FromStr for Path {
    type Err = String;

    /// Parses a path as kubectl accepts it in `--sort-by`: `{.a.b}`, `.a.b` or `a.b`.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let inner = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or(text);
        let is_relaxed = !inner.starts_with(['.', '[', '$', '@']);
        Self::parse(&if is_relaxed { format!(".{inner}") } else { inner.to_owned() })
    }
}

impl Path {
    fn parse(text: &str) -> Result<Self, String> {
        let (path, rest) = Self::begin(text.trim(), 0)?;
        if rest.trim().is_empty() { Ok(path) } else { Err(format!("unexpected {rest:?} in a path")) }
    }

    /// Parses a path at the start of a text and returns the rest. `depth` filters surround the path.
    fn begin(text: &str, depth: usize) -> Result<(Self, &str), String> {
        let mut steps = Vec::new();
        let mut rest = text.strip_prefix(['$', '@']).unwrap_or(text);
        loop {
            rest = if let Some(after) = rest.strip_prefix("..") {
                steps.push(Step::Deep);
                field(after, &mut steps)?
            } else if let Some(after) = rest.strip_prefix('.') {
                field(after, &mut steps)?
            } else if let Some(after) = rest.strip_prefix('[') {
                let (inner, after) = enclosed(after, ']')?;
                steps.push(subscript(inner.trim(), depth)?);
                after
            } else {
                return Ok((Self(steps), rest));
            };
        }
    }

    /// Returns the values to which the path leads; none where a field is missing.
    pub(super) fn values<'v>(&self, root: &'v Value) -> Vec<&'v Value> {
        self.0
            .iter()
            .fold(vec![root], |values, step| values.into_iter().flat_map(|value| step.apply(value)).collect())
    }

    /// Compares two values by the first value to which the path leads: numbers as numbers, all else as text.
    /// A missing value comes first, and numbers come before text: sorting needs a total order.
    pub(super) fn compare(&self, a: &Value, b: &Value) -> Ordering {
        match (self.values(a).first(), self.values(b).first()) {
            (Some(a), Some(b)) if a.is_number() == b.is_number() => compare(a, b),
            (Some(a), Some(b)) => b.is_number().cmp(&a.is_number()),
            (a, b) => a.is_some().cmp(&b.is_some()),
        }
    }
}

/// Parses a field's name; a backslash makes the next character a part of the name.
fn field<'t>(text: &'t str, steps: &mut Vec<Step>) -> Result<&'t str, String> {
    let mut name = String::new();
    let mut rest = text.chars();
    loop {
        let before = rest.as_str();
        match rest.next() {
            Some('\\') => name.extend(rest.next()),
            Some(c) if !".[ =!<>".contains(c) => name.push(c),
            _ => {
                match name.as_str() {
                    "*" => steps.push(Step::Every),
                    // `{.}` is the value itself, and `..[0]` has no name.
                    "" if before.is_empty() || before.starts_with('[') => {}
                    "" => return Err(format!("a field's name is missing before {before:?}")),
                    _ => steps.push(Step::Field(name)),
                }
                return Ok(before);
            }
        }
    }
}

fn subscript(text: &str, depth: usize) -> Result<Step, String> {
    let number = |text: &str| text.trim().parse().map_err(|_| format!("{text:?} is not an index"));
    if text == "*" {
        return Ok(Step::Every);
    }
    if let Some(name) = unquoted(text) {
        return Ok(Step::Field(name));
    }
    if let Some(condition) = text.strip_prefix("?(").and_then(|rest| rest.strip_suffix(')')) {
        return condition_of(condition, depth + 1);
    }
    if let Some((from, to)) = text.split_once(':') {
        let bound = |text: &str| if text.trim().is_empty() { Ok(None) } else { number(text).map(Some) };
        return Ok(Step::Slice(bound(from)?, bound(to)?));
    }
    number(text).map(Step::Index)
}

fn condition_of(text: &str, depth: usize) -> Result<Step, String> {
    if depth > MOST_FILTERS {
        return Err(format!("more than {MOST_FILTERS} filters are inside of each other"));
    }
    let (path, rest) = Path::begin(text.trim(), depth)?;
    let rest = rest.trim();
    if rest.is_empty() {
        return Ok(Step::Where(path, None));
    }
    let found = OPERATORS.iter().find_map(|(sign, how)| Some((rest.strip_prefix(sign)?.trim(), *how)));
    let (right, how) = found.ok_or_else(|| format!("{rest:?} does not begin with an operator such as =="))?;
    let value = match unquoted(right) {
        Some(text) => Value::String(text),
        None => {
            serde_json::from_str(right).map_err(|_| format!("{right:?} is neither quoted nor a number"))?
        }
    };
    Ok(Step::Where(path, Some((how, value))))
}

/// Returns the text inside single or double quotes.
fn unquoted(text: &str) -> Option<String> {
    let quote = text.chars().next().filter(|c| "'\"".contains(*c))?;
    let inner = text.strip_prefix(quote)?.strip_suffix(quote)?;
    let mut out = String::new();
    let mut rest = inner.chars();
    while let Some(c) = rest.next() {
        match c {
            '\\' => match rest.next() {
                Some('n') => out.push('\n'),
                Some('t') => out.push('\t'),
                Some('r') => out.push('\r'),
                other => out.extend(other),
            },
            c if c == quote => return None,
            c => out.push(c),
        }
    }
    Some(out)
}

/// Splits at the first `end` outside of quotes and brackets.
fn enclosed(text: &str, end: char) -> Result<(&str, &str), String> {
    let (mut depth, mut quote, mut is_escaped) = (0_usize, None, false);
    for (at, c) in text.char_indices() {
        if is_escaped {
            is_escaped = false;
        } else if c == '\\' {
            is_escaped = true;
        } else if let Some(open) = quote {
            quote = Some(open).filter(|open| *open != c);
        } else if c == end && depth == 0 {
            return Ok((&text[..at], &text[at + c.len_utf8()..]));
        } else {
            match c {
                '\'' | '"' => quote = Some(c),
                '[' | '(' => depth += 1,
                ']' | ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
    }
    Err(format!("{end:?} is missing after {text:?}"))
}

impl Step {
    /// Returns the values to which this step leads from a value.
    fn apply<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        match self {
            Self::Field(name) => value.get(name).into_iter().collect(),
            Self::Every => inside(value),
            Self::Index(index) => {
                let elements = value.as_array().map(Vec::as_slice).unwrap_or_default();
                position(*index, elements.len()).and_then(|at| elements.get(at)).into_iter().collect()
            }
            Self::Slice(from, to) => {
                let elements = value.as_array().map(Vec::as_slice).unwrap_or_default();
                let at = |bound: &Option<i64>, default| {
                    bound
                        .map_or(default, |bound| position(bound, elements.len()).unwrap_or(0))
                        .min(elements.len())
                };
                let (from, to) = (at(from, 0), at(to, elements.len()));
                elements.get(from..to.max(from)).unwrap_or_default().iter().collect()
            }
            Self::Deep => {
                let mut all = vec![value];
                inside(value).into_iter().for_each(|one| all.extend(self.apply(one)));
                all
            }
            Self::Where(path, condition) => {
                let fits = |one: &&Value| match condition {
                    None => !path.values(one).is_empty(),
                    Some((how, right)) => path.values(one).iter().any(|left| how.holds(compare(left, right))),
                };
                inside(value).into_iter().filter(fits).collect()
            }
        }
    }
}

/// Returns the elements of a list, or the values of an object's fields.
fn inside(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(elements) => elements.iter().collect(),
        Value::Object(fields) => fields.values().collect(),
        _ => Vec::new(),
    }
}

/// Returns the position of an index, which counts from the end if it is negative.
fn position(index: i64, length: usize) -> Option<usize> {
    match usize::try_from(index) {
        Ok(index) => Some(index),
        Err(_) => length.checked_sub(usize::try_from(index.unsigned_abs()).ok()?),
    }
}

fn compare(a: &Value, b: &Value) -> Ordering {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        _ => shown(a).cmp(&shown(b)),
    }
}

impl Compared {
    fn holds(self, order: Ordering) -> bool {
        match self {
            Self::Equal => order.is_eq(),
            Self::Unequal => order.is_ne(),
            Self::Less => order.is_lt(),
            Self::LessOrEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterOrEqual => order.is_ge(),
        }
    }
}

/// Returns a value as kubectl prints it: a string without quotes, nothing for null, all else as JSON.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// A text with paths in braces.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    Path(Path),
    /// The parts for each of the path's values.
    Range(Path, Vec<Part>),
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut rest = text;
        // The parts of the whole text, and those of the ranges that are still open with their paths.
        let (mut parts, mut open) = (Vec::new(), Vec::new());
        while !rest.is_empty() {
            let (text, after) = rest.split_once('{').unwrap_or((rest, ""));
            if !text.is_empty() {
                parts.push(Part::Text(text.to_owned()));
            }
            if text.len() == rest.len() {
                break;
            }
            let (inner, after) = enclosed(after, '}')?;
            rest = after;
            let inner = inner.trim();
            if let Some(path) = inner.strip_prefix("range ") {
                open.push((Path::parse(path)?, std::mem::take(&mut parts)));
            } else if inner == "end" {
                let (path, before) = open.pop().ok_or("{end} has no {range}")?;
                let inside = std::mem::replace(&mut parts, before);
                parts.push(Part::Range(path, inside));
            } else if let Some(text) = unquoted(inner) {
                parts.push(Part::Text(text));
            } else {
                parts.push(Part::Path(Path::parse(inner)?));
            }
        }
        if open.is_empty() { Ok(Self(parts)) } else { Err("{range} has no {end}".to_owned()) }
    }
}

impl Template {
    /// Returns the text for a value; a path with several values adds them with blanks between.
    pub(super) fn text(&self, root: &Value) -> String {
        let mut text = String::new();
        render(&self.0, root, &mut text);
        text
    }
}

fn render(parts: &[Part], root: &Value, text: &mut String) {
    for part in parts {
        match part {
            Part::Text(own) => text.push_str(own),
            Part::Path(path) => {
                let values: Vec<String> = path.values(root).into_iter().map(shown).collect();
                text.push_str(&values.join(" "));
            }
            Part::Range(path, inside) => {
                path.values(root).into_iter().for_each(|value| render(inside, value, text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn pod() -> Value {
        json!({
            "kind": "Pod",
            "metadata": {"name": "web", "labels": {"app.kubernetes.io/name": "shop"}},
            "spec": {"containers": [{"name": "a", "image": "x:1"}, {"name": "b", "image": "y:2"}]},
            "status": {
                "podIP": "10.0.0.7",
                "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "False"}],
                "containerStatuses": [{"restartCount": 3}],
            },
        })
    }

    #[test]
    fn templates_give_what_kubectl_gives() {
        let check = |template: &str, expected: &str| {
            assert_eq!(template.parse::<Template>().unwrap().text(&pod()), expected, "{template}");
        };
        check("{.status.podIP}", "10.0.0.7");
        check("{$.status.podIP}{\"\\n\"}", "10.0.0.7\n");
        check("{.kind}: {.metadata['name']}!", "Pod: web!");
        check("{.spec.containers[*].image}", "x:1 y:2");
        check("{.spec.containers[-1].name}{.spec.containers[0:1].name}", "ba");
        check("{.metadata.labels.app\\.kubernetes\\.io/name}", "shop");
        check("{.status.conditions[?(@.type==\"Ready\")].status}", "True");
        check("{.status.conditions[?(@.type != 'Ready')].type}", "PodScheduled");
        check("{.status.containerStatuses[?(@.restartCount>=3)].restartCount}", "3");
        check("{range .spec.containers[*]}{.name}={.image};{end}", "a=x:1;b=y:2;");
        check("{..image}", "x:1 y:2");
        check("{.no.such}{.spec.containers[7].name}", "");
        check("{.metadata.labels}", "{\"app.kubernetes.io/name\":\"shop\"}");
        check("plain", "plain");
    }

    #[test]
    fn a_faulty_template_is_refused_with_its_fault() {
        let check = |template: &str, expected: &str| {
            let error = template.parse::<Template>().unwrap_err();
            assert!(error.contains(expected), "{template}: {error}");
        };
        check("{.a", "'}' is missing");
        check("{.a[0}", "'}' is missing");
        check("{.a[x]}", "\"x\" is not an index");
        check("{range .a[*]}{.b}", "{range} has no {end}");
        check("{end}", "{end} has no {range}");
        check("{.a[?(@.b=1)]}", "operator");
        check("{a b}", "unexpected");
    }

    #[test]
    fn paths_of_columns_need_no_braces_and_sort_numbers_as_numbers() {
        let path: Path = "status.n".parse().unwrap();
        assert_eq!(path, "{.status.n}".parse().unwrap());
        let of = |n: Value| json!({ "status": { "n": n } });
        assert_eq!(path.compare(&of(json!(9)), &of(json!(10))), Ordering::Less);
        assert_eq!(path.compare(&of(json!("b")), &of(json!("a"))), Ordering::Greater);
        assert_eq!(path.compare(&json!({}), &of(json!("a"))), Ordering::Less);
    }

    #[test]
    fn filters_inside_of_filters_have_a_limit() {
        let nested = |count: usize| format!("{}{}", "[?(@".repeat(count), ")]".repeat(count)).parse::<Path>();
        assert!(nested(MOST_FILTERS).is_ok());
        assert!(nested(MOST_FILTERS + 1).unwrap_err().contains("more than 32 filters"));
        assert!(nested(10_000).is_err());
    }

    proptest! {
        #[test]
        fn values_have_a_total_order(mut values in prop::collection::vec((any::<bool>(), -20..20_i32), 3)) {
            let path: Path = "n".parse().unwrap();
            let value = |(is_text, n): &(bool, i32)| {
                if *is_text { json!({ "n": n.to_string() }) } else { json!({ "n": n }) }
            };
            values.sort_by(|a, b| path.compare(&value(a), &value(b)));
            for (index, a) in values.iter().enumerate() {
                for b in &values[index..] {
                    prop_assert!(path.compare(&value(a), &value(b)).is_le(), "{values:?}");
                }
            }
        }

        #[test]
        fn no_text_makes_the_parser_fail_hard(text in "[.a{}\\[\\]*?()@$:'\"\\\\0-9 =<!-]{0,24}") {
            if let Ok(template) = text.parse::<Template>() {
                template.text(&pod());
            }
            let _ = text.parse::<Path>().map(|path| path.values(&pod()).len());
        }
    }
}
