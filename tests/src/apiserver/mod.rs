//! Scripted API server: plain HTTP on loopback, in memory, for tests of the agent that need no cluster.
//!
//! The server implements the rules that a node agent depends on (versions, UIDs, conflicts, graceful
//! deletion, the status subresource, watches), records every request, and fails on demand:
//!
//! ```ignore
//! let api = FakeApi::start();
//! api.put("/api/v1/namespaces/default/pods/web", json!({ "spec": { "nodeName": "n" } }));
//! api.on(Verb::Patch, "/api/v1/nodes/*/status").times(2).refuse(500, "etcd is away");
//! let held = api.on(Verb::Create, "/api/v1/nodes").hold();
//! // ... start what is tested with api.kubeconfig() ...
//! held.reached().await;
//! api.crash();                       // every connection breaks, the port refuses
//! api.come_back();                   // same port, same objects
//! api.wait_for("the node", |asked| asked.verb == Verb::Create && asked.succeeded()).await;
//! let pod = api.wait_until("a status", |api| api.get("/api/v1/namespaces/default/pods/web")).await;
//! ```
//!
//! Waits end with the expected event, and fail the test after [`PATIENCE`], listing all requests. The server
//! has its own thread, so that it is independent of the test's async runtime.

mod authority;
pub mod hostile;
mod patch;
mod path;
mod refusal;
mod script;
mod server;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::io::DuplexStream;
use tokio::sync::{mpsc, watch};

pub use self::authority::Authority;
pub use self::path::Verb;
pub use self::script::Script;
pub use crate::faults::{Held, PATIENCE};

use self::path::{Target, fits};
use self::refusal::Refusal;
use self::script::{Act, Fault};
use self::server::Signal;
use self::store::Store;
use crate::faults::Rules;

/// Received request.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Number of the request, from 0.
    pub number: usize,
    /// Operation.
    pub verb: Verb,
    /// Path without the query.
    pub path: String,
    /// Query, decoded.
    pub query: BTreeMap<String, String>,
    /// Content type of the body: for patches, their kind.
    pub content_type: String,
    /// Header `Authorization`, which identifies the client.
    pub authorization: Option<String>,
    /// Body; null if the request had none.
    pub body: Value,
    /// Time of arrival.
    pub at: Instant,
    /// Result.
    pub outcome: Outcome,
}

impl Asked {
    /// Returns true if the request was executed and answered with a success.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        matches!(self.outcome, Outcome::Answered(200..=299))
    }

    /// Returns true for this verb and a path that matches `pattern`, in which `*` stands for one part.
    #[must_use]
    pub fn is(&self, verb: Verb, pattern: &str) -> bool {
        self.verb == verb && fits(pattern, &self.path)
    }
}

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The request is in progress.
    Pending,
    /// The request was answered with this status. For a watch: it began.
    Answered(u16),
    /// The connection broke.
    Broken,
}

/// Fake API server, stopped on drop.
pub struct FakeApi {
    shared: Arc<Shared>,
    address: SocketAddr,
    serving: Mutex<Option<JoinHandle<()>>>,
    /// Bound but never listening, so that no other process gets the port while the server is stopped.
    _reserved: Socket,
}

/// State shared by the test's side and the server's side.
struct Shared {
    state: Mutex<State>,
    /// Counts changes of requests and of objects.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    store: Store,
    rules: Rules<Asked, Fault>,
    asked: Vec<Asked>,
    signals: Option<mpsc::UnboundedSender<Signal>>,
    authority: Option<Authority>,
    /// Validity of certificates that are signed on request; None: requests wait.
    signs: Option<Duration>,
}

#[allow(clippy::panic)] // a test that cannot continue fails with the reason
impl FakeApi {
    /// Starts a server on its own port.
    ///
    /// # Panics
    /// If the machine has no free port.
    #[must_use]
    pub fn start() -> Self {
        let api = Self::absent();
        api.come_back();
        api
    }

