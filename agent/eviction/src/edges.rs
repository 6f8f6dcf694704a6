//! The kernel's hints to read memory again: a stall of the pods' cgroup, a counter of memory.events, a
//! crossed usage threshold, an OOM kill. A hint does not prove a shortage; each one triggers an immediate
//! reading of the gauges, and more frequent ones for a while.

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
use beelet_cgroups::{Cgroups, memory, notify};

/// The cgroup of all pods.
const PODS: &str = "/kubepods";
/// Wait for memory within a window that counts as a hint: low, because a hint only triggers a reading.
const STALL: Duration = Duration::from_millis(50);
/// Minimum time between two hints from the same source: a counter may change a thousand times per second.
const SPACING: Duration = Duration::from_millis(50);

/// A channel of hints; clones share it.
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
    /// Sends a hint.
    pub fn notify(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.given.send_modify(|count| *count += 1);
    }

    /// Returns a receiver of all hints from now on.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.given.subscribe()
    }

    /// Returns true if a hint came within this time.
    #[must_use]
    pub fn within(&self, time: Duration) -> bool {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|last| last.elapsed() < time)
    }
}

/// The kind of a descriptor, which decides how to read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Ready with priority, without content.
    Trigger,
    /// Ready with priority, and read from its beginning.
    Events,
    /// An eventfd.
    Counter,
}

/// Forwards this kernel's notifications about the pods' memory as hints. With usage notifications (version
/// 1), a hint is the crossing of the pods' limit less each of `thresholds`.
pub async fn listen(cgroups: Arc<Cgroups>, thresholds: Vec<Threshold>, hints: Hints) {
    let mut listening = Vec::new();
    let opened = blocking("opening hints of memory pressure", move || open(&cgroups, &thresholds)).await;
    let names: Vec<&str> = opened.iter().map(|(name, ..)| *name).collect();
    if names.is_empty() {
        info!("the kernel sends no memory pressure notifications; polling memory at least once per second");
    } else {
        debug!(?names, "listening for the kernel's memory pressure notifications");
    }
    for (name, kind, fd) in opened {
        let hints = hints.clone();
        listening.push(async move {
            if let Err(error) = follow(fd, kind, &hints).await {
                debug!(%error, name, "lost a source of memory pressure notifications");
            }
        });
    }
    futures::future::join_all(listening).await;
}

/// Forwards the kernel programs' events about the pods' memory as hints: reclaim above its bound, OOM kills.
/// Never ends.
pub async fn listen_to_kernel(edges: Edges, hints: Hints, metrics: Metrics) {
    loop {
        match edges.recv().await {
            Edge::OomKill { kill, .. } => {
                warn!(
                    pid = kill.pid,
                    anon_rss = kill.anon_rss,
                    "the kernel killed a pod's process (out of memory)"
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
    add("pressure stalls", Kind::Trigger, notify::pressure(cgroups, PODS, STALL));
    let is_v2 = cgroups.paths.hierarchies().iter().all(|hierarchy| hierarchy.is_v2);
    if is_v2 {
        add("memory.events", Kind::Events, notify::memory_events(cgroups, PODS));
    } else {
        for bytes in usages(cgroups, thresholds) {
            add("usage threshold", Kind::Counter, notify::usage_threshold(cgroups, PODS, bytes));
        }
    }
    opened
}

/// Returns the usages at which each memory threshold of the pods would be crossed, if none of the usage were
/// reclaimable.
fn usages(cgroups: &Cgroups, thresholds: &[Threshold]) -> Vec<u64> {
    let Some(limit) = memory::of(cgroups, PODS).and_then(|memory| memory.limit) else {
        return Vec::new();
    };
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
