//! Waits from the first sign of a container's end to the runtime's confirmation.
//!
//! A single task waits for all containers: it queries a container's state soon and often after the first
//! sign, then less often, and leaves the rest to the relist. Many containers are queried in a single list.
//! The task also remembers exits of unknown processes: a container can end before the agent has seen it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_proto::cri;
use futures::future::join_all;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{ExitHint, Pace};
use beelet_base::blocking::blocking;
use beelet_base::clock::monotonic_ns;
use beelet_base::work::Work;
use beelet_bpf::OomKill;
use beelet_cgroups::{Cgroups, search};
use beelet_cri::{Error, Runtime};
use beelet_model::{
    processes::{Process, Shared},
    request::{OomUpdate, Request},
    status::OomFacts,
};

/// Intervals of queries to the runtime, each up to an age of the exit. After the last the relist takes over.
/// For most containers the runtime reports the end after a tenth of a second, and on a busy machine after up
/// to a second: those must not wait even longer.
const SCHEDULE: [(Duration, Duration); 3] = [
    (Duration::from_secs(2), Duration::from_millis(2)),
    (Duration::from_secs(5), Duration::from_millis(20)),
    (Duration::from_secs(30), Duration::from_millis(250)),
];
/// Intervals while the runtime streams its events: the queries are only a fallback.
const SCHEDULE_STREAMED: [(Duration, Duration); 2] = [
    (Duration::from_secs(3), Duration::from_millis(50)),
    (Duration::from_secs(30), Duration::from_millis(250)),
];
/// Minimum pause after a query, as a multiple of the query's duration.
const SHARE: u32 = 4;
/// Maximum number of containers to query one by one; more are queried in a single list.
const ONE_BY_ONE: usize = 4;
/// Maximum number of remembered exits of unknown processes.
const STRANGERS: usize = 1024;
/// Time for which exits of unknown processes are remembered.
const STRANGER_AGE: Duration = Duration::from_secs(5);
/// Time after which an ended process without an exit reported by the kernel ends the trust in the kernel.
const SILENCE: Duration = Duration::from_secs(5);

/// Counters; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    seen: Family<Source, Counter>,
    delay: Histogram,
    given_up: Counter,
}

/// The first source that reported a container's end.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Source {
    source: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        let bounds = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
        Self { seen: Family::default(), delay: Histogram::new(bounds), given_up: Counter::default() }
    }
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "beelet_container_exits",
            "Ends of containers, by the source that reported them first",
            self.seen.clone(),
        );
        registry.register(
            "beelet_container_exit_delay_seconds",
            "Time from a container's exit in the kernel to the runtime's report of it",
            self.delay.clone(),
        );
        registry.register(
            "beelet_container_exits_left_to_relist",
            "Exits that the runtime did not confirm in time",
            self.given_up.clone(),
        );
    }
}

/// Dependencies of the task.
#[derive(Debug)]
pub struct Parts {
    /// The runtime.
    pub runtime: Runtime,
    /// Receiver of the exits that the runtime confirmed.
    pub requests: mpsc::Sender<Request>,
    /// The running processes.
    pub processes: watch::Receiver<Shared>,
    /// Hints of exits.
    pub hints: mpsc::Receiver<ExitHint>,
    /// Pace of the relist.
    pub pace: Pace,
    /// Cgroups, for finding containers by their cgroup ids.
    pub cgroups: Arc<Cgroups>,
    /// Counters.
    pub metrics: Metrics,
}

/// A container whose end is awaited.
#[derive(Clone, Debug)]
struct Pending {
    uid: String,
    since: Instant,
    /// Time at which the kernel saw the exit; `None` if another source reported it.
    at_ns: Option<u64>,
}

