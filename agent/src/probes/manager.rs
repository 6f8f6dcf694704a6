//! The task that owns all probes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_policy::probe::{
    EdgePolicy, Outcome, ProbeKind, ProbeParams, ProbeResult, ProbeState, Transition,
};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::{
    sync::CancellationToken,
    time::{DelayQueue, delay_queue},
};
use tracing::{debug, warn};

use super::{
    http,
    metrics::{Metrics, ProbeLabels},
    target::{Target, Timing, pod_ips, probes_of},
    tcp::{self, Answer},
};
use crate::{
    clock::monotonic_ns,
    kernel::{Edge, Edges, Listener, Listeners, NetnsHandle},
    pods::{
        manager::{ProbeUpdate, Request},
        table::{PodEntry, PodName, PodTable},
    },
};

/// Probes that wait for an answer at the same time. More wait for their turn.
const AT_ONCE: usize = 256;
/// When the kernel's listener table and its socket list disagree after an edge, one of them is about to
/// change: it is looked at again after this time.
const RECHECK: Duration = Duration::from_millis(1);

/// How probes behave on this node.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether tcpSocket probes are answered by the kernel where it can.
    pub tcp_by_kernel: bool,
    /// What a listener's coming and going does to readiness.
    pub edge_policy: EdgePolicy,
}

/// What the probes need from the rest of the node.
#[derive(Debug)]
pub struct Parts {
    /// The pods with their status.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Where changed results go.
    pub requests: mpsc::Sender<Request>,
    /// The kernel's listeners, where it tells them.
    pub listeners: Option<Listeners>,
    /// The kernel's edges.
    pub edges: Edges,
    /// See there.
    pub settings: Settings,
    /// Counters.
    pub metrics: Metrics,
}

/// One probe of one container.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    uid: Arc<str>,
    container: Arc<str>,
    kind: ProbeKind,
}

/// A probe's answer, from the task that waited for it.
struct Finished {
    key: Key,
    container_id: String,
    answer: Answer,
}

#[derive(Debug)]
struct Worker {
    state: ProbeState,
    target: Target,
    timing: Timing,
    labels: ProbeLabels,
    /// The container instance under the probe; `None` between two instances.
    container_id: Option<String>,
    ips: Vec<IpAddr>,
    /// The network namespace's cookie, where the kernel answers this probe.
    kernel: Option<u64>,
    due: Option<delay_queue::Key>,
    in_flight: bool,
}

/// The network namespace of a pod, or the host's own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Netns {
    Host,
    Pod(PathBuf),
}

