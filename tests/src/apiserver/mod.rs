//! An API server that does as it is told: plain HTTP on loopback, in memory, for tests of the agent that need
//! no cluster.
//!
//! It has the rules that a node agent depends on (versions, UIDs, conflicts, graceful deletion, the status
//! subresource, watches), records every request, and goes wrong on demand:
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
//! Waits end with the event they wait for, and give up (a failed test, with all requests listed) after
//! [`PATIENCE`]. It runs on a thread of its own, so it goes on whatever the test's async runtime does.

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

/// A request that came.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its number, from 0.
    pub number: usize,
    /// What it wanted.
    pub verb: Verb,
    /// Its path, without the query.
    pub path: String,
    /// Its query, decoded.
    pub query: BTreeMap<String, String>,
    /// How its body is meant: for patches, their kind.
    pub content_type: String,
    /// The client: the header `Authorization`.
    pub authorization: Option<String>,
    /// Its body; null if it had none.
    pub body: Value,
    /// When it came.
    pub at: Instant,
    /// What became of it.
    pub outcome: Outcome,
}

impl Asked {
    /// It was done, and answered so.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        matches!(self.outcome, Outcome::Answered(200..=299))
    }

    /// It is of this kind and about this path, in which `*` stands for one part.
    #[must_use]
    pub fn is(&self, verb: Verb, pattern: &str) -> bool {
        self.verb == verb && fits(pattern, &self.path)
    }
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is being worked on.
    Pending,
    /// It was answered with this status. Of a watch: it began.
    Answered(u16),
    /// Its connection broke.
    Broken,
}

/// A fake API server. Dropped, it goes away.
pub struct FakeApi {
    shared: Arc<Shared>,
    address: SocketAddr,
    serving: Mutex<Option<JoinHandle<()>>>,
    /// Bound and never listening: nobody else gets the port while the server is away.
    _reserved: Socket,
}

/// What the test's side and the server's side share.
struct Shared {
    state: Mutex<State>,
    /// Counts changes: of requests and of objects.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    store: Store,
    rules: Rules<Asked, Fault>,
    asked: Vec<Asked>,
    signals: Option<mpsc::UnboundedSender<Signal>>,
    authority: Option<Authority>,
    /// For how long certificates are signed as soon as they are asked for; none: they wait.
    signs: Option<Duration>,
}

#[allow(clippy::panic)] // a test that can't go on fails, with the reason
impl FakeApi {
    /// A server on a port of its own, listening.
    ///
    /// # Panics
    /// If the machine has no port left.
    #[must_use]
    pub fn start() -> Self {
        let api = Self::absent();
        api.come_back();
        api
    }

    /// A server that isn't there yet: its address is known, and [`FakeApi::come_back`] starts it.
    ///
    /// # Panics
    /// If the machine has no port left.
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

    /// The URL at which it listens: `http://127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig that leads here, with the token `token` for who asks.
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

    // ---- Coming and going ----

    /// Starts to listen, at the same port, with the objects it had. Nothing where it listens already.
    ///
    /// # Panics
    /// If the port can't be listened at.
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

    /// Goes away as a killed process does: every connection breaks, the port refuses.
    pub fn crash(&self) {
        let signals = self.shared.lock().signals.take();
        if let Some(signals) = signals {
            // It fails where the server has ended by itself.
            let _ = signals.send(Signal::Stop);
        }
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = serving {
            let _ = thread.join();
        }
    }

    /// Breaks every connection, and goes on listening.
    pub fn sever(&self) {
        if let Some(signals) = &self.shared.lock().signals {
            let _ = signals.send(Signal::Sever);
        }
    }

    // ---- What goes wrong ----

