//! Builds the parts, connects them, runs them, stops them. Nothing else knows them all.
//!
//! [`Builder`] is the way in. `run.rs` lists what a node that runs pods starts, in order; [`observe`] is a
//! node that watches the pods of another kubelet; `frame.rs` has what both have around their parts.
//! [`Services`] exist from the start; `services::Late` has those that come later; `tasks.rs` runs the parts.

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
pub(crate) mod preflight;
pub mod process;
mod protection;
mod run;
mod servers;
mod services;
mod sources;
mod stats;
mod subordinate_ids;
pub mod systemd;
mod tasks;
mod upkeep;

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::tasks::Tasks;
pub use self::{builder::Builder, doors::Doors, facts::Machine, handles::Handles, services::Services};
use beelet_config::Config;

/// A signal that comes again within this time has the same cause: timeout(1) signals both its child and its
/// group.
const SAME_CAUSE: Duration = Duration::from_secs(1);
/// How long the parts get to end after they were told to.
const FAREWELL: Duration = Duration::from_secs(10);

/// Runs the node until SIGTERM or SIGINT.
///
/// # Errors
/// A required resource is unavailable; the sentence says which, and what to do.
pub async fn run(builder: Builder, config: Config) -> Result<()> {
    let shutdown = CancellationToken::new();
    // Killed or ended at once, it leaves the kernel programs to the next start, as it is meant to.
    stop_on_signals(&shutdown, || {})?;
    builder.run(config, shutdown).await
}

/// The first signal ends the agent in order. One that comes later ends it at once, after `at_once`.
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
                    warn!("{name} again: ending at once");
                    at_once();
                    std::process::exit(130);
                }
                None => {}
            }
            first = Some(Instant::now());
            info!("{name}: ending");
            shutdown.cancel();
        }
    });
    Ok(())
}

/// Lets the parts end by themselves, but not for ever.
async fn farewell(mut tasks: Tasks) {
    if tokio::time::timeout(FAREWELL, tasks.ended()).await.is_err() {
        warn!("some parts did not end within {} s and are dropped", FAREWELL.as_secs());
    }
}
