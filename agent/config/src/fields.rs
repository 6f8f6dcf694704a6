//! Names of the fields that a struct reads, taken from serde itself, so that no separate list is necessary.

use serde::de::{DeserializeOwned, Deserializer, Visitor, value::Error};
use serde::forward_to_deserialize_any;

/// Returns the field names of `T`'s derived `Deserialize`.
pub(super) fn names_of<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // The probe stores the names and then fails every request, since it has no value.
    let _ = T::deserialize(Probe(&mut names));
    names
}

struct Probe<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Error> {
        *self.0 = fields;
        self.deserialize_any(_visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Error> {
        Err(serde::de::Error::custom("the probe has no value"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Returns the name of `known` of which `given` is most likely a misspelling, if any.
pub(super) fn closest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|name| (distance(&given.to_lowercase(), &name.to_lowercase()), name))
        .min()
        .filter(|(distance, name)| *distance <= name.len() / 4)
        .map(|(_, name)| name)
}

/// Returns the Levenshtein distance: insertions, deletions and substitutions between two names.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    #[allow(dead_code)] // only its field names are read
    struct Sample {
        first_field: u8,
        #[serde(rename = "SECOND")]
        second: u8,
    }

    #[test]
    fn names_are_those_of_the_wire() {
        assert_eq!(names_of::<Sample>(), ["firstField", "SECOND"]);
    }

    #[test]
    fn a_typing_mistake_finds_its_field_and_nonsense_finds_none() {
        let known = || ["staticPodPath", "maxPods", "cgroupRoot"].into_iter();
        assert_eq!(closest("staticPodsPath", known()), Some("staticPodPath"));
        assert_eq!(closest("maxpods", known()), Some("maxPods"));
        assert_eq!(closest("somethingElse", known()), None);
    }
}
