//! `beelet describe`: details and events of a pod, the node or another object.

mod node;
mod object;
mod pod;
mod text;

use std::process::ExitCode;

use beelet_proto::beelet as proto;
use clap::{Args, Subcommand};
use jiff::Timestamp;

use super::args::AgentArgs;
use super::get::show_notice;
use super::print::print;
use super::{complete, finish};
use beelet_client::Client;
use beelet_model::table::PodName;

/// Arguments of `beelet describe`.
#[derive(Debug, Args)]
pub struct DescribeArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Show a pod with its containers and events.
    #[command(visible_aliases = ["pods", "po"])]
    Pod(PodArgs),
    /// Show the node with its conditions, the pods and their resource requests, and events.
    #[command(visible_aliases = ["nodes", "no"])]
    Node(AgentArgs),
    /// Show a ConfigMap from the manifest directory and the pods that use it.
    #[command(name = "configmap", visible_aliases = ["configmaps", "cm"])]
    ConfigMap(object::ObjectArgs),
    /// Show a Secret from the manifest directory and the pods that use it, without its values.
    #[command(visible_alias = "secrets")]
    Secret(object::ObjectArgs),
    /// Show a PriorityClass from the manifest directory and the pods that use it.
    #[command(name = "priorityclass", visible_aliases = ["priorityclasses", "pc"])]
    PriorityClass(object::ObjectArgs),
    /// Show a RuntimeClass from the manifest directory and the pods that use it.
    #[command(name = "runtimeclass", visible_alias = "runtimeclasses")]
    RuntimeClass(object::ObjectArgs),
}

#[derive(Debug, Args)]
struct PodArgs {
    /// Name of the pod; may omit the `-NODE` suffix of static pods.
    name: String,
    /// Namespace of the pod. Required only if two pods have the same name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints the description.
#[must_use]
pub fn run(args: &DescribeArgs) -> ExitCode {
    finish(async {
        match &args.what {
            What::Pod(args) => describe(args).await,
            What::Node(args) => describe_node(args).await,
            What::ConfigMap(args) => object::describe("ConfigMap", args).await,
            What::Secret(args) => object::describe("Secret", args).await,
            What::PriorityClass(args) => object::describe("PriorityClass", args).await,
            What::RuntimeClass(args) => object::describe("RuntimeClass", args).await,
        }
    })
}

async fn describe(args: &PodArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let (table, notice) = client.pods.list().await?;
    let namespace = args.namespace.as_deref().unwrap_or_default();
    let (name, entry) = table.find(namespace, &args.name).map_err(anyhow::Error::msg)?;
    let wanted = proto::ListEventsRequest {
        watch: false,
        namespace: name.namespace.clone(),
        pod: name.name.clone(),
        uid: entry.pod.metadata.uid.clone().unwrap_or_default(),
    };
    let events = client.events.kept(wanted).await?;
    let signals = signals(&args.agent.socket, name).await;
    print(&pod::text(&entry.pod, &signals, &events, Timestamp::now()))?;
    show_notice(&notice);
    Ok(())
}

/// Returns the measured waits of the pod's containers, or an empty list while the agent does not measure yet.
async fn signals(socket: &std::path::Path, name: &PodName) -> Vec<proto::SignalContainer> {
    let Ok(mut client) = beelet_client::signals::Client::connect(socket).await else { return Vec::new() };
    let Ok(snapshot) = client.snapshot(&name.namespace).await else { return Vec::new() };
    let pod = snapshot.pods.into_iter().find(|pod| pod.name == name.name);
    pod.map(|pod| pod.containers).unwrap_or_default()
}

async fn describe_node(args: &AgentArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.socket).await?;
    let node = client.devices.node().await?;
    let (table, notice) = client.pods.list().await?;
    let mut events = client.events.kept(proto::ListEventsRequest::default()).await?;
    events.retain(|event| event.object_kind == "Node");
    print(&node::text(&node, &table, &events, Timestamp::now()))?;
    show_notice(&notice);
    Ok(())
}
