//! Scripted container runtime: CRI v1 on a unix socket, in memory, for tests of the agent without root and
//! without containerd.
//!
//! The runtime behaves like containerd (states, idempotence, error codes and texts), records every call, and
//! fails on demand:
//!
//! ```ignore
//! let cri = FakeCri::start();
//! cri.add_image("busybox:1.36");
//! cri.on(Op::StartContainer).times(2).fail(Code::Unknown, "no space left on device");
//! let held = cri.on(Op::PullImage).hold();
//! // ... start the subject on cri.endpoint() ...
//! held.reached().await;
//! cri.crash();                       // every connection breaks, the socket stays behind
//! cri.come_back();                   // same socket, same state (forget() first: state lost)
//! let is_start = |call: &Call| call.op() == Op::StartContainer && call.succeeded();
//! let call = cri.wait_for("a container to start", is_start).await;
//! cri.exit(&cri.container("web-node", "main").unwrap().id, 137);
//! ```
//!
//! A wait ends with its event, and fails the test, with a list of all calls, after [`PATIENCE`]. The runtime
//! has its own thread, independent of the test's async runtime; a paused clock does not affect it, and must
//! not be used with it (it would advance during waits for real sockets). A simulation instead gives the
//! runtime a [`Director`] and connects in memory ([`FakeCri::connect`]), on its own thread and clock.

mod calls;
mod director;
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
pub use self::director::Director;
pub use self::script::Script;
pub use self::world::{Container, Sandbox, World};
pub use crate::faults::{Held, PATIENCE};

use self::script::{Act, Fault};
use self::server::Signal;
use crate::faults::Rules;

/// Fake container runtime; a drop stops it and removes its socket.
pub struct FakeCri {
    shared: Arc<Shared>,
    socket: PathBuf,
    serving: Mutex<Option<JoinHandle<()>>>,
    // Keeps a temporary folder of the socket.
    _folder: Option<tempfile::TempDir>,
}

/// State shared by the test and the server.
struct Shared {
    state: Mutex<State>,
    /// Counts changes of calls and of the world.
    changes: watch::Sender<u64>,
    /// Decides about all calls of a simulation, which records them itself.
    director: Option<Arc<dyn Director>>,
}

struct State {
    world: World,
    rules: Rules<Asked, Fault>,
    calls: Vec<Call>,
    signals: Option<mpsc::UnboundedSender<Signal>>,
}

#[allow(clippy::panic)] // a test that cannot continue fails with the reason
impl FakeCri {
    /// Starts a runtime on a socket in its own folder.
    ///
    /// # Panics
    /// If the socket cannot be created.
    #[must_use]
    pub fn start() -> Self {
        let cri = Self::absent();
        cri.come_back();
        cri
    }

    /// Creates a runtime that is not running: its endpoint is known, and [`FakeCri::come_back`] starts it.
    ///
    /// # Panics
    /// If the folder cannot be created.
    #[must_use]
    pub fn absent() -> Self {
        let folder = match tempfile::Builder::new().prefix("cri").tempdir() {
            Ok(folder) => folder,
            Err(error) => panic!("cannot create a folder for the socket: {error}"),
        };
        let socket = folder.path().join("cri.sock");
        Self::with(socket, Some(folder), None)
    }

    /// Like [`FakeCri::absent`], at the given socket.
    #[must_use]
    pub fn absent_at(socket: &Path) -> Self {
        Self::with(socket.to_owned(), None, None)
    }

    /// Creates the runtime of a simulation, without a socket: connect with [`FakeCri::connect`].
    #[must_use]
    pub fn directed(director: Arc<dyn Director>) -> Self {
        Self::with(PathBuf::new(), None, Some(director))
    }

    /// Opens a connection in memory. A task of the caller's async runtime serves it.
    #[must_use]
    pub fn connect(&self) -> tokio::io::DuplexStream {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        tokio::spawn(server::serve_connection(Arc::clone(&self.shared), theirs));
        ours
    }

