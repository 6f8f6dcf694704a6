//! The probes as shown by `beelet probe`, and a check on demand with an explanation.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use beelet_policy::probe::{
    Outcome,
    listener::{QueueWatch, Verdict},
};
use jiff::Timestamp;
use tokio::{sync::oneshot, time::Instant};

use super::{
    answer::Answer,
    ask::Question,
    canary,
    handle::{AskError, CheckView, Command, Explained, ProbeView, ToleratedView, Wanted},
    ids::Id,
    listening::{Lookup, answer},
    manager::Probes,
    worker::{Method, Worker, now},
};
use beelet_bpf::{CheckedNetns, Checker, Found};

impl Probes {
    pub(super) fn on_command(&mut self, command: Command) {
        match command {
            Command::List(reply) => {
                let mut list: Vec<ProbeView> =
                    self.workers.iter().map(|(_, worker)| self.view(worker)).collect();
                list.sort_by(|a, b| {
                    (&a.namespace, &a.pod, &a.container, a.kind).cmp(&(
                        &b.namespace,
                        &b.pod,
                        &b.container,
                        b.kind,
                    ))
                });
                // The client may have disconnected.
                let _ = reply.send(list);
            }
            Command::Run { wanted, reply } => match self.one(&wanted) {
                Ok(id) => self.explain(id, reply),
                Err(refused) => {
                    let _ = reply.send(Err(refused));
                }
            },
        }
    }

    fn one(&self, wanted: &Wanted) -> Result<Id, AskError> {
        let Wanted { namespace, pod, container, kind } = wanted;
        match *self.find(namespace, pod, container, *kind) {
            [id] => Ok(id),
            [] => Err(AskError::NotFound(format!(
                "container {container:?} of a pod {pod:?} has no {} probe here; `beelet probe ls` shows all",
                kind.name()
            ))),
            _ => Err(AskError::NotFound(format!(
                "there are several pods {pod:?}: name its namespace with -n, or its full name"
            ))),
        }
    }

    /// Runs a check outside the timetable, and explains the results.
    fn explain(&self, id: Id, reply: oneshot::Sender<Result<Explained, AskError>>) {
        let Some(worker) = self.workers.get(id) else { return };
        let probe = self.view(worker);
        let Some(question) = worker.question().map(|question| Question { kept: None, ..question }) else {
            let error = AskError::NotFound("the container has not run yet".to_owned());
            let _ = reply.send(Err(error));
            return;
        };
        let mut explanation = Vec::new();
        if let Some(why) = &probe.fallback {
            let who =
                if worker.wants_direct() { "helper cannot run the command" } else { "kernel cannot answer" };
            explanation.push(format!("the {who}: {why}"));
        }
        let kernel = worker.in_kernel().map(|(netns, port)| (Arc::clone(netns), port));
        let Some((netns, port)) = kernel else {
            let probers = self.probers.clone();
            self.parts.asking.spawn(async move {
                explanation
                    .push(format!("{}: {}, waiting at most {:?}", probe.mode, probe.target, probe.timeout));
                let (answer, latency) = probers.ask(&question).await;
                let _ = reply.send(Ok(explained(probe, answer, latency, explanation)));
            });
            return;
        };
        let started = Instant::now();
        let lookup = self.lookups(&[id]).pop().unwrap_or(Lookup::Unknown("the probe was removed".to_owned()));
        explanation.push(format!(
            "{}: looked up port {port} in the network namespace with cookie {}",
            probe.mode,
            netns.handle().cookie()
        ));
        let mut queues = worker.hot.queues;
        explanation.push(said(&lookup));
        let verdict = lookup.sighting().map(|sighting| queues.judge(now(), question.within, sighting));
        let address = worker.ip.map(|ip| (ip, port).into());
        let onlooker = Onlooker { checker: self.parts.checker.clone(), netns, address, queues };
        let canary = worker.sends_canaries();
        let out_of_sight = verdict == Some(Verdict::NotListening) && !worker.has_seen_listener;
        let probers = self.probers.clone();
        self.parts.asking.spawn(async move {
            if out_of_sight {
                explanation
                    .push("the kernel has never had a listener there: a connection decides".to_owned());
                let (answer, latency) = probers.ask(&question).await;
                let _ = reply.send(Ok(explained(probe, answer, latency, explanation)));
                return;
            }
            let verdict = onlooker.settle(verdict, question.within, &mut explanation).await;
            let mut found = match verdict {
                Some(verdict) => answer(verdict, port),
                None => Answer::error("the kernel can't check for a listener; a regular check connects"),
            };
            if canary && found.outcome == Outcome::Success {
                let heard = onlooker.canary(question.within).await;
                explanation.extend(heard.iter().map(|heard| format!("canary: {}", heard.detail)));
                found = heard.filter(|heard| heard.outcome != Outcome::Success).unwrap_or(found);
            }
            let _ = reply.send(Ok(explained(probe, found, started.elapsed(), explanation)));
        });
    }
    /// Describes the current state of a probe.
    fn view(&self, worker: &Worker) -> ProbeView {
        let direct = self.probers.direct().filter(|_| worker.wants_direct());
        let reason = direct.zip(worker.container_id.as_deref()).and_then(|(direct, id)| direct.reason(id));
        let view = view(worker);
        match reason {
            Some(why) => ProbeView { mode: worker.target.mode(), fallback: Some(why), ..view },
            None => view,
        }
    }
}

