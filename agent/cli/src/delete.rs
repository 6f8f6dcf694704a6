//! `beelet delete`: manifests out of the agent's folder, and for pods the wait until they are gone.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use beelet_proto::beelet as proto;
use clap::{Args, ValueEnum};

use super::args::AgentArgs;
use super::failed;
use beelet_client::{Client, Event};
use beelet_model::table::PodTable;

/// Arguments of `beelet delete`.
///
/// What runs here is what the folder of manifests says, so deleting an object is removing its manifest. Keep a copy, or
/// say --keep-manifest: the file gets .bak at its end then, and renaming it back brings the object back.
#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// What kind of object.
    #[arg(value_enum, value_name = "KIND")]
    kind: Kind,
    /// Their names; a pod's with or without the node's name at its end.
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// Their namespace.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
    namespace: String,
    /// Rename the manifest to FILE.bak instead of removing it.
    #[arg(long)]
    keep_manifest: bool,
    /// Seconds that a pod's containers get to end by themselves; else the pod's own.
    #[arg(long, value_name = "SECONDS")]
    grace_period: Option<u64>,
    /// Come back at once, not when the pods are gone.
    #[arg(long)]
    no_wait: bool,
    /// Wait at most so many seconds.
    #[arg(long, value_name = "SECONDS", conflicts_with = "no_wait")]
    timeout: Option<u64>,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Pods.
    #[value(aliases = ["pods", "po"])]
    Pod,
    /// ConfigMaps; pods that run keep what they have.
    #[value(name = "configmap", aliases = ["configmaps", "cm"])]
    ConfigMap,
    /// Secrets; pods that run keep what they have.
    #[value(aliases = ["secrets"])]
    Secret,
    /// PriorityClasses.
    #[value(name = "priorityclass", aliases = ["priorityclasses", "pc"])]
    PriorityClass,
    /// RuntimeClasses.
    #[value(name = "runtimeclass", aliases = ["runtimeclasses"])]
    RuntimeClass,
}

impl Kind {
    /// As manifests have it.
    fn text(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::PriorityClass => "PriorityClass",
            Self::RuntimeClass => "RuntimeClass",
        }
    }
}

/// Deletes them.
#[must_use]
pub fn run(args: &DeleteArgs) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(delete(args)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

async fn delete(args: &DeleteArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let mut uids = Vec::new();
    for name in &args.names {
        let request = proto::DeleteRequest {
            kind: args.kind.text().to_owned(),
            namespace: args.namespace.clone(),
            name: name.clone(),
            keep_manifest: args.keep_manifest,
            grace_seconds: args.grace_period,
        };
        let deleted = client.delete(request).await?;
        let kind = args.kind.text().to_lowercase();
        match deleted.kept.as_str() {
            "" => println!("{kind}/{} deleted ({} removed)", deleted.name, deleted.file),
            kept => println!("{kind}/{} deleted (its manifest is {kept} now)", deleted.name),
        }
        uids.push(deleted.uid);
    }
    uids.retain(|uid| !uid.is_empty());
    if args.no_wait || uids.is_empty() {
        return Ok(());
    }
    let gone = wait_until_gone(&mut client, &uids);
    match args.timeout {
        None => gone.await,
        Some(seconds) => match tokio::time::timeout(Duration::from_secs(seconds), gone).await {
            Ok(gone) => gone,
            Err(_) => bail!("not all pods were gone within {seconds} s; they are being stopped"),
        },
    }
}

async fn wait_until_gone(client: &mut Client, uids: &[String]) -> anyhow::Result<()> {
    let mut watch = client.watch().await?;
    let (mut table, mut synced) = (PodTable::default(), false);
    while let Some(event) = watch.next().await? {
        synced |= event == Event::Synced;
        match &event {
            Event::Notice(notice) if notice.is_empty() => {
                eprintln!("the wait goes on: the container runtime answers again");
            }
            Event::Notice(notice) => eprintln!("waiting: {notice}"),
            _ => {}
        }
        event.apply(&mut table);
        let there = table
            .pods
            .values()
            .any(|entry| entry.pod.metadata.uid.as_ref().is_some_and(|uid| uids.contains(uid)));
        if synced && !there {
            return Ok(());
        }
    }
    bail!("the agent stopped")
}
