//! `/containerLogs/{namespace}/{pod}/{container}`: the data of `kubectl logs`, byte for byte as from the
//! kubelet, except that rotated files are read too.
//!
//! Sources: getContainerLogs in pkg/kubelet/server/server.go, validateContainerLogStatus in
//! pkg/kubelet/kubelet_pods.go, ValidatePodLogOptions in pkg/apis/core/validation.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Extension, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream::unfold;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;

use beelet_logs::Stream;
use beelet_logs::read::{self, Piece, Wanted};
use beelet_model::pod::{log_folder, log_path};
use beelet_model::status::runtime_id;

use crate::App;
use crate::connection::Peer;
use crate::containers::{Failure, Target, ended, has_container, status_of};

/// Pieces queued for one reader. A slower reader blocks the reading, as with a pipe.
const QUEUE: usize = 16;

/// Name and value pairs of a query.
pub(crate) type Pairs = Vec<(String, String)>;

/// `v1.PodLogOptions`.
#[derive(Clone, Debug, Default, PartialEq)]
struct Options {
    follow: bool,
    previous: bool,
    timestamps: bool,
    since_seconds: Option<i64>,
    since_time: Option<Timestamp>,
    tail: Option<i64>,
    limit: Option<i64>,
    stream: Option<Stream>,
}

impl Options {
    fn read(pairs: &[(String, String)]) -> Result<Self, Failure> {
        let unreadable =
            || Failure::new(StatusCode::BAD_REQUEST, "{\"message\": \"Unable to decode query.\"}");
        let value = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        // As for the API's parameters: only a missing value, false and 0 mean no.
        let flag = |name: &str| value(name).is_some_and(|value| !matches!(value, "false" | "0"));
        let number =
            |name: &str| value(name).map(|value| value.parse::<i64>().map_err(|_| unreadable())).transpose();
        let tail = match value("tail").filter(|tail| !tail.is_empty()) {
            // An older name, which takes precedence.
            Some("all") => None,
            Some(tail) => Some(tail.parse().map_err(|_| unreadable())?),
            None => number("tailLines")?,
        };
        let since_time = value("sinceTime").filter(|time| !time.is_empty());
        let options = Self {
            follow: flag("follow"),
            previous: flag("previous"),
            timestamps: flag("timestamps"),
            since_seconds: number("sinceSeconds")?,
            since_time: since_time.map(|time| time.parse().map_err(|_| unreadable())).transpose()?,
            tail,
            limit: number("limitBytes")?,
            stream: match value("stream") {
                None | Some("" | "All") => None,
                Some("Stdout") => Some(Stream::Out),
                Some("Stderr") => Some(Stream::Err),
                Some(_) => return Err(invalid()),
            },
        };
        let sound = options.tail.is_none_or(|lines| lines >= 0)
            && options.limit.is_none_or(|bytes| bytes >= 1)
            && options.since_seconds.is_none_or(|seconds| seconds >= 1)
            && (options.since_seconds.is_none() || options.since_time.is_none())
            && (options.stream.is_none() || options.tail.is_none());
        if sound { Ok(options) } else { Err(invalid()) }
    }

    fn wanted(&self, now: Timestamp) -> Wanted {
        let seconds = |seconds| now.checked_sub(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN);
        Wanted {
            tail: self.tail.and_then(|lines| u64::try_from(lines).ok()),
            since: self.since_time.or(self.since_seconds.map(seconds)),
            timestamps: self.timestamps,
            stream: self.stream,
        }
    }
}

fn invalid() -> Failure {
    Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "{\"message\": \"Invalid request.\"}")
}

