//! `beelet delete`: manifests out of the agent's folder, and for pods the wait until they are gone.

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
use beelet_model::table::PodName;

/// Arguments of `beelet delete`.
///
/// What runs here is what the folder of manifests says, so deleting an object is removing its manifest. Keep
/// a copy, or say --keep-manifest: the file gets .bak at its end then, and renaming it back brings the object
/// back.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  beelet delete pod web
  beelet delete -f shop/
  beelet delete pods -l app=shop --keep-manifest")]
pub struct DeleteArgs {
    /// What kind of object.
    #[arg(value_enum, value_name = "KIND", required_unless_present = "files")]
    kind: Option<Kind>,
    /// Their names; a pod's with or without the node's name at its end.
    #[arg(value_name = "NAME", value_parser = pod_name, add = complete::pods(), required_unless_present_any = ["files", "selector", "all"])]
    names: Vec<String>,
    /// What these manifests describe: files, folders or - for standard input.
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with_all = ["kind", "names", "selector", "all"])]
    files: Vec<PathBuf>,
    /// Those with such labels (`app=shop,tier!=db`).
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "names")]
    selector: Option<String>,
    /// All of the kind in the namespace.
    #[arg(long, conflicts_with_all = ["names", "selector"])]
    all: bool,
    /// Their namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces(), default_value = "default")]
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
    /// Wait at most so long (`90s`, `5m`).
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

/// Returns true if all of them are deleted.
async fn delete(args: &DeleteArgs, given: Vec<Manifest>) -> anyhow::Result<bool> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let objects = objects(args, given, &mut client).await?;
    if objects.is_empty() {
        eprintln!("No objects found.");
    }
    let (mut targets, mut all) = (Vec::new(), true);
    for object in objects {
        match delete_one(args, &object, &mut client).await {
            Ok(target) => targets.extend(target),
            Err(error) => {
                all = false;
                eprintln!("error: {}", plain::line(&error.to_string()));
            }
        }
    }
    if args.no_wait || targets.is_empty() {
        return Ok(all);
    }
    let waited = until::wait(&mut client, &targets, &Wanted::Deleted, args.timeout, |_| {}).await?;
    if waited.missed.is_empty() {
        return Ok(all);
    }
    let names: Vec<String> = waited.missed.iter().map(|target| target.name.to_string()).collect();
    let seconds = args.timeout.unwrap_or_default().as_secs();
    bail!("not gone within {seconds} s, and still being stopped: {}", names.join(", "))
}

/// Takes one object's manifest out; the pod that goes with it, if it is a pod's.
async fn delete_one(
    args: &DeleteArgs,
    object: &Object,
    client: &mut Client,
) -> anyhow::Result<Option<Target>> {
    let request = proto::DeleteRequest {
        kind: object.kind.clone(),
        namespace: object.namespace.clone(),
        name: object.name.clone(),
        keep_manifest: args.keep_manifest,
        grace_seconds: args.grace_period,
    };
    let deleted = client.delete(request).await?;
    let kind = object.kind.to_lowercase();
    match deleted.kept.as_str() {
        "" => println!("{kind}/{} deleted ({} removed)", deleted.name, deleted.file),
        kept => println!("{kind}/{} deleted (its manifest is {kept} now)", deleted.name),
    }
    if !deleted.used_by.is_empty() {
        let pods = deleted.used_by.join(", ");
        eprintln!(
            "warning: {}",
            plain::line(&format!("{kind}/{} is in use: {pods} cannot be started without it", deleted.name))
        );
    }
    let name = PodName { namespace: object.namespace.clone(), name: deleted.name };
    Ok((!deleted.uid.is_empty()).then_some(Target { name, uid: deleted.uid }))
}

/// What is to be deleted.
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
    let listed = client.list(request).await?.into_iter();
    Ok(listed.map(|one| Object { kind: one.kind, namespace: one.namespace, name: one.name }).collect())
}
