//! Decoder of a tree of values into a typed object. Accepts numbers where Kubernetes takes numbers or
//! strings, and reports all type errors at once, and unknown fields.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use super::error::Problem;

/// Message about a field that an object does not have.
const UNKNOWN: &str = "unknown field; has no effect";

/// Limit of type errors reported per manifest.
const MAX_TYPE_ERRORS: usize = 10;

/// Places where a quantity may be a number. `*` is any key, `[*]` any element.
const QUANTITIES: &[&str] = &[
    "spec.containers[*].resources.limits.*",
    "spec.containers[*].resources.requests.*",
    "spec.containers[*].env[*].valueFrom.resourceFieldRef.divisor",
    "spec.initContainers[*].resources.limits.*",
    "spec.initContainers[*].resources.requests.*",
    "spec.initContainers[*].env[*].valueFrom.resourceFieldRef.divisor",
    "spec.resources.limits.*",
    "spec.resources.requests.*",
    "spec.overhead.*",
    "spec.volumes[*].emptyDir.sizeLimit",
    "spec.volumes[*].downwardAPI.items[*].resourceFieldRef.divisor",
    "spec.volumes[*].projected.sources[*].downwardAPI.items[*].resourceFieldRef.divisor",
];

/// Converts the numbers of a pod into strings where Kubernetes accepts both: `cpu: 2`.
pub fn normalize(value: &mut Value) {
    for pattern in QUANTITIES {
        visit_mut(value, pattern, &mut |node| {
            if let Value::Number(number) = node {
                *node = Value::String(number.to_string());
            }
        });
    }
}

/// Calls `f` with every node that matches `pattern`.
fn visit_mut(value: &mut Value, pattern: &str, f: &mut impl FnMut(&mut Value)) {
    if pattern.is_empty() {
        return f(value);
    }
    let pattern = pattern.trim_start_matches('.');
    if let Some(rest) = pattern.strip_prefix("[*]") {
        value.as_array_mut().into_iter().flatten().for_each(|item| visit_mut(item, rest, f));
        return;
    }
    let end = pattern.find(['.', '[']).unwrap_or(pattern.len());
    let (key, rest) = pattern.split_at(end);
    match value.as_object_mut() {
        Some(map) if key == "*" => map.values_mut().for_each(|child| visit_mut(child, rest, f)),
        Some(map) => map.get_mut(key).into_iter().for_each(|child| visit_mut(child, rest, f)),
        None => {}
    }
}

/// Decodes an object, and finds its unknown fields; or finds every field of a wrong type, with the unknown
/// fields.
pub(crate) fn object<T: DeserializeOwned + Serialize>(
    value: &Value,
) -> Result<(T, Vec<Problem>), Vec<Problem>> {
    let decoded: T =
        serde_path_to_error::deserialize(value).map_err(|error| type_errors::<T>(value, error))?;
    let unknown = unknown_to(&decoded, value);
    Ok((decoded, unknown))
}

/// Returns the fields of `written` that `decoded`, its decoded form, lacks.
fn unknown_to<T: Serialize>(decoded: &T, written: &Value) -> Vec<Problem> {
    let mut unknown = Vec::new();
    if let Ok(known) = serde_json::to_value(decoded) {
        unknown_fields(written, &known, &mut String::new(), &mut unknown);
    }
    unknown
}

/// Returns every field of a wrong type, then the unknown fields; `error` is the first type error.
fn type_errors<T: DeserializeOwned + Serialize>(
    value: &Value,
    mut error: serde_path_to_error::Error<serde_json::Error>,
) -> Vec<Problem> {
    let mut value = value.clone();
    let mut problems = Vec::new();
    loop {
        problems.push(Problem::new(path_text(error.path()), sentence(&error.inner().to_string())));
        // Removing the field reveals the errors after it.
        if problems.len() >= MAX_TYPE_ERRORS || !remove(&mut value, error.path()) {
            return problems;
        }
        match serde_path_to_error::deserialize::<_, T>(&value) {
            Ok(decoded) => {
                problems.extend(unknown_to(&decoded, &value));
                return problems;
            }
            Err(next) => error = next,
        }
    }
}

/// Formats the path of an error for [`crate::document::Document::locate`]; empty for the root.
pub(crate) fn path_text(path: &Path) -> String {
    // "." is the root, and "?" an unknown place.
    path.to_string().trim_end_matches('?').trim_end_matches('.').to_owned()
}

