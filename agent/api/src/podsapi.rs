//! The pods API v1alpha1 (KEP-4188): the node's pods with their local status, for programs on the node, on a
//! socket of its own. A pod is the protobuf of a `v1.Pod`, encoded again only after a change.
//!
//! As KEP-4188 requires, calls fail (`FAILED_PRECONDITION`) until all running pods are known.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use beelet_base::work::Work;
use beelet_codec::protobuf;
use beelet_model::table::{Complete, PodChanges, PodEntry, PodTable};
use beelet_proto::pods::{
    EventType, GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent,
    WatchPodsRequest,
    pods_server::{Pods, PodsServer},
};
use beelet_serve::grpc;
use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use prost::bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// Path of the socket below the kubelet's directory, as in the kubelet of 1.36.
const SOCKET: &str = "pods-api/pods-api.sock";

/// Inputs of the server.
pub struct Inputs {
    /// Directory of the kubelet.
    pub folder: PathBuf,
    /// The pods.
    pub pods: watch::Receiver<Arc<PodTable>>,
    /// Set once the table contains all running pods.
    pub complete: Complete,
}

/// Serves until `shutdown`. A failure to create the socket is logged and affects only this API's clients.
pub fn serve(inputs: Inputs, shutdown: CancellationToken) -> Work {
    Box::pin(async move {
        let Inputs { folder, pods, complete } = inputs;
        let listener = match grpc::bind(&folder.join(SOCKET)).await {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!("cannot serve the pods API: {error:#}");
                return shutdown.cancelled().await;
            }
        };
        let service = PodsServer::new(Server { pods, complete, known: Arc::default() });
        if let Err(error) = grpc::serve_others(listener, Routes::new(service), shutdown).await {
            tracing::error!("the pods API server failed: {error:#}");
        }
    })
}

struct Server {
    pods: watch::Receiver<Arc<PodTable>>,
    complete: Complete,
    known: Arc<Known>,
}

/// Last encoding of each pod by UID, shared by all clients.
#[derive(Default)]
struct Known(Mutex<HashMap<String, (Arc<PodEntry>, Bytes)>>);

impl Known {
    /// Returns a pod's encoding.
    fn bytes(&self, entry: &Arc<PodEntry>) -> Option<Bytes> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((before, bytes)) = known.get(uid(entry))
            && Arc::ptr_eq(before, entry)
        {
            return Some(bytes.clone());
        }
        let bytes = write(&entry.pod)?;
        known.insert(uid(entry).to_owned(), (Arc::clone(entry), bytes.clone()));
        Some(bytes)
    }

    /// Removes pods that are not in the table.
    fn keep(&self, table: &PodTable) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() > table.pods.len() {
            let here: HashSet<&str> = table.pods.values().map(|entry| uid(entry)).collect();
            known.retain(|uid, _| here.contains(uid.as_str()));
        }
    }

    /// Returns the events between two tables; shared parts are skipped.
    fn events(&self, before: &PodTable, after: &PodTable) -> Vec<WatchPodsEvent> {
        let changes = PodChanges::between(&before.pods, &after.pods);
        let (mut events, mut here) = (Vec::new(), Vec::new());
        for (_, entry) in changes.gone {
            events.extend(Some(entry).filter(|entry| is_shown(entry)).and_then(|entry| deleted(entry)));
        }
        for (name, entry) in changes.changed {
            let old = before.pods.get(name).filter(|old| is_shown(old));
            let is_same = old.is_some_and(|old| uid(old) == uid(entry));
            // A different pod with the same name, or the end of a deleted pod.
            events.extend(old.filter(|_| !is_same || !is_shown(entry)).and_then(|old| deleted(old)));
            if is_shown(entry) && old.is_none_or(|old| old.pod != entry.pod) {
                let kind = if is_same { EventType::Modified } else { EventType::Added };
                here.extend(self.bytes(entry).map(|bytes| event(kind, bytes)));
            }
        }
        self.keep(after);
        events.append(&mut here);
        events
    }
}

