//! `beelet get node`: the machine's capacity, and what of it pods may have.

use std::collections::BTreeSet;
use std::path::PathBuf;

use beelet_proto::beelet as proto;
use clap::{Args, ValueEnum};
use serde_json::json;

use super::columns::Columns;
use super::print;
use crate::api::client::Client;

const TITLES: &[&str] = &["RESOURCE", "CAPACITY", "ALLOCATABLE"];

/// Arguments of `beelet get node`.
#[derive(Debug, Args)]
pub(super) struct NodeArgs {
    /// How it is shown.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// The agent's socket.
    #[arg(long, value_name = "PATH", env = "BEELET_SOCKET", default_value = "/run/beelet/beelet.sock")]
    socket: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// One line a resource.
    Table,
    /// A v1.Node with its name, capacity and allocatable.
    Json,
}

pub(super) async fn get(args: &NodeArgs) -> anyhow::Result<()> {
    let node = Client::connect(&args.socket).await?.node().await?;
    let text = match args.output {
        Output::Table => table(&node),
        Output::Json => {
            let status = json!({ "capacity": node.capacity, "allocatable": node.allocatable });
            let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node.name }, "status": status });
            format!("{}\n", serde_json::to_string_pretty(&node)?)
        }
    };
    Ok(print(&text)?)
}

fn table(node: &proto::GetNodeResponse) -> String {
    let names: BTreeSet<&String> = node.capacity.keys().chain(node.allocatable.keys()).collect();
    let cell = |amount: Option<&String>| amount.map_or_else(|| "0".to_owned(), String::clone);
    let row = |name: &&String| {
        vec![(*name).clone(), cell(node.capacity.get(*name)), cell(node.allocatable.get(*name))]
    };
    let rows: Vec<Vec<String>> = names.iter().map(row).collect();
    Columns::new(TITLES).table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_is_a_line() {
        let amounts = |all: &[(&str, &str)]| {
            all.iter().map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned())).collect()
        };
        let node = proto::GetNodeResponse {
            name: "n".to_owned(),
            capacity: amounts(&[("cpu", "4"), ("example.com/gpu", "2")]),
            allocatable: amounts(&[("cpu", "3500m")]),
        };
        assert_eq!(
            table(&node),
            "RESOURCE          CAPACITY   ALLOCATABLE\ncpu               4          3500m\nexample.com/gpu   2          0\n"
        );
    }
}
