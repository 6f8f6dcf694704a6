//! Runs the checks that may take a while: requests to an application or to the runtime.

use std::{net::IpAddr, sync::Arc, time::Duration};

use beelet_policy::probe::Outcome;
use tokio::sync::Semaphore;
use tokio_rustls::rustls::ClientConfig;

use super::{answer::Answer, direct::Direct, exec, grpc, http, kept::Slot, target::Target, tcp};
use beelet_base::tls;
use beelet_cri::Runtime;

/// Maximum number of probes that wait for an answer at the same time. Further ones wait for their turn.
const AT_ONCE: usize = 256;
/// Maximum number of commands that run at the same time: each costs the runtime some processes and some tens
/// of milliseconds of CPU.
const COMMANDS_AT_ONCE: usize = 16;
/// Maximum tries of a probe that can't be run (`maxProbeRetries`, pkg/kubelet/prober).
const TRIES: usize = 3;

/// Sends requests to the applications and the runtime. Clones share the limits.
#[derive(Clone, Debug)]
pub(super) struct Probers {
    runtime: Option<Runtime>,
    direct: Option<Direct>,
    tls: Option<Arc<ClientConfig>>,
    slots: Arc<Semaphore>,
    commands: Arc<Semaphore>,
}

/// A request of a probe.
#[derive(Clone, Debug)]
pub(super) struct Question {
    /// The probe's target.
    pub target: Target,
    /// The pod's address, once it has one.
    pub pod_ip: Option<IpAddr>,
    /// The container for a command.
    pub container_id: String,
    /// Timeout.
    pub within: Duration,
    /// True if the helper should run the command.
    pub direct: bool,
    /// The connection that the server has kept open; `None` for a fresh connection.
    pub kept: Option<Slot>,
}

impl Probers {
    pub(super) fn new(runtime: Option<Runtime>, direct: Option<Direct>) -> Self {
        let tls =
            tls::settings().inspect_err(|error| tracing::error!(%error, "cannot run HTTPS probes")).ok();
        Self {
            runtime,
            direct,
            tls,
            slots: Arc::new(Semaphore::new(AT_ONCE)),
            commands: Arc::new(Semaphore::new(COMMANDS_AT_ONCE)),
        }
    }

    /// Returns the client of the helper.
    pub(super) fn direct(&self) -> Option<&Direct> {
        self.direct.as_ref()
    }

    /// Sends the request, up to three times if it can't be sent. The second value is the duration of the last
    /// try.
    pub(super) async fn ask(&self, question: &Question) -> (Answer, Duration) {
        let slots = if matches!(question.target, Target::Exec { .. }) { &self.commands } else { &self.slots };
        // The semaphore is never closed.
        let _slot = slots.acquire().await;
        let mut tries = 0;
        loop {
            tries += 1;
            let started = std::time::Instant::now();
            let answer = self.once(question).await;
            if answer.outcome != Outcome::Error || tries == TRIES {
                return (answer, started.elapsed());
            }
        }
    }

    async fn once(&self, question: &Question) -> Answer {
        let Question { target, pod_ip, container_id, within, direct, kept } = question;
        let named = match target {
            Target::Tcp { host, .. } | Target::Http { host, .. } => host.clone(),
            Target::Grpc { .. } | Target::Exec { .. } => None,
        };
        if let Target::Exec { command } = target {
            let Some(runtime) = &self.runtime else {
                return Answer::error("cannot run a command: no container runtime");
            };
            if let Some(direct) = self.direct.as_ref().filter(|_| *direct)
                && let Some(answer) = direct.run(container_id, command, *within).await
            {
                return answer;
            }
            return exec::run(runtime, container_id, command, *within).await;
        }
        let Some(host) = named.or_else(|| pod_ip.map(|ip| ip.to_string())) else {
            return Answer::error("the pod has no address yet");
        };
        match target {
            Target::Http { port, get, .. } => match &self.tls {
                Some(tls) => http::get(get, &host, *port, tls, *within, kept.as_ref()).await,
                None => Answer::error("cannot run HTTP probes: no cryptography"),
            },
            Target::Tcp { port, .. } | Target::Grpc { port, .. } => {
                match tokio::time::timeout(*within, tcp::resolve(&host, *port)).await {
                    Ok(Ok(address)) => match target {
                        Target::Grpc { service, tls, .. } => {
                            let tls = self.tls.as_ref().filter(|_| *tls);
                            grpc::check(address, service, tls, *within, kept.as_ref()).await
                        }
                        _ => tcp::connect(address, *within).await,
                    },
                    Ok(Err(error)) => Answer::failure(error),
                    Err(_) => Answer::failure(format!(
                        "cannot resolve {host}: no answer within {} s",
                        within.as_secs_f64()
                    )),
                }
            }
            Target::Exec { .. } => Answer::error("a command has no address"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(target: Target) -> Question {
        Question {
            target,
            pod_ip: None,
            container_id: "c".to_owned(),
            within: Duration::from_secs(30),
            direct: false,
            kept: None,
        }
    }

    #[tokio::test]
    async fn a_request_that_cannot_be_sent_is_an_error_and_not_a_failure() {
        let probers = Probers::new(None, None);
        let tcp = Target::Tcp { host: None, port: 80 };
        assert_eq!(probers.ask(&question(tcp)).await.0, Answer::error("the pod has no address yet"));
        let exec = Target::Exec { command: vec!["true".to_owned()] };
        assert_eq!(probers.ask(&question(exec)).await.0.outcome, Outcome::Error);
    }

    #[tokio::test]
    async fn a_host_of_its_own_is_looked_up() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let probers = Probers::new(None, None);
        let at = |host: &str| question(Target::Tcp { host: Some(host.to_owned()), port });
        assert_eq!(probers.ask(&at("127.0.0.1")).await.0.outcome, Outcome::Success);
        let answer = probers.ask(&at("no-such-host.invalid")).await.0;
        assert!(
            answer.outcome == Outcome::Failure && answer.detail.starts_with("cannot resolve"),
            "{answer:?}"
        );
    }
}
