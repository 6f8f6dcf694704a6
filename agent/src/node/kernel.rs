//! Starts and stops the kernel half, which may block, off the async threads.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result};
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use beelet_bpf::{Kernel, KernelOptions, PodFolders, Scheduler};
use beelet_cgroups::{Cgroups, Version};
use beelet_tuner::{Scheduling, StartScheduler};
use beelet_units::scheduling::SchedulingShare;

/// Brings up the kernel half as far as this kernel allows. The kernel half logs what is missing.
pub(super) async fn start(options: KernelOptions) -> Result<Kernel> {
    let kernel =
        spawn_blocking(move || Kernel::start(&options)).await.context("the kernel half could not start")?;
    if kernel.adopted() {
        info!("the kernel half went on while the agent was away; it is taken over");
    }
    Ok(kernel)
}

/// Stops it; with `keep_pins` its programs and maps stay for the next start.
pub(super) async fn stop(kernel: Kernel, keep_pins: bool) {
    match spawn_blocking(move || kernel.stop(keep_pins)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "the kernel half was not left in order"),
        Err(error) => warn!(%error, "the kernel half was dropped"),
    }
}

/// What the tuner asks of it. A failure is the counters' too, which are read before, and say so.
pub(super) fn for_tuner(measures: beelet_bpf::Measures) -> beelet_tuner::KernelHalf {
    let freed = measures.clone();
    beelet_tuner::KernelHalf {
        counters: waits(measures.clone()),
        holders: holders(measures),
        freed: Arc::new(move || freed.freed_pages().unwrap_or_default()),
    }
}

/// Who had the CPUs while others waited.
fn holders(measures: beelet_bpf::Measures) -> beelet_tuner::Holders {
    Arc::new(move |waiting| {
        let found = measures.waited_for(|id| waiting.contains(&id)).unwrap_or_default();
        let permille = |part: u64, of: u64| {
            u32::try_from(u128::from(part) * 1000 / u128::from(of.max(1))).unwrap_or(u32::MAX).min(1000)
        };
        let shares = |waited: beelet_bpf::WaitedFor| {
            let of = waited.waited_ns;
            waited.held.into_iter().map(|(id, held_ns)| (id, permille(held_ns, of))).collect()
        };
        found.into_iter().map(|(id, waited)| (id, shares(waited))).collect()
    })
}

/// What the kernel programs count. The tuner reads twice per second, so a failure is logged once.
fn waits(measures: beelet_bpf::Measures) -> beelet_tuner::Source {
    let warned = AtomicBool::new(false);
    Arc::new(move || match measures.snapshot() {
        Ok(counters) => {
            warned.store(false, Ordering::Relaxed);
            counters
        }
        Err(error) => {
            if !warned.swap(true, Ordering::Relaxed) {
                warn!(%error, "cannot read the kernel's counters; the tuner does without");
            }
            BTreeMap::new()
        }
    })
}

/// Loads the tuner's own scheduler over the pods of these cgroups.
pub(super) fn scheduler(cgroups: Arc<Cgroups>) -> StartScheduler {
    Arc::new(move || {
        if cgroups.version() != Version::V2 {
            return Err("it needs cgroup version 2 alone: it knows pods by their cgroups there".to_owned());
        }
        let folder =
            |path: &str| cgroups.cgroup2_path(path).ok_or_else(|| format!("there is no cgroup {path}"));
        let (root, burstable) = (folder("/kubepods")?, folder("/kubepods/burstable")?);
        let best_effort = folder("/kubepods/besteffort")?;
        let folders = PodFolders { root: &root, burstable: &burstable, best_effort: &best_effort };
        let scheduler = Scheduler::start(&folders).map_err(|error| error.to_string())?;
        Ok(Box::new(Loaded(scheduler)) as Box<dyn Scheduling>)
    })
}

/// The kernel half's scheduler as the tuner knows it.
struct Loaded(Scheduler);

impl Scheduling for Loaded {
    fn share_out(
        &mut self,
        pods: &BTreeMap<u64, SchedulingShare>,
        limits: &BTreeMap<u64, u64>,
    ) -> Result<(), String> {
        self.0.share_out(pods, limits).map_err(|error| error.to_string())
    }

    fn ended(&self) -> Result<Option<String>, String> {
        self.0.ended().map(|end| end.map(|end| end.reason)).map_err(|error| error.to_string())
    }
}
