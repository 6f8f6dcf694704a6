//! Closed-loop tuning of cgroups: measures how containers suffer, has `policy::tuner` decide, and holds
//! cgroup settings accordingly until they are restored.
//!
//! A durable journal records every setting with its owner's value before the write, so that stopping, `off`,
//! and a start after any kind of crash restore the earlier values. A setting that another process overwrites
//! belongs to that process from then on. The mode `advise` writes nothing. Must never set anything except
//! through [`beelet_cgroups`], nor decide by itself.

mod cold;
mod engine;
mod events;
mod foreign;
mod history;
mod holder;
mod journal;
mod knobs;
mod metrics;
mod quiet;
mod rung;
mod sample;
mod targets;
#[cfg(test)]
mod tests;
mod throttled;
mod view;

use std::{sync::Arc, time::Duration};

use beelet_base::blocking::spawn_blocking;
use beelet_policy::{
    resources::cgroups::CgroupConfig,
    tuner::{Law, TunerMode},
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

pub use self::{
    cold::ColdSettings,
    engine::{Engine, recover},
    events::record_events,
    metrics::Metrics,
    rung::{SchedulerError, Scheduling, StartScheduler},
    sample::{Freed, Holders, KernelHalf, Source},
    targets::{Target, TargetContainer},
    view::{Blocked, HeldSetting, Outcome, TunerRecord, View},
};
use self::{foreign::Foreign, targets::Targets};
use beelet_base::clock::processor_time;
use beelet_base::work::Work;
use beelet_cgroups::Cgroups;
use beelet_model::table::PodTable;
use beelet_state::State;

/// Settings of the tuner.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Level of intervention.
    pub mode: TunerMode,
    /// Time between two ticks.
    pub interval: Duration,
    /// Time for which the tuner leaves an overwritten setting alone.
    pub back_off: Duration,
    /// Bounds, step sizes, patience.
    pub law: Law,
    /// Proactive reclaim.
    pub cold: ColdSettings,
}

/// The owner of the pods and their cgroups.
#[derive(Clone, Debug)]
pub enum Owner {
    /// This agent, with this configuration.
    Us(CgroupConfig),
    /// A kubelet, whose pods are only observed.
    Kubelet,
}

/// The tuner's dependencies.
pub struct Parts {
    /// The pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The cgroups.
    pub cgroups: Arc<Cgroups>,
    /// Owner of the cgroups.
    pub owner: Owner,
    /// Storage of the journal.
    pub state: Arc<State>,
    /// Measurements of the kernel programs, if loaded.
    pub kernel: Option<KernelHalf>,
    /// Loader of the tuner's own scheduler, if configured.
    pub scheduler: Option<StartScheduler>,
    /// Settings of the tuner.
    pub settings: Settings,
    /// Counters and gauges.
    pub metrics: Metrics,
    /// Channel for the tuner's view.
    pub view: watch::Sender<Arc<View>>,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Maximum share of a processor for sampling, as one part in N: a tick over all pods of a suffering node
/// reads some eighteen files of each. Advice is less urgent, and leaves more to a busy node.
const fn share(mode: TunerMode) -> u32 {
    match mode {
        TunerMode::Enforce => 25,
        TunerMode::Advise | TunerMode::Off => 100,
    }
}

/// Factor by which the mode `advise` ticks less often while no container can suffer: advice is not urgent.
const QUIETER: u32 = 4;

/// Returns the time from the end of one tick to the next if it is longer than usual, because the tick took
/// long or no container can suffer.
fn longer_pause(settings: &Settings, took: Duration, is_quiet: bool) -> Option<Duration> {
    let quieter = if is_quiet && settings.mode == TunerMode::Advise { QUIETER } else { 1 };
    let pause = (settings.interval * quieter).max(took * (share(settings.mode) - 1));
    Some(pause).filter(|pause| *pause > settings.interval)
}

/// Runs until `shutdown`, then restores all held settings.
pub fn run(parts: Parts, shutdown: CancellationToken) -> Work {
    Box::pin(async move {
        if parts.settings.mode == TunerMode::Off {
            let history = history::History::load(&parts.state).shown();
            parts.view.send_replace(Arc::new(View { history, ..View::off() }));
            return;
        }
        let (mut engine, mut finder) = (parts.engine(), parts.finder());
        let mut ticks = interval(parts.settings.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = ticks.tick() => {}
            }
            let (table, mut moved) = (Arc::clone(&parts.table.borrow()), finder);
            let ticked = spawn_blocking(move || {
                let (now, before) = (Instant::now().into_std(), processor_time());
                let pods = moved.find(&table, &mut engine, now);
                let view = engine.tick(&pods, now);
                (engine, moved, view, processor_time().saturating_sub(before))
            });
            (engine, finder) = match ticked.await {
                Ok((engine, finder, view, took)) => {
                    parts.view.send_replace(Arc::new(view));
                    if let Some(pause) = longer_pause(&parts.settings, took, engine.is_quiet()) {
                        ticks.reset_after(pause);
                    }
                    (engine, finder)
                }
                Err(failed) => {
                    error!(%failed, "the tuner failed; restoring all settings and restarting it");
                    (parts.recovered_engine().await, parts.finder())
                }
            };
        }
        let restored = spawn_blocking(move || engine.restore()).await.unwrap_or_default();
        if restored > 0 {
            info!(settings = restored, "restored all cgroup settings that the tuner held");
        }
    })
}

/// A finder of the running pods.
enum Finder {
    Ours(CgroupConfig, Targets),
    Foreign(Foreign),
}

impl Finder {
    fn find(&mut self, table: &Arc<PodTable>, engine: &mut Engine, now: std::time::Instant) -> Arc<[Target]> {
        match self {
            Self::Ours(config, targets) => targets.of(table, config),
            Self::Foreign(foreign) => {
                if let Some(cgroup) = foreign.best_effort() {
                    engine.set_best_effort(cgroup);
                }
                foreign.targets(table, now).into()
            }
        }
    }
}

impl Parts {
    fn engine(&self) -> Engine {
        let engine = Engine::new(
            Arc::clone(&self.cgroups),
            Arc::clone(&self.state),
            self.kernel.clone(),
            self.settings,
            self.metrics.clone(),
        );
        match self.owner {
            Owner::Us(_) => engine.with_scheduler(self.scheduler.clone()),
            Owner::Kubelet => engine.into_guest(),
        }
    }

    fn finder(&self) -> Finder {
        match &self.owner {
            Owner::Us(config) => Finder::Ours(config.clone(), Targets::default()),
            Owner::Kubelet => Finder::Foreign(Foreign::new(Arc::clone(&self.cgroups))),
        }
    }

    async fn recovered_engine(&self) -> Engine {
        let (cgroups, state) = (Arc::clone(&self.cgroups), Arc::clone(&self.state));
        let _ = spawn_blocking(move || recover(&cgroups, &state)).await;
        self.engine()
    }
}
