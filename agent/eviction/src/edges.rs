//! The kernel's hints that it is time to look at memory again: a stall on the pods' cgroup, a counter of
//! memory.events, a threshold of usage crossed, an OOM kill. None of them says that anything is short; each
//! makes the gauges read at once, and more often for a while.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_policy::eviction::{NodeCondition, Threshold};
use beelet_units::quantity::Quantity;
use rustix::fs::{SeekFrom, seek};
use tokio::{io::Interest, sync::watch, time::Instant};
use tracing::{debug, info, warn};

use super::Metrics;
use beelet_base::blocking::blocking;
use beelet_bpf::{Edge, Edges, PressureKind};
use beelet_cgroups::Cgroups;

/// The cgroup of all pods.
const PODS: &str = "/kubepods";
/// So much waiting for memory within a window is a hint: early, because it only makes us look.
const STALL: Duration = Duration::from_millis(50);
/// Least time between two hints from the same place: a counter may move a thousand times per second.
const SPACING: Duration = Duration::from_millis(50);

/// Where hints go; clones lead to the same place.
#[derive(Clone, Debug)]
pub struct Hints {
    given: Arc<watch::Sender<u64>>,
    last: Arc<Mutex<Option<Instant>>>,
}

impl Default for Hints {
    fn default() -> Self {
        Self { given: Arc::new(watch::Sender::new(0)), last: Arc::default() }
    }
}

impl Hints {
    /// Look now.
    pub fn notify(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.given.send_modify(|count| *count += 1);
    }

    /// Each hint from now on.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.given.subscribe()
    }

    /// Returns true if there was one within so much time.
    #[must_use]
    pub fn within(&self, time: Duration) -> bool {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|last| last.elapsed() < time)
    }
}

/// What a descriptor is, and so how it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Ready with priority, and that is all.
    Trigger,
    /// Ready with priority, and to be read from its beginning.
    Events,
    /// An eventfd.
    Counter,
}

/// Passes on what this kernel says of the pods' memory. Where notifications are by usage (version 1),
/// crossing what `thresholds` leave of the pods' limit is a hint.
pub async fn listen(cgroups: Arc<Cgroups>, thresholds: Vec<Threshold>, hints: Hints) {
    let mut listening = Vec::new();
    let opened = blocking("opening hints of memory pressure", move || open(&cgroups, &thresholds)).await;
    let names: Vec<&str> = opened.iter().map(|(name, ..)| *name).collect();
    if names.is_empty() {
        info!(
            "the kernel gives no hints on memory pressure here; memory is looked at once a second and more often"
        );
    } else {
        debug!(?names, "the kernel's hints on memory pressure are listened to");
    }
    for (name, kind, fd) in opened {
        let hints = hints.clone();
        listening.push(async move {
            if let Err(error) = follow(fd, kind, &hints).await {
                debug!(%error, name, "a source of hints on memory pressure ended");
            }
        });
    }
    futures::future::join_all(listening).await;
}

/// Passes on what the kernel half says of the pods' memory: reclaim above its bound, OOM kills. Never ends.
pub async fn listen_to_kernel(edges: Edges, hints: Hints, metrics: Metrics) {
    loop {
        match edges.recv().await {
            Edge::OomKill { kill, .. } => {
                warn!(
                    pid = kill.pid,
                    anon_rss = kill.anon_rss,
                    "the kernel killed a pod's process for want of memory"
                );
                metrics.oom_killed();
            }
            Edge::Pressure { kind: PressureKind::Reclaim, above: true, .. } | Edge::Lost => {}
            _ => continue,
        }
        hints.notify();
    }
}

fn open(cgroups: &Cgroups, thresholds: &[Threshold]) -> Vec<(&'static str, Kind, OwnedFd)> {
    let mut opened = Vec::new();
    let mut add = |name, kind, fd: Result<OwnedFd, beelet_cgroups::CgroupError>| match fd {
        Ok(fd) => opened.push((name, kind, fd)),
        Err(error) => debug!(%error, name, "not available here"),
    };
    add("pressure stalls", Kind::Trigger, cgroups.pressure_trigger(PODS, STALL));
    let is_v2 = cgroups.hierarchies().iter().all(|hierarchy| hierarchy.is_v2);
    if is_v2 {
        add("memory.events", Kind::Events, cgroups.memory_events(PODS));
    } else {
        for bytes in usages(cgroups, thresholds) {
            add("usage threshold", Kind::Counter, cgroups.usage_threshold(PODS, bytes));
        }
    }
    opened
}

/// The amounts of usage at which each memory threshold of the pods would be crossed, were all of it needed.
fn usages(cgroups: &Cgroups, thresholds: &[Threshold]) -> Vec<u64> {
    let Some(limit) = cgroups.memory_use(PODS).and_then(|memory| memory.limit) else { return Vec::new() };
    let capacity = Quantity::from_units(i64::try_from(limit).unwrap_or(i64::MAX));
    let of_memory = thresholds.iter().filter(|t| t.signal.condition() == NodeCondition::MemoryPressure);
    of_memory
        .filter_map(|threshold| u64::try_from(threshold.value.of(capacity).value()).ok())
        .map(|left| limit.saturating_sub(left))
        .collect()
}

async fn follow(fd: OwnedFd, kind: Kind, hints: &Hints) -> io::Result<()> {
    let interest = if kind == Kind::Counter { Interest::READABLE } else { Interest::PRIORITY };
    let fd = beelet_bpf::watched(fd, interest)?;
    loop {
        let mut ready = fd.ready(interest).await?;
        if kind != Kind::Trigger {
            let mut buffer = [0_u8; 512];
            if kind == Kind::Events {
                seek(fd.as_fd(), SeekFrom::Start(0))?;
            }
            match rustix::io::read(fd.as_fd(), &mut buffer) {
                Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        ready.clear_ready();
        hints.notify();
        tokio::time::sleep(SPACING).await;
    }
}
