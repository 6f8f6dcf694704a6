//! `beelet restart`: restarts containers immediately, without their back-off.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use beelet_model::status::runtime_id;
use beelet_model::table::{PodEntry, PodTable};
use beelet_policy::pod::why::end_of;
use beelet_proto::beelet as proto;
use clap::Args;
use k8s_openapi::api::core::v1::ContainerStatus;

use super::args::{AgentArgs, ContainerArgs};
use super::{finish, plain, until};
use beelet_client::{Client, Event};

/// Arguments of `beelet restart`.
///
/// Stops running containers as after a failed probe, within the pod's grace period, and starts them again at
/// once. Containers that wait for their back-off or for an image start now. The pod keeps its identity, its
/// address and its volumes.
#[derive(Debug, Args)]
#[command(mut_arg("container", |arg| arg.help("Name of the container. Default: all containers that restart after they terminate")))]
#[command(after_help = "Examples:\n  beelet restart web\n  beelet restart web -c main --no-wait")]
pub struct RestartArgs {
    #[command(flatten)]
    of: ContainerArgs,
    /// Return immediately instead of waiting until the containers run again.
    #[arg(long)]
    no_wait: bool,
    /// Maximum time to wait, e.g. `90s` or `5m`.
    #[arg(long, value_name = "TIME", value_parser = until::duration, default_value = "2m")]
    timeout: Duration,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Restarts the containers.
#[must_use]
pub fn run(args: &RestartArgs) -> ExitCode {
    finish(restart(args))
}

async fn restart(args: &RestartArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let asked = client.containers.restart(args.of.target()).await?;
    if args.no_wait {
        asked
            .containers
            .iter()
            .for_each(|one| println!("container {} of pod {} is restarting", one.name, asked.pod));
        return Ok(());
    }
    match tokio::time::timeout(args.timeout, running_again(&mut client, &asked, &args.of.pod)).await {
        Ok(done) => done,
        Err(_) => bail!(
            "some containers of pod {} are not running after {} s: see `beelet describe pod {}`",
            asked.pod,
            args.timeout.as_secs(),
            args.of.pod
        ),
    }
}

/// Waits until new instances of the containers run.
async fn running_again(client: &mut Client, asked: &proto::RestartResponse, pod: &str) -> anyhow::Result<()> {
    let mut waiting: BTreeMap<&str, &str> =
        asked.containers.iter().map(|one| (one.name.as_str(), one.id.as_str())).collect();
    let mut watch = client.pods.watch().await?;
    let (mut table, mut is_synced, mut told) = (PodTable::default(), false, BTreeMap::new());
    while let Some(event) = watch.next().await? {
        is_synced |= event == Event::Synced;
        event.apply(&mut table);
        let entry = table.pods.values().find(|entry| entry.pod.metadata.uid.as_ref() == Some(&asked.uid));
        let Some(entry) = entry else {
            if is_synced {
                bail!("pod {} no longer exists", asked.pod);
            }
            continue;
        };
        waiting.retain(|name, before| {
            let runs = runs_since(entry, name, before);
            if runs {
                println!("{}", plain::line(&format!("container {name} of pod {} restarted", asked.pod)));
            }
            !runs
        });
        if waiting.is_empty() {
            return Ok(());
        }
        for (name, before) in &waiting {
            let Some(status) = status_of(entry, name) else { continue };
            if let Some(end) = ended_since(status, before) {
                let end =
                    plain::line(&format!("container {name} restarted and terminated: {end}")).into_owned();
                bail!("{end}; see `beelet describe pod {pod}`");
            }
            let Some(why) = waits_for(status).filter(|why| told.get(name) != Some(why)) else { continue };
            eprintln!("{}", plain::line(&format!("container {name} is waiting: {why}")));
            told.insert(*name, why);
        }
    }
    bail!("the agent stopped while containers were restarting")
}

fn status_of<'e>(entry: &'e PodEntry, name: &str) -> Option<&'e ContainerStatus> {
    let status = entry.pod.status.as_ref()?;
    let all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    all.into_iter().find(|status| status.name == name)
}

/// Returns the end of the new instance, if it has terminated.
fn ended_since(status: &ContainerStatus, before: &str) -> Option<String> {
    runtime_id(status).filter(|id| *id != before)?;
    let [now, last] = [&status.state, &status.last_state].map(|state| state.as_ref()?.terminated.as_ref());
    let is_waiting = status.state.as_ref().is_some_and(|state| state.waiting.is_some());
    Some(end_of(now.or_else(|| last.filter(|_| is_waiting))?, None))
}

/// Returns the reason why a container does not start, if its status has a message.
fn waits_for(status: &ContainerStatus) -> Option<String> {
    let waiting = status.state.as_ref()?.waiting.as_ref()?;
    let message = waiting.message.as_deref().filter(|message| !message.is_empty())?;
    Some(format!("{}: {message}", waiting.reason.as_deref().unwrap_or_default()))
}

/// Returns true if a new instance of the container runs.
fn runs_since(entry: &PodEntry, name: &str, before: &str) -> bool {
    status_of(entry, name).is_some_and(|status| {
        let runs = status.state.as_ref().is_some_and(|state| state.running.is_some());
        runs && runtime_id(status).is_some_and(|id| id != before)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn status(id: &str, state: &Value, last: &Value) -> ContainerStatus {
        let status = json!({"name": "c", "ready": false, "restartCount": 1, "image": "", "imageID": "",
            "containerID": id, "state": state, "lastState": last});
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn one_that_ends_at_once_is_told_with_its_end() {
        let crash = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}});
        let end =
            json!({"terminated": {"exitCode": 128, "reason": "StartError", "message": "a\nno such file\n"}});
        let (running, none) = (json!({"running": {}}), json!({}));
        let check = |id: &str, state: &Value, last: &Value, expected: Option<&str>| {
            assert_eq!(ended_since(&status(id, state, last), "1").as_deref(), expected, "{id} {state}");
        };
        let told = Some("StartError, exit 128: no such file");
        check("x://2", &crash, &end, told);
        check("x://2", &end, &none, told);
        // This end belongs to the previous instance.
        check("x://1", &crash, &end, None);
        check("x://2", &running, &end, None);
        check("x://2", &json!({"terminated": {"exitCode": 3}}), &none, Some("exit 3"));
    }

    #[test]
    fn what_a_container_waits_for_is_told_but_not_its_turn() {
        let check = |state: &Value, expected: Option<&str>| {
            assert_eq!(waits_for(&status("x://1", state, &json!({}))).as_deref(), expected, "{state}");
        };
        let absent = json!({"waiting": {"reason": "ErrImageNeverPull", "message": "x is missing"}});
        check(&absent, Some("ErrImageNeverPull: x is missing"));
        check(&json!({"waiting": {"reason": "ContainerCreating"}}), None);
        check(&json!({"running": {}}), None);
    }
}
