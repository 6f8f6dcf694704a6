//! `beelet get configmaps` and similar: objects other than pods in the manifest directory.

use anyhow::Context as _;
use beelet_proto::beelet as proto;
use clap::Args;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::columns::Columns;
use super::format::Format;
use super::pod::age;
use crate::args::AgentArgs;
use crate::print::print;
use crate::{complete, plain};
use beelet_client::Client;

/// Arguments of `beelet get configmaps`, `secrets`, …
#[derive(Debug, Args)]
pub(super) struct ObjectsArgs {
    /// Show only these objects.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Show only objects in this namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    /// Show objects in all namespaces. This is the default; accepted for compatibility with kubectl.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Label selector, e.g. `app=shop,tier!=db`.
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<String>,
    /// Output format: table, wide, json, yaml, name, jsonpath=TEMPLATE or custom-columns=TITLE:PATH,...
    #[arg(short, long, value_name = "FORMAT", default_value = "table", add = complete::formats())]
    output: Format,
    /// Omit the line of titles.
    #[arg(long)]
    no_headers: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

const TITLES: &[&str] = &["NAMESPACE", "NAME", "DATA", "AGE", "FILE"];

/// Prints the objects of a kind (`ConfigMap`, …).
pub(super) async fn get(kind: &str, args: &ObjectsArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let request = proto::ListRequest {
        kind: kind.to_owned(),
        namespace: args.namespace.clone().unwrap_or_default(),
        selector: args.selector.clone().unwrap_or_default(),
    };
    let mut objects = client.manifests.list(request).await?;
    if let Some(missing) = args.names.iter().find(|name| !objects.iter().any(|one| one.name == **name)) {
        return Err(no_such(kind, missing));
    }
    objects.retain(|one| args.names.is_empty() || args.names.contains(&one.name));
    let values =
        objects.iter().map(|one| serde_json::from_slice(&one.json)).collect::<Result<Vec<Value>, _>>();
    let values = values.context("cannot parse the agent's object; does the agent have another version?")?;
    if objects.is_empty() && args.output.is_table() {
        eprintln!("No {} found.", plural(kind));
        return Ok(());
    }
    let text = if args.output.is_table() {
        let now = Timestamp::now();
        let rows: Vec<_> = objects.iter().zip(&values).map(|(one, value)| row(one, value, now)).collect();
        Columns::new(TITLES).titled(!args.no_headers).table(&rows)
    } else {
        let list = |all: &[Value]| json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": all});
        args.output.text(&values, args.names.len() == 1, !args.no_headers, list)?
    };
    Ok(print(&text)?)
}

/// Returns the error for a missing object.
pub(crate) fn no_such(kind: &str, name: &str) -> anyhow::Error {
    let (one, all) = (kind.to_lowercase(), plural(kind));
    anyhow::anyhow!("{one} {name:?} not found; `beelet get {all}` lists all")
}

/// Returns the plural of a kind, as the command line writes it.
fn plural(kind: &str) -> String {
    let kind = kind.to_lowercase();
    if kind.ends_with('s') { format!("{kind}es") } else { format!("{kind}s") }
}

/// Returns the cells for [`TITLES`].
fn row(object: &proto::Described, value: &Value, now: Timestamp) -> Vec<String> {
    let count = |field: &str| value.get(field).and_then(Value::as_object).map_or(0, serde_json::Map::len);
    let data = match object.kind.as_str() {
        "ConfigMap" | "Secret" => (count("data") + count("binaryData") + count("stringData")).to_string(),
        "PriorityClass" => value["value"].to_string(),
        "RuntimeClass" => value["handler"].as_str().unwrap_or_default().to_owned(),
        _ => "-".to_owned(),
    };
    let changed = Timestamp::from_nanosecond(object.changed_ns.into()).unwrap_or_default();
    let namespace = if object.namespace.is_empty() { "-" } else { &object.namespace };
    let cells = [namespace, &object.name, &data, &age(changed, now), &object.file];
    cells.map(|cell| plain::line(cell).into_owned()).into()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns an object named `conf` whose manifest was changed one second after the epoch.
    pub(crate) fn described(kind: &str, namespace: &str, json: &Value) -> proto::Described {
        proto::Described {
            kind: kind.to_owned(),
            namespace: namespace.to_owned(),
            name: "conf".to_owned(),
            file: "/m/conf.yaml".to_owned(),
            changed_ns: 1_000_000_000,
            json: json.to_string().into_bytes(),
        }
    }

    #[test]
    fn who_asks_for_what_is_not_there_is_told_how_to_see_all() {
        let told = |kind: &str| no_such(kind, "x").to_string();
        assert!(told("Secret").ends_with("secret \"x\" not found; `beelet get secrets` lists all"));
        assert!(told("RuntimeClass").ends_with("`beelet get runtimeclasses` lists all"));
    }

    #[test]
    fn a_line_says_how_much_is_in_it_and_where_it_is() {
        let check = |kind: &str, namespace: &str, value: Value, expected: [&str; 5]| {
            let object = described(kind, namespace, &value);
            assert_eq!(row(&object, &value, Timestamp::from_second(61).unwrap()), expected);
        };
        let map = json!({"data": {"a": "b", "c": "d"}, "binaryData": {"e": ""}});
        check("ConfigMap", "shop", map, ["shop", "conf", "3", "60s", "/m/conf.yaml"]);
        check("Secret", "shop", json!({}), ["shop", "conf", "0", "60s", "/m/conf.yaml"]);
        check("PriorityClass", "", json!({"value": 5}), ["-", "conf", "5", "60s", "/m/conf.yaml"]);
        check("RuntimeClass", "", json!({"handler": "runsc"}), ["-", "conf", "runsc", "60s", "/m/conf.yaml"]);
    }
}
