//! Finds the fields of an API object by its type's own deserializer, so that fields of newer k8s-openapi
//! versions are found too.
//!
//! [`fields`] deserializes a type from a source that contains everything: each struct gets all fields that it
//! requests, each list one element, each map one entry. The requests at each place are recorded.

use std::fmt;

use k8s_openapi::Resource;
use serde::de::value::{Error, StrDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;

/// Single step from a value into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Into the field of this name.
    Field(&'static str),
    /// Into an element of a list.
    Item,
    /// Into the value of a key of a map.
    Key,
}

/// Kind of value at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// 32-bit number.
    Int32,
    /// 64-bit number.
    Int64,
    /// Text.
    Text,
    /// Amount, as a text.
    Quantity,
    /// Number or name.
    IntOrString,
    /// Point in time, RFC 3339.
    Time,
    /// Any JSON.
    Json,
    /// Object with the fields of the type of this name.
    Object(&'static str),
    /// List.
    List,
    /// Map with text keys.
    Map,
}

/// Place in an object, with the kind of its value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Field {
    /// Steps from the object itself.
    pub path: Vec<Step>,
    /// Kind of the value.
    pub kind: Kind,
}

impl Field {
    /// Returns the last field name in the path; empty for the object itself.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let names = self.path.iter().rev();
        let mut names =
            names.filter_map(|step| if let Step::Field(name) = step { Some(*name) } else { None });
        names.next().unwrap_or_default()
    }

    /// Returns true if the path contains a field of this name.
    #[must_use]
    pub fn goes_through(&self, name: &str) -> bool {
        self.path.iter().any(|step| matches!(step, Step::Field(field) if *field == name))
    }
}

impl fmt::Display for Field {
    /// `spec.containers[].resources.limits.*`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, step) in self.path.iter().enumerate() {
            match step {
                Step::Field(name) if place == 0 => f.write_str(name)?,
                Step::Field(name) => write!(f, ".{name}")?,
                Step::Item => f.write_str("[]")?,
                Step::Key => f.write_str(".*")?,
            }
        }
        Ok(())
    }
}

/// Returns every place in an object of type `T`, parents first.
///
/// # Errors
/// The type requests a value that this module does not support yet.
pub fn fields<T: DeserializeOwned + Resource>() -> Result<Vec<Field>, Error> {
    let mut found = Vec::new();
    let type_meta = [("apiVersion", T::API_VERSION), ("kind", T::KIND)];
    T::deserialize(Place { path: Vec::new(), within: None, type_meta, found: &mut found })?;
    Ok(found)
}

/// Place that provides every requested value.
struct Place<'a> {
    path: Vec<Step>,
    /// Kind of the enclosing newtype.
    within: Option<Kind>,
    type_meta: [(&'static str, &'static str); 2],
    found: &'a mut Vec<Field>,
}

impl Place<'_> {
    fn at(&mut self, step: Step) -> Place<'_> {
        let path = self.path.iter().copied().chain([step]).collect();
        Place { path, within: None, type_meta: self.type_meta, found: self.found }
    }

    fn record(&mut self, kind: Kind) {
        if self.within.is_none() {
            self.found.push(Field { path: self.path.clone(), kind });
        }
    }

    fn unknown<T>(&self, what: &str) -> Result<T, Error> {
        let field = Field { path: self.path.clone(), kind: Kind::Json };
        Err(Error::custom(format!(
            "{field} asks for {what}, which agent/testing/src/schema.rs does not know"
        )))
    }

    fn text<'de, V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        self.record(Kind::Text);
        match (self.within, self.path.as_slice()) {
            (Some(Kind::Time), _) => visitor.visit_str("2026-01-01T00:00:00Z"),
            (_, [Step::Field(name)]) => {
                let known = self.type_meta.iter().find(|(field, _)| field == name);
                visitor.visit_str(known.map_or("x", |(_, text)| text))
            }
            _ => visitor.visit_str("x"),
        }
    }
}

