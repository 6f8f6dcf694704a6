//! `/healthz`, `/metrics` and its parts and `/stats/summary`, as the kubelet serves them, but without
//! authentication: on loopback only (which the configuration enforces), and only numbers and names. Pod specs
//! (environment variables, arguments) are private to root: `/pods` is served only if the configuration allows
//! it.
//!
//! Any local user can connect, so connections are short-lived and limited. A client that opens many
//! connections, sends nothing or reads nothing cannot block `/healthz` for others: the oldest connection
//! without an expensive request is closed first, and expensive pages have a limit of their own.

mod cadvisor;
mod exposition;
mod numbers;
pub mod slis;
pub mod summary;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router, middleware};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::core::v1::Pod;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use beelet_base::room::{Limits, Place, Port};
use beelet_base::work::Work;
use beelet_model::table::PodTable;
use beelet_stats::Stats;

/// Connection limits; known connections are those that receive an expensive page.
const ROOM: Limits = Limits { known: 32, strangers: 256 };
/// Maximum bytes of a request's head.
const HEAD_MAX: usize = 16 << 10;
/// Time limits for sending a request and for a whole connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// State of the server.
#[derive(Clone)]
pub struct ApiState {
    /// The pods.
    pub pods: watch::Receiver<Arc<PodTable>>,
    /// All metrics of the agent.
    pub registry: Arc<Registry>,
    /// Measurements of containers.
    pub pressure: Stats,
    /// Serve `/pods`: all specs, to any client.
    pub specs: bool,
    /// Serve `/stats/summary`: names and numbers of this machine.
    pub summary: bool,
    /// Returns the reason why the agent is unhealthy, if any.
    pub health: Arc<dyn Fn() -> Option<String> + Send + Sync>,
    /// Results of `/healthz`.
    pub slis: slis::Slis,
}

impl fmt::Debug for ApiState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiState").finish_non_exhaustive()
    }
}

/// A metric with its page and labels.
#[cfg(any(test, feature = "test-util"))]
type Documented = (&'static str, numbers::Metric, &'static str);

/// Returns all metrics of `/metrics/resource` and `/metrics/slis`, and those of `/metrics/cadvisor` that
/// differ between kinds of cgroups, for docs/metrics.md.
#[cfg(any(test, feature = "test-util"))]
pub fn documented() -> Vec<Documented> {
    cadvisor::documented().into_iter().chain(numbers::documented()).collect()
}

/// Opens the port; `setting` is the field of the configuration that sets it.
///
/// # Errors
/// The port is in use, usually by a kubelet; the error has the fix.
pub async fn bind(address: SocketAddr, setting: &str) -> anyhow::Result<Port> {
    Port::bind(address, ROOM).await.map_err(|error| {
        anyhow::anyhow!(
            "cannot serve health and metrics on {address}: {error}; set another `{setting}` (0 disables the server), or stop the process \
             that uses the port (a kubelet?)"
        )
    })
}

/// Serves until `shutdown`; pending answers get one second to finish.
pub fn serve(port: Port, state: ApiState, shutdown: CancellationToken) -> Work {
    Box::pin(async move {
        let router = router(state).layer(middleware::from_fn(in_room));
        let connections = TaskTracker::new();
        loop {
            let (stream, place) = tokio::select! {
                (stream, _, place) = port.accept("health and metrics") => (stream, Arc::new(place)),
                () = shutdown.cancelled() => break,
            };
            let router = router.clone().layer(Extension(Arc::clone(&place)));
            connections.spawn(async move {
                tokio::select! {
                    biased;
                    // A request that has already arrived is answered.
                    () = answer(stream, router) => {}
                    () = place.taken() => tracing::debug!("health and metrics: closed a connection to make room"),
                }
            });
        }
        connections.close();
        let _ = tokio::time::timeout(Duration::from_secs(1), connections.wait()).await;
    })
}

/// Answers `/healthz` immediately, and other requests within the connection limit.
async fn in_room(Extension(place): Extension<Arc<Place>>, request: Request, next: Next) -> Response {
    if request.uri().path().starts_with("/healthz") || place.allowed() {
        return next.run(request).await;
    }
    let sentence = "too many requests: try again later\n";
    (StatusCode::SERVICE_UNAVAILABLE, sentence).into_response()
}

/// Answers the single request of a connection.
async fn answer(stream: TcpStream, router: Router) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(HEAD_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("health and metrics: a connection failed: {error}"),
        Err(_) => tracing::debug!("health and metrics: a connection timed out"),
    }
}

/// Returns the router with all pages.
pub fn router(state: ApiState) -> Router {
    let mut router = Router::new()
        .route("/", get(index))
        .route("/healthz", get(healthz))
        .route("/healthz/ping", get(alive))
        .route("/healthz/log", get(alive))
        .route("/healthz/syncloop", get(syncloop))
        .route("/metrics", get(numbers::metrics))
        .route("/metrics/cadvisor", get(cadvisor::cadvisor))
        .route("/metrics/probes", get(numbers::probes))
        .route("/metrics/resource", get(numbers::resource))
        .route("/metrics/slis", get(slis::slis));
    if state.summary {
        router = router.route("/stats/summary", get(summary::summary).post(summary::summary));
    }
    router.route("/pods", if state.specs { get(pods) } else { get(no_pods) }).with_state(state)
}

async fn index(State(state): State<ApiState>) -> String {
    let more = [(state.summary, " /stats/summary"), (state.specs, " /pods")];
    let more: String = more.into_iter().filter_map(|(is_served, path)| is_served.then_some(path)).collect();
    format!(
        "beelet: /healthz /metrics /metrics/cadvisor /metrics/probes /metrics/resource /metrics/slis{more}\n"
    )
}

/// Explains where to read the pods instead.
async fn no_pods() -> Response {
    let sentence = "pod specs are not served without authentication: use `beelet get pods -o json` as root. \
                    (For `beelet run`, set `unauthenticatedPods` in the BeeletConfiguration.)\n";
    (StatusCode::FORBIDDEN, sentence).into_response()
}

async fn healthz(State(state): State<ApiState>) -> Response {
    let answer = syncloop(State(state.clone())).await;
    state.slis.record(answer.status().is_success());
    answer
}

async fn syncloop(State(state): State<ApiState>) -> Response {
    match (state.health)() {
        None => "ok".into_response(),
        Some(reasons) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{reasons}\n")).into_response(),
    }
}

/// An answer shows that the agent is alive and writes its log.
async fn alive() -> &'static str {
    "ok"
}

async fn pods(State(state): State<ApiState>) -> Response {
    let table = Arc::clone(&state.pods.borrow());
    // Thousands of pods are megabytes of text, which would delay the timers of an async thread.
    let encoded = beelet_base::blocking::spawn_blocking(move || {
        beelet_codec::list::<Pod>(table.shown().map(|(_, entry)| &entry.pod)).to_string()
    });
    match encoded.await {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("pods: {error}\n")).into_response(),
    }
}

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
