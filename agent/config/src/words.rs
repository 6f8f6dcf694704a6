//! Values that stand alone, as the resolvers of both documents read them. Each function writes the value that
//! is in effect back into its document: the default where nothing is written, and one spelling where there
//! are several. So a document that is resolved is the configuration in effect.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::error::Problem;
use super::values::GoDuration;

/// A duration; zero stands for the default.
pub(super) fn duration(value: &mut Option<GoDuration>, default: Duration) -> Duration {
    value.take_if(|value| value.0.is_zero());
    value.get_or_insert(GoDuration(default)).0
}

/// A duration of which zero is a value.
pub(super) fn duration_or_zero(value: &mut Option<GoDuration>) -> Duration {
    value.get_or_insert(GoDuration(Duration::ZERO)).0
}

/// A text; empty by default.
pub(super) fn text(value: &mut Option<String>) -> String {
    value.get_or_insert_default().clone()
}

/// A number from `least` to `most`.
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

/// A number of which zero stands for the default.
pub(super) fn nonzero(value: &mut Option<i64>) -> &mut Option<i64> {
    value.take_if(|value| *value == 0);
    value
}

/// One of a few words; the first of them for none. Of several words of one meaning the first is written back.
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

/// An absolute path without `..`; an empty one counts as not written.
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

/// An absolute path without `..`; `default` where none is written.
pub(super) fn path_or(field: &str, value: &mut Option<String>, default: &Path) -> Result<PathBuf, Problem> {
    let path = path(field, value)?.unwrap_or_else(|| default.to_owned());
    *value = Some(path.to_string_lossy().into_owned());
    Ok(path)
}

/// An absolute path without `..`; an empty one is a value and stands for no path.
pub(super) fn path_or_empty(field: &str, value: &mut Option<String>) -> Result<Option<PathBuf>, Problem> {
    let path = path(field, value)?;
    value.get_or_insert_default();
    Ok(path)
}
