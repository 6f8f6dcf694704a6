//! Builds the parts, connects them, runs them, stops them. Nothing else knows them all.
//!
//! [`builder`] is the way in. [`run`](mod@run) connects a node that runs pods, [`observe`] one that watches
//! the pods of another kubelet; [`frame`] is what both have around their parts.

mod addresses;
pub mod builder;
mod conditions;
mod devices;
#[cfg(test)]
mod docs;
pub mod facts;
mod frame;
mod health;
mod kernel;
mod kernel_settings;
pub mod metrics;
pub mod observe;
mod own_use;
mod parts;
pub(crate) mod preflight;
pub mod process;
mod protection;
mod run;
mod sources;
mod stats;
mod subordinate_ids;
pub mod systemd;

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::parts::Parts;
pub use self::{
    builder::{Builder, Doors, Handles},
    facts::Machine,
};
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
async fn farewell(mut tasks: Parts) {
    if tokio::time::timeout(FAREWELL, tasks.ended()).await.is_err() {
        warn!("some parts did not end within {} s and are dropped", FAREWELL.as_secs());
    }
}
