//! The state of the node that follows from the facts: pods, sandboxes, containers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::trace::{Container, End, Event, Fact, Pod, ProbeKind, Role, Status};

/// Time in which the agent hears from the API server again: the longest pause between two attempts of a watch
/// (client-go: `defaultBackoff` of the reflector, 30 s with jitter), and a list that takes its time.
const RECONNECTED: Duration = Duration::from_secs(75);

/// A pod.
#[derive(Clone, Debug)]
pub(crate) struct PodState {
    pub(crate) spec: Pod,
    /// Time of the pod's creation.
    pub(crate) created: Duration,
    /// Time of the latest change of the spec.
    pub(crate) changed: Duration,
    /// Begin of the deletion, and its grace period in seconds.
    pub(crate) deleting: Option<(Duration, u64)>,
    /// Time at which the object was gone.
    pub(crate) unwanted: Option<Duration>,
    /// The newest status.
    pub(crate) status: Option<Status>,
    /// Time of the newest status.
    pub(crate) published: Option<Duration>,
}

impl PodState {
    /// Returns the time from which the pod's end is justified, if it is.
    pub(crate) fn ends_since(&self) -> Option<Duration> {
        [self.deleting.map(|(at, _)| at), self.unwanted].into_iter().flatten().min()
    }

    /// Returns the spec of a container.
    pub(crate) fn container(&self, name: &str) -> Option<&Container> {
        self.spec.containers.iter().find(|container| container.name == name)
    }

    /// Returns the CPU that the pod requests in thousandths: KEP-753's sum, without the pod's overhead.
    pub(crate) fn cpu(&self) -> u64 {
        let of = |role: Role| self.spec.containers.iter().filter(move |c| c.role == role).map(|c| c.cpu);
        let running: u64 = of(Role::Main).sum::<u64>() + of(Role::Sidecar).sum::<u64>();
        running.max(of(Role::Init).max().unwrap_or(0))
    }
}

/// A container at the runtime.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub(crate) id: String,
    pub(crate) uid: String,
    pub(crate) sandbox: String,
    pub(crate) name: String,
    pub(crate) devices: BTreeSet<String>,
    pub(crate) cpu: Option<u64>,
    pub(crate) started: Option<Duration>,
    /// First requested stop, with its grace period in seconds.
    pub(crate) stop: Option<(Duration, i64)>,
    pub(crate) exited: Option<(Duration, i32, End)>,
    pub(crate) removed: bool,
    /// Consecutive failures by kind of probe, with the time of the first and the latest one.
    pub(crate) failures: BTreeMap<ProbeKind, (u32, Duration, Duration)>,
}

impl Instance {
    pub(crate) fn runs(&self) -> bool {
        self.started.is_some() && self.exited.is_none()
    }
}

/// A sandbox at the runtime.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox {
    pub(crate) uid: String,
    pub(crate) stopped: Option<Duration>,
    pub(crate) removed: bool,
}

/// The state of the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) pods: BTreeMap<String, PodState>,
    pub(crate) sandboxes: BTreeMap<String, Sandbox>,
    /// All containers ever created, in order of creation.
    pub(crate) instances: Vec<Instance>,
    index: BTreeMap<String, usize>,
    by_pod: BTreeMap<String, Vec<usize>>,
    /// Latest start of the agent.
    pub(crate) agent_since: Option<Duration>,
    pub(crate) faults_ended: Option<Duration>,
    /// Time until which the agent may not hear from the API server.
    pub(crate) deaf_until: Duration,
    /// Steps of the wall clock in seconds, with their times.
    pub(crate) steps: Vec<(Duration, i64)>,
    /// Rests at the end.
    pub(crate) left: Vec<(String, String)>,
    /// Statuses that the API server has at the end, by pod.
    pub(crate) stored: BTreeMap<String, Status>,
    /// Readiness of the Node at the end; None on a standalone node.
    pub(crate) node_ready: Option<bool>,
}

impl Ledger {
    /// Returns the sum of the wall clock's steps forward since `since`, in seconds.
    pub(crate) fn steps_forward(&self, since: Duration) -> u64 {
        let later = self.steps.iter().filter(|(at, _)| *at >= since);
        later.map(|(_, seconds)| u64::try_from(*seconds).unwrap_or(0)).sum()
    }

    /// Returns a container by id.
    pub(crate) fn instance(&self, id: &str) -> Option<&Instance> {
        self.instances.get(*self.index.get(id)?)
    }

