//! `beelet restart`: containers started again at once, without their back-off.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use beelet_model::status::runtime_id;
use beelet_model::table::{PodEntry, PodTable};
use beelet_proto::beelet as proto;
use clap::Args;

use super::args::AgentArgs;
use super::{block_on, failed, plain, until};
use beelet_client::{Client, Event};

/// Arguments of `beelet restart`.
///
/// Containers that run are stopped as at a failed probe, within the pod's grace period, and started again at
/// once; those that wait for their back-off, or for an image, are started now. The pod keeps its identity,
/// its address and its volumes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet restart web\n  beelet restart web -c main --no-wait")]
pub struct RestartArgs {
    /// The pod, with or without the node's name at its end.
    #[arg(value_name = "POD")]
    pod: String,
    /// The container; else all that are started again when they end.
    #[arg(short, long, value_name = "CONTAINER")]
    container: Option<String>,
    /// The pod's namespace; needed only where two pods have the name.
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Come back at once, not when they run again.
    #[arg(long)]
    no_wait: bool,
    /// Wait at most so long (`90s`, `5m`).
    #[arg(long, value_name = "TIME", value_parser = until::duration, default_value = "2m")]
    timeout: Duration,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Restarts them.
#[must_use]
pub fn run(args: &RestartArgs) -> ExitCode {
    match block_on(restart(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

async fn restart(args: &RestartArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let target = proto::ContainerTarget {
        namespace: args.namespace.clone().unwrap_or_default(),
        pod: args.pod.clone(),
        container: args.container.clone().unwrap_or_default(),
    };
    let asked = client.restart(target).await?;
    if args.no_wait {
        asked
            .containers
            .iter()
            .for_each(|one| println!("container {} of pod {} is being restarted", one.name, asked.pod));
        return Ok(());
    }
    match tokio::time::timeout(args.timeout, running_again(&mut client, &asked)).await {
        Ok(done) => done,
        Err(_) => bail!(
            "not all containers of pod {} run again within {} s: see `beelet describe pod {}`",
            asked.pod,
            args.timeout.as_secs(),
            args.pod
        ),
    }
}

/// Waits until the containers have been started since.
async fn running_again(client: &mut Client, asked: &proto::RestartResponse) -> anyhow::Result<()> {
    let mut waiting: BTreeMap<&str, &str> =
        asked.containers.iter().map(|one| (one.name.as_str(), one.id.as_str())).collect();
    let mut watch = client.watch().await?;
    let (mut table, mut is_synced) = (PodTable::default(), false);
    while let Some(event) = watch.next().await? {
        is_synced |= event == Event::Synced;
        event.apply(&mut table);
        let entry = table.pods.values().find(|entry| entry.pod.metadata.uid.as_ref() == Some(&asked.uid));
        let Some(entry) = entry else {
            if is_synced {
                bail!("the pod {} is gone", asked.pod);
            }
            continue;
        };
        waiting.retain(|name, before| {
            let runs = runs_since(entry, name, before);
            if runs {
                println!("{}", plain::line(&format!("container {name} of pod {} runs again", asked.pod)));
            }
            !runs
        });
        if waiting.is_empty() {
            return Ok(());
        }
    }
    bail!("the agent stopped")
}

/// Returns true if another instance of a container runs than the one before.
fn runs_since(entry: &PodEntry, name: &str, before: &str) -> bool {
    let status = entry.pod.status.as_ref();
    let main = status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten();
    let init = status.and_then(|status| status.init_container_statuses.as_ref()).into_iter().flatten();
    main.chain(init).filter(|status| status.name == name).any(|status| {
        let runs = status.state.as_ref().is_some_and(|state| state.running.is_some());
        runs && runtime_id(status).is_some_and(|id| id != before)
    })
}