impl Netns {
    fn path(&self) -> &Path {
        match self {
            Self::Host => Path::new("/proc/self/ns/net"),
            Self::Pod(path) => path,
        }
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct Probes {
    parts: Parts,
    known: BTreeMap<PodName, Arc<PodEntry>>,
    workers: HashMap<Key, Worker>,
    due: DelayQueue<Key>,
    by_port: BTreeMap<(u64, u16), BTreeSet<Key>>,
    namespaces: HashMap<Netns, NetnsHandle>,
    slots: Arc<Semaphore>,
    finished_in: mpsc::Receiver<Finished>,
    finished_out: mpsc::Sender<Finished>,
}

impl Probes {
    /// Probes that have not looked at anything yet.
    pub fn new(parts: Parts) -> Self {
        let (finished_out, finished_in) = mpsc::channel(AT_ONCE);
        Self {
            parts,
            known: BTreeMap::new(),
            workers: HashMap::new(),
            due: DelayQueue::new(),
            by_port: BTreeMap::new(),
            namespaces: HashMap::new(),
            slots: Arc::new(Semaphore::new(AT_ONCE)),
            finished_in,
            finished_out,
        }
    }

    /// Probes until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let wake = self.parts.edges.wake();
        self.sync().await;
        loop {
            tokio::select! {
                // Edges first: they are what a user waits for.
                biased;
                () = shutdown.cancelled() => return,
                () = wake.notified() => self.drain_edges().await,
                Some(finished) = self.finished_in.recv() => self.on_finished(finished).await,
                changed = self.parts.table.changed() => {
                    if changed.is_err() { return }
                    self.sync().await;
                }
                Some(expired) = self.due.next() => self.on_due(expired.into_inner()).await,
            }
        }
    }

    /// Makes the probes fit the pods. Entries that are the same `Arc` as before are passed over.
    async fn sync(&mut self) {
        let table = Arc::clone(&self.parts.table.borrow_and_update());
        let gone: Vec<PodName> =
            self.known.keys().filter(|n| !table.pods.contains_key(*n)).cloned().collect();
        for name in gone {
            if let Some(entry) = self.known.remove(&name) {
                self.forget(&entry, None);
            }
        }
        for (name, entry) in &table.pods {
            let before = self.known.get(name);
            if before.is_some_and(|b| Arc::ptr_eq(b, entry)) {
                continue;
            }
            if let Some(before) = before.cloned()
                && before.pod.metadata.uid != entry.pod.metadata.uid
            {
                self.forget(&before, None);
            }
            self.sync_pod(entry).await;
            self.known.insert(name.clone(), Arc::clone(entry));
        }
        self.drop_unused_namespaces();
    }

    /// Drops the probes of a pod: of all its containers, or of those without probes now.
    fn forget(&mut self, entry: &PodEntry, keep: Option<&BTreeSet<Key>>) {
        let uid = entry.pod.metadata.uid.clone().unwrap_or_default();
        let gone = |key: &Key| *key.uid == *uid && keep.is_none_or(|k| !k.contains(key));
        for (_, worker) in self.workers.extract_if(|key, _| gone(key)) {
            if let Some(due) = worker.due {
                self.due.remove(&due);
            }
            self.parts.metrics.probes.remove(&worker.labels);
        }
        self.by_port.retain(|_, keys| {
            keys.retain(|key| !gone(key));
            !keys.is_empty()
        });
    }

    fn drop_unused_namespaces(&mut self) {
        let used: BTreeSet<Netns> = self.known.values().map(|entry| netns_of(entry)).collect();
        self.namespaces.retain(|netns, _| used.contains(netns));
    }

    async fn sync_pod(&mut self, entry: &Arc<PodEntry>) {
        let Some(spec) = &entry.pod.spec else { return };
        let uid: Arc<str> = entry.pod.metadata.uid.clone().unwrap_or_default().into();
        let mut wanted = BTreeSet::new();
        let sidecars = spec.init_containers.iter().flatten().filter(|c| beelet_policy::pod::is_sidecar(c));
        for container in spec.containers.iter().chain(sidecars) {
            for (kind, probe) in probes_of(container) {
                let key = Key { uid: Arc::clone(&uid), container: container.name.as_str().into(), kind };
                wanted.insert(key.clone());
                if !self.workers.contains_key(&key) {
                    let Some(worker) = self.new_worker(&entry.pod, container, kind, probe) else { continue };
                    self.workers.insert(key.clone(), worker);
                }
                self.sync_container(entry, key).await;
            }
        }
        self.forget(entry, Some(&wanted));
    }

    fn new_worker(
        &self,
        pod: &core::Pod,
        container: &core::Container,
        kind: ProbeKind,
        probe: &core::Probe,
    ) -> Option<Worker> {
        let target = Target::of(probe, container)
            .inspect_err(|error| warn!(pod = %PodName::of(pod), container = container.name, ?kind, error, "probe can't be run"))
            .ok()?;
        let waits = container.startup_probe.is_some() && kind != ProbeKind::Startup;
        let params = ProbeParams::from_probe(probe, waits, self.parts.settings.edge_policy);
        let name = PodName::of(pod);
        Some(Worker {
            state: ProbeState::new(kind, &params),
            target,
            timing: Timing::of(probe),
            labels: ProbeLabels {
                probe_type: match kind {
                    ProbeKind::Liveness => "Liveness",
                    ProbeKind::Readiness => "Readiness",
                    ProbeKind::Startup => "Startup",
                },
                result: "successful",
                container: container.name.as_str().into(),
                pod: name.name.into(),
                namespace: name.namespace.into(),
            },
            container_id: None,
            ips: Vec::new(),
            kernel: None,
            due: None,
            in_flight: false,
        })
    }

    /// Tells a probe what became of its container.
    async fn sync_container(&mut self, entry: &PodEntry, key: Key) {
        let now = now();
        let status = container_status(&entry.pod, &key.container);
        let running = status.and_then(|s| s.state.as_ref()?.running.as_ref());
        let id = status.and_then(|s| s.container_id.as_deref()).map(bare_id);
        let cookie = self.cookie_for(entry, &key);
        let Some(worker) = self.workers.get_mut(&key) else { return };
        worker.ips = pod_ips(&entry.pod);
        let mut transitions = Vec::new();
        match (running, id) {
            (Some(running), Some(id)) if worker.container_id.as_ref() != Some(&id) => {
                let started_at = running.started_at.as_ref().map_or(now, |t| since_boot(t.0, now));
                let first = worker.container_id.is_none();
                let settled = status.is_some_and(|s| match key.kind {
                    ProbeKind::Readiness => s.ready,
                    ProbeKind::Startup => s.started == Some(true),
                    ProbeKind::Liveness => false,
                });
                if first && settled {
                    // Taken over from before a restart of the agent: it goes on as it was.
                    worker.resume(started_at);
                } else {
                    transitions.extend(worker.state.container_started(now, started_at));
                }
                worker.container_id = Some(id);
                worker.kernel = cookie;
                let at = worker.first_look(&key, started_at, now, first && settled);
                worker.schedule(&mut self.due, &key, at.saturating_sub(now));
            }
            // One that was taken over before its network namespace was known.
            (Some(_), Some(_)) if worker.kernel.is_none() => worker.kernel = cookie,
            (None, _) => transitions.extend(worker.state.container_stopped(now)),
            _ => {}
        }
        if let (Some(cookie), Target::Tcp { port, .. }) = (worker.kernel, &worker.target) {
            self.by_port.entry((cookie, *port)).or_default().insert(key.clone());
        }
        if entry.pod.metadata.deletion_timestamp.is_some() {
            transitions.extend(worker.state.pod_deleted(now));
        }
        if key.kind != ProbeKind::Startup && status.is_some_and(|s| s.started == Some(true)) {
            let was_due = worker.state.due(now);
            worker.state.startup_succeeded();
            if !was_due && worker.state.due(now) {
                worker.schedule(&mut self.due, &key, Duration::ZERO);
            }
        }
        for transition in transitions {
            self.send(&key, transition, None).await;
        }
    }

    /// The cookie of the namespace where the kernel can answer this probe; `None` where it must connect.
    fn cookie_for(&mut self, entry: &PodEntry, key: &Key) -> Option<u64> {
        let worker = self.workers.get(key)?;
        let by_kernel = self.parts.settings.tcp_by_kernel
            && self.parts.listeners.is_some()
            && matches!(worker.target, Target::Tcp { host: None, .. });
        let on_host = entry.pod.spec.as_ref().is_some_and(|s| s.host_network == Some(true));
        if !by_kernel || (entry.netns.is_none() && !on_host) {
            return None;
        }
        let netns = netns_of(entry);
        if let Some(handle) = self.namespaces.get(&netns) {
            return Some(handle.cookie());
        }
        match NetnsHandle::open(netns.path()) {
            Ok(handle) => {
                let cookie = handle.cookie();
                self.namespaces.insert(netns, handle);
                Some(cookie)
            }
            Err(error) => {
                warn!(pod = %PodName::of(&entry.pod), %error, "the kernel can't answer this pod's TCP probes; they connect");
                None
            }
        }
    }

    async fn on_due(&mut self, key: Key) {
        let Some(worker) = self.workers.get_mut(&key) else { return };
        worker.due = None;
        let period = worker.timing.period;
        worker.schedule(&mut self.due, &key, period);
        // A probe on hold or not due yet keeps its place in the timetable; one under way has had its turn.
        if worker.in_flight || !worker.state.due(now()) {
            return;
        }
        match (worker.kernel, &worker.target) {
            (Some(cookie), Target::Tcp { port, .. }) => {
                let (port, ips) = (*port, worker.ips.clone());
                if let Some(listening) = self.is_listening(cookie, port, &ips) {
                    self.record(&key, tcp::verdict(listening, port)).await;
                    return;
                }
                self.launch(key);
            }
            _ => self.launch(key),
        }
    }

    /// Whether anything listens, by the socket list of the pod's namespace, else by our own table; `None`
    /// if neither can say.
    fn is_listening(&self, cookie: u64, port: u16, ips: &[IpAddr]) -> Option<bool> {
        let handle = self.namespaces.values().find(|h| h.cookie() == cookie);
        match handle.map(|h| h.is_listening(port, ips)) {
            Some(Ok(listening)) => return Some(listening),
            Some(Err(error)) => debug!(%error, port, "the socket list can't be read"),
            None => {}
        }
        let table = self.parts.listeners.as_ref()?;
        table.is_listening(cookie, port, ips).map(|found| found.is_some()).ok()
    }

    /// Asks somebody who may take a while, beside this task.
    fn launch(&mut self, key: Key) {
        let Some(worker) = self.workers.get_mut(&key) else { return };
        let Some(container_id) = worker.container_id.clone() else { return };
        worker.in_flight = true;
        let (target, within) = (worker.target.clone(), worker.timing.timeout);
        let pod_ip = worker.ips.first().copied();
        let (slots, finished) = (Arc::clone(&self.slots), self.finished_out.clone());
        tokio::spawn(async move {
            let Ok(_slot) = slots.acquire_owned().await else { return };
            let answer = ask(&target, pod_ip, within).await;
            // Nobody waits for it any more if the agent ends.
            let _ = finished.send(Finished { key, container_id, answer }).await;
        });
    }

    async fn on_finished(&mut self, finished: Finished) {
        let Some(worker) = self.workers.get_mut(&finished.key) else { return };
        worker.in_flight = false;
        // An answer of a container that is gone says nothing about the one after it.
        if worker.container_id.as_ref() == Some(&finished.container_id) {
            self.record(&finished.key, finished.answer).await;
        }
    }

    async fn record(&mut self, key: &Key, answer: Answer) {
        let Some(worker) = self.workers.get_mut(key) else { return };
        let result = match answer.outcome {
            Outcome::Success => "successful",
            Outcome::Failure => "failed",
            Outcome::Error => "unknown",
        };
        self.parts.metrics.probes.get_or_create(&ProbeLabels { result, ..worker.labels.clone() }).inc();
        if answer.outcome != Outcome::Success {
            debug!(?key, detail = answer.detail, "probe did not succeed");
        }
        if let Some(transition) = worker.state.record(now(), answer.outcome) {
            if transition.restart {
                warn!(container = %key.container, kind = ?key.kind, reason = answer.detail, "probe failed; the container must restart");
            }
            self.send(key, transition, None).await;
        }
    }

    async fn drain_edges(&mut self) {
        while let Some(edge) = self.parts.edges.try_recv() {
            match edge {
                Edge::ListenerOpened { listener, at_ns } => self.on_edge(&listener, true, at_ns).await,
                Edge::ListenerClosed { listener, at_ns } => self.on_edge(&listener, false, at_ns).await,
                Edge::Lost => self.look_again(),
                Edge::ContainerExited { .. } | Edge::OomKill { .. } | Edge::Pressure { .. } => {} // not asked for
            }
        }
    }

    /// A listener came or went somewhere on the machine.
    async fn on_edge(&mut self, listener: &Listener, opened: bool, at_ns: u64) {
        let cookie = listener.netns_cookie;
        for (port, key) in self.probes_at(cookie, listener.port) {
            let Some(worker) = self.workers.get(&key) else { continue };
            if !reaches(listener, &worker.ips) {
                continue;
            }
            if !opened {
                let table = self.parts.listeners.as_ref();
                let in_table = table.and_then(|t| t.is_listening(cookie, port, &worker.ips).ok().flatten());
                if in_table.is_some() {
                    continue; // another listener is still there
                }
                // One that our table never saw may be there too; or this one is just about to leave the list.
                let still = self.is_listening(cookie, port, &worker.ips.clone());
                if listener.port == 0 && still != Some(false) {
                    continue; // it was about another port
                }
                if still == Some(true) {
                    if let Some(worker) = self.workers.get_mut(&key) {
                        worker.schedule(&mut self.due, &key, RECHECK);
                    }
                    continue;
                }
            }
            let Some(worker) = self.workers.get_mut(&key) else { continue };
            if let Some(transition) = worker.state.edge(now(), opened) {
                self.parts.metrics.edges.inc();
                self.send(&key, transition, Some(at_ns)).await;
            }
        }
    }

    /// The probes that the kernel answers for a port of a network namespace. Port 0 stands for all: a listener from
    /// before the programs were attached, whose port the kernel had chosen, has lost it by the time its end is told
    /// (tcp_set_state puts the port before the tracepoint).
    fn probes_at(&self, cookie: u64, port: u16) -> Vec<(u16, Key)> {
        let ports = if port == 0 { 0..=u16::MAX } else { port..=port };
        let found = self.by_port.range((cookie, *ports.start())..=(cookie, *ports.end()));
        found.flat_map(|(&(_, port), keys)| keys.iter().map(move |key| (port, key.clone()))).collect()
    }

    /// Edges were lost: every probe that the kernel answers looks now.
    fn look_again(&mut self) {
        for (key, worker) in self.workers.iter_mut().filter(|(_, w)| w.kernel.is_some()) {
            worker.schedule(&mut self.due, key, Duration::ZERO);
        }
    }

    async fn send(&self, key: &Key, transition: Transition, kernel_ns: Option<u64>) {
        let Some(container_id) = self.workers.get(key).and_then(|w| w.container_id.clone()) else { return };
        let update = ProbeUpdate {
            uid: key.uid.to_string(),
            container: key.container.to_string(),
            container_id,
            kind: key.kind,
            result: transition.result,
            restart: transition.restart,
            kernel_ns,
        };
        // The manager ends only with the agent.
        let _ = self.parts.requests.send(Request::Probe(update)).await;
    }
}

impl Worker {
    /// Goes on with a container that was fine before the agent's restart.
    fn resume(&mut self, started_at: Duration) {
        let kind = self.state.kind();
        self.state = ProbeState::resume(kind, self.state.params(), started_at, ProbeResult::Success);
    }

