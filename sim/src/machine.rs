//! The simulated machine: a container runtime with processes that live, end, and take their time to stop.
//! The machine outlives the agent. Records the facts for the judge where they happen.

mod calls;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use beelet_judge::trace::{End, Event, Fact};
use beelet_judge::{Judge, Violation, rules};
use beelet_pleg::ExitHint;
use beelet_proto::cri::{ContainerState, PodSandboxState};
use beelet_tests::cri::{Container, Director, FakeCri, World};
use fastrand::Rng;
use tokio::sync::{Notify, mpsc};

use crate::disturbances::Disturbances;
use crate::plan::Plan;
use crate::seam;
use crate::shapes::{Behaviour, IMAGE};

/// Allocatable CPU of the machine in thousandths.
pub(crate) const CPU: u64 = 4000;
/// Exit code of a killed process.
const KILLED: i32 = 137;
/// Exit code of a process ended by SIGTERM.
const TERMINATED: i32 = 143;

/// The machine.
pub(crate) struct Machine {
    pub(crate) cri: Arc<FakeCri>,
    pub(crate) core: Arc<Core>,
}

impl Machine {
    /// Creates a machine without pods.
    pub(crate) fn new(plan: &Plan, cgroups: PathBuf) -> Self {
        let core = Arc::new(Core {
            seed: plan.seed,
            kernel: plan.kernel,
            cgroups,
            state: Mutex::new(State::new()),
            disturbances: Disturbances::default(),
            changed: Notify::new(),
            killed: Arc::new(Notify::new()),
            cri: OnceLock::new(),
        });
        let director: Arc<dyn Director> = Arc::<Core>::clone(&core);
        let cri = Arc::new(FakeCri::directed(director));
        // Fails only for a second machine.
        let _ = core.cri.set(Arc::downgrade(&cri));
        cri.add_image(IMAGE);
        cri.change(|world| world.streams_events = plan.streams);
        Self { cri, core }
    }
}

/// The part of the machine that decides about calls.
pub(crate) struct Core {
    seed: u64,
    /// True if the kernel reports exits.
    kernel: bool,
    /// Folder of the cgroups' controllers.
    cgroups: PathBuf,
    state: Mutex<State>,
    pub(crate) disturbances: Disturbances,
    /// A process or a due time has changed.
    pub(crate) changed: Notify,
    /// The agent is to be killed now.
    pub(crate) killed: Arc<Notify>,
    cri: OnceLock<Weak<FakeCri>>,
}

/// The machine's state beside the runtime's own.
struct State {
    processes: BTreeMap<String, Process>,
    /// UIDs of the pods and names of all containers, by id.
    names: BTreeMap<String, (String, String)>,
    /// Folders of the running containers' cgroups below a controller, by id.
    folders: BTreeMap<String, PathBuf>,
    seen: Seen,
    /// Causes of ends that the world does not know.
    causes: BTreeMap<String, End>,
    /// Times at which starts were requested.
    starts: BTreeMap<String, Duration>,
    /// Number of calls so far by call and subject.
    counts: BTreeMap<String, u64>,
    hints: Option<mpsc::UnboundedSender<ExitHint>>,
    statuses: BTreeMap<String, beelet_judge::trace::Status>,
    events: Vec<Event>,
    calls: Vec<(Duration, String)>,
    judge: Judge,
}

/// A container's process.
struct Process {
    behaviour: Behaviour,
    /// Time and exit code of its end, if known.
    ends: Option<(Duration, i32, End)>,
    terminated: bool,
}

/// The world as the trace has it.
#[derive(Default)]
struct Seen {
    /// Sandboxes; true if ready.
    sandboxes: BTreeMap<String, bool>,
    /// Containers with their state and CPU.
    containers: BTreeMap<String, (ContainerState, u64, String)>,
}

impl State {
    fn new() -> Self {
        Self {
            processes: BTreeMap::new(),
            names: BTreeMap::new(),
            folders: BTreeMap::new(),
            seen: Seen::default(),
            causes: BTreeMap::new(),
            starts: BTreeMap::new(),
            counts: BTreeMap::new(),
            hints: None,
            statuses: BTreeMap::new(),
            events: Vec::new(),
            calls: Vec::new(),
            judge: Judge::new(rules::Node { cpu: CPU, devices: 0 }),
        }
    }

