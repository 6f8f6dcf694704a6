//! `beelet apply -f`: manifests into the agent's folder, checked first.

use std::process::ExitCode;
use std::time::Duration;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::applied::Result as Applied;
use clap::Args;

use super::args::AgentArgs;
use super::files::{self, FilesArgs, Manifest};
use super::until::{self, Target, Wanted};
use super::{USAGE, code, finish, plain};
use beelet_client::{Client, ClientError};
use beelet_model::table::PodName;

/// Arguments of `beelet apply`.
///
/// All manifests are checked before the first one is written, and everything that is wrong in any of them is
/// told. Each is written as it is, with its comments, in the place of the one that described the same object.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ApplyArgs {
    #[command(flatten)]
    files: FilesArgs,
    /// Only say what would be done. Without an agent they are only checked.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    prune: PruneArgs,
    /// Come back only when the pods are so: ready, running, succeeded, ended or condition=NAME[=VALUE].
    #[arg(
        long,
        value_name = "STATE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "ready",
        conflicts_with = "dry_run"
    )]
    wait: Option<Wanted>,
    /// With --wait: at most so long (`90s`, `5m`).
    #[arg(long, value_name = "TIME", value_parser = until::duration, requires = "wait", default_value = "5m")]
    timeout: Duration,
    #[command(flatten)]
    agent: AgentArgs,
}

/// How long it is watched what becomes of the pods where nobody asked to wait.
const GLANCE: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "Examples:
  beelet apply -f web.yaml
  beelet apply -f web.yaml --wait --timeout=2m
  beelet apply --dry-run -f shop/          # every error of every file, and what would change
  beelet apply -f shop/ --prune -l app=shop
  generate | beelet apply -f -";

/// What else goes.
#[derive(Debug, Args)]
struct PruneArgs {
    /// Also take out the manifests that are not among these and that -l or --all names.
    #[arg(long, requires = "pruned")]
    prune: bool,
    /// With --prune: manifests with such labels (`app=shop,tier!=db`).
    #[arg(short = 'l', long, value_name = "SELECTOR", requires = "prune", group = "pruned")]
    selector: Option<String>,
    /// With --prune: all that the folder holds.
    #[arg(long, requires = "prune", group = "pruned")]
    all: bool,
}

/// Applies them, all or none if any is wrong.
#[must_use]
pub fn run(args: &ApplyArgs) -> ExitCode {
    let manifests = match files::read_all(&args.files.files) {
        Ok(manifests) => manifests,
        Err(errors) => {
            files::show_errors(&errors);
            return ExitCode::from(USAGE);
        }
    };
    for manifest in &manifests {
        let warnings = manifest.warnings.iter();
        warnings
            .for_each(|text| eprintln!("warning: {}", plain::line(&format!("{}: {text}", manifest.name))));
    }
    finish(async { Ok(code(apply(args, &manifests).await?)) })
}

/// Returns true if the node takes all of them.
async fn apply(args: &ApplyArgs, manifests: &[Manifest]) -> anyhow::Result<bool> {
    let mut client = match Client::connect(&args.agent.socket).await {
        Err(error @ ClientError::NotRunning { .. }) if args.dry_run => {
            manifests
                .iter()
                .for_each(|manifest| println!("{}: {} is valid", manifest.name, manifest.title()));
            eprintln!("what would change is not known: {error}");
            return Ok(true);
        }
        client => client?,
    };
    let selector = args.prune.selector.clone().unwrap_or_default();
    let request = proto::ApplyRequest {
        manifests: files::to_send(manifests),
        dry_run: args.dry_run,
        prune: args.prune.prune.then_some(proto::Prune { selector }),
    };
    let answer = client.apply(request).await?;
    let mut taken = true;
    for (manifest, applied) in manifests.iter().zip(&answer.applied) {
        let refused = if applied.refused.is_empty() { "" } else { ", but refused" };
        println!("{}{refused}", sentence(applied, args.dry_run));
        for reason in &applied.refused {
            taken = false;
            eprintln!("error: {}", plain::line(&format!("{}: the node refuses it: {reason}", manifest.name)));
        }
    }
    answer.pruned.iter().for_each(|pruned| println!("{}", sentence(pruned, args.dry_run)));
    if args.dry_run {
        return Ok(taken);
    }
    Ok(follow(args, &mut client, &answer.applied).await? && taken)
}

/// Says what becomes of the pods: at a glance, or for as long as is wanted. Returns true if they are as they
/// are wanted.
async fn follow(args: &ApplyArgs, client: &mut Client, applied: &[proto::Applied]) -> anyhow::Result<bool> {
    let is_followed = |one: &&proto::Applied| {
        let changed = one.result() != Applied::Unchanged || args.wait.is_some();
        changed && !one.pod.is_empty() && one.refused.is_empty()
    };
    let target = |one: &proto::Applied| {
        let name = PodName { namespace: one.namespace.clone(), name: one.pod.clone() };
        Target { name, uid: one.uid.clone() }
    };
    let targets: Vec<Target> = applied.iter().filter(is_followed).map(target).collect();
    if targets.is_empty() {
        return Ok(true);
    }
    let (wanted, time) = match &args.wait {
        Some(wanted) => (wanted.clone(), args.timeout),
        None => (Wanted::Ready, GLANCE),
    };
    let met = |name: &PodName| {
        if args.wait.is_some() {
            println!("pod {name} is {wanted}");
        }
    };
    let waited = until::wait(client, &targets, &wanted, Some(time), met).await?;
    for reason in waited.reasons(client).await? {
        let how = match &args.wait {
            None if waited.is_settled => String::new(),
            None => format!("not ready after {} s: ", GLANCE.as_secs()),
            Some(_) if waited.is_settled => format!("will not be {wanted}: "),
            Some(_) => format!("not {wanted} within {} s: ", time.as_secs()),
        };
        eprintln!("{how}{}", plain::line(&reason));
    }
    Ok(args.wait.is_none() || waited.missed.is_empty())
}

/// `pod/web created`.
fn sentence(applied: &proto::Applied, dry_run: bool) -> String {
    let result = match applied.result() {
        Applied::Created => "created",
        Applied::Configured => "configured",
        Applied::Pruned => "pruned",
        Applied::Unchanged | Applied::Unspecified => "unchanged",
    };
    let only = if dry_run { " (dry run)" } else { "" };
    plain::line(&format!("{}/{} {result}{only}", applied.kind.to_lowercase(), applied.name)).into_owned()
}
