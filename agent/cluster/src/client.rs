//! Requests to the API server, as JSON values. Callers choose the path. Answers are bounded in size and time.
//! Errors contain the request and the cause.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use beelet_units::{bounds, shorten::in_the_middle};
use futures::{Stream, StreamExt, stream::try_unfold};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt},
    sync::watch,
    time::timeout,
};
use tokio_util::io::StreamReader;

use crate::{presence::Presence, url};

pub use crate::error::{Error, Kind};

/// Maximum size of an answer, in bytes: a list of 110 pods of the largest size that etcd accepts.
const MAX_ANSWER: usize = 256 << 20;
/// Maximum size of a watch event, in bytes: an object has at most 1.5 MiB in etcd, and JSON escapes add to
/// that.
const MAX_EVENT: usize = 16 << 20;
/// Maximum accepted value of `Retry-After`.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Timeout of an answer, except for watches.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// Annotation of the bookmark that follows the initial events of a watch (KEP-3157).
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Kind of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patch {
    /// Lists are merged by their keys.
    StrategicMerge,
    /// RFC 7386: lists are replaced.
    Merge,
}

impl Patch {
    fn content_type(self) -> &'static str {
        match self {
            Self::StrategicMerge => "application/strategic-merge-patch+json",
            Self::Merge => "application/merge-patch+json",
        }
    }
}

/// Event of a watch.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The object was added or changed.
    Applied(Value),
    /// The object was deleted; its last state.
    Deleted(Value),
    /// All further events are newer than this resource version.
    Bookmark(String),
    /// The bookmark that ends the initial events of a watch.
    Complete(String),
}

/// Client of the API server. Clones share the connection, which may be replaced at any time, e.g. when the
/// client certificate is rotated.
#[derive(Clone)]
pub struct Client {
    newest: watch::Receiver<kube::Client>,
    presence: Presence,
    /// True if the server does not support initial events of a watch.
    lists_only: Arc<AtomicBool>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Sends each request through the newest client of `newest`.
    #[must_use]
    pub fn new(newest: watch::Receiver<kube::Client>) -> Self {
        Self::with_presence(newest, Presence::default())
    }

    /// Sends each request through the newest client of `newest`, and records each result in `presence`.
    pub(crate) fn with_presence(newest: watch::Receiver<kube::Client>, presence: Presence) -> Self {
        Self { newest, presence, lists_only: Arc::default() }
    }

    /// Returns true unless the server has refused to begin a watch with the initial events.
    pub(crate) fn has_streamed_lists(&self) -> bool {
        !self.lists_only.load(Ordering::Relaxed)
    }

    /// Makes each watch start with a list from now on.
    pub(crate) fn disable_streamed_lists(&self) {
        self.lists_only.store(true, Ordering::Relaxed);
    }

    /// Returns the record of the server's answers.
    pub(crate) fn presence(&self) -> &Presence {
        &self.presence
    }