    fn record(&mut self, fact: Fact) {
        let event = Event { at: seam::elapsed(), fact };
        self.judge.observe(&event);
        self.events.push(event);
    }

    /// Records the differences between the world and the trace.
    fn follow(&mut self, world: &World, cgroups: &Path) {
        self.follow_ends(world, cgroups);
        self.follow_sandboxes(world);
        for (id, container) in &world.containers {
            let cpu = cpu_of(container);
            let known = self.seen.containers.get(id).map(|(state, cpu, _)| (*state, *cpu));
            if known.is_none() {
                let metadata =
                    world.sandboxes.get(&container.sandbox_id).and_then(|s| s.config.metadata.as_ref());
                let uid = metadata.map(|metadata| metadata.uid.clone()).unwrap_or_default();
                self.names.insert(id.clone(), (uid, container.name().to_owned()));
                self.record(Fact::Created {
                    container: id.clone(),
                    sandbox: container.sandbox_id.clone(),
                    name: container.name().to_owned(),
                    devices: BTreeSet::new(),
                });
            }
            if known.is_none() {
                self.record(Fact::Cpu { container: id.clone(), milli: cpu });
            }
            let runs = container.state == ContainerState::ContainerRunning;
            if runs && known.is_none_or(|(state, _)| state != container.state) {
                let asked = self.starts.remove(id).unwrap_or_default();
                self.record(Fact::Started { container: id.clone(), asked });
                self.start(container);
                let parent = world.sandboxes.get(&container.sandbox_id).and_then(|s| s.config.linux.as_ref());
                let parent = parent.map_or("", |linux| linux.cgroup_parent.trim_start_matches('/'));
                let folder = PathBuf::from(parent).join(id);
                for (controller, file, value) in [
                    ("cpu", "cpu.shares", container.resources.as_ref().map_or(2, |r| r.cpu_shares.max(2))),
                    ("cpu", "cpu.cfs_quota_us", -1),
                    ("cpu", "cpu.cfs_period_us", 100_000),
                    ("memory", "memory.limit_in_bytes", 9_223_372_036_854_771_712),
                ] {
                    let folder = cgroups.join(controller).join(&folder);
                    // A pod's cgroup may be gone, as on a real machine; then the container has none.
                    let _ = std::fs::create_dir(&folder);
                    let _ = std::fs::write(folder.join(file), format!("{value}\n"));
                }
                self.folders.insert(id.clone(), folder);
            }
            let cpu = known.map_or(cpu, |(_, cpu)| cpu);
            let seen = (container.state, cpu, container.sandbox_id.clone());
            self.seen.containers.insert(id.clone(), seen);
        }
    }

    /// Records the amounts in force of the running containers of one pod, or of all.
    fn read_cgroups(&mut self, cgroups: &Path, uid: Option<&str>) {
        let mut changed = Vec::new();
        for (id, folder) in &self.folders {
            let is_meant = |uid: &str| self.names.get(id).is_some_and(|(of, _)| of == uid);
            let Some((_, before, _)) = self.seen.containers.get(id).filter(|_| uid.is_none_or(is_meant))
            else {
                continue;
            };
            let shares = std::fs::read_to_string(cgroups.join("cpu").join(folder).join("cpu.shares"));
            let milli = shares.ok().and_then(|text| text.trim().parse().ok()).map(milli_of);
            if let Some(milli) = milli.filter(|milli| milli != before) {
                changed.push((id.clone(), milli));
            }
        }
        for (id, milli) in changed {
            if let Some((_, cpu, _)) = self.seen.containers.get_mut(&id) {
                *cpu = milli;
            }
            self.record(Fact::Cpu { container: id, milli });
        }
    }

