//! Server of the fake API: records every request, applies the script, and then lets the store answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::path::{self, Target, Verb};
use super::refusal::Refusal;
use super::script::{Act, Fault};
use super::store::{Body, now};
use super::{Asked, Outcome, Shared};

/// Maximum size of a request's body in bytes, as in the API server.
const MAX_BODY: usize = 3 << 20;

/// Commands to a running server.
pub(super) enum Signal {
    /// Break every connection, but keep listening.
    Sever,
    /// Break every connection, and stop listening.
    Stop,
}

/// Serves until a stop command. Runs on its own thread with its own runtime: dropping that ends every
/// connection at once, like a killed process.
pub(super) fn serve(
    listener: &std::net::TcpListener,
    shared: &Arc<Shared>,
    mut signals: mpsc::UnboundedReceiver<Signal>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return };
    runtime.block_on(async {
        let listener = listener.try_clone().and_then(tokio::net::TcpListener::from_std);
        let Ok(listener) = listener else { return };
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                signal = signals.recv() => match signal {
                    Some(Signal::Sever) => {
                        connections.abort_all();
                        shared.lock().store.cut(|_| true, true);
                    }
                    Some(Signal::Stop) | None => break,
                },
                Ok((stream, _)) = listener.accept() => {
                    // Without this option the last bytes of a watch's event wait for an acknowledgement.
                    let _ = stream.set_nodelay(true);
                    connections.spawn(serve_one(stream, Arc::clone(shared)));
                }
                Some(_) = connections.join_next() => {}
            }
        }
    });
    // Pending events of watches are lost with their connections.
    shared.lock().store.cut(|_| true, true);
}

/// Serves one connection until it ends.
pub(super) async fn serve_one(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    shared: Arc<Shared>,
) -> hyper::Result<()> {
    let service = service_fn(move |request| answer(Arc::clone(&shared), request));
    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
}

/// Error that breaks the connection.
#[derive(Debug, thiserror::Error)]
#[error("broken by the test")]
struct Broken;

