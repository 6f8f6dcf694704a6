//! Starts and stops the kernel half (the BPF programs) on blocking threads.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result};
use tracing::{info, warn};

use beelet_base::blocking::spawn_blocking;
use beelet_bpf::{Kernel, KernelOptions, PodFolders, Scheduler};
use beelet_cgroups::{Cgroups, Version};
use beelet_tuner::{SchedulerError, Scheduling, StartScheduler};
use beelet_units::scheduling::SchedulingShare;

/// Starts the kernel half as far as this kernel allows. The kernel half logs missing capabilities.
pub(super) async fn start(options: KernelOptions) -> Result<Kernel> {
    let kernel =
        spawn_blocking(move || Kernel::start(&options)).await.context("cannot start the kernel half")?;
    if kernel.adopted() {
        info!("adopted BPF programs that kept running while the agent was stopped");
    }
    Ok(kernel)
}

/// Stops the kernel half; `keep_pins` keeps its programs and maps for the next start.
pub(super) async fn stop(kernel: Kernel, keep_pins: bool) {
    match spawn_blocking(move || kernel.stop(keep_pins)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "cannot stop the kernel half cleanly"),
        Err(error) => warn!(%error, "cannot detach BPF programs"),
    }
}

/// Returns the kernel half's measurements for the tuner. Errors other than those of the counters are ignored:
/// the counters are read first and fail for the same causes.
pub(super) fn for_tuner(measures: beelet_bpf::Measures) -> beelet_tuner::KernelHalf {
    let freed = measures.clone();
    beelet_tuner::KernelHalf {
        counters: waits(measures.clone()),
        holders: holders(measures),
        freed: Arc::new(move || freed.freed_pages().unwrap_or_default()),
    }
}

/// Returns the cgroups that held the CPUs while others waited.
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

/// Returns the BPF programs' counters. The tuner reads twice per second, so only the first failure is logged.
fn waits(measures: beelet_bpf::Measures) -> beelet_tuner::Source {
    let warned = AtomicBool::new(false);
    Arc::new(move || match measures.snapshot() {
        Ok(counters) => {
            warned.store(false, Ordering::Relaxed);
            counters
        }
        Err(error) => {
            if !warned.swap(true, Ordering::Relaxed) {
                warn!(%error, "cannot read the BPF programs' counters; the tuner works without them");
            }
            BTreeMap::new()
        }
    })
}

/// Loads the tuner's own scheduler over the pods of these cgroups.
pub(super) fn scheduler(cgroups: Arc<Cgroups>) -> StartScheduler {
    Arc::new(move || {
        if cgroups.paths.version() != Version::V2 {
            let message = "the scheduler needs cgroup version 2 alone to identify pods";
            return Err(SchedulerError(message.to_owned()));
        }
        let folder = |path: &str| {
            let missing = || SchedulerError(format!("cgroup {path} does not exist"));
            cgroups.paths.cgroup2_path(path).ok_or_else(missing)
        };
        let (root, burstable) = (folder("/kubepods")?, folder("/kubepods/burstable")?);
        let best_effort = folder("/kubepods/besteffort")?;
        let folders = PodFolders { root: &root, burstable: &burstable, best_effort: &best_effort };
        let scheduler = Scheduler::start(&folders).map_err(|error| SchedulerError(error.to_string()))?;
        Ok(Box::new(Loaded(scheduler)) as Box<dyn Scheduling>)
    })
}

/// The kernel half's scheduler behind the tuner's interface.
struct Loaded(Scheduler);

impl Scheduling for Loaded {
    fn share_out(
        &mut self,
        pods: &BTreeMap<u64, SchedulingShare>,
        limits: &BTreeMap<u64, u64>,
    ) -> Result<(), SchedulerError> {
        self.0.share_out(pods, limits).map_err(|error| SchedulerError(error.to_string()))
    }

    fn ended(&self) -> Result<Option<String>, SchedulerError> {
        self.0.ended().map(|end| end.map(|end| end.reason)).map_err(|error| SchedulerError(error.to_string()))
    }
}