    fn follow_ends(&mut self, world: &World, cgroups: &Path) {
        let running = |state: ContainerState| state == ContainerState::ContainerRunning;
        let before: Vec<(String, ContainerState, String)> = self
            .seen
            .containers
            .iter()
            .map(|(id, (state, _, pod))| (id.clone(), *state, pod.clone()))
            .collect();
        for (id, state, sandbox) in before {
            let now = world.containers.get(&id);
            if running(state) && now.is_none_or(|container| !running(container.state)) {
                let code = now.map_or(KILLED, |container| container.exit_code);
                let by = self.causes.remove(&id).unwrap_or(End::Force);
                self.processes.remove(&id);
                if let Some(folder) = self.folders.remove(&id) {
                    for controller in ["cpu", "memory"] {
                        let _ = std::fs::remove_dir_all(cgroups.join(controller).join(&folder));
                    }
                }
                self.record(Fact::Exited { container: id.clone(), code, by });
                if let Some((seen, _, _)) = self.seen.containers.get_mut(&id) {
                    *seen = ContainerState::ContainerExited;
                }
            }
            if now.is_none() {
                self.seen.containers.remove(&id);
                if world.sandboxes.contains_key(&sandbox) {
                    self.record(Fact::Removed { container: id });
                }
            }
        }
    }

    fn follow_sandboxes(&mut self, world: &World) {
        for (id, ready) in std::mem::take(&mut self.seen.sandboxes) {
            match world.sandboxes.get(&id) {
                None => self.record(Fact::SandboxRemoved { sandbox: id }),
                Some(sandbox) if ready && sandbox.state == PodSandboxState::SandboxNotready => {
                    self.record(Fact::SandboxStopped { sandbox: id.clone() });
                    self.seen.sandboxes.insert(id, false);
                }
                Some(_) => {
                    self.seen.sandboxes.insert(id, ready);
                }
            }
        }
        for (id, sandbox) in &world.sandboxes {
            if !self.seen.sandboxes.contains_key(id) {
                let uid = sandbox.config.metadata.as_ref().map(|name| name.uid.clone()).unwrap_or_default();
                self.record(Fact::SandboxRan { sandbox: id.clone(), uid });
                self.seen.sandboxes.insert(id.clone(), true);
            }
        }
    }

    fn start(&mut self, container: &Container) {
        let behaviour = Behaviour::of(&container.config.args);
        let ends = behaviour
            .lives
            .map(|(seconds, code)| (seam::elapsed() + Duration::from_secs(seconds), code, End::Itself));
        self.processes.insert(container.id.clone(), Process { behaviour, ends, terminated: false });
    }
}

/// Returns a container's CPU in thousandths, from its shares (kubelet: `MilliCPUToShares`).
fn cpu_of(container: &Container) -> u64 {
    let shares = container.resources.as_ref().map_or(0, |resources| resources.cpu_shares);
    milli_of(u64::try_from(shares).unwrap_or(0))
}

