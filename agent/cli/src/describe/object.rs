//! The text of ConfigMaps, Secrets and classes in the manifest directory, with the pods that use them.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail};
use beelet_codec::ApiType;
use beelet_model::table::{PodName, PodTable};
use beelet_policy::pod::references::{self, Kind, Reference};
use beelet_proto::beelet as proto;
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::Metadata;
use k8s_openapi::api::{
    core::v1::{ConfigMap, Pod, Secret},
    node::v1::RuntimeClass,
    scheduling::v1::PriorityClass,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::text::Text;
use crate::args::AgentArgs;
use crate::complete;
use crate::get::{objects::no_such, pod::age};
use crate::print::print;
use beelet_client::Client;

/// Arguments of `beelet describe configmap` and the like.
#[derive(Debug, Args)]
pub(super) struct ObjectArgs {
    /// Name of the object.
    name: String,
    /// Namespace of the object. Required only if two objects have the same name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints the object of this kind (`ConfigMap`, …).
pub(super) async fn describe(kind: &str, args: &ObjectArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let request = proto::ListRequest {
        kind: kind.to_owned(),
        namespace: args.namespace.clone().unwrap_or_default(),
        selector: String::new(),
    };
    let mut found = client.manifests.list(request).await?;
    found.retain(|one| one.name == args.name);
    let one = match found.as_slice() {
        [one] => one,
        [] => return Err(no_such(kind, &args.name)),
        [first, second, ..] => bail!(
            "{:?} exists in the namespaces {} and {}: choose one with `--namespace`",
            args.name,
            first.namespace,
            second.namespace
        ),
    };
    let (table, _) = client.pods.list().await?;
    Ok(print(&text(one, &table, Timestamp::now())?)?)
}

/// Returns the full description, without the values of a Secret.
fn text(object: &proto::Described, table: &PodTable, now: Timestamp) -> anyhow::Result<String> {
    let mut text = Text::default();
    match object.kind.as_str() {
        "ConfigMap" => {
            let map: ConfigMap = head(&mut text, object, now)?;
            text.set(0, "Immutable", map.immutable.map(|is| is.to_string()).as_deref());
            text.list(0, "Used By", users(table, Kind::ConfigMap, object));
            values(&mut text, map.data.iter().flatten());
            let binary = map.binary_data.into_iter().flatten();
            sizes(&mut text, "BinaryData", binary.map(|(key, value)| (key, value.0.len())));
        }
        "Secret" => {
            let secret: Secret = head(&mut text, object, now)?;
            text.line(0, "Type", secret.type_.as_deref().unwrap_or("Opaque"));
            text.set(0, "Immutable", secret.immutable.map(|is| is.to_string()).as_deref());
            text.list(0, "Used By", users(table, Kind::Secret, object));
            let plain = secret.string_data.into_iter().flatten().map(|(key, value)| (key, value.len()));
            let encoded = secret.data.into_iter().flatten().map(|(key, value)| (key, value.0.len()));
            // stringData wins over data for a key in both, as in the API server.
            let all: BTreeMap<String, usize> = encoded.chain(plain).collect();
            sizes(&mut text, "Data", all.into_iter());
        }
        "PriorityClass" => {
            let class: PriorityClass = head(&mut text, object, now)?;
            text.line(0, "Value", &class.value.unwrap_or(0).to_string());
            text.line(0, "Global Default", &class.global_default.unwrap_or(false).to_string());
            let preemption = class.preemption_policy.as_deref();
            text.line(0, "Preemption Policy", preemption.unwrap_or("PreemptLowerPriority"));
            text.set(0, "Description", class.description.as_deref());
            let is_user = |pod: &Pod| {
                pod.spec.as_ref().is_some_and(|s| s.priority_class_name.as_ref() == Some(&object.name))
            };
            text.list(0, "Used By", pods(table, is_user));
        }
        _ => {
            let class: RuntimeClass = head(&mut text, object, now)?;
            text.line(0, "Handler", &class.handler);
            let overhead = class.overhead.and_then(|overhead| overhead.pod_fixed).unwrap_or_default();
            let overhead = overhead.iter().map(|(resource, amount)| format!("{resource}: {}", amount.0));
            text.list(0, "Overhead", overhead);
            let is_user = |pod: &Pod| {
                pod.spec.as_ref().is_some_and(|s| s.runtime_class_name.as_ref() == Some(&object.name))
            };
            text.list(0, "Used By", pods(table, is_user));
        }
    }
    Ok(text.0)
}

/// Writes the common fields and parses the object.
fn head<T>(text: &mut Text, object: &proto::Described, now: Timestamp) -> anyhow::Result<T>
where
    T: ApiType + Metadata<Ty = ObjectMeta>,
{
    let read = T::from_json(&object.json)
        .context("cannot parse the agent's object; does the agent have another version?")?;
    text.line(0, "Name", &object.name);
    text.set(0, "Namespace", Some(&object.namespace));
    text.metadata(read.metadata());
    text.line(0, "File", &object.file);
    let changed = Timestamp::from_nanosecond(object.changed_ns.into()).unwrap_or_default();
    text.line(0, "Changed", &format!("{} ago", age(changed, now)));
    Ok(read)
}

/// Returns the pods that refer to the object.
fn users(table: &PodTable, kind: Kind, object: &proto::Described) -> Vec<String> {
    let wanted = Reference { kind, namespace: object.namespace.clone(), name: object.name.clone() };
    pods(table, |pod| references::of(pod).contains(&wanted))
}

fn pods(table: &PodTable, is_user: impl Fn(&Pod) -> bool) -> Vec<String> {
    let users = table.pods.iter().filter(|(_, entry)| is_user(&entry.pod));
    users.map(|(PodName { namespace, name }, _)| format!("{namespace}/{name}")).collect()
}

fn values<'v>(text: &mut Text, values: impl Iterator<Item = (&'v String, &'v String)>) {
    title(text, "Data");
    for (key, value) in values {
        text.push(&format!("{key}:"));
        text.push("----");
        value.lines().for_each(|line| text.push(line));
        text.push("");
    }
}

fn sizes(text: &mut Text, name: &str, sizes: impl Iterator<Item = (String, usize)>) {
    let mut sizes = sizes.peekable();
    if sizes.peek().is_some() {
        title(text, name);
        sizes.for_each(|(key, size)| text.line(0, &key, &format!("{size} bytes")));
    }
}

fn title(text: &mut Text, name: &str) {
    text.push("");
    text.push(name);
    text.push("====");
}

#[cfg(test)]
mod tests {
    use beelet_model::table::PodEntry;
    use serde_json::{Value, json};

    use super::*;
    use crate::get::objects::tests::described;

    /// Returns the lines of the description, each with single blanks.
    fn check(kind: &str, namespace: &str, json: &Value, expected: &str) {
        let pod = json!({"metadata": {"name": "web-n1", "namespace": "shop"},
            "spec": {"priorityClassName": "conf", "containers": [{"name": "main", "envFrom":
                [{"configMapRef": {"name": "conf"}}, {"secretRef": {"name": "conf"}}]}]}});
        let mut table = PodTable::default();
        let entry = PodEntry::of(Pod::from_value(&pod).unwrap());
        table.pods.insert(PodName::of(&entry.pod), entry.into());
        let object = described(kind, namespace, json);
        let text = text(&object, &table, Timestamp::from_second(61).unwrap()).unwrap();
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines.join("\n"), expected);
    }

    const COMMON: &str = "Labels: <none>\nAnnotations: <none>\nFile: /m/conf.yaml\nChanged: 60s ago";

    #[test]
    fn a_config_map_is_described_with_its_values_and_its_users() {
        let json = json!({"data": {"a": "1\n2\n", "b": "\u{1b}[2J"}, "binaryData": {"c": "AAAA"}});
        let expected = format!(
            "Name: conf\nNamespace: shop\n{COMMON}\nUsed By: shop/web-n1\n\nData\n====\na:\n----\n1\n2\n\nb:\n----\n\
             \\u{{1b}}[2J\n\n\nBinaryData\n====\nc: 3 bytes"
        );
        check("ConfigMap", "shop", &json, &expected);
    }

    #[test]
    fn nothing_secret_is_in_a_secrets_description() {
        let json = json!({"type": "Opaque", "data": {"a": "aGVsbG8="}, "stringData": {"b": "four"}});
        let expected = format!(
            "Name: conf\nNamespace: shop\n{COMMON}\nType: Opaque\nUsed By: shop/web-n1\n\nData\n====\na: 5 bytes\n\
             b: 4 bytes"
        );
        check("Secret", "shop", &json, &expected);
    }

    #[test]
    fn classes_are_described_with_what_they_mean() {
        let expected = format!(
            "Name: conf\n{COMMON}\nValue: 5\nGlobal Default: false\nPreemption Policy: PreemptLowerPriority\n\
             Used By: shop/web-n1"
        );
        check("PriorityClass", "", &json!({"value": 5}), &expected);
        let json = json!({"handler": "runsc", "overhead": {"podFixed": {"cpu": "10m"}}});
        let expected = format!("Name: conf\n{COMMON}\nHandler: runsc\nOverhead: cpu: 10m\nUsed By: <none>");
        check("RuntimeClass", "", &json, &expected);
    }
}
