//! Objects as the protobuf that Kubernetes' own types are marshalled to: what `v1.Pod#Unmarshal` of Go reads.
//!
//! One walk over an object's value and the table of its message (made by build.rs from the vendored .proto
//! files). As in JSON, a field that isn't there is not written; the reader has the same zero for both.

use jiff::Timestamp;
use prost::encoding::{WireType, encode_key, encode_varint};
use serde_json::Value;

use crate::ApiType;

include!(concat!(env!("OUT_DIR"), "/messages.rs"));

/// The place of `v1.Pod` in the table: it is the first root.
const POD: usize = 0;

/// A message by its fields, in the order of their numbers.
pub(super) struct Message {
    fields: &'static [Field],
}

struct Field {
    name: &'static str,
    number: u32,
    many: bool,
    /// Its fields stand in JSON among those of the message that it is in.
    embedded: bool,
    kind: Kind,
}

enum Kind {
    Bool,
    Int,
    Text,
    /// By its place in the table.
    Message(usize),
    /// Keys are text.
    Map(&'static Kind),
    /// A text or a number in JSON, a message with a text here.
    Quantity,
    /// A number or a text in JSON.
    IntOrString,
    /// RFC 3339 in JSON, seconds and nanoseconds here.
    Time,
    /// Any JSON, as bytes.
    Raw,
}

/// A pod as protobuf.
///
/// # Errors
/// A field that has another type than its message says: which, by its path.
pub fn pod(pod: &k8s_openapi::api::core::v1::Pod) -> Result<Vec<u8>, Unfit> {
    let mut out = Vec::with_capacity(4096);
    message(&MESSAGES[POD], &pod.to_value(), &mut out)?;
    Ok(out)
}

/// Why an object has no form in protobuf.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the field {path} is not what protobuf has there")]
pub struct Unfit {
    path: String,
}

impl Unfit {
    fn here() -> Self {
        Self { path: String::new() }
    }