/// Returns the attempt number of the requested instance, and true if its log is still being written.
fn instance(
    pod: &str,
    status: Option<&core::ContainerStatus>,
    name: &str,
    previous: bool,
) -> Result<(u32, bool), Failure> {
    let refuse = |what: String| {
        Err(Failure::new(StatusCode::BAD_REQUEST, format!("container {name:?} in pod {pod:?} {what}")))
    };
    let Some(status) = status else { return refuse("is not available".to_owned()) };
    let newest = u32::try_from(status.restart_count).unwrap_or(0);
    let state = status.state.clone().unwrap_or_default();
    let has_id =
        |ended: &core::ContainerStateTerminated| ended.container_id.as_ref().is_some_and(|id| !id.is_empty());
    let last =
        status.last_state.as_ref().and_then(|last| last.terminated.as_ref()).filter(|last| has_id(last));
    let is_over = state.terminated.as_ref().is_some_and(has_id);
    match (previous, &state.running, &state.terminated, last) {
        // While the next instance waits to start, the newest one is the previous one.
        (true, None, _, Some(_)) if !is_over => Ok((newest, false)),
        (true, _, _, Some(_)) => Ok((newest.saturating_sub(1), false)),
        (true, _, _, None) => {
            let sentence = format!("previous terminated container {name:?} in pod {pod:?} not found");
            Err(Failure::new(StatusCode::BAD_REQUEST, sentence))
        }
        (false, Some(_), _, _) => Ok((newest, true)),
        (false, None, Some(_), _) if is_over => Ok((newest, false)),
        (false, None, _, Some(_)) => Ok((newest, false)),
        (false, None, Some(_), None) => refuse("is terminated".to_owned()),
        (false, None, None, None) => match state.waiting.and_then(|waiting| waiting.reason).as_deref() {
            Some("ErrImagePull") => refuse("is waiting to start: image can't be pulled".to_owned()),
            Some("ImagePullBackOff") => {
                refuse("is waiting to start: trying and failing to pull image".to_owned())
            }
            Some(reason) => refuse(format!("is waiting to start: {reason}")),
            None => refuse("is waiting to start - no logs yet".to_owned()),
        },
    }
}

pub(crate) async fn container_logs(
    State(app): State<App>,
    Extension(peer): Extension<Arc<Peer>>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    Query(pairs): Query<Pairs>,
) -> Result<Response, Failure> {
    let options = Options::read(&pairs)?;
    let full = |_| Failure::new(StatusCode::SERVICE_UNAVAILABLE, "too many logs are being read\n");
    let room = Arc::clone(&app.log_readers).try_acquire_owned().map_err(full)?;
    let target = Target { namespace, pod, uid: None, container };
    let found = target.find(&app.table.borrow());
    let (name, entry) = found
        .map_err(|_| Failure::new(StatusCode::NOT_FOUND, format!("pod {:?} does not exist\n", target.pod)))?;
    if !has_container(&entry.pod, &target.container) {
        let sentence = format!("container {:?} not found in pod {:?}\n", target.container, target.pod);
        return Err(Failure::new(StatusCode::NOT_FOUND, sentence));
    }
    let status = status_of(&entry.pod, &target.container);
    let (attempt, runs) = instance(&target.pod, status, &target.container, options.previous)?;
    let uid = entry.pod.metadata.uid.clone();
    let path = log_folder(&app.logs, &name, uid.as_deref().unwrap_or_default())
        .join(log_path(&target.container, attempt));
    let folder = path.parent().unwrap_or(&path).to_owned();
    if !tokio::fs::try_exists(&folder).await.unwrap_or(false) {
        let sentence =
            format!("the logs of container {:?} in pod {:?} no longer exist", target.container, target.pod);
        return Err(Failure::new(StatusCode::BAD_REQUEST, sentence));
    }
    let id = status.and_then(runtime_id).map(str::to_owned);
    let end = (options.follow && runs).then(|| ended(app.table.clone(), name, uid, id));
    let (pieces, read) = mpsc::channel(QUEUE);
    let wanted = options.wanted(Timestamp::now());
    let stop = app.shutdown.clone();
    let reading = tokio::spawn(async move {
        tokio::select! {
            done = read::read(path, wanted, pieces, end) => done,
            () = stop.cancelled() => Ok(()),
        }
    });
    let left = options.limit.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
    let answer = Answer { read, left, peer, reading: Some(reading), _room: room };
    let body = Body::from_stream(unfold(answer, Answer::next));
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response())
}

/// A log being sent to a client.
struct Answer {
    read: mpsc::Receiver<Piece>,
    /// Remaining bytes of the limit.
    left: usize,
    peer: Arc<Peer>,
    /// Task that reads the log; None once its result is known.
    reading: Option<JoinHandle<Result<(), beelet_logs::Error>>>,
    _room: OwnedSemaphorePermit,
}

impl Answer {
    async fn next(mut self) -> Option<(io::Result<Vec<u8>>, Self)> {
        let piece = if self.left == 0 { None } else { self.read.recv().await };
        let Some(mut bytes) = piece.map(|piece| piece.bytes) else {
            return self.end().await;
        };
        bytes.truncate(self.left);
        self.left -= bytes.len();
        Some((Ok(bytes), self))
    }