/// Removes the node at `path`, or the list that contains it (an element's removal would renumber the others).
fn remove(value: &mut Value, path: &Path) -> bool {
    let segments: Vec<&Segment> = path.iter().collect();
    let Some(last) = segments.iter().rposition(|s| matches!(s, Segment::Map { .. })) else { return false };
    let mut node = value;
    for segment in &segments[..last] {
        let next = match segment {
            Segment::Map { key } => node.get_mut(key),
            Segment::Seq { index } => node.get_mut(index),
            _ => None,
        };
        let Some(next) = next else { return false };
        node = next;
    }
    match (segments[last], node) {
        (Segment::Map { key }, Value::Object(map)) => map.remove(key).is_some(),
        _ => false,
    }
}

/// Rephrases serde's message for authors of manifests.
fn sentence(message: &str) -> String {
    let rest = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    let Some((found, wanted)) = rest.and_then(|rest| rest.rsplit_once(", expected ")) else {
        return message.to_owned();
    };
    let (found, plain) = in_words(found);
    match wanted {
        // The original text is lost: 0644 and 1.10 are 420 and 1.1 by now.
        "a string" if plain => format!("must be a string, not {found}; put it in quotes"),
        "a string" => format!("must be a string, not {found}"),
        "i32" | "a 32-bit integer" => format!("must be a whole number of at most 32 bits, not {found}"),
        "i64" => format!("must be a whole number, not {found}"),
        "a boolean" => format!("must be true or false, not {found}"),
        "a sequence" => format!("must be a list, not {found}"),
        "a map" => format!("must be a mapping, not {found}"),
        "Quantity" => format!("must be a quantity such as 250m or 512Mi, not {found}"),
        "enum IntOrString" | "IntOrString" => format!("must be a number or a name, not {found}"),
        kind if kind.starts_with(char::is_uppercase) => {
            format!("must be a mapping with the fields of {kind}, not {found}")
        }
        other => format!("must be {other}, not {found}"),
    }
}

/// Describes serde's found value; the flag is true if quotes would make it a string.
fn in_words(found: &str) -> (String, bool) {
    let quoted = |kind: &str| found.strip_prefix(kind).map(|text| text.trim_matches([' ', '`']));
    if let Some(text) = quoted("integer").or_else(|| quoted("floating point")) {
        return (format!("the number {text}"), true);
    }
    if let Some(text) = quoted("boolean") {
        return (format!("{text} (yes, on and y mean true in YAML; no, off and n mean false)"), true);
    }
    let words = match found {
        "map" => "a mapping",
        "sequence" => "a list",
        "null" | "unit value" => "nothing",
        other => other.strip_prefix("string ").unwrap_or(other),
    };
    (words.to_owned(), false)
}

/// Returns the kind of a value, for a sentence.
pub fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}

/// Collects the fields of `written` that the typed object lost. Skips empty ones.
fn unknown_fields(written: &Value, known: &Value, path: &mut String, found: &mut Vec<Problem>) {
    let length = path.len();
    match (written, known) {
        (Value::Object(written), Value::Object(known)) => {
            for (key, child) in written.iter().filter(|(_, child)| !child.is_null()) {
                if length > 0 {
                    path.push('.');
                }
                path.push_str(key);
                match known.get(key) {
                    Some(known) => unknown_fields(child, known, path, found),
                    None if is_type_meta(length, key) => {}
                    None => found.push(Problem::new(path.clone(), UNKNOWN)),
                }
                path.truncate(length);
            }
        }
        (Value::Array(written), Value::Array(known)) => {
            for (i, (child, known)) in written.iter().zip(known).enumerate() {
                path.push_str(&format!("[{i}]"));
                unknown_fields(child, known, path, found);
                path.truncate(length);
            }
        }
        _ => {}
    }
}

fn is_type_meta(depth: usize, key: &str) -> bool {
    depth == 0 && matches!(key, "apiVersion" | "kind")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_sentence(message: &str, expected: &str) {
        assert_eq!(sentence(message), expected);
    }

    #[test]
    fn type_errors_read_as_sentences() {
        check_sentence(
            "invalid type: integer `80`, expected a string",
            "must be a string, not the number 80; put it in quotes",
        );
        check_sentence(
            "invalid type: floating point `1.5`, expected a string",
            "must be a string, not the number 1.5; put it in quotes",
        );
        check_sentence("invalid type: map, expected a string", "must be a string, not a mapping");
        check_sentence(
            "invalid type: sequence, expected PodSpec",
            "must be a mapping with the fields of PodSpec, not a list",
        );
        check_sentence(
            "invalid type: string \"x, expected y\", expected i32",
            "must be a whole number of at most 32 bits, not \"x, expected y\"",
        );
        check_sentence("something else", "something else");
    }
}