    fn within(self, name: &str) -> Self {
        let path = if self.path.is_empty() { name.to_owned() } else { format!("{name}.{}", self.path) };
        Self { path }
    }
}

fn message(of: &Message, value: &Value, out: &mut Vec<u8>) -> Result<(), Unfit> {
    for field in of.fields {
        if field.embedded {
            let mut inner = Vec::new();
            one(&field.kind, value, &mut inner)?;
            // Where nothing of it is set, Go has it all the same, without a content.
            tagged(field.number, &inner, out);
            continue;
        }
        let Some(found) = value.get(field.name).filter(|found| !found.is_null()) else { continue };
        self::field(field, found, out).map_err(|unfit| unfit.within(field.name))?;
    }
    Ok(())
}

fn field(field: &Field, value: &Value, out: &mut Vec<u8>) -> Result<(), Unfit> {
    if let Kind::Map(kind) = &field.kind {
        for (key, value) in value.as_object().ok_or_else(Unfit::here)? {
            let mut entry = Vec::new();
            tagged(1, key.as_bytes(), &mut entry);
            scalar_or_block(2, kind, value, &mut entry).map_err(|unfit| unfit.within(key))?;
            tagged(field.number, &entry, out);
        }
        return Ok(());
    }
    if field.many {
        for value in value.as_array().ok_or_else(Unfit::here)? {
            scalar_or_block(field.number, &field.kind, value, out)?;
        }
        return Ok(());
    }
    scalar_or_block(field.number, &field.kind, value, out)
}

/// A value with its number before it.
fn scalar_or_block(number: u32, kind: &Kind, value: &Value, out: &mut Vec<u8>) -> Result<(), Unfit> {
    match kind {
        Kind::Bool => varint(number, u64::from(value.as_bool().ok_or_else(Unfit::here)?), out),
        Kind::Int => varint(number, value.as_i64().ok_or_else(Unfit::here)?.cast_unsigned(), out),
        _ => {
            let mut block = Vec::new();
            one(kind, value, &mut block)?;
            tagged(number, &block, out);
        }
    }
    Ok(())
}

/// A value that has a length.
fn one(kind: &Kind, value: &Value, out: &mut Vec<u8>) -> Result<(), Unfit> {
    let text = || value.as_str().ok_or_else(Unfit::here);
    match kind {
        Kind::Text => out.extend_from_slice(text()?.as_bytes()),
        Kind::Message(index) => message(&MESSAGES[*index], value, out)?,
        Kind::Quantity => match value {
            Value::String(text) => tagged(1, text.as_bytes(), out),
            Value::Number(number) => tagged(1, number.to_string().as_bytes(), out),
            _ => return Err(Unfit::here()),
        },
        Kind::IntOrString => match value {
            Value::String(text) => {
                varint(1, 1, out);
                tagged(3, text.as_bytes(), out);
            }
            other => {
                varint(1, 0, out);
                varint(2, other.as_i64().ok_or_else(Unfit::here)?.cast_unsigned(), out);
            }
        },
        Kind::Time => {
            let time: Timestamp = text()?.parse().map_err(|_| Unfit::here())?;
            varint(1, time.as_second().cast_unsigned(), out);
            varint(2, i64::from(time.subsec_nanosecond()).cast_unsigned(), out);
        }
        Kind::Raw => tagged(1, value.to_string().as_bytes(), out),
        Kind::Bool | Kind::Int | Kind::Map(_) => return Err(Unfit::here()),
    }
    Ok(())
}

fn varint(number: u32, value: u64, out: &mut Vec<u8>) {
    encode_key(number, WireType::Varint, out);
    encode_varint(value, out);
}

fn tagged(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::api::core::v1::Pod;
    use protox::prost_reflect::{DescriptorPool, DynamicMessage, Value as Found};
    use serde_json::json;

    use super::*;

    const NAME: &str = "k8s.io.api.core.v1.Pod";

    fn pool() -> DescriptorPool {
        let files = protox::compile(["k8s.io/api/core/v1/generated.proto"], ["proto"]).unwrap();
        DescriptorPool::from_file_descriptor_set(files).unwrap()
    }

    fn read(bytes: &[u8]) -> DynamicMessage {
        DynamicMessage::decode(pool().get_message_by_name(NAME).unwrap(), bytes).unwrap()
    }

    /// All fields by their path, but those that say nothing: Go writes every zero.
    fn fields(message: &DynamicMessage, path: &str, all: &mut BTreeMap<String, String>) {
        for (field, value) in message.fields() {
            let path = format!("{path}.{}", field.name());
            match value {
                Found::List(list) => {
                    list.iter().enumerate().for_each(|(i, one)| leaf(one, &format!("{path}[{i}]"), all));
                }
                Found::Map(map) => {
                    map.iter().for_each(|(key, one)| leaf(one, &format!("{path}[{key:?}]"), all));
                }
                other => leaf(other, &path, all),
            }
        }
    }

    fn leaf(value: &Found, path: &str, all: &mut BTreeMap<String, String>) {
        match value {
            Found::Message(message) => fields(message, path, all),
            Found::String(text) if text.is_empty() => {}
            Found::I32(0) | Found::I64(0) | Found::Bool(false) => {}
            other => drop(all.insert(path.to_owned(), format!("{other:?}"))),
        }
    }

    #[test]
    fn kubernetes_own_pod_with_every_field_set_is_what_its_own_bytes_say() {
        // k8s.io/api/testdata: the same object in JSON and in protobuf, behind "k8s\0" in an envelope whose
        // second field is the object.
        let object = Pod::from_json(include_bytes!("../testdata/core.v1.Pod.json")).unwrap();
        let envelope = &include_bytes!("../testdata/core.v1.Pod.pb")[4..];
        let unknown = pool().get_message_by_name("k8s.io.apimachinery.pkg.runtime.Unknown").unwrap();
        let unknown = DynamicMessage::decode(unknown, envelope).unwrap();
        let raw = unknown.get_field_by_name("raw").unwrap();
        let (mut theirs, mut ours) = (BTreeMap::new(), BTreeMap::new());
        fields(&read(raw.as_bytes().unwrap()), "", &mut theirs);
        fields(&read(&pod(&object).unwrap()), "", &mut ours);
        let missing: Vec<_> = theirs.iter().filter(|(path, value)| ours.get(*path) != Some(value)).collect();
        assert_eq!(missing, [], "{} of {} fields differ", missing.len(), theirs.len());
        assert_eq!(theirs.len(), ours.len());
        assert!(theirs.len() > 700, "{}", theirs.len());
    }

    #[test]
    fn a_field_of_another_type_is_named_by_its_path() {
        let value = json!({"spec": {"containers": [{"name": "c", "ports": [{"containerPort": "http"}]}]}});
        let unfit = message(&MESSAGES[POD], &value, &mut Vec::new()).unwrap_err();
        assert_eq!(
            unfit.to_string(),
            "the field spec.containers.ports.containerPort is not what protobuf has there"
        );
        let value = json!({"metadata": {"creationTimestamp": "yesterday"}});
        assert!(message(&MESSAGES[POD], &value, &mut Vec::new()).is_err());
    }
}