    /// Creates a server that is not running yet: its address is known, and [`FakeApi::come_back`] starts it.
    ///
    /// # Panics
    /// If the machine has no free port.
    #[must_use]
    pub fn absent() -> Self {
        let bound = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
            let address =
                socket.local_addr()?.as_socket().ok_or_else(|| std::io::Error::other("no address"))?;
            Ok::<_, std::io::Error>((socket, address))
        };
        let (reserved, address) = bound().unwrap_or_else(|error| panic!("no port for a server: {error}"));
        let shared = Arc::new(Shared { state: Mutex::default(), changes: watch::channel(0).0 });
        FakeApi { shared, address, serving: Mutex::new(None), _reserved: reserved }
    }

    /// Returns the server's URL: `http://127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns a kubeconfig for this server with the token `token`.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": { "server": self.url() } }],
            "users": [{ "name": "test", "user": { "token": "token" } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        format!("{config:#}\n")
    }

    // ---- Start and stop ----

    /// Starts to listen on the same port, with the earlier objects. Does nothing if the server is running.
    ///
    /// # Panics
    /// If the port cannot be used.
    pub fn come_back(&self) {
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        if serving.is_some() {
            return;
        }
        let bound = TcpListener::bind(self.address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = bound.unwrap_or_else(|error| panic!("cannot listen at {}: {error}", self.address));
        let (sender, signals) = mpsc::unbounded_channel();
        self.shared.lock().signals = Some(sender);
        let shared = Arc::clone(&self.shared);
        *serving = Some(std::thread::spawn(move || server::serve(&listener, &shared, signals)));
    }

    /// Opens a connection in memory, served by a task of the caller's async runtime: for a simulation, which
    /// needs no running server.
    #[must_use]
    pub fn connect(&self) -> DuplexStream {
        let (near, far) = tokio::io::duplex(1 << 16);
        // A connection that ends with an error is the client's to handle.
        tokio::spawn(server::serve_one(far, Arc::clone(&self.shared)));
        near
    }

    /// Returns a receiver of changes of requests and of objects.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// Stops like a killed process: every connection breaks, new ones are refused.
    pub fn crash(&self) {
        let signals = self.shared.lock().signals.take();
        if let Some(signals) = signals {
            // Sending fails if the server has ended by itself.
            let _ = signals.send(Signal::Stop);
        }
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = serving {
            let _ = thread.join();
        }
    }

    /// Breaks every connection, but keeps listening.
    pub fn sever(&self) {
        if let Some(signals) = &self.shared.lock().signals {
            let _ = signals.send(Signal::Sever);
        }
    }

    // ---- Faults ----

    /// Begins a rule for the next request of this verb with a path that matches `pattern`, in which `*`
    /// stands for one part, e.g. `/api/v1/nodes/*/status`. Of several rules for a request, the oldest that is
    /// not used up decides.
    pub fn on(&self, verb: Verb, pattern: &str) -> Script<'_> {
        script::on(self, Some(verb), Some(pattern))
    }

    /// Like [`FakeApi::on`], for the next request of any kind.
    pub fn on_any(&self) -> Script<'_> {
        script::on(self, None, None)
    }

    /// Removes all rules. Held requests stay held until their [`Held`] is dropped.
    pub fn heal(&self) {
        self.shared.lock().rules.clear();
    }

    /// Ends the watches of paths that match `pattern` regularly, as the server does after some minutes.
    pub fn end_watches(&self, pattern: &str) {
        self.shared.lock().store.cut(|path| fits(pattern, path), false);
    }

    /// Breaks the connections of these watches.
    pub fn break_watches(&self, pattern: &str) {
        self.shared.lock().store.cut(|path| fits(pattern, path), true);
    }

    /// Sends these bytes to these watches: half an event, a bookmark of the past.
    pub fn say(&self, pattern: &str, bytes: impl AsRef<[u8]>) {
        self.shared.lock().store.say(|path| fits(pattern, path), bytes.as_ref());
    }

    /// Sends a bookmark to these watches.
    pub fn bookmark(&self, pattern: &str) {
        self.shared.lock().store.bookmarks(|path| fits(pattern, path));
    }

    /// Discards the history: a watch that begins at an older version than the newest gets the error that it
    /// is too old.
    pub fn compact(&self) {
        self.shared.lock().store.compact();
    }

    /// Returns the watched paths.
    #[must_use]
    pub fn watched(&self) -> Vec<String> {
        self.shared.lock().store.watched()
    }

    // ---- Objects ----

    /// Creates or replaces the object at `path` completely, including its status.
    ///
    /// # Panics
    /// If the path does not name an object.
    pub fn put(&self, path: &str, object: Value) -> Value {
        self.change(path, |store, target| store.set(target, object))
    }

    /// Returns the object at `path`.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<Value> {
        self.shared.lock().store.get(&Target::of(path)?).ok()
    }

    /// Returns the UID of the object at `path`.
    #[must_use]
    pub fn uid(&self, path: &str) -> Option<String> {
        self.shared.lock().store.uid(&Target::of(path)?)
    }

    /// Returns every object of a collection in all namespaces: `/api/v1/pods`.
    #[must_use]
    pub fn all(&self, collection: &str) -> Vec<Value> {
        self.shared.lock().store.all(collection)
    }

    /// Changes the object at `path` with a merge patch; a path that ends with `/status` changes the status.
    ///
    /// # Panics
    /// If the object does not exist.
    pub fn patch(&self, path: &str, patch: &Value) -> Value {
        self.change(path, |store, target| store.patch(target, "application/merge-patch+json", patch))
    }

    /// Deletes the object at `path` like a user: a pod on a node gracefully.
    ///
    /// # Panics
    /// If the object does not exist.
    pub fn delete(&self, path: &str) -> Value {
        self.change(path, |store, target| store.delete(target, &Value::Null))
    }

    /// Deletes the object like a user with a grace period (`kubectl delete --grace-period`).
    ///
    /// # Panics
    /// If the object does not exist.
    pub fn delete_within(&self, path: &str, seconds: i64) -> Value {
        self.change(path, |store, target| store.delete(target, &json!({ "gracePeriodSeconds": seconds })))
    }

    /// Deletes the object by force, at once.
    ///
    /// # Panics
    /// If the object does not exist.
    pub fn remove(&self, path: &str) -> Value {
        self.change(path, |store, target| store.delete(target, &json!({ "gracePeriodSeconds": 0 })))
    }

    /// Deletes the object with this grace period. Returns None if it does not exist.
    ///
    /// # Panics
    /// If the path does not name an object.
    pub fn try_delete_within(&self, path: &str, seconds: i64) -> Option<Value> {
        self.try_change(path, |store, target| store.delete(target, &json!({ "gracePeriodSeconds": seconds })))
            .ok()
    }

    /// Removes the finalizers of the object at `path`, which prevent its removal. Returns None if the object
    /// does not exist.
    ///
    /// # Panics
    /// If the path does not name an object.
    pub fn release(&self, path: &str) -> Option<Value> {
        let patch = json!({ "metadata": { "finalizers": null } });
        self.try_change(path, |store, target| store.patch(target, "application/merge-patch+json", &patch))
            .ok()
    }

    fn change(
        &self,
        path: &str,
        change: impl FnOnce(&mut Store, &Target) -> Result<Value, Refusal>,
    ) -> Value {
        self.try_change(path, change).unwrap_or_else(|refusal| panic!("{path}: {}", refusal.message))
    }

    fn try_change(
        &self,
        path: &str,
        change: impl FnOnce(&mut Store, &Target) -> Result<Value, Refusal>,
    ) -> Result<Value, Refusal> {
        let Some(target) = Target::of(path) else { panic!("{path} does not name an object") };
        let changed = change(&mut self.shared.lock().store, &target);
        self.shared.changed();
        changed
    }

    // ---- Certificates ----

    /// Signs every CertificateSigningRequest from now on when it is created, with this validity.
    ///
    /// # Panics
    /// If the key cannot be generated.
    pub fn sign_certificates(&self, valid: Duration) {
        let authority = Authority::new("test").unwrap_or_else(|error| panic!("no authority: {error}"));
        let mut state = self.shared.lock();
        state.authority.get_or_insert(authority);
        state.signs = Some(valid);
    }

    /// Returns the certificate of the signing authority; None before [`FakeApi::sign_certificates`].
    #[must_use]
    pub fn authority(&self) -> Option<String> {
        self.shared.lock().authority.as_ref().map(|authority| authority.pem().to_owned())
    }

    // ---- Received requests ----

    /// Returns all requests so far, in order of arrival.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        self.shared.lock().asked.clone()
    }

    /// Returns the number of requests of this verb for paths that match `pattern`.
    #[must_use]
    pub fn count(&self, verb: Verb, pattern: &str) -> usize {
        self.shared.lock().asked.iter().filter(|asked| asked.is(verb, pattern)).count()
    }

    /// Waits for a request that `wanted` accepts, among earlier and later ones; `what` describes it in
    /// errors.
    ///
    /// # Panics
    /// If `wanted` accepts no request within [`PATIENCE`].
    pub async fn wait_for(&self, what: &str, wanted: impl Fn(&Asked) -> bool) -> Asked {
        self.wait_for_after(what, 0, wanted).await
    }

    /// Like [`FakeApi::wait_for`], among the requests from number `first` on: `api.asked().len()` before the
    /// tested action.
    ///
    /// # Panics
    /// If `wanted` accepts no request within [`PATIENCE`].
    pub async fn wait_for_after(&self, what: &str, first: usize, wanted: impl Fn(&Asked) -> bool) -> Asked {
        self.wait_until(what, |api| {
            api.shared.lock().asked.iter().skip(first).find(|asked| wanted(asked)).cloned()
        })
        .await
    }

    /// Waits until `query` returns a value, calling it after every change.
    ///
    /// # Panics
    /// If `query` returns no value within [`PATIENCE`].
    pub async fn wait_until<T>(&self, what: &str, query: impl Fn(&FakeApi) -> Option<T>) -> T {
        let mut changes = self.shared.changes.subscribe();
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                changes.mark_unchanged();
                if let Some(found) = query(self) {
                    return found;
                }
                // The sender lives as long as this value.
                let _ = changes.changed().await;
            }
        });
        match found.await {
            Ok(found) => found,
            Err(_) => panic!("waited {PATIENCE:?} for {what}; the requests so far:\n{}", self.transcript()),
        }
    }

    /// Formats the requests so far, one per line, for failed tests.
    #[must_use]
    pub fn transcript(&self) -> String {
        let line = |asked: &Asked| {
            // Whole objects would hide the order, which readers need.
            let body: String = asked.body.to_string().chars().take(240).collect();
            let Asked { number, outcome, verb, path, query, .. } = asked;
            format!("{number:4} {outcome:?}: {verb} {path} {query:?} {body}\n")
        };
        self.shared.lock().asked.iter().map(line).collect()
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.crash();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Records a request; returns its handling.
    fn arrive(self: &Arc<Self>, asked: &mut Asked) -> (Arrival, Duration, Act) {
        let mut state = self.lock();
        let (delay, act) = state.rules.decide(asked);
        asked.number = state.asked.len();
        state.asked.push(asked.clone());
        drop(state);
        self.changed();
        (Arrival { shared: Arc::clone(self), number: asked.number, outcome: Outcome::Broken }, delay, act)
    }
}

