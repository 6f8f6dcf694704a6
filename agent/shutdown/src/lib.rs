//! The graceful end of a node (KEP-2000, KEP-2712): holds the machine up by a delay lock of logind, and
//! when it is about to go down ends the pods by priority. Only once they have given everything back, and
//! the API server has their last statuses, the lock is given back.
//!
//! `beelet_policy::node::shutdown` decides who goes when; the pods' manager ends them. Everything here is
//! said to others by one value ("since when the machine has been going down"): admission lets nobody in
//! then, and the node is not ready. Where there is no logind, the agent runs without it and says so once.
//!
//! Must never end a pod on a signal's word alone: anybody may send one.

mod ending;
mod metrics;
mod room;

use std::{path::PathBuf, sync::Arc, time::Duration};

use beelet_base::blocking::blocking;
use beelet_base::clock::After as _;
use beelet_base::work::Work;
use beelet_model::{request::Request, table::PodTable};
use beelet_policy::node::shutdown::{self, Periods};
use beelet_state::{Loaded, State, events::NodeEvents};
use beelet_systemd::{
    Error,
    logind::{DelayLock, Logind},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use metrics::Metrics;

/// Who logind shows as the holder of the lock, and why.
const WHO: &str = "beelet";
const WHY: &str = "pods are ended before the machine goes down";
/// The event's reason, as the kubelet's.
const REASON: &str = "NodeShutdown";
/// The durable record of the last shutdown.
const RECORD: &str = "node-shutdown";
/// The pauses between two tries to reach logind.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Since when the machine has been going down; None while it doesn't.
pub type Since = Option<Timestamp>;

/// What the part needs from the rest of the node.
#[derive(Debug)]
pub struct Parts {
    /// What pods get.
    pub periods: Periods,
    /// The address of the system bus; None: the machine's own.
    pub bus: Option<String>,
    /// The folder for our piece of logind's configuration.
    pub logind_drop_ins: PathBuf,
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// To the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// The newest table of which the API server has every status; None where no API server wants to know.
    pub written: watch::Receiver<Option<Arc<PodTable>>>,
    /// Tells everybody.
    pub since: watch::Sender<Since>,
    /// What people should know.
    pub events: NodeEvents,
    /// Where the last shutdown is remembered.
    pub state: Arc<State>,
    /// Counters.
    pub metrics: Metrics,
}

/// The last shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Record {
    began: Timestamp,
    /// When all was done; None if it never was.
    ended: Option<Timestamp>,
}

/// Follows logind.
#[derive(Debug)]
pub struct Shutdown {
    parts: Parts,
    /// None while the machine goes down, and where logind can't be reached.
    lock: Option<DelayLock>,
}

impl Shutdown {
    /// Nothing is asked of logind before it runs.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self { parts, lock: None }
    }

    /// Works until `stop`. Returns at once where pods get no time at all.
    pub fn run(mut self, stop: CancellationToken) -> Work {
        Box::pin(async move {
            if self.parts.periods.is_off() {
                return;
            }
            stop.run_until_cancelled(async {
                self.show_last().await;
                self.follow().await;
            })
            .await;
        })
    }

    async fn follow(&mut self) {
        let (mut pause, mut told) = (RETRY.0, String::new());
        loop {
            let began = Instant::now();
            let Err(error) = self.session().await;
            let sentence = error.to_string();
            if sentence != told {
                warn!(
                    "cannot follow shutdowns of the machine: {sentence}. Pods get no time to end until that works \
                     (shutdownGracePeriod; it is tried again)"
                );
                told = sentence;
            }
            pause = if began.elapsed() > RETRY.1 { RETRY.0 } else { (pause * 2).min(RETRY.1) };
            sleep(pause).await;
        }
    }

    /// As long as one connection works.
    async fn session(&mut self) -> Result<std::convert::Infallible, Error> {
        let mut logind = Logind::connect(self.parts.bus.as_deref()).await?;
        // First of all: without a logind there is nothing to make room in.
        let goes_down = logind.is_preparing_for_shutdown().await?;
        if let Err(why) = room::make(&logind, &self.parts.periods, &self.parts.logind_drop_ins).await {
            self.parts.events.warning(REASON, &why);
        }
        if !goes_down {
            // A new one, also where the one before still holds: logind may have been restarted.
            self.lock = Some(logind.delay_shutdown(WHO, WHY).await?);
            info!("a shutdown of the machine waits for the pods");
        }
        loop {
            let goes_down = logind.is_preparing_for_shutdown().await?;
            let is_told = self.parts.since.borrow().is_some();
            match (goes_down, is_told) {
                (true, false) => {
                    self.shut_down(&mut logind).await;
                    // It may have been called off meanwhile, and nobody says so twice.
                    continue;
                }
                (false, true) => self.call_off(&logind).await?,
                _ => {}
            }
            if !logind.changed().await {
                return Err(Error::lost());
            }
        }
    }

    /// Ends all pods, and gives the lock back. Returns early if the shutdown was called off.
    async fn shut_down(&mut self, logind: &mut Logind) {
        let (began, at) = (Instant::now(), Timestamp::now());
        self.parts.events.normal(REASON, "Shutdown manager detected shutdown event");
        self.parts.since.send_replace(Some(at));
        let delay = logind.longest_delay().await.unwrap_or_else(|_| self.parts.periods.total());
        let latest = began.after(shutdown::latest_release(delay));
        self.remember(Record { began: at, ended: None }).await;
        tokio::select! {
            () = ending::end_all(&self.parts, latest) => {}
            () = called_off(logind) => return,
        }
        self.remember(Record { began: at, ended: Some(Timestamp::now()) }).await;
        info!(seconds = began.elapsed().as_secs(), "the machine may go down");
        self.lock = None;
    }

    /// The machine stays: pods that nobody else makes again run again.
    async fn call_off(&mut self, logind: &Logind) -> Result<(), Error> {
        self.parts.events.normal(REASON, "Shutdown manager detected shutdown cancellation");
        self.lock = Some(logind.delay_shutdown(WHO, WHY).await?);
        self.parts.since.send_replace(None);
        ending::begin_again(&self.parts).await;
        Ok(())
    }

    /// What is remembered of the last shutdown, for the page of metrics.
    async fn show_last(&self) {
        let state = Arc::clone(&self.parts.state);
        match blocking("reading the last shutdown", move || state.load::<Record>(RECORD)).await {
            Ok(Loaded::Value { value, .. }) => self.parts.metrics.show(value.began, value.ended),
            Ok(_) => {}
            Err(error) => warn!(%error, "cannot read when the last shutdown was"),
        }
    }

    async fn remember(&self, record: Record) {
        self.parts.metrics.show(record.began, record.ended);
        let state = Arc::clone(&self.parts.state);
        let stored = blocking("keeping the shutdown", move || state.store(RECORD, &record)).await;
        if let Err(error) = stored {
            warn!(%error, "cannot remember when this shutdown was");
        }
    }
}

/// Waits until the machine does not go down any more; for ever if that can't be known.
async fn called_off(logind: &mut Logind) {
    while logind.changed().await {
        if logind.is_preparing_for_shutdown().await == Ok(false) {
            return;
        }
    }
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests;
