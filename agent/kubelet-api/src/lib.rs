//! The HTTPS server of a node: the kubelet's API for the API server, kubectl, metrics-server and monitors, on
//! the kubelet's port and with its responses.
//!
//! Every request is authenticated ([`auth`]) and needs a right (`policy::node::access`). Other crates build
//! the pages of metrics and pods; this crate builds the pages that reach into containers: logs, commands,
//! ports. This crate makes no decisions about pods, and limits every wait for a client: connections, streams,
//! bytes and times are bounded.

// Tests pass literals by value.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod auth;
mod cache;
mod connection;
mod containers;
mod flags;
mod identity;
mod journal;
mod logs;
mod metrics;
mod pages;
mod streams;
mod system_logs;
mod tls;
mod turns;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{any, get, post};
use axum::{Router, middleware};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use beelet_base::blocking::blocking;
use beelet_base::room::Port;
use beelet_base::work::Work;
use beelet_config::{Authorization, Server};
use beelet_cri::Runtime;
use beelet_model::table::PodTable;
use beelet_policy::node::access;

use auth::{Auth, Refusal, Reviewers};
use connection::{Peer, REQUEST_TIMEOUT};
pub use flags::Verbosity;
use identity::is_anonymous;
pub use metrics::Metrics;
use metrics::RequestLabels;
use tls::Keyring;

/// Default port of a node of a cluster.
pub const PORT: u16 = 10250;

/// Dependencies of the server.
pub struct Parts {
    /// The server's part of the configuration.
    pub config: Server,
    /// Name of the node.
    pub node_name: String,
    /// Directory of a self-signed certificate and its key.
    pub certificates: PathBuf,
    /// Authenticates and authorizes clients that the configuration does not know.
    pub reviewers: Reviewers,
    /// Pages built by other crates.
    pub pages: Router,
    /// Effective configuration in the kubelet's format.
    pub configz: serde_json::Value,
    /// The pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The container runtime.
    pub runtime: Runtime,
    /// Directory of the pods' logs.
    pub logs: PathBuf,
    /// Directory of the machine's own logs.
    pub system_logs: PathBuf,
    /// Directory for checkpoints of containers.
    pub checkpoints: PathBuf,
    /// Ends the streams.
    pub shutdown: CancellationToken,
    /// Sets the log level; None disables the page.
    pub verbosity: Option<Verbosity>,
    /// Counters.
    pub metrics: Metrics,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("config", &self.config).finish_non_exhaustive()
    }
}

/// State of the pages built here. Clones share it.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) config: Arc<Server>,
    pub(crate) configz: Arc<serde_json::Value>,
    pub(crate) table: watch::Receiver<Arc<PodTable>>,
    pub(crate) runtime: Runtime,
    pub(crate) logs: Arc<Path>,
    pub(crate) system_logs: Arc<Path>,
    pub(crate) checkpoints: Arc<Path>,
    pub(crate) verbosity: Option<Verbosity>,
    /// Permits for streams.
    pub(crate) streams: Arc<Semaphore>,
    /// Permits for log readers: half of all connections, so that other requests find one.
    pub(crate) log_readers: Arc<Semaphore>,
    /// Running streams.
    pub(crate) tasks: TaskTracker,
    pub(crate) shutdown: CancellationToken,
}

/// Returns the pages built here that the configuration enables.
fn own_pages(app: App) -> Router {
    let mut router = Router::new()
        .route("/configz", get(pages::configz))
        .route("/checkpoint/{namespace}/{pod}/{container}", post(pages::checkpoint));
    if app.config.debugging_handlers {
        let logs = "/containerLogs/{namespace}/{pod}/{container}";
        router = router
            .route("/runningpods", get(pages::running_pods))
            .route("/runningpods/", get(pages::running_pods))
            .route(logs, get(logs::container_logs))
            .route("/portForward/{namespace}/{pod}", any(streams::port_forward))
            .route("/portForward/{namespace}/{pod}/{uid}", any(streams::port_forward));
        for place in ["{namespace}/{pod}/{container}", "{namespace}/{pod}/{uid}/{container}"] {
            router = router
                .route(&format!("/exec/{place}"), any(streams::exec))
                .route(&format!("/attach/{place}"), any(streams::attach))
                .route(&format!("/run/{place}"), any(pages::run));
        }
    } else {
        for page in ["run", "exec", "attach", "portForward", "containerLogs", "runningpods"] {
            router = router.route(&format!("/{page}/{{*path}}"), any(pages::disabled));
        }
    }
    if app.config.debugging_handlers && app.config.debug_flags {
        router = router.route("/debug/flags/v", any(flags::verbosity));
    }
    router = if app.config.debugging_handlers && app.config.system_logs {
        router
            .route("/logs", get(|| async { Redirect::permanent("/logs/") }))
            .route("/logs/", get(system_logs::top))
            .route("/logs/{*path}", get(system_logs::below))
    } else {
        let none = any(pages::no_logs);
        router.route("/logs", none.clone()).route("/logs/", none.clone()).route("/logs/{*path}", none)
    };
    router.with_state(app)
}

/// A server with an open port and loaded keys.
pub struct Bound {
    port: Port,
    keyring: Arc<Keyring>,
    router: Router,
    metrics: Metrics,
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bound").field("port", &self.port).finish_non_exhaustive()
    }
}

