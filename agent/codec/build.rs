//! Makes tables of the messages that a `v1.Pod` consists of, from the vendored .proto files: which field has
//! which number and kind. Tables instead of types: the objects are k8s-openapi's, and a table is some
//! kilobytes.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::Path;

use protox::prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};

/// The objects that are written as protobuf.
const ROOTS: [&str; 1] = ["k8s.io.api.core.v1.Pod"];

/// Types that Go embeds: in JSON their fields stand among those of the message around them, in protobuf they
/// are a message of their own. By message and field, as in `k8s.io/api/core/v1/types.go` (`json:",inline"`).
const EMBEDDED: [(&str, &str); 10] = [
    ("Volume", "volumeSource"),
    ("Probe", "handler"),
    ("EphemeralContainer", "ephemeralContainerCommon"),
    ("ConfigMapEnvSource", "localObjectReference"),
    ("ConfigMapKeySelector", "localObjectReference"),
    ("ConfigMapProjection", "localObjectReference"),
    ("ConfigMapVolumeSource", "localObjectReference"),
    ("SecretEnvSource", "localObjectReference"),
    ("SecretKeySelector", "localObjectReference"),
    ("SecretProjection", "localObjectReference"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["k8s.io/api/core/v1/generated.proto"], ["proto"])?;
    let pool = protox::prost_reflect::DescriptorPool::from_file_descriptor_set(files)?;
    let mut tables = Tables::default();
    for root in ROOTS {
        let message = pool.get_message_by_name(root).ok_or("unknown root message")?;
        tables.index(&message);
    }
    let mut text = String::from("pub(super) static MESSAGES: &[Message] = &[\n");
    while let Some(message) = tables.waiting.pop_front() {
        writeln!(text, "    Message {{ fields: &[ // {}", message.full_name())?;
        let mut fields: Vec<FieldDescriptor> = message.fields().collect();
        fields.sort_by_key(FieldDescriptor::number);
        for field in fields {
            writeln!(text, "        {},", tables.field(&message, &field)?)?;
        }
        text.push_str("    ] },\n");
    }
    text.push_str("];\n");
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("messages.rs"), text)?;
    Ok(())
}

#[derive(Default)]
struct Tables {
    indices: BTreeMap<String, usize>,
    waiting: VecDeque<MessageDescriptor>,
}

impl Tables {
    /// The place of a message in the table; a new one's table is to be written.
    fn index(&mut self, message: &MessageDescriptor) -> usize {
        let next = self.indices.len();
        *self.indices.entry(message.full_name().to_owned()).or_insert_with(|| {
            self.waiting.push_back(message.clone());
            next
        })
    }

    fn field(&mut self, message: &MessageDescriptor, field: &FieldDescriptor) -> Result<String, String> {
        let embedded = EMBEDDED.contains(&(message.name(), field.name()));
        let kind = if field.is_map() {
            let Kind::Message(entry) = field.kind() else { return Err("a map without entries".to_owned()) };
            let value = self.kind(&entry.map_entry_value_field())?;
            format!("Kind::Map(&{value})")
        } else {
            self.kind(field)?
        };
        let (name, number) = (field.name(), field.number());
        let many = field.is_list();
        Ok(format!(
            "Field {{ name: {name:?}, number: {number}, many: {many}, embedded: {embedded}, kind: {kind} }}"
        ))
    }

    fn kind(&mut self, field: &FieldDescriptor) -> Result<String, String> {
        Ok(match field.kind() {
            Kind::Bool => "Kind::Bool".to_owned(),
            Kind::Int32 | Kind::Int64 => "Kind::Int".to_owned(),
            Kind::String => "Kind::Text".to_owned(),
            Kind::Message(message) => match message.full_name() {
                "k8s.io.apimachinery.pkg.api.resource.Quantity" => "Kind::Quantity".to_owned(),
                "k8s.io.apimachinery.pkg.util.intstr.IntOrString" => "Kind::IntOrString".to_owned(),
                "k8s.io.apimachinery.pkg.apis.meta.v1.Time"
                | "k8s.io.apimachinery.pkg.apis.meta.v1.MicroTime" => "Kind::Time".to_owned(),
                "k8s.io.apimachinery.pkg.apis.meta.v1.FieldsV1" => "Kind::Raw".to_owned(),
                _ => format!("Kind::Message({})", self.index(&message)),
            },
            other => return Err(format!("{}: no code for a field of kind {other:?}", field.full_name())),
        })
    }
}
