//! `beelet delete`: removes manifests from the agent's manifest directory and waits until their pods have
//! terminated.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use beelet_proto::beelet as proto;
use clap::{Args, ValueEnum};

use super::args::{AgentArgs, pod_name};
use super::files::{self, Manifest};
use super::until::{self, Target, Wanted};
use super::{USAGE, code, complete, finish, plain};
use beelet_client::Client;
use beelet_model::table::{PodEntry, PodName};

/// Time to wait in addition to the pods' grace period.
const PATIENCE: Duration = Duration::from_secs(120);

/// Arguments of `beelet delete`.
///
/// The agent runs the pods of its manifest directory, so deleting an object removes its manifest. Keep a
/// copy, or use --keep-manifest, which renames the file to FILE.bak; renaming it back restores the object.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  beelet delete pod web
  beelet delete -f shop/
  beelet delete pods -l app=shop --keep-manifest")]
pub struct DeleteArgs {
    /// Kind of the objects.
    #[arg(value_enum, value_name = "KIND", required_unless_present = "files")]
    kind: Option<Kind>,
    /// Names of the objects; a pod's name may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "NAME", value_parser = pod_name, add = complete::pods(), required_unless_present_any = ["files", "selector", "all"])]
    names: Vec<String>,
    /// Delete the objects of these manifests: files, directories or - for standard input.
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with_all = ["kind", "names", "selector", "all"])]
    files: Vec<PathBuf>,
    /// Label selector, e.g. `app=shop,tier!=db`.
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "names")]
    selector: Option<String>,
    /// Delete all objects of the kind in the namespace.
    #[arg(long, conflicts_with_all = ["names", "selector"])]
    all: bool,
    /// Namespace of the objects.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces(), default_value = "default")]
    namespace: String,
    /// Rename the manifest to FILE.bak instead of removing it.
    #[arg(long)]
    keep_manifest: bool,
    /// Grace period in seconds. Default: each pod's own.
    #[arg(long, value_name = "SECONDS")]
    grace_period: Option<u64>,
    /// Return immediately instead of waiting until the pods have terminated.
    #[arg(long)]
    no_wait: bool,
    /// Delete with a grace period of zero, do not wait, and hide the pods. The agent keeps trying to stop
    /// containers that the runtime cannot stop; a new pod of the same name stays Pending until they have
    /// terminated.
    #[arg(long, conflicts_with_all = ["grace_period", "timeout"])]
    force: bool,
    /// Maximum time to wait, e.g. `90s` or `5m`. Default: two minutes more than the longest grace period.
    #[arg(long, value_name = "TIME", value_parser = until::duration, conflicts_with = "no_wait")]
    timeout: Option<Duration>,
    #[command(flatten)]
    agent: AgentArgs,
}

/// An object to delete.
#[derive(Debug, PartialEq, Eq)]
struct Object {
    kind: String,
    namespace: String,
    name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Pods.
    #[value(aliases = ["pods", "po"])]
    Pod,
    /// ConfigMaps; running pods keep the values that they have.
    #[value(name = "configmap", aliases = ["configmaps", "cm"])]
    ConfigMap,
    /// Secrets; running pods keep the values that they have.
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
    /// Returns the kind as manifests write it.
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

/// Deletes the objects.
#[must_use]
pub fn run(args: &DeleteArgs) -> ExitCode {
    let given = if args.files.is_empty() { Ok(Vec::new()) } else { files::read_all(&args.files) };
    let given = match given {
        Ok(given) => given,
        Err(errors) => {
            files::show_errors(&errors);
            return ExitCode::from(USAGE);
        }
    };
    finish(async { Ok(code(delete(args, given).await?)) })
}

/// Returns true if all objects were deleted.
async fn delete(args: &DeleteArgs, given: Vec<Manifest>) -> anyhow::Result<bool> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let objects = objects(args, given, &mut client).await?;
    if objects.is_empty() {
        eprintln!("No objects found.");
    }
    let graces = graces(args, &mut client).await;
    let (mut going, mut all) = (BTreeMap::new(), true);
    for object in objects {
        match delete_one(args, &object, &mut client).await {
            Ok(one) => going.extend(one.map(|one| (one.target.name.clone(), one))),
            Err(error) => {
                all = false;
                eprintln!("error: {}", plain::line(&error.to_string()));
            }
        }
    }
    if going.is_empty() {
        return Ok(all);
    }
    let longest = going.keys().filter_map(|name| graces.get(name)).max().copied().unwrap_or_default();
    let timeout = args.timeout.unwrap_or(longest.saturating_add(PATIENCE));
    let targets: Vec<Target> = going.values().map(|one| one.target.clone()).collect();
    let met = |name: &PodName| {
        if let Some(one) = going.get(name) {
            println!("{}", one.sentence);
        }
    };
    let waited = until::wait(&mut client, &targets, &Wanted::Deleted, Some(timeout), met).await?;
    if waited.missed.is_empty() {
        return Ok(all);
    }
    for reason in waited.reasons(&mut client).await? {
        eprintln!("error: not deleted within {} s: {}", timeout.as_secs(), plain::line(&reason.text));
    }
    bail!(
        "the agent keeps stopping the remaining pods: use `beelet events` to follow, `beelet wait POD --for=deleted` to wait, \
         or `--force` to hide a pod"
    )
}