    /// When to look first at a container that started at `started_at`. Readiness and startup want good news at
    /// once. Liveness can only bring bad news, so a container gets one period before the first of it, and an
    /// application that fails on its first failure isn't killed while it still starts. (The kubelet's first
    /// look comes at a random moment of the first period.) Containers that ran before this agent did are
    /// spread through a period.
    fn first_look(&self, key: &Key, started_at: Duration, now: Duration, settled: bool) -> Duration {
        let initial = self.state.params().initial_delay;
        let liveness = key.kind == ProbeKind::Liveness;
        let at = started_at + if liveness { initial.max(self.timing.period) } else { initial };
        if settled || (liveness && at <= now) { at.max(now) + self.phase(key) } else { at.max(now) }
    }

    /// Spreads the probes that an agent takes over evenly through their period.
    fn phase(&self, key: &Key) -> Duration {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let period = u64::try_from(self.timing.period.as_millis()).unwrap_or(u64::MAX).max(1);
        Duration::from_millis(hasher.finish() % period)
    }

    fn schedule(&mut self, queue: &mut DelayQueue<Key>, key: &Key, after: Duration) {
        match &self.due {
            Some(due) => queue.reset(due, after),
            None => self.due = Some(queue.insert(key.clone(), after)),
        }
    }
}

/// Whether a connection to one of `ips` would reach the listener. Without an address yet, every listener counts.
fn reaches(listener: &Listener, ips: &[IpAddr]) -> bool {
    let at = listener.address;
    let fits = |ip: &IpAddr| match (at, ip) {
        (IpAddr::V4(own), IpAddr::V4(ip)) => own.is_unspecified() || own == *ip,
        (IpAddr::V6(own), IpAddr::V6(ip)) => own.is_unspecified() || own == *ip,
        (IpAddr::V6(own), IpAddr::V4(ip)) => {
            listener.dual_stack && (own.is_unspecified() || own.to_ipv4_mapped() == Some(*ip))
        }
        (IpAddr::V4(_), IpAddr::V6(_)) => false,
    };
    ips.is_empty() || ips.iter().any(fits)
}

async fn ask(target: &Target, pod_ip: Option<IpAddr>, within: Duration) -> Answer {
    let named = match target {
        Target::Tcp { host, .. } | Target::Http { host, .. } => host.clone(),
    };
    let Some(host) = named.or_else(|| pod_ip.map(|ip| ip.to_string())) else {
        return Answer::error("the pod has no address yet".to_owned());
    };
    let port = match target {
        Target::Tcp { port, .. } | Target::Http { port, .. } => *port,
    };
    let address = match tcp::resolve(&host, port).await {
        Ok(address) => address,
        Err(error) => return Answer::failure(error),
    };
    match target {
        Target::Tcp { .. } => tcp::connect(address, within).await,
        Target::Http { path, headers, .. } => http::get(&host, address, path, headers, within).await,
    }
}

fn container_status<'a>(pod: &'a core::Pod, name: &str) -> Option<&'a core::ContainerStatus> {
    let status = pod.status.as_ref()?;
    let all =
        status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    all.into_iter().find(|c| c.name == name)
}

