//! A container runtime that does as it is told: CRI v1 on a unix socket, in memory, for tests of the agent
//! that need no root and no containerd.
//!
//! It answers as containerd does (states, idempotence, error codes and texts), records every call, and goes
//! wrong on demand:
//!
//! ```ignore
//! let cri = FakeCri::start();
//! cri.add_image("busybox:1.36");
//! cri.on(Op::StartContainer).times(2).fail(Code::Unknown, "no space left on device");
//! let held = cri.on(Op::PullImage).hold();
//! // ... start what is tested on cri.endpoint() ...
//! held.reached().await;
//! cri.crash();                       // every connection breaks, the socket stays behind
//! cri.come_back();                   // same socket, same state (forget() first: state lost)
//! let is_start = |call: &Call| call.op() == Op::StartContainer && call.succeeded();
//! let call = cri.wait_for("a container to start", is_start).await;
//! cri.exit(&cri.container("web-node", "main").unwrap().id, 137);
//! ```
//!
//! Waits end with the event they wait for, and give up (a failed test, with all calls listed) after
//! [`PATIENCE`]. It runs on a thread of its own, so it goes on whatever the test's async runtime does; a
//! paused clock has no power over it, and must not be used with it (real sockets are never idle time).

mod calls;
mod script;
mod server;
mod world;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tonic::{Code, Status};

pub use self::calls::{Asked, CHANGES, Call, Op, Outcome};
pub use self::script::Script;
pub use self::world::{Container, Sandbox, World};
pub use crate::faults::{Held, PATIENCE};

use self::script::{Act, Fault};
use self::server::Signal;
use crate::faults::Rules;

/// A fake container runtime. Dropped, it goes away with its socket.
pub struct FakeCri {
    shared: Arc<Shared>,
    socket: PathBuf,
    serving: Mutex<Option<JoinHandle<()>>>,
    // Holds the socket's folder, where it is ours.
    _folder: Option<tempfile::TempDir>,
}

/// What the test's side and the server's side share.
struct Shared {
    state: Mutex<State>,
    /// Counts changes: of calls and of the world.
    changes: watch::Sender<u64>,
}

struct State {
    world: World,
    rules: Rules<Asked, Fault>,
    calls: Vec<Call>,
    signals: Option<mpsc::UnboundedSender<Signal>>,
}

#[allow(clippy::panic)] // a test that can't go on fails, with the reason
impl FakeCri {
    /// A runtime on a socket in a folder of its own, listening.
    ///
    /// # Panics
    /// If the machine has no room for a socket.
    #[must_use]
    pub fn start() -> Self {
        let cri = Self::absent();
        cri.come_back();
        cri
    }

    /// A runtime that isn't there yet: its endpoint is known, and [`FakeCri::come_back`] starts it.
    ///
    /// # Panics
    /// If the machine has no room for a folder.
    #[must_use]
    pub fn absent() -> Self {
        let folder = match tempfile::Builder::new().prefix("cri").tempdir() {
            Ok(folder) => folder,
            Err(error) => panic!("no folder for a socket: {error}"),
        };
        let socket = folder.path().join("cri.sock");
        Self::with(socket, Some(folder))
    }

    /// As [`FakeCri::absent`], at a socket of the test's choice.
    #[must_use]
    pub fn absent_at(socket: &Path) -> Self {
        Self::with(socket.to_owned(), None)
    }