    /// Reads the resource at `path`, which may have a query.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get(&self, path: &str) -> Result<Value, Error> {
        self.ask(Method::GET, path, None).await
    }

    /// Creates an object in the collection at `path`.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn create(&self, path: &str, object: &Value) -> Result<Value, Error> {
        self.ask(Method::POST, path, Some(("application/json", object))).await
    }

    /// Replaces the object at `path` by `object`.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn replace(&self, path: &str, object: &Value) -> Result<Value, Error> {
        self.ask(Method::PUT, path, Some(("application/json", object))).await
    }

    /// Patches the object at `path`.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn patch(&self, path: &str, kind: Patch, change: &Value) -> Result<Value, Error> {
        self.ask(Method::PATCH, path, Some((kind.content_type(), change))).await
    }

    /// Deletes the object at `path` without a grace period, if its UID is still `uid`.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn delete(&self, path: &str, uid: Option<&str>) -> Result<Value, Error> {
        let mut options = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0 });
        if let Some(uid) = uid {
            options["preconditions"] = json!({ "uid": uid });
        }
        self.ask(Method::DELETE, path, Some(("application/json", &options))).await
    }

    /// Watches `path`, whose query must request a watch. The stream ends when the server ends the watch.
    ///
    /// # Errors
    /// See [`Error`]. An error ends the stream.
    pub async fn watch(
        &self,
        path: &str,
    ) -> Result<impl Stream<Item = Result<Event, Error>> + Send + Unpin + use<>, Error> {
        let request = format!("watch {path}");
        let opened = self.open(&request, path).await;
        self.presence.record(&opened);
        let answer = opened?;
        let body = answer.into_body().into_data_stream().map(|chunk| chunk.map_err(std::io::Error::other));
        let lines = StreamReader::new(body);
        // The initial events are a list and have its maximum size.
        let first = path.contains("sendInitialEvents=true").then_some(MAX_ANSWER);
        Ok(try_unfold((lines, request, first), |(mut lines, request, first)| async move {
            let Some(line) = line(&mut lines).await.map_err(|cause| Error::unreachable(&request, &cause))?
            else {
                return Ok(None);
            };
            let event = event(&request, &line)?;
            let left = match first.filter(|_| !matches!(event, Event::Complete(_))) {
                None => None,
                Some(left) => match left.checked_sub(line.len()) {
                    None => return Err(Error::unreachable(&request, &"the initial events are too large")),
                    left => left,
                },
            };
            Ok(Some((event, (lines, request, left))))
        })
        .boxed())
    }

    /// Sends a request for a watch and returns the answer.
    async fn open(&self, request: &str, path: &str) -> Result<Response<Body>, Error> {
        let sent = self.send(build(request, Method::GET, path, None)?);
        let answer = timeout(ANSWER, sent).await.map_err(|_| late(request))?;
        let answer = answer.map_err(|error| failed(request.to_owned(), &error))?;
        accepted(request, answer).await
    }

    async fn send(&self, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
        let client = self.newest.borrow().clone();
        client.send(request).await
    }

    async fn ask(&self, method: Method, path: &str, body: Option<(&str, &Value)>) -> Result<Value, Error> {
        // A query may be long and does not help the reader of an error.
        let request = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let whole = async {
            let built = build(&request, method, path, body)?;
            let answer = self.send(built).await.map_err(|error| failed(request.clone(), &error))?;
            let answer = accepted(&request, answer).await?;
            let read = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            let bytes = read.map_err(|cause| Error::unreachable(&request, &cause))?.to_bytes();
            if bytes.is_empty() {
                return Ok(Value::Null);
            }
            beelet_codec::answer(&bytes).map_err(|cause| Error::unreachable(&request, &cause))
        };
        let answer = timeout(ANSWER, whole).await.unwrap_or_else(|_| Err(late(&request)));
        self.presence.record(&answer);
        answer
    }
}

/// Builds a request; errors refer to it by `name`.
fn build(
    name: &str,
    method: Method,
    path: &str,
    body: Option<(&str, &Value)>,
) -> Result<Request<Body>, Error> {
    if let Some(why) = url::wrong_part(path) {
        return Err(unaskable(name, why));
    }
    let request = Request::builder().method(method).uri(path).header(header::ACCEPT, "application/json");
    let request = match body {
        None => request.body(Body::empty()),
        Some((kind, value)) => {
            request.header(header::CONTENT_TYPE, kind).body(Body::from(value.to_string().into_bytes()))
        }
    };
    request.map_err(|error| unaskable(name, error.to_string()))
}

/// Returns the error of a request that can't be sent. Shortens the request, since an invalid name may have
/// any length.
fn unaskable(request: &str, message: String) -> Error {
    const MOST: usize = 256;
    let mut request = request.to_owned();
    in_the_middle(&mut request, MOST);
    Error { request, kind: Kind::Unaskable, message }
}

/// Returns the answer if its status is a success, and the server's error otherwise.
async fn accepted(request: &str, answer: Response<Body>) -> Result<Response<Body>, Error> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let retry_after =
        answer.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let body = Limited::new(answer.into_body(), MAX_EVENT).collect().await;
    let value: Value =
        body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok()).unwrap_or_default();
    Err(refused(request, status.as_u16(), &value, retry_after.map(bounds::seconds)))
}

