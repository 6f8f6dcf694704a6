//! The change of agents itself: stop one, start the other, watch, and put the old one back after a failure.
//!
//! The command may be killed at any point. The command keeps no state: the next call with the same direction
//! continues, and the opposite direction goes back.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use beelet_base::program::{Bounds, Complaints, Program};
use beelet_client::Client;
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_handover::found;
use beelet_policy::handover::{Found, loss};
use k8s_openapi::api::core::v1::Pod;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::{
    args::{Agent, HandoverArgs, of_kubelet},
    survey::name_of,
};

/// Pause between two inspections of the node.
const PAUSE: Duration = Duration::from_millis(250);
/// Maximum bytes of a control program's output in an error.
const OUTPUT: usize = 4096;

/// Prints a line. Ignores errors: `println!` panics if nothing reads the output any more, and between the
/// stop and the start no agent would run.
fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// A change of agents.
pub(super) struct Turn<'a> {
    pub(super) args: &'a HandoverArgs,
    pub(super) config: &'a Config,
    pub(super) runtime: &'a Runtime,
    /// The pods that must run on, by UID.
    pub(super) found: BTreeMap<String, Found>,
    /// The definitions of these pods, by UID.
    pub(super) pods: BTreeMap<String, Pod>,
    /// Set once a person interrupts the command.
    pub(super) interrupted: CancellationToken,
}

/// Keeps the command alive between the stop and the start of an agent: the end of the terminal's session
/// (SIGHUP) changes nothing, and an interruption puts the old agent back.
///
/// # Errors
/// The signals cannot be handled.
pub(super) fn on_signals() -> Result<CancellationToken> {
    let mut hangup = signal(SignalKind::hangup()).context("cannot handle SIGHUP")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let interrupted = CancellationToken::new();
    let token = interrupted.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = hangup.recv() => {}
                _ = interrupt.recv() => token.cancel(),
                _ = terminate.recv() => token.cancel(),
            }
        }
    });
    Ok(interrupted)
}