    /// Returns all containers of a pod, in order of creation.
    pub(crate) fn of_pod<'a>(&'a self, uid: &str) -> impl DoubleEndedIterator<Item = &'a Instance> + use<'a> {
        let places = self.by_pod.get(uid).map(Vec::as_slice).unwrap_or_default();
        places.iter().filter_map(|place| self.instances.get(*place))
    }

    /// Returns the containers of this name in a pod that were started, in order of creation.
    pub(crate) fn started(&self, uid: &str, name: &str) -> std::vec::IntoIter<&Instance> {
        let named = self.of_pod(uid).filter(|instance| instance.name == name && instance.started.is_some());
        named.collect::<Vec<_>>().into_iter()
    }

    fn instance_mut(&mut self, id: &str) -> Option<&mut Instance> {
        self.instances.get_mut(*self.index.get(id)?)
    }

    /// Applies a fact.
    pub(crate) fn apply(&mut self, event: &Event) {
        let at = event.at;
        match &event.fact {
            Fact::Wanted(pod) => self.want(pod, at),
            Fact::Deleting { uid, grace } => {
                if let Some(pod) = self.pods.get_mut(uid) {
                    // A second deletion can only shorten the grace period (BeforeDelete in apiserver's rest).
                    let (since, before) = pod.deleting.unwrap_or((at, *grace));
                    pod.deleting = Some((since, before.min(*grace)));
                }
            }
            Fact::Unwanted { uid } => {
                if let Some(pod) = self.pods.get_mut(uid) {
                    pod.unwanted.get_or_insert(at);
                }
            }
            Fact::AgentStarted => self.agent_since = Some(at),
            Fact::ApiServerDisturbed { seconds } => {
                let until = at.saturating_add(Duration::from_secs(*seconds)).saturating_add(RECONNECTED);
                self.deaf_until = self.deaf_until.max(until);
            }
            Fact::ClockStepped { seconds } => self.steps.push((at, *seconds)),
            Fact::FaultsEnded => self.faults_ended = Some(at),
            Fact::SandboxRan { sandbox, uid } => {
                let made = Sandbox { uid: uid.clone(), stopped: None, removed: false };
                self.sandboxes.insert(sandbox.clone(), made);
            }
            Fact::SandboxStopped { sandbox } => {
                if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
                    sandbox.stopped.get_or_insert(at);
                }
            }
            Fact::SandboxRemoved { sandbox } => {
                if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
                    sandbox.stopped.get_or_insert(at);
                    sandbox.removed = true;
                }
                self.instances.iter_mut().filter(|c| c.sandbox == *sandbox).for_each(|c| c.removed = true);
            }
            Fact::Created { container, sandbox, name, devices } => {
                self.create(container, sandbox, name, devices);
            }
            Fact::Stored(status) => {
                self.stored.insert(status.uid.clone(), status.clone());
            }
            Fact::Node { ready } => self.node_ready = Some(*ready),
            Fact::Left { uid, place } => self.left.push((uid.clone(), place.clone())),
            Fact::Status(status) => {
                if let Some(pod) = self.pods.get_mut(&status.uid) {
                    pod.status = Some(status.clone());
                    pod.published = Some(at);
                }
            }
            Fact::AgentKilled | Fact::AgentFailed { .. } | Fact::Rebooted => {}
            other => self.apply_to_container(other, at),
        }
    }

    fn want(&mut self, pod: &Pod, at: Duration) {
        let known = self.pods.entry(pod.uid.clone()).or_insert_with(|| PodState {
            spec: pod.clone(),
            created: at,
            changed: at,
            deleting: None,
            unwanted: None,
            status: None,
            published: None,
        });
        known.spec = pod.clone();
        known.changed = at;
    }

    fn create(&mut self, id: &str, sandbox: &str, name: &str, devices: &BTreeSet<String>) {
        let uid = self.sandboxes.get(sandbox).map(|sandbox| sandbox.uid.clone()).unwrap_or_default();
        let place = self.instances.len();
        self.index.insert(id.to_owned(), place);
        self.by_pod.entry(uid.clone()).or_default().push(place);
        self.instances.push(Instance {
            id: id.to_owned(),
            uid,
            sandbox: sandbox.to_owned(),
            name: name.to_owned(),
            devices: devices.clone(),
            cpu: None,
            started: None,
            stop: None,
            exited: None,
            removed: false,
            failures: BTreeMap::new(),
        });
    }

    fn apply_to_container(&mut self, fact: &Fact, at: Duration) {
        let (Fact::Started { container, .. }
        | Fact::StopAsked { container, .. }
        | Fact::Exited { container, .. }
        | Fact::Removed { container }
        | Fact::Cpu { container, .. }
        | Fact::Probed { container, .. }) = fact
        else {
            return;
        };
        let Some(instance) = self.instance_mut(container) else { return };
        match fact {
            Fact::Started { .. } => {
                instance.started = Some(at);
            }
            Fact::StopAsked { grace, .. } => {
                instance.stop.get_or_insert((at, *grace));
            }
            Fact::Exited { code, by, .. } => instance.exited = Some((at, *code, *by)),
            Fact::Removed { .. } => instance.removed = true,
            Fact::Cpu { milli, .. } => instance.cpu = Some(*milli),
            Fact::Probed { kind, passed, .. } => {
                if *passed {
                    instance.failures.remove(kind);
                } else {
                    let entry = instance.failures.entry(*kind).or_insert((0, at, at));
                    *entry = (entry.0 + 1, entry.1, at);
                }
            }
            _ => {}
        }
    }
}