    /// Begins a rule for the next request of this kind whose path is `pattern`, in which `*` stands for
    /// one part: `api.on(Verb::Patch, "/api/v1/nodes/*/status").times(3).refuse(500, "etcd is away")`. Of
    /// several rules for a request, the oldest that isn't used up decides.
    pub fn on(&self, verb: Verb, pattern: &str) -> Script<'_> {
        script::on(self, Some(verb), Some(pattern))
    }

    /// The same at the next request of any kind.
    pub fn on_any(&self) -> Script<'_> {
        script::on(self, None, None)
    }

    /// Takes all rules back. What hangs goes on hanging until its [`Held`] is dropped.
    pub fn heal(&self) {
        self.shared.lock().rules.clear();
    }

    /// Ends the watches of the paths that `pattern` means, in order, as the server does after some minutes.
    pub fn end_watches(&self, pattern: &str) {
        self.shared.lock().store.cut(|path| fits(pattern, path), false);
    }

    /// Breaks the connections of such watches.
    pub fn break_watches(&self, pattern: &str) {
        self.shared.lock().store.cut(|path| fits(pattern, path), true);
    }

    /// Sends such watches these bytes, whatever they mean: half an event, a bookmark of the past.
    pub fn say(&self, pattern: &str, bytes: impl AsRef<[u8]>) {
        self.shared.lock().store.say(|path| fits(pattern, path), bytes.as_ref());
    }

    /// Sends such watches a bookmark.
    pub fn bookmark(&self, pattern: &str) {
        self.shared.lock().store.bookmarks(|path| fits(pattern, path));
    }

    /// Forgets how things were: a watch that begins at an older version than the newest is told that it is
    /// too old.
    pub fn compact(&self) {
        self.shared.lock().store.compact();
    }

    /// The paths that are being watched.
    #[must_use]
    pub fn watched(&self) -> Vec<String> {
        self.shared.lock().store.watched()
    }

    // ---- The objects ----

    /// Makes or replaces the object at `path` as it stands, its status too.
    ///
    /// # Panics
    /// If the path names no object.
    pub fn put(&self, path: &str, object: Value) -> Value {
        self.change(path, |store, target| store.put(target, object))
    }

    /// The object at `path`.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<Value> {
        self.shared.lock().store.get(&Target::of(path)?).ok()
    }

    /// Every object of a collection, of all namespaces: `/api/v1/pods`.
    #[must_use]
    pub fn all(&self, collection: &str) -> Vec<Value> {
        self.shared.lock().store.all(collection)
    }

    /// Changes the object at `path` by a merge patch; a path that ends in `/status` changes the status.
    ///
    /// # Panics
    /// If there is no such object.
    pub fn patch(&self, path: &str, patch: &Value) -> Value {
        self.change(path, |store, target| store.patch(target, "application/merge-patch+json", patch))
    }

    /// Deletes the object at `path` as a user does: a pod on a node gracefully.
    ///
    /// # Panics
    /// If there is no such object.
    pub fn delete(&self, path: &str) -> Value {
        self.change(path, |store, target| store.delete(target, &Value::Null))
    }

    /// Deletes it as a user does who says how many seconds it gets (`kubectl delete --grace-period`).
    ///
    /// # Panics
    /// If there is no such object.
    pub fn delete_within(&self, path: &str, seconds: i64) -> Value {
        self.change(path, |store, target| store.delete(target, &json!({ "gracePeriodSeconds": seconds })))
    }

    /// Deletes it by force: it is gone at once.
    ///
    /// # Panics
    /// If there is no such object.
    pub fn remove(&self, path: &str) -> Value {
        self.change(path, |store, target| store.delete(target, &json!({ "gracePeriodSeconds": 0 })))
    }

    /// Deletes it with so many seconds of grace, whatever its own are. None if there is no such object.
    ///
    /// # Panics
    /// If the path names no object.
    pub fn try_delete_within(&self, path: &str, seconds: i64) -> Option<Value> {
        self.try_change(path, |store, target| store.delete(target, &json!({ "gracePeriodSeconds": seconds })))
            .ok()
    }

    /// Takes away what keeps the object at `path` from being removed: its finalizers. None if there is no
    /// such object.
    ///
    /// # Panics
    /// If the path names no object.
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
        let Some(target) = Target::of(path) else { panic!("{path} names no object") };
        let changed = change(&mut self.shared.lock().store, &target);
        self.shared.changed();
        changed
    }

    // ---- Certificates ----

    /// Signs every CertificateSigningRequest from now on as soon as it is made, for so long.
    ///
    /// # Panics
    /// If no key can be made.
    pub fn sign_certificates(&self, valid: Duration) {
        let authority = Authority::new("test").unwrap_or_else(|error| panic!("no authority: {error}"));
        let mut state = self.shared.lock();
        state.authority.get_or_insert(authority);
        state.signs = Some(valid);
    }

    /// The certificate of the authority that signs; none before it was told to.
    #[must_use]
    pub fn authority(&self) -> Option<String> {
        self.shared.lock().authority.as_ref().map(|authority| authority.pem().to_owned())
    }

    // ---- What was asked ----

    /// All requests so far, in the order they came.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        self.shared.lock().asked.clone()
    }

    /// Number of requests of this kind for the paths that `pattern` means.
    #[must_use]
    pub fn count(&self, verb: Verb, pattern: &str) -> usize {
        self.shared.lock().asked.iter().filter(|asked| asked.is(verb, pattern)).count()
    }

    /// Waits for a request that `wanted` says yes to, among those that came already and those to come; `what`
    /// says what is waited for.
    ///
    /// # Panics
    /// If none comes within [`PATIENCE`].
    pub async fn wait_for(&self, what: &str, wanted: impl Fn(&Asked) -> bool) -> Asked {
        self.wait_for_after(what, 0, wanted).await
    }

    /// As [`FakeApi::wait_for`], among the requests from number `first` on: `api.asked().len()` before what
    /// is tested.
    ///
    /// # Panics
    /// If none comes within [`PATIENCE`].
    pub async fn wait_for_after(&self, what: &str, first: usize, wanted: impl Fn(&Asked) -> bool) -> Asked {
        self.wait_until(what, |api| {
            api.shared.lock().asked.iter().skip(first).find(|asked| wanted(asked)).cloned()
        })
        .await
    }

    /// Waits until `look` finds something, looking after every change.
    ///
    /// # Panics
    /// If it doesn't within [`PATIENCE`].
    pub async fn wait_until<T>(&self, what: &str, look: impl Fn(&FakeApi) -> Option<T>) -> T {
        let mut changes = self.shared.changes.subscribe();
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                changes.mark_unchanged();
                if let Some(found) = look(self) {
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

    /// The requests so far, one per line: for failed tests.
    #[must_use]
    pub fn transcript(&self) -> String {
        let line = |asked: &Asked| {
            // Whole objects would bury the order, which is what a reader wants.
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

    /// Notes that a request came; what is to become of it.
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
    /// Signs a request for a certificate, if it was told to.
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

/// A request that is being worked on.
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