/// `containerd://<id>` without the runtime's name.
fn bare_id(id: &str) -> String {
    id.split_once("://").map_or(id, |(_, bare)| bare).to_owned()
}

fn netns_of(entry: &PodEntry) -> Netns {
    entry.netns.clone().map_or(Netns::Host, Netns::Pod)
}

/// The clock of `ProbeState`: `CLOCK_MONOTONIC`, the kernel's edges' own.
fn now() -> Duration {
    Duration::from_nanos(monotonic_ns())
}

/// A wall-clock time in the past on that clock.
fn since_boot(at: Timestamp, now: Duration) -> Duration {
    let ago = Duration::try_from(Timestamp::now().duration_since(at)).unwrap_or(Duration::ZERO);
    now.saturating_sub(ago)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_reached_at_its_own_address_or_at_any() {
        let check = |address: &str, dual_stack, ips: &[&str], expect| {
            let listener = Listener {
                cookie: 1,
                netns_cookie: 1,
                family: 0,
                address: address.parse().unwrap(),
                port: 80,
                dual_stack,
                cgroup_id: 0,
                since_ns: 0,
            };
            let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            assert_eq!(reaches(&listener, &ips), expect, "{address} {ips:?}");
        };
        check("0.0.0.0", false, &["10.0.0.7"], true);
        check("0.0.0.0", false, &["fd00::7"], false);
        check("::", true, &["10.0.0.7"], true);
        check("::", false, &["10.0.0.7"], false);
        check("::", false, &["10.0.0.7", "fd00::7"], true);
        check("10.0.0.7", false, &["10.0.0.7"], true);
        check("::ffff:10.0.0.7", true, &["10.0.0.7"], true);
        check("127.0.0.1", false, &["10.0.0.7"], false);
        check("::1", false, &["10.0.0.7", "fd00::7"], false);
        check("127.0.0.1", false, &[], true);
    }
}