/// Returns true until a deleted pod has released everything: like the kubelet (`OnPodRemoved`), the API does
/// not wait for the API server's removal of the object.
fn is_shown(entry: &PodEntry) -> bool {
    !(entry.cleared && entry.pod.metadata.deletion_timestamp.is_some())
}

fn uid(entry: &PodEntry) -> &str {
    entry.pod.metadata.uid.as_deref().unwrap_or_default()
}

fn write(pod: &core::Pod) -> Option<Bytes> {
    let written = protobuf::pod(pod).map(Bytes::from);
    let name = || (pod.metadata.namespace.clone(), pod.metadata.name.clone());
    written
        .inspect_err(|error| tracing::error!(pod = ?name(), "cannot encode a pod as protobuf: {error}"))
        .ok()
}

/// Returns the guaranteed fields of a removed pod.
fn gone(pod: &core::Pod) -> core::Pod {
    let core::Pod { metadata: ObjectMeta { name, namespace, uid, .. }, .. } = pod.clone();
    core::Pod {
        metadata: ObjectMeta { name, namespace, uid, ..ObjectMeta::default() },
        ..core::Pod::default()
    }
}

fn event(kind: EventType, pod: Bytes) -> WatchPodsEvent {
    WatchPodsEvent { r#type: kind.into(), pod }
}

fn deleted(entry: &PodEntry) -> Option<WatchPodsEvent> {
    Some(event(EventType::Deleted, write(&gone(&entry.pod))?))
}

impl Server {
    fn table(&self) -> Result<Arc<PodTable>, Status> {
        if !self.complete.initialized() {
            return Err(Status::failed_precondition("the node does not know all of its pods yet"));
        }
        Ok(Arc::clone(&self.pods.borrow()))
    }
}

#[tonic::async_trait]
impl Pods for Server {
    type WatchPodsStream = Pin<Box<dyn Stream<Item = Result<WatchPodsEvent, Status>> + Send>>;

    async fn watch_pods(
        &self,
        _request: Request<WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        self.table()?;
        let (mut pods, known) = (self.pods.clone(), Arc::clone(&self.known));
        let first = Arc::clone(&pods.borrow_and_update());
        let mut start = known.events(&PodTable::default(), &first);
        start.push(event(EventType::InitialSyncComplete, Bytes::new()));
        // A slow client skips intermediate states: its view is compared with the current table.
        let changes = stream::unfold((pods, known, first), |(mut pods, known, before)| async move {
            pods.changed().await.ok()?;
            let after = Arc::clone(&pods.borrow_and_update());
            Some((known.events(&before, &after), (pods, known, after)))
        });
        let all = stream::iter(start).chain(changes.flat_map(stream::iter)).map(Ok);
        Ok(Response::new(Box::pin(all)))
    }

    async fn list_pods(&self, _: Request<ListPodsRequest>) -> Result<Response<ListPodsResponse>, Status> {
        let table = self.table()?;
        let shown = table.pods.values().filter(|entry| is_shown(entry));
        let pods = shown.filter_map(|entry| self.known.bytes(entry)).collect();
        self.known.keep(&table);
        Ok(Response::new(ListPodsResponse { pods }))
    }

    async fn get_pod(&self, request: Request<GetPodRequest>) -> Result<Response<GetPodResponse>, Status> {
        let wanted = request.into_inner().pod_uid;
        let table = self.table()?;
        let entry = table.pods.values().find(|entry| uid(entry) == wanted && is_shown(entry));
        let missing = || Status::not_found(format!("pod with UID {wanted} not found"));
        let pod = entry.and_then(|entry| self.known.bytes(entry)).ok_or_else(missing)?;
        Ok(Response::new(GetPodResponse { pod }))
    }
}

#[cfg(test)]
mod tests {
    use beelet_model::table::PodName;
    use tokio::sync::SetOnce;

    use super::*;

    fn table(pods: &[(&str, &str)]) -> Arc<PodTable> {
        let entry = |(uid, phase): &(&str, &str)| {
            let metadata = ObjectMeta {
                name: Some(format!("pod-{uid}")),
                namespace: Some("shop".to_owned()),
                uid: Some((*uid).to_owned()),
                ..ObjectMeta::default()
            };
            let status = core::PodStatus { phase: Some((*phase).to_owned()), ..core::PodStatus::default() };
            let pod = core::Pod { metadata, status: Some(status), ..core::Pod::default() };
            (PodName::of(&pod), Arc::new(PodEntry::of(pod)))
        };
        Arc::new(PodTable { pods: pods.iter().map(entry).collect(), ..PodTable::default() })
    }

    fn server(first: Arc<PodTable>) -> (Server, watch::Sender<Arc<PodTable>>, Complete) {
        let (out, pods) = watch::channel(first);
        let complete: Complete = Arc::new(SetOnce::new());
        (Server { pods, complete: Arc::clone(&complete), known: Arc::default() }, out, complete)
    }

    #[tokio::test]
    async fn nothing_is_said_before_all_that_runs_is_known() {
        let (server, _out, complete) = server(table(&[("u1", "Running")]));
        let refused = server.list_pods(Request::new(ListPodsRequest {})).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        complete.set(()).unwrap();
        let listed = server.list_pods(Request::new(ListPodsRequest {})).await.unwrap().into_inner();
        assert_eq!(listed.pods.len(), 1);
        let get = |uid: &str| server.get_pod(Request::new(GetPodRequest { pod_uid: uid.to_owned() }));
        assert_eq!(get("u1").await.unwrap().into_inner().pod, listed.pods[0]);
        assert_eq!(get("u2").await.unwrap_err().code(), tonic::Code::NotFound);
    }

    #[tokio::test]
    async fn a_watch_begins_with_what_there_is_and_tells_each_change_once() {
        let (server, out, complete) = server(table(&[("u1", "Running"), ("u2", "Running")]));
        complete.set(()).unwrap();
        let mut events = server.watch_pods(Request::new(WatchPodsRequest {})).await.unwrap().into_inner();
        let mut next = async |expected: EventType| {
            let event = events.next().await.unwrap().unwrap();
            assert_eq!(event.r#type(), expected);
            event.pod
        };
        next(EventType::Added).await;
        next(EventType::Added).await;
        assert!(next(EventType::InitialSyncComplete).await.is_empty());
        // An identical pod is not a change; a terminated or removed pod is.
        out.send_replace(table(&[("u1", "Running"), ("u2", "Running")]));
        out.send_replace(table(&[("u1", "Failed"), ("u3", "Pending")]));
        let deleted = next(EventType::Deleted).await;
        let text =
            |bytes: &[u8], part: &str| bytes.windows(part.len()).any(|window| window == part.as_bytes());
        assert!(text(&deleted, "pod-u2") && text(&deleted, "shop") && !text(&deleted, "Running"));
        assert!(text(&next(EventType::Modified).await, "Failed"));
        assert!(text(&next(EventType::Added).await, "pod-u3"));
        // A deleted pod is gone once all of it has ended, before its object is.
        let mut ending = table(&[("u1", "Failed"), ("u3", "Pending")]);
        let deletion = |ending: &mut Arc<PodTable>, cleared: bool| {
            let name = PodName { namespace: "shop".to_owned(), name: "pod-u3".to_owned() };
            let entry = Arc::make_mut(Arc::make_mut(ending).pods.get_mut(&name).unwrap());
            let since = serde_json::from_value("2026-01-01T00:00:00Z".into()).unwrap();
            (entry.pod.metadata.deletion_timestamp, entry.cleared) = (since, cleared);
        };
        deletion(&mut ending, false);
        out.send_replace(Arc::clone(&ending));
        assert!(text(&next(EventType::Modified).await, "pod-u3"));
        deletion(&mut ending, true);
        out.send_replace(Arc::clone(&ending));
        assert!(text(&next(EventType::Deleted).await, "pod-u3"));
        let listed = server.list_pods(Request::new(ListPodsRequest {})).await.unwrap().into_inner();
        assert_eq!(listed.pods.len(), 1);
        out.send_replace(table(&[("u1", "Running")]));
        assert!(text(&next(EventType::Modified).await, "pod-u1"));
        let known = server.known.0.lock().unwrap();
        assert!(known.len() == 1 && !known.contains_key("u2"), "removed pods are dropped");
    }
}