    /// Ends the answer. An incomplete log ends with an error.
    async fn end(mut self) -> Option<(io::Result<Vec<u8>>, Self)> {
        let reading = self.reading.take().filter(|_| self.left > 0);
        if let Some(reading) = reading
            && let Ok(Err(error)) = reading.await
        {
            tracing::warn!("cannot read a log to its end: {error}");
            return Some((Err(io::Error::other(error)), self));
        }
        // The end must not share a TLS record with the last line, as it never does with the kubelet: an API
        // server that forwards a log over a WebSocket drops the bytes that arrive together with the end
        // (messageCopy in apimachinery's util/httpstream/wsstream ignores the bytes that it read with
        // io.EOF).
        self.peer.has_written().await;
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn options(query: &str) -> Result<Options, u16> {
        let pairs: Vec<(String, String)> = query
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        Options::read(&pairs).map_err(|failure| failure.0.as_u16())
    }

    #[test]
    fn options_are_read_as_the_api_writes_them() {
        let check =
            |query: &str, expected: Result<Options, u16>| assert_eq!(options(query), expected, "{query}");
        let none = Options::default;
        check("", Ok(none()));
        check(
            "follow=true&timestamps=1&previous=false",
            Ok(Options { follow: true, timestamps: true, ..none() }),
        );
        check("follow", Ok(Options { follow: true, ..none() }));
        check("tailLines=3&limitBytes=10", Ok(Options { tail: Some(3), limit: Some(10), ..none() }));
        check("tail=all&tailLines=3", Ok(none()));
        check("tail=2", Ok(Options { tail: Some(2), ..none() }));
        check("stream=Stderr", Ok(Options { stream: Some(Stream::Err), ..none() }));
        let time = Some("2026-11-21T19:00:00Z".parse().unwrap());
        check("sinceTime=2026-11-21T19:00:00Z", Ok(Options { since_time: time, ..none() }));
        for query in ["tailLines=x", "limitBytes=", "sinceTime=yesterday", "sinceSeconds=1.5"] {
            check(query, Err(400));
        }
        for query in [
            "tailLines=-1",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceSeconds=1&sinceTime=2026-11-21T19:00:00Z",
            "stream=Both",
            "stream=Stdout&tailLines=1",
        ] {
            check(query, Err(422));
        }
    }

    #[test]
    fn the_instance_is_the_one_that_the_kubelet_would_take() {
        let check = |state: serde_json::Value,
                     last: serde_json::Value,
                     previous: bool,
                     expected: Result<(u32, bool), &str>| {
            let status = json!({
                "name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 2,
                "state": state, "lastState": last,
            });
            let status: core::ContainerStatus = serde_json::from_value(status).unwrap();
            match (instance("p", Some(&status), "c", previous), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{state} {last} {previous}"),
                (Err(failure), Err(part)) => assert!(failure.1.contains(part), "{}", failure.1),
                (found, _) => panic!("{state} {last} {previous}: {found:?}"),
            }
        };
        let running = || json!({ "running": {} });
        let over = || json!({ "terminated": { "exitCode": 1, "containerID": "containerd://a" } });
        let waiting = |reason: &str| json!({ "waiting": { "reason": reason } });
        check(running(), json!({}), false, Ok((2, true)));
        check(running(), over(), true, Ok((1, false)));
        check(running(), json!({}), true, Err("previous terminated container \"c\" in pod \"p\" not found"));
        check(over(), over(), false, Ok((2, false)));
        check(over(), over(), true, Ok((1, false)));
        check(waiting("CrashLoopBackOff"), over(), false, Ok((2, false)));
        check(waiting("CrashLoopBackOff"), over(), true, Ok((2, false)));
        check(waiting("ErrImagePull"), json!({}), false, Err("is waiting to start: image can't be pulled"));
        check(waiting("ImagePullBackOff"), json!({}), false, Err("trying and failing to pull image"));
        check(
            waiting("PodInitializing"),
            json!({}),
            false,
            Err("container \"c\" in pod \"p\" is waiting to start: PodInitializing"),
        );
        check(json!({ "terminated": { "exitCode": 1 } }), json!({}), false, Err("is terminated"));
        check(json!({}), json!({}), false, Err("no logs yet"));
        assert!(instance("p", None, "c", false).unwrap_err().1.contains("is not available"));
    }
}
