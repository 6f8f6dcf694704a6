//! The node's event log: actions on pods, and failures, with the reasons that users of Kubernetes know
//! (`Pulled`, `Created`, `Started`, `Killing`, `BackOff`, `Unhealthy`, `Evicted`, …).
//!
//! Every part records through a [`Recorder`]; recording never waits and never fails. The log is bounded
//! ([`CAPACITY`], the oldest events are dropped first) and survives restarts of the agent. A repeated event
//! raises a count, as in the API server. Events are for people: no part must decide by them.

mod node;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use beelet_base::blocking::spawn_blocking;
use beelet_units::shorten::in_the_middle;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::sleep};
use tracing::{error, warn};

use crate::{Loaded, State};
use beelet_model::{pod::ContainerKind, table::PodName};

pub use self::node::NodeEvents;

/// Number of kept events.
pub const CAPACITY: usize = 2048;
/// Longest message, in bytes; a longer one loses its middle. Runtimes can be verbose.
const MESSAGE_MAX: usize = 1024;
/// Name of the durable record.
const NAME: &str = "events";
/// Shortest interval between two writes, which combine events.
const WRITE_PERIOD: Duration = Duration::from_secs(2);

/// Time after which an event names the work that an object waits for, and the time between two of these
/// events.
const WAITING_AFTER: Duration = Duration::from_secs(10);
const WAITING_PERIOD: Duration = Duration::from_secs(60);

/// Severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Normal operation.
    Normal,
    /// A problem that needs attention.
    Warning,
}

impl Kind {
    /// Returns `Normal` or `Warning`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Object of an event.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Object {
    /// A pod, or one of its containers.
    Pod {
        /// Its name.
        name: PodName,
        /// `metadata.uid`.
        uid: String,
        /// Container of the event, if it is about one alone.
        container: Option<String>,
        /// List of the pod's spec that contains the container.
        #[serde(default)]
        kind: ContainerKind,
    },
    /// The node itself.
    Node {
        /// Its name.
        name: String,
    },
    /// A PersistentVolumeClaim.
    Claim {
        /// `metadata.namespace`.
        namespace: String,
        /// Its name.
        name: String,
        /// `metadata.uid`.
        uid: String,
    },
}

impl Object {
    /// Returns the object for a whole pod.
    #[must_use]
    pub fn pod(pod: &Pod) -> Self {
        Self::Pod {
            name: PodName::of(pod),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            container: None,
            kind: ContainerKind::default(),
        }
    }

    /// Returns the object for a container of a pod.
    #[must_use]
    pub fn container(pod: &Pod, container: &str) -> Self {
        Self::Pod {
            name: PodName::of(pod),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            container: Some(container.to_owned()),
            kind: ContainerKind::of(pod, container),
        }
    }

    /// Returns the object for the node.
    #[must_use]
    pub fn node(name: &str) -> Self {
        Self::Node { name: name.to_owned() }
    }

    /// Returns the object for a claim.
    #[must_use]
    pub fn claim(claim: &PersistentVolumeClaim) -> Self {
        let metadata = claim.metadata.clone();
        Self::Claim {
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
        }
    }
}

/// An event that occurred once or several times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Object of the event.
    pub object: Object,
    /// Severity.
    pub kind: Kind,
    /// Reason, a word.
    pub reason: String,
    /// Message, a sentence.
    pub message: String,
    /// Time of the first occurrence.
    pub first: Timestamp,
    /// Time of the last occurrence.
    pub last: Timestamp,
    /// Number of occurrences.
    pub count: u32,
}

/// Identity of an event.
type Key = (Object, Kind, String, String);

/// Kept events. Each has a number that grows with every change, so that a reader can continue after the last
/// number that it has seen.
#[derive(Debug, Default)]
pub struct Log {
    events: BTreeMap<u64, Arc<Event>>,
    numbers: HashMap<Key, u64>,
    next: u64,
}

