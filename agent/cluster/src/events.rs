//! Writes the node's events to the API server: correlated as in client-go (`policy::node::events`), one
//! request at a time, at the configured rate.
//!
//! The event log itself is the queue. While the API server is away the log continues, and events that the log
//! drops (the oldest beyond its bound) are not sent. No other task waits for this one.

use std::time::Duration;

use beelet_codec::ApiType;
use beelet_policy::node::events::{Correlator, Incoming, Key, Outgoing};
use beelet_state::events::{Event, Log, Object};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1 as core,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    backoff::Backoff,
    client::{Client, Error, Patch},
    url::escaped,
};

/// Reporting component: the kubelet's, so that queries for a kubelet's events match.
const REPORTER: &str = "kubelet";
/// Namespace of events about the node, which is not namespaced.
const DEFAULT: &str = "default";

/// Counters.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    sent: Counter,
    held_back: Counter,
    refused: Counter,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("beelet_api_events", "Events written to the API server", self.sent.clone());
        let help = "Events not sent because their object had too many events recently";
        registry.register("beelet_api_events_held_back", help, self.held_back.clone());
        let help = "Events that the API server refused permanently";
        registry.register("beelet_api_events_refused", help, self.refused.clone());
    }
}

/// Source and limits of the events.
#[derive(Clone, Debug)]
pub struct Source {
    /// The node's name.
    pub node_name: String,
    /// Start of the agent; an earlier run has sent older events.
    pub began: Timestamp,
    /// Maximum number of events per second; 0 for no limit.
    pub per_second: u32,
    /// Maximum number of events at once after a quiet time.
    pub burst: u32,
}

/// Sends new events of the log until `stop`.
pub async fn send(
    client: Client,
    log: watch::Receiver<Log>,
    source: Source,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let pace = Pace::new(source.per_second, source.burst);
    let correlator = Correlator::new(source.began);
    let mut sender = Sender { client, source, metrics, correlator, pace, failing: false };
    stop.run_until_cancelled(sender.run(log)).await;
}

struct Sender {
    client: Client,
    source: Source,
    metrics: Metrics,
    correlator: Correlator,
    pace: Pace,
    failing: bool,
}

impl Sender {
    async fn run(&mut self, mut log: watch::Receiver<Log>) {
        let mut next = 0;
        loop {
            let found = log.borrow_and_update().at_or_after(next);
            let Some((number, event)) = found else {
                if log.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                continue;
            };
            next = number + 1;
            if event.last < self.source.began {
                continue;
            }
            match self.correlator.event(&incoming(&event), Timestamp::now()) {
                Some(outgoing) => self.deliver(&event.object, outgoing).await,
                None => {
                    self.metrics.held_back.inc();
                }
            }
        }
    }

    /// Writes an event, without a time limit; drops an event that the API server refuses permanently.
    async fn deliver(&mut self, about: &Object, mut outgoing: Outgoing) {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        loop {
            self.pace.wait().await;
            let error = match self.write(about, &outgoing).await {
                Ok(name) => {
                    self.correlator.written(&outgoing.key, Some(name));
                    self.metrics.sent.inc();
                    if std::mem::take(&mut self.failing) {
                        info!("writing events to the API server again");
                    }
                    return;
                }
                Err(error) => error,
            };
            if error.is_not_found() && outgoing.name.is_some() {
                // The API server removes events after an hour: create the event again.
                outgoing.name = None;
                self.correlator.written(&outgoing.key, None);
            } else if error.is_transient() {
                if !std::mem::replace(&mut self.failing, true) {
                    warn!("cannot write events to the API server, retrying: {error}");
                }
                self.client.presence().pause(&mut backoff, &error).await;
            } else {
                // E.g. the pod's namespace is being deleted.
                debug!("the API server refused an event: {error}");
                self.metrics.refused.inc();
                return;
            }
        }
    }