/// Returns the error of a `metav1.Status`.
fn refused(request: &str, code: u16, status: &Value, retry_after: Option<Duration>) -> Error {
    let words = status["message"].as_str().map(str::to_owned);
    let words = words.unwrap_or_else(|| {
        StatusCode::from_u16(code)
            .ok()
            .and_then(|code| code.canonical_reason())
            .unwrap_or("an error")
            .to_owned()
    });
    let detail = status["details"]["retryAfterSeconds"].as_u64();
    let detail = detail.map(|asked| bounds::seconds(i64::try_from(asked).unwrap_or(i64::MAX)));
    Error {
        request: request.to_owned(),
        kind: Kind::Status {
            code,
            retry_after: retry_after.or(detail).map(|asked| asked.min(LONGEST_PAUSE)),
        },
        message: words,
    }
}

fn failed(request: String, failure: &kube::Error) -> Error {
    let mut causes = vec![failure.to_string()];
    let mut source = std::error::Error::source(failure);
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    // Only the innermost cause is useful: the outer ones repeat one another.
    let message = causes.pop().unwrap_or_default();
    let untrusted = message.contains("invalid peer certificate");
    Error { request, kind: if untrusted { Kind::Untrusted } else { Kind::Unreachable }, message }
}

fn late(request: &str) -> Error {
    Error::unreachable(request, &format_args!("no answer within {} s", ANSWER.as_secs()))
}

/// Returns the next line without its newline; None at the end of the stream.
async fn line(stream: &mut (impl AsyncBufRead + Unpin)) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let read = stream.take(MAX_EVENT as u64).read_until(b'\n', &mut line).await?;
    if read == 0 {
        return Ok(None);
    }
    if line.pop() != Some(b'\n') {
        let cause =
            if read < MAX_EVENT { "the stream broke within an event" } else { "an event is too long" };
        return Err(std::io::Error::other(cause));
    }
    Ok(Some(line))
}

