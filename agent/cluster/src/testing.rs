//! In-memory API server for the tests of this crate: objects by path, without a network.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex},
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use http::{Method, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::client::Body;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use crate::client::Client;

type Bytes = hyper::body::Bytes;
type AnswerBody = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

/// Clones share it.
#[derive(Clone)]
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    events: watch::Sender<Vec<(String, Value)>>,
    /// Counter that changes before and after each request.
    asked: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    requests: Vec<String>,
    version: u64,
    failing: bool,
    /// A status field that the server does not know.
    unknown: Option<&'static str>,
}

impl Default for Server {
    fn default() -> Self {
        Self { state: Arc::default(), events: watch::Sender::new(Vec::new()), asked: watch::Sender::new(()) }
    }
}

impl Server {
    pub(crate) fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| server.clone().answer(request));
        let (_, newest) = watch::channel(kube::Client::new(service, "default"));
        Client::new(newest)
    }

    /// Returns method and path of all requests, in order.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }

    /// Waits until the requests satisfy `wanted`.
    pub(crate) async fn until(&self, wanted: impl Fn(&[String]) -> bool) -> Vec<String> {
        let mut asked = self.asked.subscribe();
        loop {
            let requests = self.requests();
            if wanted(&requests) {
                return requests;
            }
            asked.changed().await.unwrap();
        }
    }

    /// Waits until the object satisfies `wanted`.
    pub(crate) async fn until_object(&self, path: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut asked = self.asked.subscribe();
        loop {
            if let Some(found) = self.object(path).filter(&wanted) {
                return found;
            }
            asked.changed().await.unwrap();
        }
    }

    pub(crate) fn object(&self, path: &str) -> Option<Value> {
        self.state.lock().unwrap().objects.get(path).cloned()
    }

    pub(crate) fn set(&self, path: &str, object: Value) {
        self.store(path, object);
    }

    /// Writes the unchanged object, as another client would.
    pub(crate) fn touch(&self, path: &str) {
        let object = self.object(path).unwrap();
        self.store(path, object);
    }

    pub(crate) fn remove(&self, path: &str) {
        let gone = self.state.lock().unwrap().objects.remove(path).unwrap();
        let event = json!({ "type": "DELETED", "object": gone });
        self.events.send_modify(|events| events.push((path.to_owned(), event)));
    }

    /// Returns the paths of all objects, in order.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.state.lock().unwrap().objects.keys().cloned().collect()
    }

    /// Drops this status field from now on.
    pub(crate) fn forget(&self, field: &'static str) {
        self.state.lock().unwrap().unknown = Some(field);
    }

    /// Makes every request fail, or none, from now on.
    pub(crate) fn fail(&self, failing: bool) {
        self.state.lock().unwrap().failing = failing;
    }

    fn store(&self, path: &str, mut object: Value) -> Value {
        let state = &mut *self.state.lock().unwrap();
        state.version += 1;
        let status = object.get_mut("status").and_then(Value::as_object_mut);
        if let (Some(field), Some(status)) = (state.unknown, status) {
            status.remove(field);
        }
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", state.version));
        }
        state.objects.insert(path.to_owned(), object.clone());
        let event = json!({ "type": "MODIFIED", "object": object });
        self.events.send_modify(|events| events.push((path.to_owned(), event)));
        object
    }

    fn answer(self, request: Request<Body>) -> BoxFuture<'static, Result<Response<AnswerBody>, Infallible>> {
        async move {
            let (head, body) = request.into_parts();
            let path = head.uri.path().to_owned();
            let watch = head.uri.query().is_some_and(|query| query.contains("watch=true"));
            let verb = if watch { "WATCH".to_owned() } else { head.method.to_string() };
            let failing = {
                let state = &mut *self.state.lock().unwrap();
                state.requests.push(format!("{verb} {path}"));
                state.failing
            };
            self.asked.send_replace(());
            if failing {
                return Ok(response(500, &json!({ "message": "the test refuses requests" })));
            }
            if watch {
                return Ok(self.watched(&path));
            }
            let body = body.collect().await.unwrap().to_bytes();
            let body: Value = serde_json::from_slice(&body).unwrap_or_default();
            let answer = self.single(&head.method, &path, body);
            self.asked.send_replace(());
            Ok(answer)
        }
        .boxed()
    }

    fn single(&self, method: &Method, path: &str, body: Value) -> Response<AnswerBody> {
        let status = |code: u16, words: &str| response(code, &json!({ "kind": "Status", "message": words }));
        let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let target = path.strip_suffix("/status").unwrap_or(path).to_owned();
        let target = if *method == Method::POST { format!("{path}/{name}") } else { target };
        match (method.as_str(), self.object(&target)) {
            ("POST", Some(_)) => status(409, "already exists"),
            ("POST", None) => response(201, &self.store(&target, body)),
            (_, None) => status(404, "not found"),
            ("PUT", Some(found))
                if found["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] =>
            {
                status(409, "has been modified")
            }
            ("PUT", Some(_)) => response(200, &self.store(&target, body)),
            ("PATCH", Some(mut found)) => {
                merge(&mut found, body);
                response(200, &self.store(&target, found))
            }
            ("GET", Some(found)) => response(200, &found),
            _ => status(405, "not in this test"),
        }
    }

    /// Returns a watch of all later events below `path`.
    fn watched(&self, path: &str) -> Response<AnswerBody> {
        let (mut events, prefix) = (self.events.subscribe(), format!("{path}/"));
        let seen = events.borrow_and_update().len();
        let told = stream::unfold((events, seen), |(mut events, seen)| async move {
            let event = events.wait_for(|events| events.len() > seen).await.ok()?[seen].clone();
            Some((event, (events, seen + 1)))
        });
        let lines = told.filter_map(move |(path, event)| {
            let line = path.starts_with(&prefix).then(|| format!("{event}\n"));
            async move { line.map(|line| Ok(hyper::body::Frame::data(Bytes::from(line)))) }
        });
        Response::new(BodyExt::boxed_unsync(StreamBody::new(lines)))
    }
}

/// Applies a strategic merge patch as far as a Node needs it: merges conditions by type and replaces other
/// lists.
fn merge(into: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *into = patch;
        return;
    };
    if !into.is_object() {
        *into = Value::Object(Map::new());
    }
    for (name, value) in patch {
        match value {
            Value::Null => drop(into.as_object_mut().unwrap().remove(&name)),
            Value::Array(items) if name == "conditions" => {
                let mut all = into[&name].as_array().cloned().unwrap_or_default();
                all.retain(|before| items.iter().all(|item| item["type"] != before["type"]));
                all.extend(items);
                into[&name] = Value::Array(all);
            }
            Value::Array(mut items) => {
                items.retain(|item| item.get("$patch").is_none());
                into[&name] = Value::Array(items);
            }
            value => merge(&mut into[&name], value),
        }
    }
}

fn response(code: u16, value: &Value) -> Response<AnswerBody> {
    let body = http_body_util::Full::new(Bytes::from(value.to_string()));
    Response::builder().status(code).body(BodyExt::boxed_unsync(body)).unwrap()
}

pub(crate) fn node(name: &str, uid: &str) -> Node {
    let metadata =
        ObjectMeta { name: Some(name.to_owned()), uid: Some(uid.to_owned()), ..ObjectMeta::default() };
    Node { metadata, ..Node::default() }
}