/// Describes the current state of a probe, without the helper's.
fn view(worker: &Worker) -> ProbeView {
    ProbeView {
        namespace: worker.name.namespace.clone(),
        pod: worker.name.name.clone(),
        container: worker.key.container.to_string(),
        kind: worker.key.kind,
        target: worker.target.to_string(),
        mode: worker.mode(),
        fallback: match worker.method() {
            Method::Ask(why) => why.clone(),
            Method::Undecided if worker.wants_kernel() && worker.container_id.is_some() => {
                Some("the runtime has not reported the pod's network namespace".to_owned())
            }
            _ => None,
        },
        result: worker.state.published(),
        since: worker.since,
        last: worker.last.as_ref().map(|check| CheckView {
            outcome: check.outcome,
            detail: check.detail.clone(),
            latency: worker.hot.looked.1,
            at: wall(worker.hot.looked.0),
        }),
        period: worker.hot.period,
        timeout: worker.timeout,
        held: worker.state.held(now()).map(|held| held.to_string()),
        problems: worker.problems.clone(),
        tolerated: worker.tolerated.last.map(|last| ToleratedView {
            checks: worker.tolerated.checks,
            failures: worker.tolerated.failures,
            last: wall(last),
        }),
    }
}

/// Converts a moment of the past to the wall clock.
fn wall(at: Duration) -> Timestamp {
    let now_there = Timestamp::now();
    now_there.checked_sub(now().saturating_sub(at)).unwrap_or(now_there)
}

/// Checks an address outside the timetable.
struct Onlooker {
    checker: Option<Checker>,
    netns: Arc<CheckedNetns>,
    address: Option<SocketAddr>,
    queues: QueueWatch,
}

impl Onlooker {
    /// Waits for a pending verdict: whether the waiting connections are accepted within the timeout.
    async fn settle(
        &self,
        verdict: Option<Verdict>,
        within: Duration,
        explanation: &mut Vec<String>,
    ) -> Option<Verdict> {
        let Some(Verdict::Pending { until }) = verdict else { return verdict };
        let target = self.address.and_then(|address| self.netns.target(address, None));
        let (Some(checker), Some(target)) = (&self.checker, target) else { return verdict };
        tokio::time::sleep(until.saturating_sub(now())).await;
        let lookup = match checker.lookup(&[target]) {
            Ok(found) => Lookup::of(found.first().copied().unwrap_or(Found::Nothing)),
            Err(error) => Lookup::Unknown(error.to_string()),
        };
        explanation.push(format!("after {within:?}: {}", said(&lookup)));
        let mut queues = self.queues;
        lookup.sighting().map(|sighting| queues.judge(now(), within, sighting))
    }

    async fn canary(&self, within: Duration) -> Option<Answer> {
        let (checker, address) = (self.checker.as_ref()?, self.address?);
        Some(canary::send(checker, &self.netns, address, within).await)
    }
}

fn said(lookup: &Lookup) -> String {
    match lookup {
        Lookup::Absent => "no socket listens there: a connection would be refused".to_owned(),
        Lookup::Unknown(why) => format!("no answer: {why}"),
        Lookup::Listening(queues) => format!(
            "{} listener(s), cgroup {}, cookie {}; {} connection(s) wait in a queue of {}; {} listener(s) have waiting \
             connections, {} are full",
            queues.listeners,
            queues.cgroup_id,
            queues.cookie,
            queues.backlog,
            u64::from(queues.max_backlog) + 1,
            queues.waiting,
            queues.full
        ),
    }
}

fn explained(probe: ProbeView, answer: Answer, latency: Duration, explanation: Vec<String>) -> Explained {
    let check = CheckView { outcome: answer.outcome, detail: answer.detail, latency, at: Timestamp::now() };
    Explained { probe, check, explanation }
}