impl Log {
    fn of(events: Vec<Event>) -> Self {
        let mut log = Self::default();
        for event in events {
            log.insert(event);
        }
        log
    }

    /// Returns all events, the latest last.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Event>> {
        self.events.values().cloned().collect()
    }

    /// Returns the number of the next event.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Returns the first event with a number of at least `from`, and that number.
    #[must_use]
    pub fn at_or_after(&self, from: u64) -> Option<(u64, Arc<Event>)> {
        self.events.range(from..).next().map(|(number, event)| (*number, Arc::clone(event)))
    }

    fn insert(&mut self, event: Event) {
        let key = (event.object.clone(), event.kind, event.reason.clone(), event.message.clone());
        let known = self.numbers.remove(&key).and_then(|number| self.events.remove(&number));
        let event = match known {
            Some(known) => Event {
                first: known.first,
                last: event.last,
                count: known.count.saturating_add(event.count),
                ..event
            },
            None => event,
        };
        self.events.insert(self.next, Arc::new(event));
        self.numbers.insert(key, self.next);
        self.next += 1;
        while self.events.len() > CAPACITY {
            let Some((_, oldest)) = self.events.pop_first() else { break };
            let Event { object, kind, reason, message, .. } = &*oldest;
            self.numbers.remove(&(object.clone(), *kind, reason.clone(), message.clone()));
        }
    }
}

/// Writer of the log. Clones share the log.
#[derive(Clone, Debug)]
pub struct Recorder {
    log: watch::Sender<Log>,
}

impl Default for Recorder {
    /// Creates a recorder of a log in memory only.
    fn default() -> Self {
        Self { log: watch::Sender::new(Log::default()) }
    }
}

impl Recorder {
    /// Creates a recorder that continues the log of an earlier instance. A damaged log is set aside, with a
    /// warning.
    #[must_use]
    pub fn load(state: &State) -> Self {
        let events = match state.load::<Vec<Event>>(NAME) {
            Ok(Loaded::Value { value, .. }) => value,
            Ok(Loaded::Absent) => Vec::new(),
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(?moved_to, %reason, "the event log is damaged and was set aside; starting an empty one");
                Vec::new()
            }
            Err(error) => {
                warn!(%error, "cannot read the event log; starting an empty one");
                Vec::new()
            }
        };
        Self { log: watch::Sender::new(Log::of(events)) }
    }

    /// Records a normal event.
    pub fn normal(&self, object: Object, reason: &str, message: impl Into<String>) {
        self.record(object, Kind::Normal, reason, message.into());
    }

    /// Records a warning.
    pub fn warning(&self, object: Object, reason: &str, message: impl Into<String>) {
        self.record(object, Kind::Warning, reason, message.into());
    }

    /// Awaits `work`. An event says that the object waits for `subject` once that takes long, and again while
    /// it does.
    pub async fn while_waiting<T>(
        &self,
        object: impl Fn() -> Object,
        subject: &str,
        work: impl Future<Output = T>,
    ) -> T {
        let mut work = std::pin::pin!(work);
        let mut pause = WAITING_AFTER;
        loop {
            if let Ok(done) = tokio::time::timeout(pause, &mut work).await {
                return done;
            }
            pause = WAITING_PERIOD;
            self.normal(object(), "Waiting", format!("Waiting for {subject}"));
        }
    }

    fn record(&self, object: Object, kind: Kind, reason: &str, message: String) {
        let now = Timestamp::now();
        let message = shortened(message);
        let event =
            Event { object, kind, reason: reason.to_owned(), message, first: now, last: now, count: 1 };
        self.log.send_modify(|log| log.insert(event));
    }

    /// Returns the log, and follows its changes.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Log> {
        self.log.subscribe()
    }

    /// Returns the task that writes the log to disk, without waiting for fsync. The task ends, after a last
    /// write, with `shutdown`. A failure is logged once; the log in memory continues.
    pub fn writer(
        &self,
        state: Arc<State>,
        shutdown: tokio_util::sync::CancellationToken,
    ) -> impl Future<Output = ()> + Send + use<> {
        let mut log = self.log.subscribe();
        async move {
            let mut failing = false;
            loop {
                let ends = tokio::select! {
                    () = shutdown.cancelled() => true,
                    changed = log.changed() => changed.is_err(),
                };
                if !ends {
                    // The pause combines this event with the following ones.
                    tokio::select! { () = shutdown.cancelled() => {}, () = sleep(WRITE_PERIOD) => {} }
                }
                let events = log.borrow_and_update().all();
                let state = Arc::clone(&state);
                let written = spawn_blocking(move || {
                    state.store_for_this_boot(NAME, &events).map_err(|e| e.to_string())
                });
                match written.await.unwrap_or_else(|e| Err(e.to_string())) {
                    Ok(()) => failing = false,
                    Err(cause) if !failing => {
                        error!(
                            error = cause,
                            "cannot write the event log; a restart of the agent will lose events"
                        );
                        failing = true;
                    }
                    Err(_) => {}
                }
                if ends {
                    return;
                }
            }
        }
    }
}

