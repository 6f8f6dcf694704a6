//! The probes as `beelet probe` shows them, and one look on demand with an explanation.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use beelet_policy::probe::{
    Outcome, ProbeKind, ProbeResult,
    listener::{QueueWatch, Verdict},
};
use jiff::Timestamp;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{
    answer::Answer,
    canary,
    listening::{Sight, answer},
    manager::Probes,
    worker::{Way, Worker, now},
    workers::Id,
};
use beelet_bpf::{CheckedNetns, Checker, Found};

/// Commands under way to the probes. More are refused.
const COMMANDS: usize = 16;

/// What can be asked of the probes.
#[derive(Debug)]
pub enum Command {
    /// Every probe.
    List(oneshot::Sender<Vec<ProbeView>>),
    /// One look, now.
    Run {
        /// Of which container.
        wanted: Wanted,
        /// The answer, or why there is none.
        reply: oneshot::Sender<Result<Explained, Refused>>,
    },
}

/// Which probe.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The pod's namespace; empty for any.
    pub namespace: String,
    /// The pod's name, with or without the node's behind it.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The kind.
    pub kind: ProbeKind,
}

/// The receiving end of [`Handle`].
pub type Commands = mpsc::Receiver<Command>;

/// Asks the probes.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
}

/// Why a question to the probes has no answer: a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such probe, or more than one.
    #[error("{0}")]
    NotFound(String),
    /// The probes don't run, or have too much to do.
    #[error("the agent's probes don't answer: it is starting, stopping or overloaded; try again")]
    Unavailable,
}

/// Both ends of the line to the probes.
#[must_use]
pub fn handle() -> (Handle, Commands) {
    let (sender, receiver) = mpsc::channel(COMMANDS);
    (Handle { commands: sender }, receiver)
}

/// How long a question may wait until the probes take it.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);

impl Handle {
    /// Every probe.
    ///
    /// # Errors
    /// The probes don't run.
    pub async fn list(&self) -> Result<Vec<ProbeView>, Refused> {
        let (reply, answer) = oneshot::channel();
        self.put(Command::List(reply))?;
        match tokio::time::timeout(TAKEN_WITHIN, answer).await {
            Ok(Ok(list)) => Ok(list),
            _ => Err(Refused::Unavailable),
        }
    }

    /// One look, now. Takes as long as the probe does.
    ///
    /// # Errors
    /// There is no such probe, or the probes don't run.
    pub async fn run(&self, wanted: Wanted) -> Result<Explained, Refused> {
        let (reply, answer) = oneshot::channel();
        self.put(Command::Run { wanted, reply })?;
        answer.await.unwrap_or(Err(Refused::Unavailable))
    }

    fn put(&self, command: Command) -> Result<(), Refused> {
        self.commands.try_send(command).map_err(|_| Refused::Unavailable)
    }
}

/// A probe, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeView {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The kind.
    pub kind: ProbeKind,
    /// What is looked at.
    pub target: String,
    /// How: `kernel`, `sock_diag`, `connect`, `http`, `https`, `grpc` or `exec`.
    pub mode: &'static str,
    /// Why the kernel doesn't answer, where it was to.
    pub fallback: Option<String>,
    /// What it says of the container.
    pub result: ProbeResult,
    /// Since when.
    pub since: Option<Timestamp>,
    /// The last look.
    pub last: Option<LookView>,
    /// Time between two looks.
    pub period: Duration,
    /// The longest wait for an answer.
    pub timeout: Duration,
    /// Why nothing counts at present.
    pub held: Option<String>,
    /// What of the pod's annotations can't be read.
    pub problems: Vec<String>,
}

/// A look, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct LookView {
    /// How it ended.
    pub outcome: Outcome,
    /// What it found.
    pub detail: String,
    /// How long it took.
    pub latency: Duration,
    /// When.
    pub at: Timestamp,
}

/// One look, with all that led to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The probe as it was before.
    pub probe: ProbeView,
    /// What was found.
    pub look: LookView,
    /// What was asked of whom and what came back, in order.
    pub explanation: Vec<String>,
}