    async fn write(&self, about: &Object, outgoing: &Outgoing) -> Result<String, Error> {
        let namespace = match about {
            Object::Pod { name, .. } => name.namespace.as_str(),
            Object::Claim { namespace, .. } => namespace,
            Object::Node { .. } => DEFAULT,
        };
        let path = format!("/api/v1/namespaces/{}/events", escaped(namespace));
        if let Some(name) = &outgoing.name {
            let body = json!({
                "count": outgoing.count,
                "lastTimestamp": rfc3339(outgoing.last),
                "message": outgoing.message,
            });
            self.client.patch(&format!("{path}/{}", escaped(name)), Patch::StrategicMerge, &body).await?;
            return Ok(name.clone());
        }
        let object = reference(about);
        // A unique name in client-go's format.
        let instant = Timestamp::now().as_nanosecond();
        let name = format!("{}.{instant:x}", object.name.as_deref().unwrap_or_default());
        let event = event(&self.source.node_name, object, namespace, &name, outgoing);
        self.client.create(&path, &event.to_value()).await?;
        Ok(name)
    }
}

fn rfc3339(at: Timestamp) -> String {
    format!("{at:.0}")
}

/// Converts an event of the log for the correlator.
fn incoming(event: &Event) -> Incoming {
    let object = match &event.object {
        Object::Pod { name, uid, container, .. } => {
            format!("Pod/{}/{}/{uid}/{}", name.namespace, name.name, container.as_deref().unwrap_or_default())
        }
        Object::Node { name } => format!("Node/{name}"),
        Object::Claim { namespace, name, uid } => format!("PersistentVolumeClaim/{namespace}/{name}/{uid}"),
    };
    let key = Key {
        object,
        kind: event.kind.as_str(),
        reason: event.reason.clone(),
        message: Some(event.message.clone()),
    };
    Incoming { key, first: event.first, last: event.last, count: event.count }
}

fn reference(about: &Object) -> core::ObjectReference {
    let (kind, namespace, name, uid) = match about {
        Object::Pod { name, uid, .. } => ("Pod", Some(name.namespace.clone()), &name.name, uid),
        // As in the kubelet, the UID is the name: `kubectl describe node` searches for it.
        Object::Node { name } => ("Node", None, name, name),
        Object::Claim { namespace, name, uid } => {
            ("PersistentVolumeClaim", Some(namespace.clone()), name, uid)
        }
    };
    let field = match about {
        Object::Pod { container: Some(container), kind, .. } => {
            Some(format!("spec.{}{{{container}}}", kind.as_str()))
        }
        _ => None,
    };
    core::ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some(kind.to_owned()),
        namespace,
        name: Some(name.clone()),
        uid: Some(uid.clone()).filter(|uid| !uid.is_empty()),
        field_path: field,
        ..core::ObjectReference::default()
    }
}

fn event(
    node_name: &str,
    object: core::ObjectReference,
    namespace: &str,
    name: &str,
    outgoing: &Outgoing,
) -> core::Event {
    core::Event {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: object,
        reason: Some(outgoing.key.reason.clone()),
        message: Some(outgoing.message.clone()),
        type_: Some(outgoing.key.kind.to_owned()),
        count: i32::try_from(outgoing.count).ok(),
        first_timestamp: Some(Time(outgoing.first)),
        last_timestamp: Some(Time(outgoing.last)),
        source: Some(core::EventSource {
            component: Some(REPORTER.to_owned()),
            host: Some(node_name.to_owned()),
        }),
        reporting_component: Some(REPORTER.to_owned()),
        reporting_instance: Some(node_name.to_owned()),
        ..core::Event::default()
    }
}

/// Rate limit: an average rate and a burst.
struct Pace {
    every: Duration,
    /// Time at which all tokens are available again; at most `ahead` in the future.
    full: Instant,
    ahead: Duration,
}

impl Pace {
    fn new(per_second: u32, burst: u32) -> Self {
        let every = Duration::from_secs(1).checked_div(per_second).unwrap_or_default();
        Self { every, full: Instant::now(), ahead: every.saturating_mul(burst.saturating_sub(1)) }
    }

