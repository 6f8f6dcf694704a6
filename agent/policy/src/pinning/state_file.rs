//! State files with Go's rules for JSON keys.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Parses a file whose keys may have any case, as Go's decoder does.
pub(crate) fn read<T: DeserializeOwned>(file: &str, keys: &[&str]) -> serde_json::Result<T> {
    let mut tree: Value = serde_json::from_str(file)?;
    if let Value::Object(map) = &mut tree {
        let named = |key: String| match keys.iter().find(|name| name.eq_ignore_ascii_case(&key)) {
            Some(name) => (*name).to_owned(),
            None => key,
        };
        *map = std::mem::take(map).into_iter().map(|(key, value)| (named(key), value)).collect();
    }
    serde_json::from_value(tree)
}