impl<'de> Deserializer<'de> for Place<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        let wanted: &dyn Expected = &visitor;
        match (self.within, wanted.to_string().as_str()) {
            (Some(Kind::Quantity), _) => visitor.visit_str("1"),
            (Some(Kind::Time), _) => visitor.visit_str("2026-01-01T00:00:00Z"),
            (None, "IntOrString") => {
                self.record(Kind::IntOrString);
                visitor.visit_i32(1)
            }
            (_, "any valid JSON value") => {
                self.record(Kind::Json);
                visitor.visit_unit()
            }
            (_, other) => self.unknown(other),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        self.record(Kind::Bool);
        visitor.visit_bool(true)
    }

    fn deserialize_i32<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        self.record(Kind::Int32);
        visitor.visit_i32(1)
    }

    fn deserialize_i64<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        self.record(Kind::Int64);
        visitor.visit_i64(1)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.text(visitor)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.text(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        mut self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        let kind = match name {
            "Quantity" => Kind::Quantity,
            "Time" | "MicroTime" => Kind::Time,
            "FieldsV1" => Kind::Json,
            other => return self.unknown(other),
        };
        self.record(kind);
        visitor.visit_newtype_struct(Place { within: Some(kind), ..self })
    }

    fn deserialize_seq<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        self.record(Kind::List);
        visitor.visit_seq(Entries { place: self, names: &["an element"], step: |_| Step::Item })
    }

    fn deserialize_map<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        self.record(Kind::Map);
        visitor.visit_map(Entries { place: self, names: &["key"], step: |_| Step::Key })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.record(Kind::Object(name));
        visitor.visit_map(Entries { place: self, names: fields, step: Step::Field })
    }

    forward_to_deserialize_any! {
        i8 i16 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct enum
        identifier ignored_any
    }
}

/// Entries of a struct, list or map.
struct Entries<'a> {
    place: Place<'a>,
    names: &'static [&'static str],
    step: fn(&'static str) -> Step,
}

impl Entries<'_> {
    /// Deserializes the value of the next name.
    fn value<'de, S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        let Some((name, rest)) = self.names.split_first() else {
            return Err(Error::custom("a value is requested without a key"));
        };
        self.names = rest;
        seed.deserialize(self.place.at((self.step)(name)))
    }
}

impl<'de> SeqAccess<'de> for Entries<'_> {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        if self.names.is_empty() { Ok(None) } else { self.value(seed).map(Some) }
    }
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        let Some(name) = self.names.first() else { return Ok(None) };
        let name: StrDeserializer<'_, Error> = (*name).into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        self.value(seed)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde::Deserialize as _;

    use super::*;

    #[test]
    fn every_field_of_a_pod_is_found_with_its_kind() {
        let found = fields::<Pod>().unwrap();
        let check = |path: &str, kind: Kind| {
            let field = found.iter().find(|field| field.to_string() == path);
            assert_eq!(field.map(|field| field.kind), Some(kind), "{path}");
        };
        check("", Kind::Object("Pod"));
        check("apiVersion", Kind::Text);
        check("metadata.deletionGracePeriodSeconds", Kind::Int64);
        check("metadata.creationTimestamp", Kind::Time);
        check("metadata.labels", Kind::Map);
        check("metadata.labels.*", Kind::Text);
        check("metadata.managedFields[].fieldsV1", Kind::Json);
        check("spec", Kind::Object("PodSpec"));
        check("spec.terminationGracePeriodSeconds", Kind::Int64);
        check("spec.containers", Kind::List);
        check("spec.containers[]", Kind::Object("Container"));
        check("spec.containers[].livenessProbe.periodSeconds", Kind::Int32);
        check("spec.containers[].livenessProbe.httpGet.port", Kind::IntOrString);
        check("spec.initContainers[].lifecycle.preStop.sleep.seconds", Kind::Int64);
        check("spec.ephemeralContainers[].resources.limits.*", Kind::Quantity);
        check("spec.volumes[].iscsi.lun", Kind::Int32);
        check("spec.volumes[].iscsi.readOnly", Kind::Bool);
        check("spec.volumes[].emptyDir.sizeLimit", Kind::Quantity);
        check("spec.securityContext.supplementalGroups[]", Kind::Int64);
        check("status.containerStatuses[].restartCount", Kind::Int32);
        let numbers = found.iter().filter(|field| matches!(field.kind, Kind::Int32 | Kind::Int64)).count();
        println!("a v1.Pod has {} places, {numbers} of them numbers", found.len());
        assert!(numbers > 100, "{numbers}");
    }

    #[test]
    fn parents_come_before_what_is_in_them_and_no_place_comes_twice() {
        let found = fields::<Pod>().unwrap();
        for (place, field) in found.iter().enumerate() {
            let same = found.iter().filter(|other| other.path == field.path).count();
            assert_eq!(same, 1, "{field}");
            if let Some((_, parent)) = field.path.split_last() {
                assert!(found[..place].iter().any(|other| other.path == parent), "{field} has no parent");
            }
        }
    }

    #[test]
    fn a_kind_of_value_that_is_not_known_is_named_with_its_place() {
        let (mut found, path) = (Vec::new(), vec![Step::Field("spec"), Step::Field("share")]);
        let place = Place {
            path,
            within: None,
            type_meta: [("apiVersion", "v1"), ("kind", "Pod")],
            found: &mut found,
        };
        let problem = u8::deserialize(place).unwrap_err().to_string();
        assert!(problem.starts_with("spec.share asks for u8"), "{problem}");
    }
}