impl Probes {
    pub(super) fn on_command(&mut self, command: Command) {
        match command {
            Command::List(reply) => {
                let mut list: Vec<ProbeView> = self.workers.iter().map(|(_, worker)| view(worker)).collect();
                list.sort_by(|a, b| {
                    (&a.namespace, &a.pod, &a.container, a.kind).cmp(&(
                        &b.namespace,
                        &b.pod,
                        &b.container,
                        b.kind,
                    ))
                });
                // Who asked may have gone.
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

    fn one(&self, wanted: &Wanted) -> Result<Id, Refused> {
        let Wanted { namespace, pod, container, kind } = wanted;
        match *self.find(namespace, pod, container, *kind) {
            [id] => Ok(id),
            [] => Err(Refused::NotFound(format!(
                "container {container:?} of a pod {pod:?} has no {} probe here; `beelet probe ls` shows all",
                kind.name()
            ))),
            _ => Err(Refused::NotFound(format!(
                "there are several pods {pod:?}: name its namespace with -n, or its full name"
            ))),
        }
    }

    /// Looks once, beside the timetable, and tells all it knows.
    fn explain(&self, id: Id, reply: oneshot::Sender<Result<Explained, Refused>>) {
        let Some(worker) = self.workers.get(id) else { return };
        let probe = view(worker);
        let Some(question) = worker.question() else {
            let error = Refused::NotFound("the container has not run yet".to_owned());
            let _ = reply.send(Err(error));
            return;
        };
        let mut explanation = Vec::new();
        if let Some(why) = &probe.fallback {
            explanation.push(format!("the kernel was to answer, but: {why}"));
        }
        let kernel = worker.in_kernel().map(|(netns, port)| (Arc::clone(netns), port));
        let Some((netns, port)) = kernel else {
            let doors = self.doors.clone();
            self.parts.asking.spawn(async move {
                explanation
                    .push(format!("{}: {}, waiting {:?} at most", probe.mode, probe.target, probe.timeout));
                let (answer, latency) = doors.ask(&question).await;
                let _ = reply.send(Ok(explained(probe, answer, latency, explanation)));
            });
            return;
        };
        let started = Instant::now();
        let sight = self.sights(&[id]).pop().unwrap_or(Sight::Unknown("the probe is gone".to_owned()));
        explanation.push(format!(
            "{}: looked port {port} up in the network namespace with the cookie {}",
            probe.mode,
            netns.handle().cookie()
        ));
        let mut queues = worker.beat.queues;
        explanation.push(said(&sight));
        let verdict = sight.sighting().map(|sighting| queues.judge(now(), question.within, sighting));
        let address = worker.ip.map(|ip| (ip, port).into());
        let onlooker = Onlooker { checker: self.parts.checker.clone(), netns, address, queues };
        let canary = worker.sends_canaries();
        self.parts.asking.spawn(async move {
            let verdict = onlooker.settle(verdict, question.within, &mut explanation).await;
            let mut found = match verdict {
                Some(verdict) => answer(verdict, port),
                None => {
                    Answer::error("the kernel can't say whether anybody listens; a regular look connects")
                }
            };
            if canary && found.outcome == Outcome::Success {
                let heard = onlooker.canary(question.within).await;
                explanation.extend(heard.iter().map(|heard| format!("canary: {}", heard.detail)));
                found = heard.filter(|heard| heard.outcome != Outcome::Success).unwrap_or(found);
            }
            let _ = reply.send(Ok(explained(probe, found, started.elapsed(), explanation)));
        });
    }
}

/// A probe as it is now.
fn view(worker: &Worker) -> ProbeView {
    ProbeView {
        namespace: worker.name.namespace.clone(),
        pod: worker.name.name.clone(),
        container: worker.key.container.to_string(),
        kind: worker.key.kind,
        target: worker.target.to_string(),
        mode: worker.mode(),
        fallback: match &worker.way {
            Way::Ask(why) => why.clone(),
            Way::Undecided if worker.wants_kernel() && worker.container_id.is_some() => {
                Some("the runtime has not told the pod's network namespace".to_owned())
            }
            _ => None,
        },
        result: worker.state.published(),
        since: worker.since,
        last: worker.last.as_ref().map(|look| LookView {
            outcome: look.outcome,
            detail: look.detail.clone(),
            latency: worker.beat.looked.1,
            at: wall(worker.beat.looked.0),
        }),
        period: worker.beat.period,
        timeout: worker.timeout,
        held: worker.state.held(now()).map(|held| held.to_string()),
        problems: worker.problems.clone(),
    }
}

/// A moment of the past on the wall's clock.
fn wall(at: Duration) -> Timestamp {
    let now_there = Timestamp::now();
    now_there.checked_sub(now().saturating_sub(at)).unwrap_or(now_there)
}

/// Looks at one address beside the timetable.
struct Onlooker {
    checker: Option<Checker>,
    netns: Arc<CheckedNetns>,
    address: Option<SocketAddr>,
    queues: QueueWatch,
}

impl Onlooker {
    /// Waits for what isn't decided yet: whether the connections that wait are accepted within the timeout.
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
        let sight = match checker.look(&[target]) {
            Ok(found) => Sight::of(found.first().copied().unwrap_or(Found::Nothing)),
            Err(error) => Sight::Unknown(error.to_string()),
        };
        explanation.push(format!("after {within:?}: {}", said(&sight)));
        let mut queues = self.queues;
        sight.sighting().map(|sighting| queues.judge(now(), within, sighting))
    }

    async fn canary(&self, within: Duration) -> Option<Answer> {
        let (checker, address) = (self.checker.as_ref()?, self.address?);
        Some(canary::send(checker, &self.netns, address, within).await)
    }
}

fn said(sight: &Sight) -> String {
    match sight {
        Sight::Absent => "no socket listens there: a connection would be refused".to_owned(),
        Sight::Unknown(why) => format!("no answer: {why}"),
        Sight::Listening(queues) => format!(
            "{} listener(s), cgroup {}, cookie {}; {} connection(s) wait, the queue takes {}; {} of them have waiting \
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
    let look = LookView { outcome: answer.outcome, detail: answer.detail, latency, at: Timestamp::now() };
    Explained { probe, look, explanation }
}
