//! `beelet get node`: capacity, allocatable resources and conditions of the node.

use std::collections::BTreeSet;

use beelet_proto::beelet as proto;
use clap::Args;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::columns::Columns;
use super::format::Format;
use super::pod::age;
use crate::args::AgentArgs;
use crate::print::print;
use crate::{complete, requested};
use beelet_client::Client;
use beelet_model::table::PodTable;
use beelet_units::quantity::Quantity;

const RESOURCES: &[&str] = &["RESOURCE", "CAPACITY", "ALLOCATABLE", "REQUESTED", "FREE"];
const CONDITIONS: &[&str] = &["CONDITION", "STATUS", "SINCE", "REASON"];

/// Arguments of `beelet get node`.
#[derive(Debug, Args)]
pub(super) struct NodeArgs {
    /// Output format: table, wide, json, yaml, name, jsonpath=TEMPLATE or custom-columns=TITLE:PATH,...
    #[arg(short, long, value_name = "FORMAT", default_value = "table", add = complete::formats())]
    output: Format,
    #[command(flatten)]
    agent: AgentArgs,
}

pub(super) async fn get(args: &NodeArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let node = client.devices.node().await?;
    // An agent that does not know its pods yet still knows its resources.
    let pods = client.pods.list().await.ok().map(|(pods, _)| pods);
    let text = if args.output.is_table() {
        table(&node, pods.as_ref(), Timestamp::now())
    } else {
        args.output.text(&[v1(&node)], true, true, |_| Value::Null)?
    };
    print(&text)?;
    if let Some(ready) = node.conditions.iter().find(|one| one.r#type == "Ready" && !one.status) {
        eprintln!("node is not ready: {}", ready.message);
    }
    Ok(())
}

/// Returns the table of resources, with the pods' requests if the pods are known.
pub(crate) fn resources(node: &proto::GetNodeResponse, pods: Option<&PodTable>) -> String {
    let names: BTreeSet<&String> = node.capacity.keys().chain(node.allocatable.keys()).collect();
    let requested = pods.map(requested::of_all);
    let cell = |amount: Option<&String>| amount.map_or_else(|| "0".to_owned(), String::clone);
    let row = |name: &&String| {
        let allocatable = cell(node.allocatable.get(*name));
        let taken = requested.as_ref().map(|all| all.get(*name).copied().unwrap_or_default());
        let free =
            taken.zip(Quantity::parse(&allocatable).ok()).map(|(taken, all)| all.saturating_sub(taken));
        let shown =
            |amount: Option<Quantity>| amount.map_or("-".to_owned(), |amount| requested::shown(name, amount));
        vec![(*name).clone(), cell(node.capacity.get(*name)), allocatable, shown(taken), shown(free)]
    };
    let rows: Vec<Vec<String>> = names.iter().map(row).collect();
    Columns::new(RESOURCES).table(&rows)
}

fn table(node: &proto::GetNodeResponse, pods: Option<&PodTable>, now: Timestamp) -> String {
    let condition = |condition: &proto::NodeCondition| {
        let status = status(condition).to_owned();
        vec![condition.r#type.clone(), status, age(since(condition), now), condition.reason.clone()]
    };
    let conditions: Vec<Vec<String>> = node.conditions.iter().map(condition).collect();
    format!("{}\n{}", resources(node, pods), Columns::new(CONDITIONS).table(&conditions))
}

fn v1(node: &proto::GetNodeResponse) -> Value {
    let condition = |condition: &proto::NodeCondition| {
        json!({
            "type": condition.r#type,
            "status": status(condition),
            "lastTransitionTime": since(condition).strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            "reason": condition.reason,
            "message": condition.message,
        })
    };
    let conditions: Vec<Value> = node.conditions.iter().map(condition).collect();
    let status =
        json!({ "capacity": node.capacity, "allocatable": node.allocatable, "conditions": conditions });
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node.name }, "status": status })
}

pub(crate) fn status(condition: &proto::NodeCondition) -> &'static str {
    if condition.status { "True" } else { "False" }
}

pub(crate) fn since(condition: &proto::NodeCondition) -> Timestamp {
    Timestamp::from_nanosecond(condition.since_ns.into()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;

    use super::*;

    #[test]
    fn a_resource_and_a_condition_are_a_line_each() {
        let amounts = |all: &[(&str, &str)]| {
            all.iter().map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned())).collect()
        };
        let condition = |name: &str, status: bool, reason: &str, since: i64| proto::NodeCondition {
            r#type: name.to_owned(),
            status,
            reason: reason.to_owned(),
            message: "a sentence".to_owned(),
            since_ns: since * 1_000_000_000,
        };
        let node = proto::GetNodeResponse {
            name: "n".to_owned(),
            capacity: amounts(&[("cpu", "4"), ("example.com/gpu", "2")]),
            allocatable: amounts(&[("cpu", "3500m")]),
            conditions: vec![
                condition("MemoryPressure", true, "KubeletHasInsufficientMemory", 1_000_000_000),
                condition("Ready", true, "KubeletReady", 999_999_400),
            ],
        };
        assert_eq!(
            table(&node, Some(&PodTable::default()), Timestamp::from_second(1_000_000_005).unwrap()),
            "RESOURCE          CAPACITY   ALLOCATABLE   REQUESTED   FREE\n\
             cpu               4          3500m         0           3500m\n\
             example.com/gpu   2          0             0           0\n\
             \n\
             CONDITION        STATUS   SINCE   REASON\n\
             MemoryPressure   True     5s      KubeletHasInsufficientMemory\n\
             Ready            True     10m     KubeletReady\n"
        );
        let v1: Node = serde_json::from_value(v1(&node)).unwrap();
        let conditions = v1.status.unwrap().conditions.unwrap();
        let last = &conditions[0];
        assert_eq!(
            (&*last.type_, &*last.status, last.message.as_deref()),
            ("MemoryPressure", "True", Some("a sentence"))
        );
        assert_eq!(last.last_transition_time.as_ref().unwrap().0.as_second(), 1_000_000_000);
    }
}