/// Returns the configured port, in a cluster or without one, or None if the server is disabled.
#[must_use]
pub fn port(config: &Server, in_cluster: bool) -> Option<u16> {
    let default = if in_cluster { PORT } else { 0 };
    Some(config.port.unwrap_or(default)).filter(|port| config.enabled && *port != 0)
}

/// Rejects a configuration that [`bind`] would reject, as far as possible without opening the port or
/// creating files.
///
/// # Errors
/// A file is unusable, or no request could ever be authorized; the error has the fix.
pub fn check(config: &Server, in_cluster: bool) -> Result<()> {
    if port(config, in_cluster).is_none() {
        return Ok(());
    }
    refuse_unasked(config, in_cluster)?;
    tls::check(config)
}

/// Rejects access reviews without an API server.
fn refuse_unasked(config: &Server, has_reviewers: bool) -> Result<()> {
    if matches!(config.authorization, Authorization::Webhook { .. }) && !has_reviewers {
        bail!(
            "authorization.mode is Webhook, but this node has no API server: set `authorization.mode: AlwaysAllow` (clients \
             with a certificate from `authentication.x509.clientCAFile` may then do everything), or `port: 0` to disable the server"
        );
    }
    Ok(())
}

/// Opens the port and loads the keys.
///
/// # Errors
/// The port is in use, a file is unusable, or no request could ever be authorized; the error has the fix.
pub async fn bind(parts: Parts, port: u16) -> Result<Bound> {
    let Parts { config, node_name, certificates, reviewers, pages, metrics, .. } = parts;
    refuse_unasked(&config, reviewers.access.is_some())?;
    let address = SocketAddr::new(config.address, port);
    let port = Port::bind(address, connection::ROOM).await.map_err(|error| {
        anyhow::anyhow!(
            "cannot serve the kubelet's API on {address}: {error}; set another `port` (0 disables the server), or stop the process that uses it (a \
             kubelet?)"
        )
    })?;
    let (settings, expiry) = (config.clone(), metrics.expiry.clone());
    let keyring = blocking("opening the server's keys", move || {
        Keyring::open(&settings, &certificates, &node_name, expiry)
    })
    .await?;
    let gate = Gate { auth: Arc::new(Auth::new(&config, reviewers)), metrics: metrics.clone() };
    let app = App {
        config: Arc::new(config),
        configz: Arc::new(parts.configz),
        table: parts.table,
        runtime: parts.runtime,
        logs: parts.logs.into(),
        system_logs: parts.system_logs.into(),
        checkpoints: parts.checkpoints.into(),
        verbosity: parts.verbosity,
        streams: streams::room(),
        log_readers: Arc::new(Semaphore::new(connection::ROOM.known / 2)),
        tasks: TaskTracker::new(),
        shutdown: parts.shutdown,
    };
    let router = pages
        .merge(own_pages(app))
        .fallback(|| async { (StatusCode::NOT_FOUND, "404 page not found\n") })
        .layer(middleware::from_fn_with_state(gate, guard));
    tracing::info!("serving the kubelet's API on https://{address}");
    Ok(Bound { port, keyring: Arc::new(keyring), router, metrics })
}

impl Bound {
    /// Returns the local address.
    ///
    /// # Errors
    /// The kernel does not report the address.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.port.address()
    }

    /// Serves until `shutdown`.
    pub fn serve(self, shutdown: CancellationToken) -> Work {
        Box::pin(connection::serve(self, shutdown))
    }
}

#[derive(Clone)]
struct Gate {
    auth: Arc<Auth>,
    metrics: Metrics,
}

/// Authorizes and counts a request.
async fn guard(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let page = access::page(&path);
    let labels = RequestLabels::new(method.as_str(), page);
    let _under_way = gate.metrics.begin(&labels);
    let Some(peer) = request.extensions().get::<Arc<Peer>>().cloned() else {
        return Refusal::Unauthorized(String::new()).into_response();
    };
    let clients = peer.keyring.newest().await.clients;
    let headers = request.headers().clone();
    let source = peer.place.source();
    let allowed = async {
        let user = gate.auth.user(&peer.certificates, clients.as_ref(), &headers, source).await?;
        gate.auth.allow(&user, method.as_str(), &path, source).await?;
        // Anonymous requests may be allowed, but leave their connection a stranger's.
        if is_anonymous(&user) || peer.place.allowed() { Ok(user) } else { Err(Refusal::Crowded) }
    };
    let response = match allowed.await {
        Err(refusal) => {
            tracing::debug!("{} {path} from {}: refused: {}", method, peer.address, refusal.cause());
            let ends = matches!(refusal, Refusal::Unauthorized(_)) || !peer.place.is_known();
            let mut response = refusal.into_response();
            if ends {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        }
        Ok(user) => {
            tracing::debug!("{method} {path} from {} by {:?}", peer.address, user.name);
            // The checkpoint of a large container takes long, too, and the call to the runtime has a deadline
            // of its own.
            if access::is_long_running(page) || page == "checkpoint" {
                peer.allow_silence();
                next.run(request).await
            } else {
                let late = |_| (StatusCode::GATEWAY_TIMEOUT, "the request timed out\n").into_response();
                tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await.unwrap_or_else(late)
            }
        }
    };
    gate.metrics.took(&labels, began.elapsed());
    response
}