    fn with(socket: PathBuf, folder: Option<tempfile::TempDir>) -> Self {
        let state = State { world: World::new(), rules: Rules::default(), calls: Vec::new(), signals: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), changes: watch::channel(0).0 });
        FakeCri { shared, socket, serving: Mutex::new(None), _folder: folder }
    }

    /// Its socket as `unix:///path`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    // ---- Coming and going ----

    /// Starts to listen, at the same socket, with the state it had. Nothing where it listens already.
    ///
    /// # Panics
    /// If the socket can't be made.
    pub fn come_back(&self) {
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        if serving.is_some() {
            return;
        }
        // A crash leaves the socket behind, as a killed process does.
        let _ = std::fs::remove_file(&self.socket);
        let bound = UnixListener::bind(&self.socket).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = match bound {
            Ok(listener) => listener,
            Err(error) => panic!("cannot listen at {}: {error}", self.socket.display()),
        };
        let (sender, signals) = mpsc::unbounded_channel();
        self.shared.lock().signals = Some(sender);
        let shared = Arc::clone(&self.shared);
        *serving = Some(std::thread::spawn(move || server::serve(&listener, &shared, signals)));
    }

    /// Goes away as a killed process does: every connection breaks, the socket stays behind and refuses.
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

    /// Goes away in order: every connection breaks, the socket is removed.
    pub fn go_away(&self) {
        self.crash();
        let _ = std::fs::remove_file(&self.socket);
    }

    /// Goes away and comes back at once, with its state.
    pub fn restart(&self) {
        self.go_away();
        self.come_back();
    }

    /// Forgets its sandboxes, containers and images.
    pub fn forget(&self) {
        self.shared
            .work(|world| {
                world.forget();
                Ok::<_, Status>(())
            })
            .unwrap_or_default();
    }

    // ---- What goes wrong ----

    /// Begins a rule for the next call of `op`, for example
    /// `cri.on(Op::PullImage).times(3).fail(Code::Unavailable, "registry is down")`. Of several rules for a
    /// call, the oldest that isn't used up decides.
    pub fn on(&self, op: Op) -> Script<'_> {
        script::on(self, Some(op))
    }

    /// The same at the next call of any kind.
    pub fn on_any(&self) -> Script<'_> {
        script::on(self, None)
    }

    /// Takes all rules back. What hangs goes on hanging until its [`Held`] is dropped.
    pub fn heal(&self) {
        self.shared.lock().rules.clear();
    }

    // ---- The world ----

    /// A copy of what it knows.
    #[must_use]
    pub fn world(&self) -> World {
        self.shared.lock().world.clone()
    }

    /// Changes what it knows: conditions, image file systems, the cgroup driver.
    pub fn change(&self, change: impl FnOnce(&mut World)) {
        change(&mut self.shared.lock().world);
        self.shared.changed();
    }

    /// Puts an image on the node; returns its id.
    pub fn add_image(&self, name: &str) -> String {
        let id = self.shared.lock().world.add_image(name).id;
        self.shared.changed();
        id
    }

    /// Puts an image into the registry, where a pull finds it.
    pub fn add_to_registry(&self, name: &str) {
        self.change(|world| {
            world.registry.insert(world::full_name(name));
        });
    }

    /// The newest container of that name in a pod.
    #[must_use]
    pub fn container(&self, pod: &str, name: &str) -> Option<Container> {
        self.shared.lock().world.container(pod, name).cloned()
    }

    /// The newest sandbox of a pod.
    #[must_use]
    pub fn sandbox(&self, pod: &str) -> Option<Sandbox> {
        self.shared.lock().world.sandbox(pod).cloned()
    }

    /// Ends a running container with an exit code, as its process would.
    ///
    /// # Panics
    /// If it isn't running.
    pub fn exit(&self, container: &str, code: i32) {
        self.end(container, code, None);
    }

    /// Ends a running container as the kernel's OOM killer would.
    ///
    /// # Panics
    /// If it isn't running.
    pub fn kill_for_memory(&self, container: &str) {
        self.end(container, 137, Some("OOMKilled"));
    }

    fn end(&self, container: &str, code: i32, reason: Option<&str>) {
        let ended = self.shared.lock().world.exit(container, code, reason);
        if let Err(sentence) = ended {
            panic!("{sentence}");
        }
        self.shared.changed();
    }

    /// Sets the details in a verbose status of the sandbox: containerd's JSON, with `pid` and
    /// `runtimeSpec.linux.namespaces`.
    ///
    /// # Panics
    /// If there is no such sandbox.
    pub fn set_sandbox_info(&self, sandbox: &str, info: serde_json::Value) {
        self.change(|world| match world.sandboxes.get_mut(sandbox) {
            Some(sandbox) => sandbox.info = info,
            None => panic!("there is no sandbox {sandbox}"),
        });
    }

    /// The node loses its sandboxes' processes and keeps the runtime's records, as a reboot does: all
    /// sandboxes are not ready, all running containers have ended with 255.
    pub fn reboot(&self) {
        self.change(|world| {
            let running = |c: &&Container| c.state == beelet_proto::cri::ContainerState::ContainerRunning;
            let ids: Vec<String> = world.containers.values().filter(running).map(|c| c.id.clone()).collect();
            for id in ids {
                // They were just seen running.
                let _ = world.exit(&id, 255, Some("Unknown"));
            }
            for sandbox in world.sandboxes.values_mut() {
                sandbox.state = beelet_proto::cri::PodSandboxState::SandboxNotready;
            }
        });
    }

    // ---- What was called ----

    /// All calls so far, in the order they came.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.shared.lock().calls.clone()
    }

    /// Number of calls of `op` so far.
    #[must_use]
    pub fn count(&self, op: Op) -> usize {
        self.shared.lock().calls.iter().filter(|call| call.op() == op).count()
    }

    /// Waits for a call that `wanted` says yes to, among those that came already and those to come; `what`
    /// says what is waited for.
    ///
    /// # Panics
    /// If none comes within [`PATIENCE`].
    pub async fn wait_for(&self, what: &str, wanted: impl Fn(&Call) -> bool) -> Call {
        self.wait_for_after(what, 0, wanted).await
    }

    /// As [`FakeCri::wait_for`], among the calls from number `first` on: `cri.calls().len()` before what is
    /// tested.
    ///
    /// # Panics
    /// If none comes within [`PATIENCE`].
    pub async fn wait_for_after(&self, what: &str, first: usize, wanted: impl Fn(&Call) -> bool) -> Call {
        self.wait(what, |state| state.calls.iter().skip(first).find(|call| wanted(call)).cloned()).await
    }

    /// Waits until no call is being worked on: once its caller is dead, until it has noticed.
    ///
    /// # Panics
    /// If it isn't so within [`PATIENCE`].
    pub async fn until_idle(&self) {
        let pending = |state: &State| state.calls.iter().any(|call| call.outcome == Outcome::Pending);
        self.wait("the calls to end", |state| (!pending(state)).then_some(())).await;
    }

    /// Waits until the world is as `wanted` says; returns it.
    ///
    /// # Panics
    /// If it isn't within [`PATIENCE`].
    pub async fn wait_until(&self, what: &str, wanted: impl Fn(&World) -> bool) -> World {
        self.wait(what, |state| wanted(&state.world).then(|| state.world.clone())).await
    }

    async fn wait<T>(&self, what: &str, look: impl Fn(&State) -> Option<T>) -> T {
        let mut changes = self.shared.changes.subscribe();
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                changes.mark_unchanged();
                let found = look(&self.shared.lock());
                if let Some(found) = found {
                    return found;
                }
                // The sender lives as long as this value.
                let _ = changes.changed().await;
            }
        });
        match found.await {
            Ok(found) => found,
            Err(_) => panic!("waited {PATIENCE:?} for {what}; the calls so far:\n{}", self.transcript()),
        }
    }

    /// The calls so far, one a line: for failed tests.
    #[must_use]
    pub fn transcript(&self) -> String {
        let line = |call: &Call| {
            // Whole configurations would bury the order, which is what a reader wants.
            let asked: String = format!("{:?}", call.asked).chars().take(240).collect();
            format!("{:4} {:?}: {asked}\n", call.number, call.outcome)
        };
        self.shared.lock().calls.iter().map(line).collect()
    }
}