/// Returns the CPU of shares, rounded to the shapes' multiples of 50.
fn milli_of(shares: u64) -> u64 {
    let milli = (shares * 1000 + 512) / 1024;
    (milli + 25) / 50 * 50
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut World)) {
        if let Some(cri) = self.cri.get().and_then(Weak::upgrade) {
            cri.change(|world| {
                change(world);
                self.lock().follow(world, &self.cgroups);
            });
        }
        self.changed.notify_one();
    }

    /// Records a fact.
    pub(crate) fn record(&self, fact: Fact) {
        self.lock().record(fact);
    }

    /// Returns a random number generator for one event: it depends on the event, not on the events before.
    fn random(&self, key: &str) -> Rng {
        let mut state = self.lock();
        let count = state.counts.entry(key.to_owned()).or_default();
        *count += 1;
        // FNV-1a.
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let start = 0xcbf2_9ce4_8422_2325 ^ self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let numbered = key.bytes().chain(count.to_le_bytes());
        Rng::with_seed(numbered.fold(start, hash))
    }

    // ---- Processes ----

    /// Returns the time of the next end of a process.
    pub(crate) fn next_end(&self) -> Option<Duration> {
        self.lock().processes.values().filter_map(|process| Some(process.ends?.0)).min()
    }

    /// Ends the processes whose time has come.
    pub(crate) fn end_due(&self) {
        let now = seam::elapsed();
        loop {
            let due = self.lock().processes.iter().find_map(|(id, process)| {
                process.ends.filter(|(at, _, _)| *at <= now).map(|(_, code, by)| (id.clone(), code, by))
            });
            let Some((id, code, by)) = due else { return };
            self.end(&id, code, by);
        }
    }

    /// Ends a running container's process.
    pub(crate) fn end(&self, id: &str, code: i32, by: End) {
        self.lock().causes.insert(id.to_owned(), by);
        self.change(|world| {
            let pid = world.containers.get(id).map_or(0, |container| container.pid);
            let reason = (by == End::Oom).then_some("OOMKilled");
            if world.exit(id, code, reason).is_ok() && self.kernel {
                let hint = ExitHint::Exited { pid, at_ns: seam::now() };
                // The agent may be away.
                let _ = self.lock().hints.as_ref().map(|hints| hints.send(hint));
            }
        });
        let mut state = self.lock();
        state.causes.remove(id);
        state.processes.remove(id);
    }

    /// Returns the id of a pod's running container.
    pub(crate) fn running(&self, uid: &str, name: &str) -> Option<String> {
        let state = self.lock();
        let mut ids = state.processes.keys();
        ids.find(|id| state.names.get(*id).is_some_and(|(of, named)| of == uid && named == name)).cloned()
    }

    fn runs(&self, id: &str) -> bool {
        self.lock().processes.contains_key(id)
    }

    /// Ends all processes, or those of one pod, with their sandboxes.
    pub(crate) fn crash(&self, uid: Option<&str>) {
        let uid = uid.map(str::to_owned);
        self.change(|world| {
            let is_meant = |world: &World, sandbox: &str| {
                let metadata = world.sandboxes.get(sandbox).and_then(|s| s.config.metadata.as_ref());
                uid.as_ref().is_none_or(|uid| metadata.is_some_and(|metadata| metadata.uid == *uid))
            };
            let running: Vec<String> = world
                .containers
                .values()
                .filter(|c| c.state == ContainerState::ContainerRunning && is_meant(world, &c.sandbox_id))
                .map(|c| c.id.clone())
                .collect();
            for id in running {
                self.lock().causes.insert(id.clone(), End::Machine);
                // Cannot fail: the container runs.
                let _ = world.exit(&id, 255, Some("Unknown"));
            }
            let ids: Vec<String> = world.sandboxes.keys().filter(|id| is_meant(world, id)).cloned().collect();
            for id in ids {
                if let Some(sandbox) = world.sandboxes.get_mut(&id) {
                    sandbox.state = PodSandboxState::SandboxNotready;
                }
            }
        });
    }

    /// Records a pod's published status, if it differs from the last one.
    pub(crate) fn record_status(&self, status: beelet_judge::trace::Status) {
        let mut state = self.lock();
        if state.statuses.get(&status.uid) != Some(&status) {
            state.statuses.insert(status.uid.clone(), status.clone());
            state.read_cgroups(&self.cgroups, Some(&status.uid));
            state.record(Fact::Status(status));
        }
    }

    /// Records the amounts in force of all running containers.
    pub(crate) fn read_cgroups(&self) {
        self.lock().read_cgroups(&self.cgroups, None);
    }

    /// Forgets the agent's connections and wishes after its death.
    pub(crate) fn forget_agent(&self) {
        let mut state = self.lock();
        state.hints = None;
        drop(state);
        self.disturbances.forget_agent();
    }

    /// Sends hints about exits to a new agent.
    pub(crate) fn send_hints(&self, hints: mpsc::UnboundedSender<ExitHint>) {
        self.lock().hints = Some(hints);
    }

    // ---- Results ----

    /// Takes the trace: the facts, the agent's calls, the violations so far and those of the end.
    pub(crate) fn finish(&self) -> (Vec<Event>, Vec<(Duration, String)>, Vec<Violation>) {
        let state = std::mem::replace(&mut *self.lock(), State::new());
        (state.events, state.calls, state.judge.finish(seam::elapsed()))
    }
}
