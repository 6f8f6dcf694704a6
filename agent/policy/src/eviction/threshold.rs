//! Values of eviction thresholds: their syntax and their amounts.

use beelet_units::quantity::Quantity;

/// An amount, or a fraction of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ThresholdValue {
    /// An absolute amount.
    Amount(Quantity),
    /// A fraction of the capacity: 0.1 is 10 %. In single precision, like the kubelet's.
    Part(f32),
}

/// An error in a threshold's value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The text is neither an amount nor a percentage.
    #[error("{0:?} is neither a quantity nor a percentage (use e.g. 100Mi or 10%)")]
    Malformed(String),
    /// The percentage is below 0 or above 100.
    #[error("{0:?} is not between 0% and 100%")]
    OutOfRange(String),
    /// The amount must be above zero.
    #[error("{0:?} must be more than zero")]
    NotPositive(String),
}

impl ThresholdValue {
    /// Reads a threshold: a quantity above zero, or a percentage. `0%` and `100%` mean *no threshold*:
    /// `Ok(None)`.
    ///
    /// # Errors
    /// If the text is neither, or outside its range.
    pub fn threshold(text: &str) -> Result<Option<Self>, ValueError> {
        if matches!(text, "0%" | "100%") {
            return Ok(None);
        }
        let value = Self::parse(text)?;
        match value {
            Self::Part(part) if part > 1.0 => Err(ValueError::OutOfRange(text.to_owned())),
            Self::Amount(amount) if amount <= Quantity::ZERO => Err(ValueError::NotPositive(text.to_owned())),
            value => Ok(Some(value)),
        }
    }

    /// Reads a minimum to reclaim: a quantity of zero or more, or a percentage above zero.
    ///
    /// # Errors
    /// If the text is neither, or outside its range.
    pub fn min_reclaim(text: &str) -> Result<Self, ValueError> {
        match Self::parse(text)? {
            Self::Part(part) if part <= 0.0 => Err(ValueError::NotPositive(text.to_owned())),
            Self::Amount(amount) if amount < Quantity::ZERO => Err(ValueError::OutOfRange(text.to_owned())),
            value => Ok(value),
        }
    }

    fn parse(text: &str) -> Result<Self, ValueError> {
        let malformed = || ValueError::Malformed(text.chars().take(64).collect());
        let Some(percent) = text.strip_suffix('%') else {
            return Quantity::parse(text.trim()).map(Self::Amount).map_err(|_| malformed());
        };
        let percent: f32 = percent.parse().ok().filter(|p: &f32| p.is_finite()).ok_or_else(malformed)?;
        if percent < 0.0 {
            Err(ValueError::OutOfRange(text.to_owned()))
        } else {
            Ok(Self::Part(percent / 100.0))
        }
    }

    /// Returns this value as an amount of `capacity`.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "the kubelet's arithmetic; the cast saturates"
    )]
    pub fn of(self, capacity: Quantity) -> Quantity {
        match self {
            Self::Amount(amount) => amount,
            Self::Part(part) => Quantity::from_units((capacity.value() as f64 * f64::from(part)) as i64),
        }
    }
}
