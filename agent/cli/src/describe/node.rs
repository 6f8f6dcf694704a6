//! The text of `beelet describe node`, laid out as `kubectl describe node`.

use beelet_model::table::{PodName, PodTable};
use beelet_policy::resources::{CPU, EPHEMERAL_STORAGE, MEMORY};
use beelet_proto::beelet as proto;
use beelet_units::quantity::Quantity;
use jiff::Timestamp;

use crate::{
    events::last_seen,
    get::{
        columns::Columns,
        node::{resources, since, status},
        pod::age,
    },
    plain, requested,
};

const CONDITIONS: &[&str] = &["TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"];
const PODS: &[&str] = &["NAMESPACE", "NAME", "CPU", "MEMORY", "EPHEMERAL-STORAGE", "OTHER"];
const EVENTS: &[&str] = &["TYPE", "REASON", "AGE", "MESSAGE"];

/// Returns the full description.
pub(super) fn text(
    node: &proto::GetNodeResponse,
    table: &PodTable,
    events: &[proto::Event],
    now: Timestamp,
) -> String {
    let mut text = format!("Name:   {}\n", plain::line(&node.name));
    let conditions: Vec<Vec<String>> = node
        .conditions
        .iter()
        .map(|one| {
            let since = age(since(one), now);
            vec![one.r#type.clone(), status(one).to_owned(), since, one.reason.clone(), one.message.clone()]
        })
        .collect();
    section(&mut text, "Conditions", &Columns::new(CONDITIONS).table(&conditions));
    section(&mut text, "Resources", &resources(node, Some(table)));
    let pods: Vec<Vec<String>> = requested::counted(table)
        .map(|entry| {
            let PodName { namespace, name } = PodName::of(&entry.pod);
            let mut requests = requested::of_pod(entry);
            let mut of = |resource: &str| {
                let amount = requests.remove(resource).unwrap_or(Quantity::ZERO);
                requested::shown(resource, amount)
            };
            let (cpu, memory, storage) = (of(CPU), of(MEMORY), of(EPHEMERAL_STORAGE));
            let other: Vec<String> = requests
                .iter()
                .map(|(resource, amount)| format!("{resource}={}", requested::shown(resource, *amount)))
                .collect();
            vec![namespace, name, cpu, memory, storage, other.join(" ")]
        })
        .collect();
    section(&mut text, "Non-terminated Pods", &Columns::new(PODS).table(&pods));
    if events.is_empty() {
        text += "Events:   <none>\n";
    } else {
        let row = |event: &proto::Event| {
            vec![event.r#type.clone(), event.reason.clone(), last_seen(event, now), event.message.clone()]
        };
        let rows: Vec<Vec<String>> = events.iter().map(row).collect();
        section(&mut text, "Events", &Columns::new(EVENTS).table(&rows));
    }
    text
}

fn section(text: &mut String, title: &str, table: &str) {
    *text += &format!("{title}:\n");
    for line in table.lines() {
        *text += &format!("  {line}\n");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use beelet_model::table::PodEntry;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_is_described_with_what_each_pod_requests() {
        let mut table = PodTable::default();
        let pod = json!({
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {
                "cpu": "500m", "memory": "64Mi", "example.com/gpu": "1"
            }}}]},
            "status": {"phase": "Running"}
        });
        let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
        table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        let amounts: &[(&str, &str)] = &[("cpu", "2"), ("memory", "128Mi"), ("pods", "110")];
        let amounts: std::collections::HashMap<String, String> =
            amounts.iter().map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned())).collect();
        let node = proto::GetNodeResponse {
            name: "n1".to_owned(),
            capacity: amounts.clone().into_iter().collect(),
            allocatable: amounts.into_iter().collect(),
            conditions: vec![proto::NodeCondition {
                r#type: "Ready".to_owned(),
                status: true,
                reason: "KubeletReady".to_owned(),
                message: "beelet is posting ready status".to_owned(),
                since_ns: 0,
            }],
        };
        let text = text(&node, &table, &[], Timestamp::from_second(60).unwrap());
        for expected in [
            "Name:   n1\n",
            "  Ready   True     60s     KubeletReady   beelet is posting ready status\n",
            "  cpu        2          2             500m        1500m\n",
            "  memory     128Mi      128Mi         64Mi        64Mi\n",
            "  pods       110        110           1           109\n",
            "  shop        web    500m   64Mi     0                   example.com/gpu=1\n",
            "Events:   <none>\n",
        ] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
    }
}
