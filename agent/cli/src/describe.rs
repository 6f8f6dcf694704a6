//! `beelet describe`: a pod, or the node, with all that is known of it, and what happened to it.

mod node;
mod pod;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use beelet_proto::beelet as proto;
use clap::{Args, Subcommand};
use jiff::Timestamp;

use super::args::AgentArgs;
use super::get::{print, show_notice};
use super::{complete, finish, neighbours};
use beelet_client::{Client, signals};

/// Arguments of `beelet describe`.
#[derive(Debug, Args)]
pub struct DescribeArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// A pod, its containers and its events.
    #[command(visible_aliases = ["pods", "po"])]
    Pod(PodArgs),
    /// The node: its conditions, what pods request of it and which pods those are, its events.
    #[command(visible_aliases = ["nodes", "no"])]
    Node(AgentArgs),
}

#[derive(Debug, Args)]
struct PodArgs {
    /// The pod's name, with or without the node's name behind it.
    name: String,
    /// The pod's namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Shows it.
#[must_use]
pub fn run(args: &DescribeArgs) -> ExitCode {
    finish(async {
        match &args.what {
            What::Pod(args) => describe(args).await,
            What::Node(args) => describe_node(args).await,
        }
    })
}

async fn describe(args: &PodArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let (table, notice) = client.pods().await?;
    let namespace = args.namespace.as_deref().unwrap_or_default();
    let (name, entry) = table.find(namespace, &args.name).map_err(anyhow::Error::msg)?;
    let wanted = proto::ListEventsRequest {
        watch: false,
        namespace: name.namespace.clone(),
        pod: name.name.clone(),
        uid: entry.pod.metadata.uid.clone().unwrap_or_default(),
    };
    let events = client.kept_events(wanted).await?;
    let uid = entry.pod.metadata.uid.as_deref().unwrap_or_default();
    let interference = interference(&args.agent.socket, uid).await;
    print(&pod::text(&entry.pod, &events, interference.as_deref(), Timestamp::now()))?;
    show_notice(&notice);
    Ok(())
}

/// Who had the CPU while the pod waited for it, over the longest time that is known: a second, where nobody
/// else looks.
async fn interference(socket: &Path, uid: &str) -> Option<String> {
    /// Two readings make a rate; longer than this nobody waits for a sentence.
    const PATIENCE: Duration = Duration::from_millis(2500);
    let asking = async {
        let mut snapshots = signals::Client::connect(socket).await.ok()?.snapshots("").await.ok()?;
        loop {
            let snapshot = snapshots.message().await.ok()??;
            let pod = snapshot.pods.iter().find(|pod| pod.uid == uid)?;
            if !pod.containers.iter().any(|container| container.running) {
                return None;
            }
            if pod.containers.iter().any(|container| container.last_1s.is_some()) {
                return Some(snapshot);
            }
        }
    };
    let snapshot = tokio::time::timeout(PATIENCE, asking).await.ok()??;
    let machine = snapshot.machine.clone().unwrap_or_default();
    let containers = snapshot.pods.iter().flat_map(|pod| &pod.containers);
    // Before ten seconds have been watched, they are shorter.
    if containers.filter_map(ten).any(|rates| rates.over_seconds > 5.0) {
        neighbours::sentence(&snapshot, uid, machine.cpu_10s, ten)
    } else {
        neighbours::sentence(&snapshot, uid, machine.cpu_1s, one)
    }
}

fn ten(container: &proto::SignalContainer) -> Option<&proto::SignalRates> {
    container.last_10s.as_ref()
}

fn one(container: &proto::SignalContainer) -> Option<&proto::SignalRates> {
    container.last_1s.as_ref()
}

async fn describe_node(args: &AgentArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.socket).await?;
    let node = client.node().await?;
    let (table, notice) = client.pods().await?;
    let mut events = client.kept_events(proto::ListEventsRequest::default()).await?;
    events.retain(|event| event.object_kind == "Node");
    print(&node::text(&node, &table, &events, Timestamp::now()))?;
    show_notice(&notice);
    Ok(())
}