    fn with(socket: PathBuf, folder: Option<tempfile::TempDir>, director: Option<Arc<dyn Director>>) -> Self {
        let state = State { world: World::new(), rules: Rules::default(), calls: Vec::new(), signals: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), changes: watch::channel(0).0, director });
        FakeCri { shared, socket, serving: Mutex::new(None), _folder: folder }
    }

    /// Returns the socket as `unix:///path`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    // ---- Availability ----

    /// Starts to listen at the same socket, with the previous state. Has no effect on a listening runtime.
    ///
    /// # Panics
    /// If the socket cannot be created.
    pub fn come_back(&self) {
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        if serving.is_some() {
            return;
        }
        // A crash leaves the socket behind, like a killed process.
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

    /// Stops like a killed process: every connection breaks, and the remaining socket refuses new ones.
    pub fn crash(&self) {
        let signals = self.shared.lock().signals.take();
        if let Some(signals) = signals {
            // Fails if the server has ended already.
            let _ = signals.send(Signal::Stop);
        }
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = serving {
            let _ = thread.join();
        }
    }

    /// Stops in order: every connection breaks, and the socket is removed.
    pub fn go_away(&self) {
        self.crash();
        let _ = std::fs::remove_file(&self.socket);
    }

    /// Stops and starts at once, with the same state.
    pub fn restart(&self) {
        self.go_away();
        self.come_back();
    }

    /// Forgets all sandboxes, containers and images.
    pub fn forget(&self) {
        self.shared
            .work(|world| {
                world.forget();
                Ok::<_, Status>(())
            })
            .unwrap_or_default();
    }

    // ---- Faults ----

    /// Begins a rule for the next call of `op`, for example
    /// `cri.on(Op::PullImage).times(3).fail(Code::Unavailable, "registry is down")`. If several rules match a
    /// call, the oldest unused one applies.
    pub fn on(&self, op: Op) -> Script<'_> {
        script::on(self, Some(op))
    }

    /// Begins a rule for the next call of any kind.
    pub fn on_any(&self) -> Script<'_> {
        script::on(self, None)
    }

    /// Removes all rules. Held calls stay held until their [`Held`] is dropped.
    pub fn heal(&self) {
        self.shared.lock().rules.clear();
    }

    // ---- The world ----

    /// Returns a copy of the runtime's state.
    #[must_use]
    pub fn world(&self) -> World {
        self.shared.lock().world.clone()
    }

    /// Changes the runtime's state: conditions, image file systems, the cgroup driver.
    pub fn change(&self, change: impl FnOnce(&mut World)) {
        change(&mut self.shared.lock().world);
        self.shared.changed();
    }

    /// Adds an image to the node and returns its id.
    pub fn add_image(&self, name: &str) -> String {
        let id = self.shared.lock().world.add_image(name).id;
        self.shared.changed();
        id
    }

    /// Adds an image to the registry, for pulls.
    pub fn add_to_registry(&self, name: &str) {
        self.change(|world| {
            world.registry.insert(world::full_name(name));
        });
    }

    /// Returns the newest container of that name in a pod.
    #[must_use]
    pub fn container(&self, pod: &str, name: &str) -> Option<Container> {
        self.shared.lock().world.container(pod, name).cloned()
    }

    /// Returns the newest sandbox of a pod.
    #[must_use]
    pub fn sandbox(&self, pod: &str) -> Option<Sandbox> {
        self.shared.lock().world.sandbox(pod).cloned()
    }

    /// Ends a running container with an exit code, like its process.
    ///
    /// # Panics
    /// If the container is not running.
    pub fn exit(&self, container: &str, code: i32) {
        self.end(container, code, None);
    }

    /// Ends a running container like the kernel's OOM killer.
    ///
    /// # Panics
    /// If the container is not running.
    pub fn kill_for_memory(&self, container: &str) {
        self.end(container, 137, Some("OOMKilled"));
    }

    fn end(&self, container: &str, code: i32, reason: Option<&str>) {
        let ended = self.shared.lock().world.exit(container, code, reason);
        if let Err(message) = ended {
            panic!("{message}");
        }
        self.shared.changed();
    }

    /// Sets the details in a verbose status of the sandbox: containerd's JSON, with `pid` and
    /// `runtimeSpec.linux.namespaces`.
    ///
    /// # Panics
    /// If the sandbox does not exist.
    pub fn set_sandbox_info(&self, sandbox: &str, info: serde_json::Value) {
        self.change(|world| match world.sandboxes.get_mut(sandbox) {
            Some(sandbox) => sandbox.info = info,
            None => panic!("sandbox {sandbox} does not exist"),
        });
    }

    /// Simulates a reboot of the node, which ends all processes but keeps the runtime's records: all
    /// sandboxes are not ready, all running containers have ended with 255.
    pub fn reboot(&self) {
        self.change(|world| {
            let running = |c: &&Container| c.state == beelet_proto::cri::ContainerState::ContainerRunning;
            let ids: Vec<String> = world.containers.values().filter(running).map(|c| c.id.clone()).collect();
            for id in ids {
                // Cannot fail: the containers are running.
                let _ = world.exit(&id, 255, Some("Unknown"));
            }
            for sandbox in world.sandboxes.values_mut() {
                sandbox.state = beelet_proto::cri::PodSandboxState::SandboxNotready;
            }
        });
    }

    // ---- Calls ----

    /// Returns all calls so far, in order of arrival.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.shared.lock().calls.clone()
    }

    /// Returns the number of calls of `op` so far.
    #[must_use]
    pub fn count(&self, op: Op) -> usize {
        self.shared.lock().calls.iter().filter(|call| call.op() == op).count()
    }

    /// Waits for a call that `wanted` matches, received before or later; `what` describes it for the failure
    /// message.
    ///
    /// # Panics
    /// If no call matches within [`PATIENCE`].
    pub async fn wait_for(&self, what: &str, wanted: impl Fn(&Call) -> bool) -> Call {
        self.wait_for_after(what, 0, wanted).await
    }

    /// Like [`FakeCri::wait_for`], for calls from number `first` on, e.g. `cri.calls().len()` before the
    /// tested action.
    ///
    /// # Panics
    /// If no call matches within [`PATIENCE`].
    pub async fn wait_for_after(&self, what: &str, first: usize, wanted: impl Fn(&Call) -> bool) -> Call {
        self.wait(what, |state| state.calls.iter().skip(first).find(|call| wanted(call)).cloned()).await
    }

    /// Waits until no call is in progress: after the death of a caller, until that is noticed.
    ///
    /// # Panics
    /// If calls are still in progress after [`PATIENCE`].
    pub async fn until_idle(&self) {
        let pending = |state: &State| state.calls.iter().any(|call| call.outcome == Outcome::Pending);
        self.wait("the calls to end", |state| (!pending(state)).then_some(())).await;
    }

    /// Waits until `wanted` matches the world, and returns it.
    ///
    /// # Panics
    /// If it does not match within [`PATIENCE`].
    pub async fn wait_until(&self, what: &str, wanted: impl Fn(&World) -> bool) -> World {
        self.wait(what, |state| wanted(&state.world).then(|| state.world.clone())).await
    }

    async fn wait<T>(&self, what: &str, query: impl Fn(&State) -> Option<T>) -> T {
        let mut changes = self.shared.changes.subscribe();
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                changes.mark_unchanged();
                let found = query(&self.shared.lock());
                if let Some(found) = found {
                    return found;
                }
                // The sender lives as long as this value.
                let _ = changes.changed().await;
            }
        });
        match found.await {
            Ok(found) => found,
            Err(_) => panic!(
                "timed out after {PATIENCE:?} waiting for {what}; calls so far:\n{}",
                self.transcript()
            ),
        }
    }

    /// Returns the calls so far, one per line, for failed tests.
    #[must_use]
    pub fn transcript(&self) -> String {
        let line = |call: &Call| {
            // Complete configurations would hide the order of the calls.
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

    /// Records a new call and returns the matching action.
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
            // Fails if the server is stopping.
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

/// Call in progress, recorded as dropped on drop.
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
