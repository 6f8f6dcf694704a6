//! `beelet handover`: changes the agent of a node under running pods, in either direction. The command checks
//! first, stops one agent and starts the other, watches until every pod is accounted for, and puts the old
//! agent back if something fails. `beelet_policy::handover` decides.

mod args;
mod survey;
mod turn;

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, bail};
use beelet_base::program::{Bounds, Complaints, Program};
use beelet_cli::{USAGE, failed};
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_policy::handover::{Next, Outcome, Reason, Sources, forgets_readiness};

pub(crate) use self::args::HandoverArgs;
use self::{
    args::{Agent, of_kubelet},
    survey::Survey,
    turn::Turn,
};
use crate::run::print_faults;

/// Longest wait for the version of the kubelet.
const VERSION: Bounds =
    Bounds { within: Duration::from_secs(10), output: 1024, complaints: Complaints::Unheard };

/// Runs the command.
#[must_use]
pub(crate) fn run(args: &HandoverArgs) -> ExitCode {
    let mut config = match Config::load(&args.config) {
        Ok((config, _)) => config,
        Err(faults) => {
            print_faults(&faults, false);
            return ExitCode::from(USAGE);
        }
    };
    config.server.cert_dir.get_or_insert_with(|| args.root_dir.join("pki"));
    match crate::threads::run(1, perform(args, &config)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => failed(&error),
    }
}

/// Checks, and acts if requested. Returns false if the check finds a pod that the hand-over changes.
async fn perform(args: &HandoverArgs, config: &Config) -> Result<bool> {
    let runtime = Runtime::new(&config.runtime_endpoint, config.runtime_request_timeout)?;
    let next = match (args.from_kubelet, args.to_kubelet) {
        (true, _) => Agent::Beelet,
        (_, true) => Agent::Kubelet,
        _ => of_kubelet(&runtime)?.map_or(Agent::Kubelet, |_| Agent::Beelet),
    };
    let survey = Survey::read(args, config, &runtime, next).await?;
    let properties = next_of(args, config, next).await?;
    let outcomes = survey.outcomes(properties);
    let clean = report(&outcomes, next);
    if forgets_readiness(properties) {
        println!(
            "kubelets before 1.35 report each container with a readiness probe as not ready until its first probe succeeds"
        );
    }
    if let Some(why) = refusal(config, next) {
        bail!("{why}");
    }
    if args.check {
        return Ok(clean);
    }
    if !clean && !args.force {
        bail!("refusing the hand-over: see the pods above; --force hands them over all the same");
    }
    let found = survey.kept(&outcomes);
    let pods = survey.definitions(&found);
    let interrupted = turn::on_signals()?;
    Turn { args, config, runtime: &runtime, found, pods, interrupted }.perform(next).await?;
    Ok(true)
}

/// Returns the reason why no hand-over is possible with this configuration of beelet, if any.
fn refusal(config: &Config, next: Agent) -> Option<&'static str> {
    if config.beelet.stop_pods_on_exit {
        return Some(
            "the configuration of beelet has `stopPodsOnExit: true`: beelet stops all pods at its end; remove the field, \
             and restart beelet if it runs",
        );
    }
    (next == Agent::Beelet && !config.beelet.adopt_kubelet_pods).then_some(
        "the configuration of beelet lacks `adoptKubeletPods: true`: beelet would take over no pod of the kubelet; add \
         the field",
    )
}

/// Returns the next agent's properties for the check.
async fn next_of(args: &HandoverArgs, config: &Config, next: Agent) -> Result<Next> {
    if next == Agent::Beelet {
        let (api, manifests) = (args.kubeconfig.is_some(), config.static_pod_path.is_some());
        return Ok(Next::Beelet(Sources { api, manifests }));
    }
    let said = match &args.kubelet_version {
        Some(said) => said.clone(),
        None => {
            let asked = Program::tool("kubelet").flag("--version").run(VERSION).await;
            let ended = asked.context("cannot ask the kubelet for its version; give --kubelet-version")?;
            String::from_utf8_lossy(&ended.output).into_owned()
        }
    };
    let minor = minor_of(&said).with_context(|| {
        format!("the kubelet's version is {said:?}, which names no release of Kubernetes; give --kubelet-version 1.N")
    })?;
    Ok(Next::Kubelet { minor })
}

/// Returns the minor version in `1.36`, `v1.36.2` or `Kubernetes v1.36.2`.
fn minor_of(said: &str) -> Option<u32> {
    let version = said.trim().rsplit(' ').next()?.trim_start_matches('v');
    let (major, rest) = version.split_once('.')?;
    let minor = rest.split(['.', '+', '-']).next()?.parse().ok()?;
    (major == "1").then_some(minor)
}

/// Prints the outcome of each pod. Returns true if the hand-over changes nothing for any pod.
fn report(outcomes: &[(String, Outcome)], next: Agent) -> bool {
    let [mut kept, mut leaving, mut unwanted, mut others] = [0_usize; 4];
    let stops = match next {
        Agent::Beelet => "beelet would stop it",
        Agent::Kubelet => "a kubelet with the same sources would stop it",
    };
    for (pod, outcome) in outcomes {
        match outcome {
            Outcome::Kept => {
                kept = kept.saturating_add(1);
                println!("{pod}: is taken over");
            }
            Outcome::Leaving => {
                leaving = leaving.saturating_add(1);
                println!("{pod}: is being deleted");
            }
            Outcome::Unwanted => {
                unwanted = unwanted.saturating_add(1);
                println!("{pod}: would be stopped: no source of beelet names the pod: {stops}");
            }
            Outcome::LeftAlone(why) => {
                others = others.saturating_add(1);
                println!("{pod}: would be left alone: {why}");
            }
            Outcome::Restarts(reasons) => {
                others = others.saturating_add(1);
                println!("{pod}: would restart: {}", joined(reasons));
            }
            Outcome::LosesVolumes(reasons) => {
                others = others.saturating_add(1);
                println!("{pod}: would lose volumes: {}", joined(reasons));
            }
        }
    }
    println!(
        "{} pods: {} would take over {kept}; {others} would restart, lose volumes or be left alone; {unwanted} would \
         be stopped; {leaving} are being deleted",
        outcomes.len(),
        next.name(),
    );
    outcomes.iter().all(|(_, outcome)| outcome.is_harmless())
}

fn joined(reasons: &[Reason]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_kubernetes_are_read_in_all_their_forms() {
        let check = |said: &str, expected| assert_eq!(minor_of(said), expected, "{said}");
        check("1.36", Some(36));
        check("Kubernetes v1.20.2\n", Some(20));
        check("v1.37.0-alpha.1", Some(37));
        check("1.33+", Some(33));
        check("2.1", None);
        check("kubelet", None);
        check("", None);
    }
}
