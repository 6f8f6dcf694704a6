//! Resolves single values of both documents. Each function writes the effective value back into its document:
//! the default for an unset value, and the canonical spelling. So a resolved document is the effective
//! configuration.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::error::Problem;
use super::values::GoDuration;

/// Resolves a duration; zero means the default.
pub(super) fn duration(value: &mut Option<GoDuration>, default: Duration) -> Duration {
    value.take_if(|value| value.0.is_zero());
    value.get_or_insert(GoDuration(default)).0
}

/// Resolves a duration for which zero is a value.
pub(super) fn duration_or_zero(value: &mut Option<GoDuration>) -> Duration {
    value.get_or_insert(GoDuration(Duration::ZERO)).0
}

/// Resolves a text, empty by default.
pub(super) fn text(value: &mut Option<String>) -> String {
    value.get_or_insert_default().clone()
}

/// Resolves a number from `least` to `most`.
pub(super) fn number<T: TryFrom<i64>>(
    field: &str,
    value: &mut Option<i64>,
    default: i64,
    least: i64,
    most: i64,
) -> Result<T, Problem> {
    let value = *value.get_or_insert(default);
    let wrong = || Problem::new(field, format!("{value} is out of range: {least} to {most}"));
    if !(least..=most).contains(&value) {
        return Err(wrong());
    }
    T::try_from(value).map_err(|_| wrong())
}

/// Removes a zero, which means the default.
pub(super) fn nonzero(value: &mut Option<i64>) -> &mut Option<i64> {
    value.take_if(|value| *value == 0);
    value
}

/// Resolves an enumerated word; the default is the first. Writes back the first of several words with the
/// same meaning.
pub(super) fn word<T: Copy + PartialEq, const N: usize>(
    field: &str,
    value: &mut Option<String>,
    words: [(&str, T); N],
) -> Result<T, Problem> {
    let given = value.as_deref().filter(|value| !value.is_empty()).unwrap_or(words[0].0);
    let Some((_, meaning)) = words.iter().find(|(word, _)| *word == given).copied() else {
        let all: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        return Err(Problem::new(field, format!("{given:?} is not one of {}", all.join(", "))));
    };
    let first = words.iter().find(|(_, same)| *same == meaning);
    *value = first.map(|(word, _)| (*word).to_owned());
    Ok(meaning)
}

/// Resolves an absolute path without `..`; an empty one counts as unset.
pub(super) fn path(field: &str, value: &mut Option<String>) -> Result<Option<PathBuf>, Problem> {
    let Some(given) = value.take().filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let path = Path::new(&given);
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return Err(Problem::new(field, format!("{given:?} must be an absolute path without '..'")));
    }
    let path: PathBuf = path.components().collect();
    *value = Some(path.to_string_lossy().into_owned());
    Ok(Some(path))
}

/// Resolves an absolute path without `..`, by default `default`.
pub(super) fn path_or(field: &str, value: &mut Option<String>, default: &Path) -> Result<PathBuf, Problem> {
    let path = path(field, value)?.unwrap_or_else(|| default.to_owned());
    *value = Some(path.to_string_lossy().into_owned());
    Ok(path)
}

/// Resolves an absolute path without `..`; an empty one is a value and means no path.
pub(super) fn path_or_empty(field: &str, value: &mut Option<String>) -> Result<Option<PathBuf>, Problem> {
    let path = path(field, value)?;
    value.get_or_insert_default();
    Ok(path)
}