impl Turn<'_> {
    /// Changes to the `next` agent.
    ///
    /// # Errors
    /// The change failed. The message says which agent runs.
    pub(super) async fn perform(&self, next: Agent) -> Result<()> {
        let old = next.other();
        let began = Instant::now();
        say(&format!("stopping {}", old.name()));
        let changed = match self.stop(old).await {
            Ok(()) => {
                say(&format!("starting {}", next.name()));
                self.start(next).await
            }
            Err(error) => Err(error),
        };
        let error = match changed {
            Ok(watched) => {
                say(&format!(
                    "{} accounts for {} pods, none of which restarted ({:.1} s; at most {:.1} s without an agent)",
                    next.name(),
                    self.found.len(),
                    began.elapsed().as_secs_f64(),
                    watched.duration_since(began).as_secs_f64(),
                ));
                return Ok(());
            }
            Err(error) => error,
        };
        let _ = writeln!(io::stderr(), "{error:#}; putting {} back", old.name());
        if let Err(failure) = self.restore(old).await {
            bail!("the hand-over failed ({error:#}), and {} is not back: {failure:#}", old.name());
        }
        bail!("the hand-over failed ({error:#}); {} runs again", old.name());
    }

    /// Stops the other agent, starts the `old` one, and waits until it drives the runtime.
    async fn restore(&self, old: Agent) -> Result<()> {
        let other = old.other();
        let stopped = self.stop(other).await;
        if self.is_present(other).await? {
            stopped?;
        }
        self.control(old, "start").await?;
        self.until(old, true).await
    }

    /// Stops an agent, and waits until it is gone.
    async fn stop(&self, agent: Agent) -> Result<()> {
        self.control(agent, "stop").await?;
        self.until(agent, false).await
    }

    /// Waits until an agent drives the runtime, or no longer does.
    async fn until(&self, agent: Agent, present: bool) -> Result<()> {
        let began = Instant::now();
        while self.is_present(agent).await? != present {
            if began.elapsed() > self.args.timeout {
                bail!("{} {}", agent.name(), if present { "does not start" } else { "still runs" });
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Starts the next agent, and watches until it accounts for every pod and none has restarted for a while.
    /// Returns the time from which on it accounted for every pod.
    async fn start(&self, agent: Agent) -> Result<Instant> {
        self.control(agent, "start").await?;
        let (began, mut settled) = (Instant::now(), None::<Instant>);
        loop {
            if self.interrupted.is_cancelled() {
                bail!("the command was interrupted");
            }
            // The runtime may restart in between.
            let missing = match found::read_after(self.runtime, &self.found).await {
                Ok(now) => {
                    self.require_no_loss(&now)?;
                    self.missing(agent).await?
                }
                Err(error) => Some(error.to_string()),
            };
            match missing {
                None => {
                    let watched = *settled.get_or_insert_with(Instant::now);
                    if watched.elapsed() >= self.args.settle {
                        return Ok(watched);
                    }
                }
                Some(missing) if began.elapsed() > self.args.timeout => {
                    bail!("{missing} after {} s", self.args.timeout.as_secs());
                }
                Some(_) => settled = None,
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Fails if a pod does not run on.
    fn require_no_loss(&self, now: &BTreeMap<String, Found>) -> Result<()> {
        let lost = |(uid, before): (&String, &Found)| {
            let loss = loss(before, now.get(uid), self.pods.get(uid)?)?;
            Some((name_of(before), loss))
        };
        match self.found.iter().find_map(lost) {
            Some((pod, loss)) => bail!("pod {pod}: {loss}"),
            None => Ok(()),
        }
    }

    /// Returns a sentence about the first pod that the agent does not account for yet, or None. A kubelet
    /// counts as soon as it drives the runtime: it lists its pods only to authorized clients.
    async fn missing(&self, agent: Agent) -> Result<Option<String>> {
        if agent == Agent::Kubelet {
            let runs = of_kubelet(self.runtime)?.is_some();
            return Ok((!runs).then(|| "the kubelet does not drive the runtime".to_owned()));
        }
        let listed = async {
            let mut client = Client::connect(&self.config.socket()).await?;
            client.pods.list().await
        };
        let table = match listed.await {
            Ok((table, _)) => table,
            Err(error) => return Ok(Some(error.to_string())),
        };
        let has =
            |uid: &String| table.pods.values().any(|entry| entry.pod.metadata.uid.as_ref() == Some(uid));
        let missing = self.found.iter().find(|(uid, _)| !has(uid));
        Ok(missing.map(|(_, pod)| format!("beelet does not know pod {}", name_of(pod))))
    }

    /// Returns true if the agent drives the runtime.
    async fn is_present(&self, agent: Agent) -> Result<bool> {
        match agent {
            Agent::Kubelet => Ok(of_kubelet(self.runtime)?.is_some()),
            Agent::Beelet => Ok(Client::connect(&self.config.socket()).await.is_ok()),
        }
    }

    /// Starts or stops an agent.
    async fn control(&self, agent: Agent, word: &str) -> Result<()> {
        let (program, unit) = match agent {
            Agent::Kubelet => (&self.args.kubelet_control, &self.args.kubelet_unit),
            Agent::Beelet => (&self.args.beelet_control, &self.args.beelet_unit),
        };
        let program = match program {
            Some(program) => Program::at(program).operand(word),
            None => Program::tool("systemctl").operand(word).operand(unit),
        };
        let bounds = Bounds { within: self.args.timeout, output: OUTPUT, complaints: Complaints::InOutput };
        let failed = || format!("cannot {word} {}", agent.name());
        let ended = program.run(bounds).await.with_context(failed)?;
        if !ended.status.success() {
            let said = String::from_utf8_lossy(&ended.output);
            bail!("{}: {} ({})", failed(), said.trim(), ended.status);
        }
        Ok(())
    }
}
