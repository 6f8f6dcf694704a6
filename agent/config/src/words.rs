//! Values that stand alone, as the resolvers of both documents read them.

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
