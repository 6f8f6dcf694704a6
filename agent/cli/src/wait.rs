//! `beelet wait`: waits until pods reach a state.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::args::{AgentArgs, pod_name};
use super::until::{self, Target, Wanted};
use super::{code, complete, finish, plain};
use beelet_client::Client;
use beelet_units::selector::Selector;

/// Arguments of `beelet wait`.
///
/// Exit codes: 0 if every pod reached the state, 1 on timeout or if one can no longer reach it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  beelet wait web --for=ready --timeout=2m
  beelet wait job --for=succeeded
  beelet wait -l app=shop --for=condition=Ready
  beelet wait web --for=deleted")]
pub struct WaitArgs {
    /// Names of the pods; a name may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods(), required_unless_present_any = ["selector", "all"])]
    pods: Vec<String>,
    /// Label selector, e.g. `app=shop,tier!=db`.
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "pods")]
    selector: Option<Selector>,
    /// Wait for all pods.
    #[arg(long, conflicts_with_all = ["pods", "selector"])]
    all: bool,
    /// Namespace of the pods.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    /// State to wait for: ready, running, succeeded, ended, deleted or condition=NAME[=VALUE].
    #[arg(long = "for", value_name = "STATE", default_value = "ready")]
    wanted: Wanted,
    /// Maximum time to wait, e.g. `90s` or `5m`.
    #[arg(long, value_name = "TIME", value_parser = until::duration, default_value = "30s")]
    timeout: Duration,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Runs the wait.
#[must_use]
pub fn run(args: &WaitArgs) -> ExitCode {
    finish(async { Ok(code(wait(args).await?)) })
}

/// Returns true if every pod reached the state.
async fn wait(args: &WaitArgs) -> anyhow::Result<bool> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let targets = targets(args, &mut client).await?;
    if targets.is_empty() {
        eprintln!("No pods found.");
        return Ok(true);
    }
    let met = |name: &_| println!("pod {name} is {}", args.wanted);
    let waited = until::wait(&mut client, &targets, &args.wanted, Some(args.timeout), met).await?;
    for reason in waited.reasons(&mut client).await? {
        let how = if waited.is_settled {
            format!("will not be {}", args.wanted)
        } else {
            format!("not {} within {} s", args.wanted, args.timeout.as_secs())
        };
        eprintln!("error: {how}: {}", plain::line(&reason.text));
    }
    Ok(waited.missed.is_empty())
}

async fn targets(args: &WaitArgs, client: &mut Client) -> anyhow::Result<Vec<Target>> {
    let (table, _) = client.pods.list().await?;
    let namespace = args.namespace.as_deref().unwrap_or_default();
    let target = |name: &beelet_model::table::PodName, entry: &beelet_model::table::PodEntry| {
        // A deletion concerns this very pod; the other states concern any pod of the name.
        let uid = entry.pod.metadata.uid.clone().filter(|_| args.wanted == Wanted::Deleted);
        Target { name: name.clone(), uid: uid.unwrap_or_default() }
    };
    let mut targets = Vec::new();
    for pod in &args.pods {
        match table.find(namespace, pod) {
            Ok((name, entry)) => targets.push(target(name, entry)),
            Err(_) if args.wanted == Wanted::Deleted => println!("pod {pod} is deleted"),
            Err(sentence) => return Err(anyhow::Error::msg(sentence)),
        }
    }
    if args.pods.is_empty() {
        let selector = args.selector.clone().unwrap_or_default();
        targets.extend(table.chosen(namespace, &selector).map(|(name, entry)| target(name, entry)));
    }
    Ok(targets)
}
