//! The event log for clients.

use beelet_proto::beelet as proto;
use beelet_proto::beelet::events_server::{Events, EventsServer};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use beelet_state::events::{Event, Log, Object, Recorder};

/// Events queued for one client. A slower client receives the rest once it has caught up.
const QUEUE: usize = 64;

/// Returns the service.
#[must_use]
pub fn service(
    recorder: &Recorder,
    node_name: &str,
    shutdown: CancellationToken,
) -> EventsServer<impl Events + use<>> {
    EventsServer::new(EventService { log: recorder.subscribe(), suffix: format!("-{node_name}"), shutdown })
}

#[derive(Debug)]
struct EventService {
    log: watch::Receiver<Log>,
    /// Suffix of static pods' names.
    suffix: String,
    shutdown: CancellationToken,
}

#[tonic::async_trait]
impl Events for EventService {
    type ListEventsStream = ReceiverStream<Result<proto::Event, Status>>;

    async fn list_events(
        &self,
        request: Request<proto::ListEventsRequest>,
    ) -> Result<Response<Self::ListEventsStream>, Status> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (log, shutdown, suffix) = (self.log.clone(), self.shutdown.clone(), self.suffix.clone());
        let wanted = request.into_inner();
        tokio::spawn(async move {
            tokio::select! {
                () = send_all(log, &wanted, &suffix, &sender) => {}
                () = shutdown.cancelled() => {
                    // Without room in the queue, the end of the stream has the same meaning.
                    let _ = sender.try_send(Err(Status::unavailable("the agent is shutting down")));
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// Sends the recorded events, and with `watch` new events, until the client or the log is closed.
async fn send_all(
    mut log: watch::Receiver<Log>,
    wanted: &proto::ListEventsRequest,
    suffix: &str,
    sender: &mpsc::Sender<Result<proto::Event, Status>>,
) {
    let mut from = 0;
    let mut synced = false;
    loop {
        loop {
            // The log is read once the queue has room, so that a slow client receives the newest state.
            let Ok(room) = sender.reserve().await else { return };
            let Some((number, event)) = log.borrow_and_update().at_or_after(from) else { break };
            from = number + 1;
            if let Some(event) = encode(&event, wanted, suffix) {
                room.send(Ok(event));
            }
        }
        if !wanted.watch {
            return;
        }
        if !synced {
            synced = true;
            if sender.send(Ok(proto::Event { synced, ..Default::default() })).await.is_err() {
                return;
            }
        }
        tokio::select! {
            changed = log.changed() => if changed.is_err() { return },
            () = sender.closed() => return,
        }
    }
}

/// Encodes an event that matches the request. A pod matches by its name with or without `suffix`, also after
/// its removal.
fn encode(event: &Event, wanted: &proto::ListEventsRequest, suffix: &str) -> Option<proto::Event> {
    let (object_kind, namespace, name, uid, container) = match &event.object {
        Object::Pod { name, uid, container, .. } => {
            ("Pod", name.namespace.clone(), name.name.clone(), uid.clone(), container.clone())
        }
        Object::Node { name } => ("Node", String::new(), name.clone(), String::new(), None),
        Object::Claim { namespace, name, uid } => {
            ("PersistentVolumeClaim", namespace.clone(), name.clone(), uid.clone(), None)
        }
    };
    let fits = |wish: &str, is: &str| wish.is_empty() || wish == is;
    let is_short = || name.strip_suffix(suffix) == Some(wanted.pod.as_str());
    let fits_pod = wanted.pod.is_empty() || object_kind == "Pod" && (wanted.pod == name || is_short());
    if !fits(&wanted.namespace, &namespace) || !fits_pod || !fits(&wanted.uid, &uid) {
        return None;
    }
    let nanoseconds = |t: jiff::Timestamp| i64::try_from(t.as_nanosecond()).unwrap_or(i64::MAX);
    Some(proto::Event {
        object_kind: object_kind.to_owned(),
        namespace,
        name,
        uid,
        container: container.unwrap_or_default(),
        r#type: event.kind.as_str().to_owned(),
        reason: event.reason.clone(),
        message: event.message.clone(),
        first_ns: nanoseconds(event.first),
        last_ns: nanoseconds(event.last),
        count: event.count,
        synced: false,
    })
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;
    use beelet_model::table::PodName;

    fn recorder() -> Recorder {
        let recorder = Recorder::default();
        let name = |name: &str| PodName { namespace: "shop".to_owned(), name: name.to_owned() };
        let of = |pod: &str| Object::Pod {
            name: name(pod),
            uid: format!("{pod}-uid"),
            container: None,
            kind: beelet_model::pod::ContainerKind::default(),
        };
        recorder.normal(Object::node("n1"), "Starting", "up");
        recorder.normal(of("a"), "Started", "a runs");
        recorder.normal(of("b-n1"), "Started", "b runs");
        recorder
    }

    async fn ask(
        recorder: &Recorder,
        wanted: proto::ListEventsRequest,
    ) -> ReceiverStream<Result<proto::Event, Status>> {
        let (log, suffix) = (recorder.subscribe(), "-n1".to_owned());
        let service = EventService { log, suffix, shutdown: CancellationToken::new() };
        service.list_events(Request::new(wanted)).await.unwrap().into_inner()
    }

    async fn messages(wanted: proto::ListEventsRequest) -> Vec<String> {
        let stream = ask(&recorder(), wanted).await;
        stream.map(|event| event.unwrap().message).collect().await
    }

    #[tokio::test]
    async fn the_list_ends_and_is_of_what_was_asked_for() {
        let all = proto::ListEventsRequest::default();
        assert_eq!(messages(all.clone()).await, ["up", "a runs", "b runs"]);
        for name in ["b", "b-n1"] {
            let of_one = proto::ListEventsRequest { pod: name.to_owned(), ..all.clone() };
            assert_eq!(messages(of_one).await, ["b runs"], "{name}");
        }
        let shop = proto::ListEventsRequest { namespace: "shop".to_owned(), ..all.clone() };
        assert_eq!(messages(shop).await, ["a runs", "b runs"]);
        assert!(messages(proto::ListEventsRequest { uid: "x".to_owned(), ..all }).await.is_empty());
    }

    #[tokio::test]
    async fn a_watch_tells_when_it_is_in_step_and_then_what_comes() {
        let recorder = recorder();
        let mut stream = ask(&recorder, proto::ListEventsRequest { watch: true, ..Default::default() }).await;
        for expected in ["up", "a runs", "b runs"] {
            assert_eq!(stream.next().await.unwrap().unwrap().message, expected);
        }
        assert!(stream.next().await.unwrap().unwrap().synced);
        recorder.normal(Object::node("n1"), "Starting", "up");
        let again = stream.next().await.unwrap().unwrap();
        assert_eq!((again.message.as_str(), again.count), ("up", 2));
    }
}
