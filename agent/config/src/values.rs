//! Value types of configuration files, which are read and printed in the same form.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A duration in Go's format, e.g. `1m30s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GoDuration(pub(super) Duration);

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        beelet_units::duration::parse(&text).map(Self).map_err(de::Error::custom)
    }
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&beelet_units::duration::format(self.0))
    }
}

/// A map of names to quantities or percentages, with or without quotes (`cpu: 2`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Amounts(pub(super) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Amounts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Amount {
            Text(String),
            Number(serde_json::Number),
        }
        let amounts = BTreeMap::<String, Amount>::deserialize(deserializer)?;
        let text = |amount| match amount {
            Amount::Text(text) => text,
            Amount::Number(number) => number.to_string(),
        };
        Ok(Self(amounts.into_iter().map(|(name, amount)| (name, text(amount))).collect()))
    }
}