/// Waits for the runtime's confirmation of every reported end of a container; runs as one task.
#[derive(Debug)]
pub struct Exits {
    parts: Parts,
    known: Shared,
    /// Pids of containers by cgroup2 id.
    cgroup_ids: HashMap<u64, u32>,
    /// Awaited containers by the runtime's identifier.
    pending: BTreeMap<String, Pending>,
    next_ask: Instant,
    /// Exited processes of containers that are not known yet.
    strangers: VecDeque<(u32, u64, Instant)>,
    /// Processes removed from `known` without an exit reported by the kernel.
    unheard: BTreeMap<u32, Instant>,
    /// Processes whose exit the kernel reported before their removal from `known`.
    heard: VecDeque<u32>,
}

impl Exits {
    /// Returns a task without hints yet.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self {
            parts,
            known: Shared::default(),
            cgroup_ids: HashMap::new(),
            pending: BTreeMap::new(),
            next_ask: Instant::now(),
            strangers: VecDeque::new(),
            unheard: BTreeMap::new(),
            heard: VecDeque::new(),
        }
    }

    /// Works until `shutdown`.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            self.on_processes().await;
            loop {
                let ask = self.next_ask;
                tokio::select! {
                    biased;
                    () = shutdown.cancelled() => return,
                    changed = self.parts.processes.changed() => {
                        if changed.is_err() { return }
                        self.on_processes().await;
                    }
                    Some(hint) = self.parts.hints.recv() => self.on_hint(hint).await,
                    () = tokio::time::sleep_until(ask), if !self.pending.is_empty() => {
                        if self.ask().await.is_err() { return }
                    }
                }
            }
        })
    }

    async fn on_hint(&mut self, hint: ExitHint) {
        match hint {
            ExitHint::Exited { pid, at_ns } => {
                self.unheard.remove(&pid);
                if self.known.contains_key(&pid) {
                    push(&mut self.heard, pid);
                    self.expect(pid, Some(at_ns));
                } else {
                    push(&mut self.strangers, (pid, at_ns, Instant::now()));
                }
            }
            ExitHint::Stopped { id } => match self.known.iter().find(|(_, process)| process.id == id) {
                Some((pid, _)) => self.expect(*pid, None),
                None => self.parts.pace.nudge(),
            },
            ExitHint::OomKilled { cgroup_id, kill } => self.on_oom(cgroup_id, kill).await,
            ExitHint::Lost => self.parts.pace.nudge(),
        }
    }

    /// Awaits the end of an exited process's container.
    fn expect(&mut self, pid: u32, at_ns: Option<u64>) {
        let Some(process) = self.known.get(&pid) else { return };
        if process.sandbox {
            // Only a relist shows a sandbox's state, and its containers end with it.
            self.parts.pace.nudge();
            return;
        }
        let now = Instant::now();
        let source = if at_ns.is_some() { "kernel" } else { "runtime" };
        if at_ns.is_none() {
            // The runtime already knows of the end.
            self.next_ask = now;
        }
        if !self.pending.contains_key(&process.id) {
            info!(id = process.id, source, "a container has ended");
            self.parts.metrics.seen.get_or_create(&Source { source }).inc();
            let pending = Pending { uid: process.uid.clone(), since: now, at_ns };
            self.pending.insert(process.id.clone(), pending);
            self.next_ask = self.next_ask.min(now.after(self.interval()));
        }
    }

    /// Returns the interval of queries to the runtime, by the most recent exit.
    fn interval(&self) -> Duration {
        let youngest = self.pending.values().map(|p| p.since.elapsed()).min().unwrap_or_default();
        let schedule: &[_] = if self.parts.pace.is_streaming() { &SCHEDULE_STREAMED } else { &SCHEDULE };
        schedule.iter().find(|(age, _)| youngest < *age).map_or(SILENCE, |(_, interval)| *interval)
    }

    /// Queries the runtime about all awaited containers; an error if the receiver is closed.
    async fn ask(&mut self) -> Result<(), ()> {
        let began = Instant::now();
        let statuses = match self.ask_runtime().await {
            Ok(statuses) => statuses,
            Err(error) => {
                debug!(%error, "cannot query ended containers; trying again");
                BTreeMap::new()
            }
        };
        for (id, status) in statuses {
            let Some(status) = status else {
                // The container was removed: the worker must check the pod itself.
                self.pending.remove(&id);
                self.parts.pace.nudge();
                continue;
            };
            if status.state() != cri::ContainerState::ContainerExited {
                continue;
            }
            let Some(pending) = self.pending.remove(&id) else { continue };
            info!(id, "the runtime confirmed that the container has ended");
            if let Some(at_ns) = pending.at_ns {
                let delay = Duration::from_nanos(monotonic_ns().saturating_sub(at_ns));
                self.parts.metrics.delay.observe(delay.as_secs_f64());
            }
            let request = Request::Exited { uid: pending.uid, status: Box::new(status) };
            self.parts.requests.send(request).await.map_err(drop)?;
        }
        self.drop_late();
        // A single query at a time, with pauses that leave a slow runtime most of its time: it is stopping
        // the containers that end together, at worst a thousand.
        self.next_ask = Instant::now().after(self.interval().max(began.elapsed().saturating_mul(SHARE)));
        Ok(())
    }

    /// Returns the status of each awaited container; `None` for a removed one. Containers that can't have
    /// changed are left out.
    async fn ask_runtime(&self) -> Result<BTreeMap<String, Option<cri::ContainerStatus>>, Error> {
        let runtime = &self.parts.runtime;
        let mut ended: Vec<&String> = self.pending.keys().collect();
        let mut found = BTreeMap::new();
        if self.pending.len() > ONE_BY_ONE {
            let listed = runtime.containers.ours().await?;
            let states: HashMap<&str, i32> = listed.iter().map(|c| (c.id.as_str(), c.state)).collect();
            let gone = ended.iter().filter(|id| !states.contains_key(id.as_str()));
            found.extend(gone.map(|id| ((*id).clone(), None)));
            let exited = i32::from(cri::ContainerState::ContainerExited);
            ended.retain(|id| states.get(id.as_str()) == Some(&exited));
        }
        let asked = ended.into_iter().map(async |id| match runtime.containers.status(id, false).await {
            Ok(response) => Ok((id.clone(), response.status)),
            Err(error) if error.is_not_found() => Ok((id.clone(), None)),
            Err(error) => Err(error),
        });
        let mut failed = None;
        for answer in join_all(asked).await {
            match answer {
                Ok((id, status)) => drop(found.insert(id, status)),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if found.is_empty() => Err(error),
            _ => Ok(found),
        }
    }

    /// Leaves containers that took too long to the relist.
    fn drop_late(&mut self) {
        let patience = SCHEDULE[SCHEDULE.len() - 1].0;
        let before = self.pending.len();
        self.pending.retain(|_, pending| pending.since.elapsed() < patience);
        let left = before - self.pending.len();
        if left > 0 {
            warn!(
                containers = left,
                "the kernel reported the end of containers, but the runtime still reports them as running; their pods wait"
            );
            self.parts.metrics.given_up.inc_by(left as u64);
            self.parts.pace.nudge();
        }
    }

    /// Handles a change of the running processes.
    async fn on_processes(&mut self) {
        let now = Arc::clone(&self.parts.processes.borrow_and_update());
        let before = std::mem::replace(&mut self.known, now);
        self.strangers.retain(|(.., since)| since.elapsed() < STRANGER_AGE);
        for (pid, at_ns, since) in std::mem::take(&mut self.strangers) {
            if self.known.contains_key(&pid) {
                push(&mut self.heard, pid);
                self.expect(pid, Some(at_ns));
            } else {
                self.strangers.push_back((pid, at_ns, since));
            }
        }
        let trusted = self.parts.pace.is_kernel_trusted();
        for pid in before.keys().filter(|pid| trusted && !self.known.contains_key(*pid)) {
            if !self.heard.contains(pid) && !self.strangers.iter().any(|(stranger, ..)| stranger == pid) {
                self.unheard.insert(*pid, Instant::now());
            }
        }
        self.check_trust();
        self.find_cgroups().await;
    }

    /// Ends the trust in the kernel if it did not report an exit.
    fn check_trust(&mut self) {
        if self.unheard.values().any(|since| since.elapsed() > SILENCE) {
            warn!(
                "containers ended without a report from the kernel (the end of a runtime or of its shims can cause that); \
                 finding exits by relist again"
            );
            self.parts.pace.set_kernel(false);
            self.unheard.clear();
        }
        while self.unheard.len() > STRANGERS {
            self.unheard.pop_first();
        }
    }

    /// Finds the cgroup2 ids of the containers, which identify them in the kernel's events.
    async fn find_cgroups(&mut self) {
        let known = Arc::clone(&self.known);
        self.cgroup_ids.retain(|_, pid| known.contains_key(pid));
        let have: BTreeSet<u32> = self.cgroup_ids.values().copied().collect();
        let new = |(pid, process): &(&u32, &Arc<Process>)| !process.sandbox && !have.contains(pid);
        if !known.iter().any(|entry| new(&entry)) {
            return;
        }
        let paths: Vec<(u32, String)> =
            known.iter().filter(new).map(|(pid, process)| (*pid, process.cgroup.clone())).collect();
        let cgroups = Arc::clone(&self.parts.cgroups);
        let find = move || -> Vec<(u64, u32)> {
            let id_of = |path: &str| {
                let (pod, id) = path.rsplit_once('/')?;
                cgroups
                    .paths
                    .cgroup_id(path)
                    .or_else(|| cgroups.paths.cgroup_id(&search::container(&cgroups, pod, id)?))
            };
            paths.into_iter().filter_map(|(pid, path)| Some((id_of(&path)?, pid))).collect()
        };
        // Without the ids, an OOM kill is assigned only by its process.
        self.cgroup_ids.extend(blocking("finding cgroups of containers", find).await);
    }

    async fn on_oom(&mut self, cgroup_id: u64, kill: OomKill) {
        // Read first, because the process will end soon.
        let command = blocking("reading a process's name", move || command_of(kill.pid)).await;
        let pid = self.cgroup_ids.get(&cgroup_id).copied().unwrap_or(kill.pid);
        let Some(process) = self.known.get(&pid).filter(|process| !process.sandbox) else {
            debug!(cgroup_id, ?kill, "OOM kill outside of all known containers");
            return;
        };
        // The container ends only if the victim was its first process.
        let facts = OomFacts { kill, command, first: kill.pid == pid };
        let update = OomUpdate { uid: process.uid.clone(), id: process.id.clone(), facts };
        // The receiver is closed after the manager's end.
        let _ = self.parts.requests.send(Request::OomKilled(update)).await;
    }
}

/// Returns the name of a process for the user; empty if the process has ended. Containers choose it, so it
/// may have any bytes.
fn command_of(pid: u32) -> String {
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = name.strip_suffix(b"\n").unwrap_or(&name);
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    String::from_utf8_lossy(name).chars().map(shown).collect()
}

/// Appends an item, and drops the oldest of a full queue.
fn push<T>(queue: &mut VecDeque<T>, item: T) {
    if queue.len() >= STRANGERS {
        queue.pop_front();
    }
    queue.push_back(item);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_is_shown_without_control_characters() {
        let named = |name: &'static [u8]| {
            std::thread::spawn(move || {
                rustix::thread::set_name(&std::ffi::CString::new(name).unwrap()).unwrap();
                command_of(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs())
            })
            .join()
            .unwrap()
        };
        assert_eq!(named(b"worker 1"), "worker 1");
        assert_eq!(named(b"\x1b[2J\xff\n"), "\u{fffd}[2J\u{fffd}\u{fffd}");
        assert_eq!(command_of(u32::MAX), "");
    }
}