    async fn wait(&mut self) {
        let now = Instant::now();
        if let Some(until) = self.full.checked_sub(self.ahead).filter(|until| *until > now) {
            sleep_until(until).await;
        }
        self.full = self.full.max(now) + self.every;
    }
}

#[cfg(test)]
mod tests {
    use beelet_model::table::PodName;
    use beelet_state::events::Recorder;

    use super::*;
    use crate::testing::Server;

    fn web() -> Object {
        let name = PodName { namespace: "shop".to_owned(), name: "web".to_owned() };
        let kind = beelet_model::pod::ContainerKind::Init;
        Object::Pod { name, uid: "u-1".to_owned(), container: Some("app".to_owned()), kind }
    }

    struct Sending {
        recorder: Recorder,
        server: Server,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    fn start(server: &Server, per_second: u32) -> Sending {
        let (recorder, stop) = (Recorder::default(), CancellationToken::new());
        let source =
            Source { node_name: "n1".to_owned(), began: Timestamp::UNIX_EPOCH, per_second, burst: 10 };
        let task = tokio::spawn(send(
            server.client(),
            recorder.subscribe(),
            source,
            Metrics::default(),
            stop.clone(),
        ));
        Sending { recorder, server: server.clone(), stop, task }
    }

    impl Sending {
        /// Waits for at least `wanted` requests and returns them.
        async fn requests(&self, wanted: usize) -> Vec<String> {
            self.server.until(|requests| requests.len() >= wanted).await
        }

        async fn end(self) {
            self.stop.cancel();
            self.task.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_is_made_once_and_counted_from_then_on() {
        let server = Server::default();
        let sending = start(&server, 50);
        sending.recorder.normal(web(), "Pulled", "it is here");
        let made = sending.requests(1).await;
        assert_eq!(made, ["POST /api/v1/namespaces/shop/events"]);
        sending.recorder.normal(web(), "Pulled", "it is here");
        let all = sending.requests(2).await;
        assert!(all[1].starts_with("PATCH /api/v1/namespaces/shop/events/web."), "{all:?}");
        let path = all[1].strip_prefix("PATCH ").unwrap();
        let event = server.until_object(path, |event| event["count"] == 2).await;
        assert_eq!(event["involvedObject"]["fieldPath"], "spec.initContainers{app}");
        assert_eq!(event["involvedObject"]["uid"], "u-1");
        assert_eq!(
            (&event["reportingComponent"], &event["reportingInstance"]),
            (&json!("kubelet"), &json!("n1"))
        );
        assert_eq!((&event["source"]["host"], &event["type"]), (&json!("n1"), &json!("Normal")));
        // The API server removed the event: the agent creates it again, with its count.
        server.remove(path);
        sending.recorder.normal(web(), "Pulled", "it is here");
        let all = sending.requests(4).await;
        assert_eq!(all[3], "POST /api/v1/namespaces/shop/events");
        sending.end().await;
    }

    #[tokio::test(start_paused = true)]
    async fn events_wait_while_the_server_is_away() {
        let server = Server::default();
        server.fail(true);
        let sending = start(&server, 50);
        sending.recorder.warning(Object::node("n1"), "Short", "of memory");
        sending.recorder.normal(web(), "Pulled", "it is here");
        sending.requests(5).await;
        server.fail(false);
        let posted = |requests: &[String], wanted: &str| requests.last().is_some_and(|last| last == wanted);
        server.until(|requests| posted(requests, "POST /api/v1/namespaces/shop/events")).await;
        let all = server.requests();
        assert!(
            all[..all.len() - 1].iter().all(|request| request == "POST /api/v1/namespaces/default/events")
        );
        sending.end().await;
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_are_sent_per_second_than_configured() {
        let server = Server::default();
        let began = Instant::now();
        let sending = start(&server, 2);
        for n in 0..14 {
            sending.recorder.normal(Object::node(&format!("n{n}")), "A", "a");
        }
        sending.requests(14).await;
        let took = began.elapsed();
        assert!((Duration::from_millis(1900)..Duration::from_secs(3)).contains(&took), "{took:?}");
        sending.end().await;
    }
}
