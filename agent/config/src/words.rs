//! Values that stand alone, as the resolvers of both documents read them.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::error::Problem;
use super::values::GoDuration;

pub(super) fn duration(value: Option<GoDuration>, default: Duration) -> Duration {
    value.map(|value| value.0).filter(|value| !value.is_zero()).unwrap_or(default)
}

pub(super) fn number<T: TryFrom<i64>>(
    field: &str,
    value: Option<i64>,
    default: i64,
    least: i64,
    most: i64,
) -> Result<T, Problem> {
    let value = value.unwrap_or(default);
    let wrong = || Problem::new(field, format!("{value} is out of range: {least} to {most}"));
    if !(least..=most).contains(&value) {
        return Err(wrong());
    }
    T::try_from(value).map_err(|_| wrong())
}

/// One of a few words; the first of them for none.
pub(super) fn word<T: Copy, const N: usize>(
    field: &str,
    value: Option<&str>,
    words: [(&str, T); N],
) -> Result<T, Problem> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(words[0].1) };
    let known = words.iter().find(|(word, _)| *word == value).map(|(_, meaning)| *meaning);
    known.ok_or_else(|| {
        let all: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        Problem::new(field, format!("{value:?} is not one of {}", all.join(", ")))
    })
}

/// An absolute path without `..`, or nothing for an empty one.
pub(super) fn path(field: &str, value: &Option<String>) -> Result<Option<PathBuf>, Problem> {
    let Some(value) = value.as_deref().filter(|value| !value.is_empty()) else { return Ok(None) };
    let path = Path::new(value);
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return Err(Problem::new(field, format!("{value:?} must be an absolute path without '..'")));
    }
    Ok(Some(path.components().collect()))
}