impl Drop for FakeCri {
    fn drop(&mut self) {
        self.go_away();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Notes that a call came; what is to become of it.
    fn arrive(
        self: &Arc<Self>,
        asked: Asked,
        timeout: Option<String>,
        parent: Option<String>,
    ) -> (Arrival, Duration, Act) {
        let mut state = self.lock();
        let (delay, act) = state.rules.decide(&asked);
        let number = state.calls.len();
        state.calls.push(Call { number, asked, timeout, parent, outcome: Outcome::Pending });
        drop(state);
        self.changed();
        (Arrival { shared: Arc::clone(self), number }, delay, act)
    }

    fn work<A>(&self, work: impl FnOnce(&mut World) -> Result<A, Status>) -> Result<A, Status> {
        let result = work(&mut self.lock().world);
        self.changed();
        result
    }

    fn sever(&self) {
        if let Some(signals) = &self.lock().signals {
            // It fails where the server is stopping anyway.
            let _ = signals.send(Signal::Sever);
        }
    }

    fn end_call(&self, number: usize, outcome: Outcome) {
        if let Some(call) = self.lock().calls.get_mut(number).filter(|call| call.outcome == Outcome::Pending)
        {
            call.outcome = outcome;
        }
        self.changed();
    }
}

/// A call that is being answered; dropped unanswered, it notes that.
struct Arrival {
    shared: Arc<Shared>,
    number: usize,
}

impl Arrival {
    fn finish<A>(self, result: &Result<A, Status>) {
        let code = result.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.shared.end_call(self.number, Outcome::Answered(code));
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.shared.end_call(self.number, Outcome::Dropped);
    }
}
