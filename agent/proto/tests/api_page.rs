//! Generates docs/api.md from beelet's .proto files.
//! `BEELET_BLESS=1 cargo test -p beelet-proto --test api_page` writes the page.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto};

const HEAD: &str = "\
# The gRPC API

This page is generated from the `.proto` files (`BEELET_BLESS=1 cargo test -p beelet-proto --test api_page`); a test fails if it is
outdated.

beelet serves its own API, the package `beelet.v1`, on the unix socket `/run/beelet/beelet.sock` (`runDir`, `--socket`). Only root can
connect: the socket has mode 0600, and the agent checks the peer's user. The command line uses this API alone. `beelet observe` serves
`Signals` and `Tuner`.

The `.proto` files are in [agent/proto/proto/beelet](../agent/proto/proto/beelet). An `optional` field is absent if the value is unknown on
this machine; it is never 0 instead. Within `beelet.v1`, fields and methods are only added
([support](support.md#state-that-carries-over)).

[examples/python](../examples/python) reads the kernel's signals and edges of containers. Other APIs of the node are the
kubelet's: [pod resources](devices.md), [the pods API](server.md#the-pods-api), [the HTTPS server](server.md).
";

/// The files, in the page's order.
const FILES: [&str; 10] = [
    "beelet",
    "containers",
    "manifests",
    "images",
    "probes",
    "devices",
    "events",
    "signals",
    "tuner",
    "garbage",
];

/// The package, as it begins the names of types.
const PACKAGE: &str = ".beelet.v1.";

/// Comments of a file by the path of their element (`SourceCodeInfo.Location.path`).
struct Comments(BTreeMap<Vec<i32>, String>);

impl Comments {
    fn of(file: &FileDescriptorProto) -> Self {
        let locations = file.source_code_info.iter().flat_map(|info| &info.location);
        let said = locations.map(|one| {
            let text = format!("{} {}", one.leading_comments(), one.trailing_comments());
            (one.path.clone(), text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|"))
        });
        Self(said.filter(|(_, text)| !text.is_empty()).collect())
    }

    fn at(&self, path: &[i32]) -> &str {
        self.0.get(path).map_or("", String::as_str)
    }
}

fn files() -> Vec<FileDescriptorProto> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let mut compiler = protox::Compiler::new([folder]).unwrap();
    compiler.include_source_info(true);
    let names = FILES.iter().map(|name| format!("beelet/{name}.proto"));
    compiler.open_files(names).unwrap();
    compiler.file_descriptor_set().file
}

fn page() -> String {
    let (mut services, mut messages) = (String::new(), String::new());
    for file in files() {
        let comments = Comments::of(&file);
        for (index, service) in (0..).zip(&file.service) {
            let _ = write!(services, "\n## {}\n\n", service.name());
            let about = comments.at(&[6, index]);
            if !about.is_empty() {
                let _ = write!(services, "{about}\n\n");
            }
            services.push_str("| method | request | answer | effect |\n| --- | --- | --- | --- |\n");
            for (number, method) in (0..).zip(&service.method) {
                let part = |is_stream: bool, name: &str| {
                    format!("{}{}", if is_stream { "stream of " } else { "" }, linked(name))
                };
                let _ = writeln!(
                    services,
                    "| `{}` | {} | {} | {} |",
                    method.name(),
                    part(method.client_streaming(), method.input_type()),
                    part(method.server_streaming(), method.output_type()),
                    comments.at(&[6, index, 2, number])
                );
            }
        }
        for (index, message) in (0..).zip(&file.message_type) {
            describe(&mut messages, message, &comments, &[4, index], "");
        }
        for (index, kind) in (0..).zip(&file.enum_type) {
            enumerate(&mut messages, kind, &comments, &[5, index], "");
        }
    }
    format!("{HEAD}{services}\n## Messages\n{messages}")
}

/// Adds a message, then the types inside it.
fn describe(text: &mut String, message: &DescriptorProto, comments: &Comments, path: &[i32], outer: &str) {
    if message.options.as_ref().is_some_and(prost_types::MessageOptions::map_entry) {
        return;
    }
    let name = format!("{outer}{}", message.name());
    let _ = write!(text, "\n### {name}\n\n");
    let about = comments.at(path);
    if !about.is_empty() {
        let _ = write!(text, "{about}\n\n");
    }
    if message.field.is_empty() {
        text.push_str("This message has no fields.\n");
    } else {
        text.push_str("| field | type | meaning |\n| --- | --- | --- |\n");
    }
    for (number, field) in (0..).zip(&message.field) {
        let about = comments.at(&[path, &[2, number]].concat());
        let _ = writeln!(text, "| `{}` | {} | {about} |", field.name(), kind(field, message));
    }
    for (number, inner) in (0..).zip(&message.nested_type) {
        describe(text, inner, comments, &[path, &[3, number]].concat(), &format!("{name}."));
    }
    for (number, inner) in (0..).zip(&message.enum_type) {
        enumerate(text, inner, comments, &[path, &[4, number]].concat(), &format!("{name}."));
    }
}

fn enumerate(text: &mut String, kind: &EnumDescriptorProto, comments: &Comments, path: &[i32], outer: &str) {
    let _ = write!(text, "\n### {outer}{}\n\n", kind.name());
    let about = comments.at(path);
    if !about.is_empty() {
        let _ = write!(text, "{about}\n\n");
    }
    text.push_str("| value | meaning |\n| --- | --- |\n");
    for (number, value) in (0..).zip(&kind.value) {
        let _ = writeln!(text, "| `{}` | {} |", value.name(), comments.at(&[path, &[2, number]].concat()));
    }
}

/// Returns the type of a field, with the word that stands before it.
fn kind(field: &FieldDescriptorProto, message: &DescriptorProto) -> String {
    let entry = message.nested_type.iter().find(|inner| {
        let is_map = inner.options.as_ref().is_some_and(prost_types::MessageOptions::map_entry);
        is_map && field.type_name().ends_with(&format!(".{}", inner.name()))
    });
    if let Some(entry) = entry {
        let parts: Vec<String> = entry.field.iter().map(plain).collect();
        return format!("map of {} to {}", parts[0], parts[1]);
    }
    let word = match field.label() {
        Label::Repeated => "repeated ",
        _ if field.proto3_optional() => "optional ",
        _ if field.oneof_index.is_some() => "one of: ",
        _ => "",
    };
    format!("{word}{}", plain(field))
}

fn plain(field: &FieldDescriptorProto) -> String {
    match field.r#type() {
        Type::Message | Type::Enum => linked(field.type_name()),
        other => other.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    }
}

/// Returns a link to the type's section; a type of another package has none.
fn linked(name: &str) -> String {
    match name.strip_prefix(PACKAGE) {
        Some(own) => format!("[{own}](#{})", own.to_lowercase().replace('.', "")),
        None => format!("`{}`", name.trim_start_matches('.')),
    }
}

#[test]
fn the_api_page_is_what_the_proto_files_say() {
    beelet_testing::page::check("docs/api.md", &page(), "cargo test -p beelet-proto --test api_page");
}