/// Returns the pods' grace periods; empty if the agent does not know its pods yet.
async fn graces(args: &DeleteArgs, client: &mut Client) -> BTreeMap<PodName, Duration> {
    let Ok((table, _)) = client.pods.list().await else { return BTreeMap::new() };
    let given = args.grace_period.map(Duration::from_secs);
    let grace = |entry: &PodEntry| given.unwrap_or_else(|| beelet_model::pod::grace_period(&entry.pod));
    table.pods.iter().map(|(name, entry)| (name.clone(), grace(entry))).collect()
}

/// A pod whose manifest was removed, and the line to print once the pod has terminated.
struct Going {
    target: Target,
    sentence: String,
}

/// Removes the manifest of one object. Returns the pod to wait for, if any.
async fn delete_one(
    args: &DeleteArgs,
    object: &Object,
    client: &mut Client,
) -> anyhow::Result<Option<Going>> {
    let request = proto::DeleteRequest {
        kind: object.kind.clone(),
        namespace: object.namespace.clone(),
        name: object.name.clone(),
        keep_manifest: args.keep_manifest,
        grace_seconds: if args.force { Some(0) } else { args.grace_period },
        force: args.force,
    };
    let deleted = client.manifests.delete(request).await?;
    let kind = object.kind.to_lowercase();
    let file = match (deleted.kept.as_str(), deleted.file.as_str()) {
        ("", "") => "manifest already removed".to_owned(),
        ("", file) => format!("{file} removed"),
        (kept, _) => format!("manifest renamed to {kept}"),
    };
    let is_pod = !deleted.uid.is_empty();
    let how = match (args.force && is_pod, args.no_wait && is_pod) {
        (true, _) => "force deleted; its containers may run until the agent has stopped them",
        (_, true) => "is terminating",
        (false, false) => "deleted",
    };
    let sentence = plain::line(&format!("{kind}/{} {how} ({file})", deleted.name)).into_owned();
    let is_waited_for = is_pod && !args.no_wait && !args.force;
    if !is_waited_for {
        println!("{sentence}");
    }
    if !deleted.used_by.is_empty() {
        let pods = deleted.used_by.join(", ");
        eprintln!(
            "warning: {}",
            plain::line(&format!("{kind}/{} is in use: {pods} cannot be started without it", deleted.name))
        );
    }
    let name = PodName { namespace: object.namespace.clone(), name: deleted.name };
    Ok(is_waited_for.then_some(Going { target: Target { name, uid: deleted.uid }, sentence }))
}

/// Returns the objects to delete.
async fn objects(
    args: &DeleteArgs,
    given: Vec<Manifest>,
    client: &mut Client,
) -> anyhow::Result<Vec<Object>> {
    let Some(kind) = args.kind else {
        let object =
            |one: Manifest| Object { kind: one.kind.to_owned(), namespace: one.namespace, name: one.object };
        return Ok(given.into_iter().map(object).collect());
    };
    let kind = kind.text().to_owned();
    if !args.names.is_empty() {
        let object = |name: &String| Object {
            kind: kind.clone(),
            namespace: args.namespace.clone(),
            name: name.clone(),
        };
        return Ok(args.names.iter().map(object).collect());
    }
    // Classes have no namespace.
    let namespace = if kind.ends_with("Class") { String::new() } else { args.namespace.clone() };
    let request = proto::ListRequest { kind, namespace, selector: args.selector.clone().unwrap_or_default() };
    let listed = client.manifests.list(request).await?.into_iter();
    Ok(listed.map(|one| Object { kind: one.kind, namespace: one.namespace, name: one.name }).collect())
}
