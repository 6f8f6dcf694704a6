//! Builds, connects, runs and stops the parts of an agent. No other module knows all parts.
//!
//! [`Builder`] is the entry point. `run.rs` lists the parts of a node that runs pods, in order of their
//! start; [`observe`] is a node that watches the pods of another kubelet; `frame.rs` is common to both.
//! [`Services`] exist from the start; `services::Late` has the later ones; `tasks.rs` runs the parts.

mod addresses;
mod builder;
mod cgroup_keepers;
mod conditions;
mod devices;
#[cfg(test)]
mod docs;
mod doors;
mod exits;
pub mod facts;
mod folders;
mod frame;
mod handles;
mod health;
mod kernel;
mod kernel_settings;
pub mod metrics;
pub mod observe;
mod opened;
mod own_use;
mod pinning;
pub(crate) mod preflight;
pub mod process;
mod protection;
mod repair;
mod run;
mod servers;
mod services;
mod sources;
mod stats;
mod subordinate_ids;
pub mod systemd;
mod tasks;
mod topology;
mod upkeep;

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub(crate) use self::repair::inputs as node_repair;
use self::tasks::Tasks;
pub use self::{builder::Builder, doors::Doors, facts::Machine, handles::Handles, services::Services};
use beelet_config::Config;

/// Time within which a repeated signal counts as the same: timeout(1) signals both its child and its group.
const SAME_CAUSE: Duration = Duration::from_secs(1);
/// Maximum time for the parts to end after the shutdown's start.
const FAREWELL: Duration = Duration::from_secs(10);

/// Runs the node until SIGTERM or SIGINT.
///
/// # Errors
/// A required resource is unavailable; the message names it and the remedy.
pub async fn run(builder: Builder, config: Config) -> Result<()> {
    let shutdown = CancellationToken::new();
    // Killed or ended at once, the agent intentionally leaves the BPF programs for the next start.
    stop_on_signals(&shutdown, || {})?;
    builder.run(config, shutdown).await
}

/// Ends the agent in order at the first signal, and immediately, after `at_once`, at a later one.
fn stop_on_signals(shutdown: &CancellationToken, at_once: impl Fn() + Send + 'static) -> Result<()> {
    let mut term = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let shutdown = shutdown.clone();
    tokio::spawn(async move {
        let mut first: Option<Instant> = None;
        loop {
            let name = tokio::select! {
                _ = term.recv() => "SIGTERM",
                _ = int.recv() => "SIGINT",
            };
            match first {
                Some(at) if at.elapsed() < SAME_CAUSE => continue,
                Some(_) => {
                    warn!("received {name} again: exiting immediately");
                    at_once();
                    std::process::exit(130);
                }
                None => {}
            }
            first = Some(Instant::now());
            info!("received {name}: shutting down");
            shutdown.cancel();
        }
    });
    Ok(())
}

/// Waits for the parts to end, for a limited time.
async fn farewell(mut tasks: Tasks) {
    if tokio::time::timeout(FAREWELL, tasks.ended()).await.is_err() {
        warn!("some parts did not end within {} s; dropping them", FAREWELL.as_secs());
    }
}