impl State {
    /// Signs a certificate request, if that is enabled.
    fn sign(&mut self, target: &Target, request: Value) -> Result<Value, Refusal> {
        let (Some(authority), Some(valid)) = (&self.authority, self.signs) else { return Ok(request) };
        let pem = base64::engine::general_purpose::STANDARD
            .decode(request["spec"]["request"].as_str().unwrap_or_default())
            .map_err(|error| Refusal::bad(format!("spec.request: {error}")))?;
        let asked = request["spec"]["expirationSeconds"].as_u64().map(Duration::from_secs);
        let signed = authority
            .sign(&String::from_utf8_lossy(&pem), asked.unwrap_or(valid).min(valid))
            .map_err(|error| Refusal::bad(format!("spec.request: {error}")))?;
        let name = request["metadata"]["name"].as_str().map(str::to_owned);
        let target = Target { name, subresource: Some("status".to_owned()), ..target.clone() };
        let mut new = request;
        new["status"] = json!({
            "conditions": [{ "type": "Approved", "status": "True", "reason": "Test" }],
            "certificate": base64::engine::general_purpose::STANDARD.encode(signed),
        });
        self.store.update(&target, new)
    }
}

/// Request in progress.
struct Arrival {
    shared: Arc<Shared>,
    number: usize,
    outcome: Outcome,
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(asked) = self.shared.lock().asked.get_mut(self.number) {
            asked.outcome = self.outcome;
        }
        self.shared.changed();
    }
}