/// Records a request, applies the script, and lets the store answer it.
async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, Broken> {
    let (parts, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY).collect().await.map_err(|_| Broken)?.to_bytes();
    let path = parts.uri.path().to_owned();
    let query = path::query(parts.uri.query().unwrap_or_default());
    let header = |name| parts.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let mut asked = Asked {
        number: 0,
        verb: Target::verb(&parts.method, &path, &query),
        path,
        query,
        content_type: header(header::CONTENT_TYPE).unwrap_or_default(),
        authorization: header(header::AUTHORIZATION),
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        at: Instant::now(),
        outcome: Outcome::Pending,
    };
    let (mut arrival, delay, act) = shared.arrive(&mut asked);
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let response = match act {
        Act::Proceed => work(&shared, &asked),
        Act::Fault(Fault::Refuse { code, message, retry_after }) => {
            let refusal = Refusal { code, reason: "Scripted", message };
            let mut response = whole(code, &refusal.status());
            if let Some(seconds) = retry_after {
                response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
            }
            response
        }
        Act::Fault(Fault::Drop) => return Err(Broken),
        Act::LoseReply => {
            // The client does not learn the result.
            work(&shared, &asked);
            return Err(Broken);
        }
        Act::Hold(gate) => {
            gate.wait().await;
            work(&shared, &asked)
        }
        Act::HoldReply(gate) => {
            let response = work(&shared, &asked);
            gate.wait().await;
            response
        }
        // A watch has no end at which its answer could be changed.
        Act::Fault(Fault::Alter(_)) if asked.verb == Verb::Watch => work(&shared, &asked),
        Act::Fault(Fault::Alter(alter)) => {
            let response = work(&shared, &asked);
            let code = response.status().as_u16();
            let body = response.into_body().collect().await.map_err(|_| Broken)?.to_bytes();
            let mut value = serde_json::from_slice(&body).unwrap_or(Value::Null);
            alter(&mut value);
            whole(code, &value)
        }
        Act::Fault(Fault::Body(bytes)) => {
            let response = work(&shared, &asked);
            response.map(|_| full(bytes.into()))
        }
    };
    arrival.outcome = Outcome::Answered(response.status().as_u16());
    Ok(response)
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

fn whole(code: u16, value: &Value) -> Response<Body> {
    let mut response = Response::new(full(value.to_string().into()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

/// Executes a request.
fn work(shared: &Arc<Shared>, asked: &Asked) -> Response<Body> {
    match (asked.path.as_str(), Target::of(&asked.path)) {
        ("/healthz" | "/livez" | "/readyz", _) => Response::new(full("ok".into())),
        ("/apis/resource.k8s.io/v1", _) => whole(
            200,
            &json!({ "kind": "APIResourceList", "groupVersion": "resource.k8s.io/v1", "resources": [] }),
        ),
        ("/version", _) => whole(200, &json!({ "major": "1", "minor": "36", "gitVersion": "v1.36.0" })),
        (_, Some(target)) if asked.verb == Verb::Watch => watch(shared, asked, &target),
        (_, Some(target)) => {
            let done = change(shared, asked, &target);
            shared.changed();
            match done {
                Ok(object) if asked.verb == Verb::Create => whole(201, &object),
                Ok(object) => whole(200, &object),
                Err(refusal) => whole(refusal.code, &refusal.status()),
            }
        }
        (_, None) => {
            let message = "the server could not find the requested resource".to_owned();
            whole(404, &Refusal { code: 404, reason: "NotFound", message }.status())
        }
    }
}

fn change(shared: &Shared, asked: &Asked, target: &Target) -> Result<Value, Refusal> {
    let mut state = shared.lock();
    let body = || {
        let body = asked.body.is_object().then(|| asked.body.clone());
        body.ok_or_else(|| Refusal::bad("the body is not an object"))
    };
    match asked.verb {
        Verb::Get => state.store.get(target),
        Verb::List | Verb::Watch => Ok(state.store.list(target, &asked.query)),
        Verb::Create if target.subresource.as_deref() == Some("token") => {
            let account = Target { subresource: None, ..target.clone() };
            state.store.get(&account)?;
            Ok(token(target, asked.number, body()?))
        }
        // No budget of this server refuses an eviction: a test scripts the refusal.
        Verb::Create if target.subresource.as_deref() == Some("eviction") => {
            let pod = Target { subresource: None, ..target.clone() };
            state.store.delete(&pod, &body()?["deleteOptions"])?;
            Ok(json!({ "kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201 }))
        }
        // Reviews are answered and not stored.
        Verb::Create if target.resource().ends_with("reviews") => body(),
        Verb::Create => {
            let made = state.store.create(target, body()?)?;
            if target.resource() == "certificatesigningrequests" {
                state.sign(target, made)
            } else {
                Ok(made)
            }
        }
        Verb::Update => state.store.update(target, body()?),
        Verb::Patch => state.store.patch(target, &asked.content_type, &body()?),
        Verb::Delete if target.name.is_none() => Ok(state.store.delete_all(target, &asked.query)),
        Verb::Delete => {
            let mut options = asked.body.clone();
            if let Some(grace) =
                asked.query.get("gracePeriodSeconds").and_then(|text| text.parse::<i64>().ok())
            {
                options = json!({ "gracePeriodSeconds": grace });
            }
            state.store.delete(target, &options)
        }
    }
}

/// Returns a token of a service account: each is unique and names its account.
fn token(target: &Target, number: usize, mut request: Value) -> Value {
    let account = target.name.as_deref().unwrap_or_default();
    let seconds = request["spec"]["expirationSeconds"].as_u64().unwrap_or(3600);
    request["spec"]["expirationSeconds"] = seconds.into();
    request["status"] = json!({
        "token": format!("token-{number}-of-{}-{account}", target.namespace),
        "expirationTimestamp": now(seconds),
    });
    request
}

fn watch(shared: &Arc<Shared>, asked: &Asked, target: &Target) -> Response<Body> {
    let version = asked.query.get("resourceVersion").map_or("", String::as_str);
    if !version.is_empty() && version.parse::<u64>().is_err() {
        let refusal = Refusal::bad(format!("Invalid resource version: {version}"));
        return whole(refusal.code, &refusal.status());
    }
    let (lines, receiver) = mpsc::unbounded_channel();
    let id = shared.lock().store.watch(target, &asked.path, &asked.query, lines);
    if let Some(seconds) = asked.query.get("timeoutSeconds").and_then(|text| text.parse().ok()) {
        let shared = Arc::clone(shared);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            shared.lock().store.end_watch(id);
        });
    }
    let body = StreamBody::new(UnboundedReceiverStream::new(receiver)).boxed_unsync();
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}