fn event(request: &str, line: &[u8]) -> Result<Event, Error> {
    let mut value = beelet_codec::answer(line).map_err(|cause| Error::unreachable(request, &cause))?;
    let object = value.get_mut("object").map(Value::take).filter(Value::is_object);
    let object = object.ok_or_else(|| Error::unreachable(request, &"an event without an object"))?;
    match value["type"].as_str() {
        Some("ADDED" | "MODIFIED") => Ok(Event::Applied(object)),
        Some("DELETED") => Ok(Event::Deleted(object)),
        Some("BOOKMARK") => {
            let metadata = &object["metadata"];
            let version = metadata["resourceVersion"].as_str().unwrap_or_default().to_owned();
            let ends = metadata["annotations"][INITIAL_EVENTS_END] == "true";
            Ok(if ends { Event::Complete(version) } else { Event::Bookmark(version) })
        }
        Some("ERROR") => {
            let code = object["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(500);
            Err(refused(request, code, &object, None))
        }
        other => Err(Error::unreachable(request, &format_args!("unknown event type {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_loses_its_managed_fields_and_keeps_the_rest() {
        let line = br#"{"type":"ADDED","object":{"metadata":{"name":"a","managedFields":[1]},"spec":{}}}"#;
        let expected = Event::Applied(json!({ "metadata": { "name": "a" }, "spec": {} }));
        assert_eq!(event("watch", line), Ok(expected));
        let line = br#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7"}}}"#;
        assert_eq!(event("watch", line), Ok(Event::Bookmark("7".to_owned())));
        let line = br#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7",
            "annotations":{"k8s.io/initial-events-end":"true"}}}}"#;
        assert_eq!(event("watch", line), Ok(Event::Complete("7".to_owned())));
    }

    #[test]
    fn an_event_with_managed_fields_of_any_depth_is_an_event() {
        let deep = format!("{}1{}", r#"{"f:a":"#.repeat(300), "}".repeat(300));
        let managed = format!(r#"[{{"manager":"author","fieldsV1":{deep}}}]"#);
        let line =
            format!(r#"{{"type":"ADDED","object":{{"metadata":{{"name":"a","managedFields":{managed}}}}}}}"#);
        assert_eq!(
            event("watch", line.as_bytes()),
            Ok(Event::Applied(json!({ "metadata": { "name": "a" } })))
        );
    }

    #[test]
    fn an_error_event_is_the_servers_error() {
        let line = br#"{"type":"ERROR","object":{"code":410,"message":"too old resource version: 1 (9)"}}"#;
        let error = event("watch /api/v1/pods", line).unwrap_err();
        assert!(error.is_expired());
        assert_eq!(
            error.to_string(),
            "watch /api/v1/pods: the API server answered 410: too old resource version: 1 (9)"
        );
    }

    #[test]
    fn a_server_can_not_ask_for_a_pause_without_an_end() {
        let status = json!({ "details": { "retryAfterSeconds": u64::MAX } });
        let error = refused("GET /", 503, &status, None);
        assert_eq!(error.retry_after(), Some(LONGEST_PAUSE));
        let asked = Some(Duration::from_secs(u64::MAX));
        assert_eq!(refused("GET /", 429, &Value::Null, asked).retry_after(), Some(LONGEST_PAUSE));
    }

    #[test]
    fn an_event_that_is_none_is_an_error_and_no_panic() {
        for line in [
            r#""ok""#,
            "[]",
            "[[]]",
            "null",
            "7",
            "true",
            "{}",
            r#"{"type":"ADDED"}"#,
            r#"{"type":"ADDED","object":null}"#,
            r#"{"type":"ADDED","object":"ok"}"#,
            r#"{"type":"DELETED","object":[{}]}"#,
            r#"{"type":7,"object":{}}"#,
            r#"{"type":"GONE","object":{}}"#,
        ] {
            assert_eq!(event("watch", line.as_bytes()).unwrap_err().kind, Kind::Unreachable, "{line}");
        }
        for object in [r#"{"metadata":null}"#, r#"{"metadata":"ok"}"#, r#"{"metadata":[{}]}"#, "{}"] {
            for kind in ["ADDED", "DELETED", "BOOKMARK", "ERROR"] {
                let _ = event("watch", format!(r#"{{"type":"{kind}","object":{object}}}"#).as_bytes());
            }
        }
    }

    #[tokio::test]
    async fn a_request_that_can_not_be_made_reaches_nobody_and_says_nothing_of_the_server() {
        let server = crate::testing::Server::default();
        let client = server.client();
        let path = "/api/v1/namespaces/shop/secrets/..";
        for error in [client.get(path).await.unwrap_err(), client.watch(path).await.map(drop).unwrap_err()] {
            assert_eq!(error.kind, Kind::Unaskable);
            assert!(!error.is_transient() && !error.is_absence() && error.is_not_found());
            let words = "invalid request: the name \"..\" may not be '..'";
            assert!(error.to_string().ends_with(words), "{error}");
        }
        let long = format!("/api/v1/namespaces/shop/secrets/{}", "a".repeat(300_000));
        let error = client.get(&long).await.unwrap_err();
        assert!(error.kind == Kind::Unaskable && error.is_not_found());
        let words = "a\" is longer than 512 bytes";
        assert!(error.to_string().ends_with(words) && error.to_string().len() < 700, "{error}");
        // An unescaped character that is invalid in a URL.
        assert_eq!(client.get("/api/v1/a b").await.unwrap_err().kind, Kind::Unaskable);
        assert!(server.requests().is_empty());
        assert!(client.presence().is_unknown());
    }

    #[tokio::test]
    async fn a_stream_that_breaks_within_an_event_is_an_error() {
        let mut stream = &b"one\ntwo"[..];
        assert_eq!(line(&mut stream).await.unwrap(), Some(b"one".to_vec()));
        assert_eq!(line(&mut stream).await.unwrap_err().to_string(), "the stream broke within an event");
        assert_eq!(line(&mut &b""[..]).await.unwrap(), None);
    }
}
