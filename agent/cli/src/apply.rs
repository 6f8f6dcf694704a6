//! `beelet apply -f`: validates manifests and writes them to the agent's manifest directory.

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
/// Validates all manifests before writing the first one and reports every error of every manifest. Each
/// manifest is written unchanged, including its comments, in place of the manifest that described the same
/// object.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ApplyArgs {
    #[command(flatten)]
    files: FilesArgs,
    /// Print the changes without making them. If no agent runs, only validate the manifests.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    prune: PruneArgs,
    /// Wait until the pods reach this state: ready, running, succeeded, ended or condition=NAME[=VALUE].
    #[arg(
        long,
        value_name = "STATE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "ready",
        conflicts_with = "dry_run"
    )]
    wait: Option<Wanted>,
    /// Maximum time for --wait, e.g. `90s` or `5m`.
    #[arg(long, value_name = "TIME", value_parser = until::duration, requires = "wait", default_value = "5m")]
    timeout: Duration,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Time to watch the pods when --wait is not given.
const GLANCE: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "Examples:
  beelet apply -f web.yaml
  beelet apply -f web.yaml --wait --timeout=2m
  beelet apply --dry-run -f shop/          # every error of every file, and what would change
  beelet apply -f shop/ --prune -l app=shop
  generate | beelet apply -f -";

/// Arguments of the removal of other manifests.
#[derive(Debug, Args)]
struct PruneArgs {
    /// Also remove manifests that -l or --all selects and that are not among the given ones.
    #[arg(long, requires = "pruned")]
    prune: bool,
    /// Label selector of the manifests to prune, e.g. `app=shop,tier!=db`.
    #[arg(short = 'l', long, value_name = "SELECTOR", requires = "prune", group = "pruned")]
    selector: Option<String>,
    /// Prune all other manifests in the directory.
    #[arg(long, requires = "prune", group = "pruned")]
    all: bool,
}

/// Applies the manifests: all of them, or none if any is invalid.
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

/// Returns true if the node admits every pod.
async fn apply(args: &ApplyArgs, manifests: &[Manifest]) -> anyhow::Result<bool> {
    let mut client = match Client::connect(&args.agent.socket).await {
        Err(error @ ClientError::NotRunning { .. }) if args.dry_run => {
            manifests
                .iter()
                .for_each(|manifest| println!("{}: {} is valid", manifest.name, manifest.title()));
            eprintln!("cannot determine the changes: {error}");
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
    let answer = client.manifests.apply(request).await?;
    let mut taken = true;
    for (manifest, applied) in manifests.iter().zip(&answer.applied) {
        let refused = if applied.refused.is_empty() { "" } else { ", but rejected" };
        println!("{}{refused}", sentence(applied, args.dry_run));
        for reason in &applied.refused {
            taken = false;
            eprintln!(
                "error: {}",
                plain::line(&format!("{}: rejected by the node: {reason}", manifest.name))
            );
        }
    }
    answer.pruned.iter().for_each(|pruned| println!("{}", sentence(pruned, args.dry_run)));
    if args.dry_run {
        return Ok(taken);
    }
    Ok(follow(args, &mut client, &answer.applied).await? && taken)
}

/// Follows the pods, for `--timeout` with `--wait` and briefly otherwise, and prints the result. Returns true
/// if the pods reached the state that `--wait` names, or if `--wait` is missing.
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
    let reasons = waited.reasons(client).await?;
    let is_calm = |reason: &&until::Reason| args.wait.is_none() && !waited.is_settled && !reason.has_cause;
    for reason in reasons.iter().filter(|reason| !is_calm(reason)) {
        let how = match &args.wait {
            None if waited.is_settled => String::new(),
            None => format!("not ready after {} s: ", GLANCE.as_secs()),
            Some(_) if waited.is_settled => format!("will not be {wanted}: "),
            Some(_) => format!("not {wanted} within {} s: ", time.as_secs()),
        };
        eprintln!("{how}{}", plain::line(&reason.text));
    }
    match reasons.iter().filter(is_calm).count() {
        0 => {}
        1 => eprintln!("1 pod is starting; --wait waits until it is ready"),
        count => eprintln!("{count} pods are starting; --wait waits until they are ready"),
    }
    Ok(args.wait.is_none() || waited.missed.is_empty())
}

/// Returns a line such as `pod/web created`.
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