fn shortened(mut message: String) -> String {
    in_the_middle(&mut message, MESSAGE_MAX);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(recorder: &Recorder) -> Vec<String> {
        let log = recorder.log.borrow();
        log.all().iter().map(|e| format!("{} x{}", e.message, e.count)).collect()
    }

    #[test]
    fn the_same_event_again_is_counted_and_moves_to_the_end() {
        let recorder = Recorder::default();
        let node = || Object::node("n1");
        recorder.normal(node(), "A", "first");
        recorder.normal(node(), "A", "second");
        recorder.normal(node(), "A", "first");
        recorder.warning(node(), "A", "first");
        assert_eq!(messages(&recorder), ["second x1", "first x2", "first x1"]);
        let log = recorder.log.borrow();
        let (number, event) = log.at_or_after(2).unwrap();
        assert_eq!((number, event.count), (2, 2));
        assert!(log.at_or_after(log.next()).is_none());
    }

    #[test]
    fn the_oldest_event_goes_when_there_is_no_room() {
        let recorder = Recorder::default();
        for n in 0..CAPACITY + 3 {
            recorder.normal(Object::node("n1"), "A", n.to_string());
        }
        let all = messages(&recorder);
        assert_eq!((all.len(), all[0].as_str()), (CAPACITY, "3 x1"));
        // A dropped event is new again.
        recorder.normal(Object::node("n1"), "A", "0");
        assert_eq!(messages(&recorder).last().unwrap(), "0 x1");
        assert_eq!(recorder.log.borrow().numbers.len(), CAPACITY);
    }

    #[test]
    fn a_long_message_says_what_failed_and_why() {
        let recorder = Recorder::default();
        let name = "ä".repeat(MESSAGE_MAX);
        recorder.normal(Object::node("n1"), "A", format!("cannot read {name}: it is missing"));
        let message = &recorder.log.borrow().all()[0].message;
        assert!(message.starts_with("cannot read ä") && message.ends_with("ä: it is missing"), "{message}");
        assert!((MESSAGE_MAX - 4..=MESSAGE_MAX).contains(&message.len()), "{}", message.len());
    }

    #[tokio::test]
    async fn the_log_survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        {
            let state = Arc::new(State::open(dir.path()).unwrap());
            let recorder = Recorder::load(&state);
            recorder.normal(Object::node("n1"), "A", "first");
            let shutdown = tokio_util::sync::CancellationToken::new();
            let writer = recorder.writer(state, shutdown.clone());
            shutdown.cancel();
            writer.await;
        }
        let state = State::open(dir.path()).unwrap();
        let recorder = Recorder::load(&state);
        recorder.normal(Object::node("n1"), "A", "first");
        assert_eq!(messages(&recorder), ["first x2"]);
    }
}
