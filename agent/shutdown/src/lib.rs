//! The graceful end of a node (KEP-2000, KEP-2712): holds a delay lock of logind, and terminates the pods by
//! priority when the machine is about to go down. The lock is released only once the pods have released
//! everything and the API server has their last statuses.
//!
//! `beelet_policy::node::shutdown` decides the order; the pods' manager terminates the pods. A published
//! value, the start time of the shutdown, informs the other parts: admission then rejects pods, and the node
//! is not ready. Without logind the agent runs without this part and logs that once.
//!
//! This crate must never end a pod because of a signal alone: any local process may send one.

mod ending;
mod metrics;
mod room;

use std::{path::PathBuf, sync::Arc, time::Duration};

use beelet_base::blocking::blocking;
use beelet_base::clock::After as _;
use beelet_base::work::Work;
use beelet_model::{request::Request, table::PodTable};
use beelet_policy::node::shutdown::{self, Periods};
use beelet_state::{ForeignFile, StateError, events::NodeEvents};
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

/// Holder of the lock and reason, as logind shows them.
const WHO: &str = "beelet";
const WHY: &str = "terminate pods before the machine goes down";
/// Reason of the event, as in the kubelet.
const REASON: &str = "NodeShutdown";
/// Name of the file in the kubelet's directory with the times of the last shutdown.
pub const STATE_FILE: &str = "graceful_node_shutdown_state";
/// Shortest and longest pause between two tries to reach logind.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Start time of the shutdown; None while the machine stays up.
pub type Since = Option<Timestamp>;

/// Inputs from the rest of the node.
#[derive(Debug)]
pub struct Parts {
    /// Time for the pods, by priority.
    pub periods: Periods,
    /// Address of the system bus; None: the machine's own.
    pub bus: Option<String>,
    /// Folder for beelet's drop-in of logind's configuration.
    pub logind_drop_ins: PathBuf,
    /// Pod table.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Newest table of which the API server has every status; None without an API server.
    pub written: watch::Receiver<Option<Arc<PodTable>>>,
    /// Publishes the start time of the shutdown.
    pub since: watch::Sender<Since>,
    /// Events of the node.
    pub events: NodeEvents,
    /// File of the last shutdown's times, in the kubelet's format: [`STATE_FILE`].
    pub file: ForeignFile,
    /// Counters.
    pub metrics: Metrics,
}

/// Times of the last shutdown, as in the kubelet's file (`state` in pkg/kubelet/nodeshutdown/storage.go).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    start_time: Timestamp,
    /// End of the shutdown, or [`NEVER`].
    end_time: Timestamp,
}

/// The time of Go's zero value, 0001-01-01T00:00:00Z.
const NEVER: Timestamp = Timestamp::constant(-62_135_596_800, 0);

/// Follows logind and ends the pods.
#[derive(Debug)]
pub struct Shutdown {
    parts: Parts,
    /// Delay lock; None while the machine goes down, and while logind is unreachable.
    lock: Option<DelayLock>,
}

impl Shutdown {
    /// Creates the part; [`Self::run`] makes the first call to logind.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self { parts, lock: None }
    }

    /// Runs until `stop`. Returns at once if pods get no time.
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

    /// Serves one connection until it fails.
    async fn session(&mut self) -> Result<std::convert::Infallible, Error> {
        let mut logind = Logind::connect(self.parts.bus.as_deref()).await?;
        // Comes first: without logind its configuration need not change.
        let goes_down = logind.is_preparing_for_shutdown().await?;
        if let Err(why) = room::make(&logind, &self.parts.periods, &self.parts.logind_drop_ins).await {
            self.parts.events.warning(REASON, &why);
        }
        if !goes_down {
            // A new lock, even if the previous one still holds: logind may have been restarted.
            self.lock = Some(logind.delay_shutdown(WHO, WHY).await?);
            info!("holding logind's delay lock: a shutdown waits for the pods");
        }
        loop {
            let goes_down = logind.is_preparing_for_shutdown().await?;
            let is_told = self.parts.since.borrow().is_some();
            match (goes_down, is_told) {
                (true, false) => {
                    self.shut_down(&mut logind).await;
                    // The shutdown may have been cancelled meanwhile, and logind announces that once.
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

    /// Ends all pods, and releases the lock. Returns early if the shutdown was cancelled.
    async fn shut_down(&mut self, logind: &mut Logind) {
        let (began, at) = (Instant::now(), Timestamp::now());
        self.parts.events.normal(REASON, "Shutdown manager detected shutdown event");
        self.parts.since.send_replace(Some(at));
        let delay = logind.longest_delay().await.unwrap_or_else(|_| self.parts.periods.total());
        let latest = began.after(shutdown::latest_release(delay));
        self.remember(Record { start_time: at, end_time: NEVER }).await;
        tokio::select! {
            () = ending::end_all(&self.parts, latest) => {}
            () = called_off(logind) => return,
        }
        self.remember(Record { start_time: at, end_time: Timestamp::now() }).await;
        info!(seconds = began.elapsed().as_secs(), "pods have ended: the machine may go down");
        self.lock = None;
    }

    /// Handles a cancelled shutdown: restarts static pods.
    async fn call_off(&mut self, logind: &Logind) -> Result<(), Error> {
        self.parts.events.normal(REASON, "Shutdown manager detected shutdown cancellation");
        self.lock = Some(logind.delay_shutdown(WHO, WHY).await?);
        self.parts.since.send_replace(None);
        ending::begin_again(&self.parts).await;
        Ok(())
    }

    /// Publishes the record of the last shutdown as metrics.
    async fn show_last(&self) {
        let file = self.parts.file.clone();
        let bytes = match blocking("reading the last shutdown", move || file.read()).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return,
            Err(error) => return warn!(%error, "cannot read the times of the last shutdown"),
        };
        match serde_json::from_slice::<Record>(&bytes) {
            Ok(record) => self.show(record),
            Err(error) => {
                let path = self.parts.file.path().display();
                warn!(
                    "cannot read the times of the last shutdown: {path}: {error}; the next shutdown replaces the file"
                );
            }
        }
    }

    /// Publishes the times as metrics: 0 for a time that is missing.
    fn show(&self, record: Record) {
        let known = |time: Timestamp| (time > Timestamp::UNIX_EPOCH).then_some(time);
        self.parts.metrics.show(known(record.start_time), known(record.end_time));
    }

    async fn remember(&self, record: Record) {
        self.show(record);
        let file = self.parts.file.clone();
        let stored = blocking("storing the times of the shutdown", move || {
            let bytes = serde_json::to_vec(&record);
            file.replace(
                &bytes.map_err(|source| StateError::Encode { name: STATE_FILE.to_owned(), source })?,
            )?;
            file.settle()
        });
        if let Err(error) = stored.await {
            warn!(%error, "cannot store the times of this shutdown");
        }
    }
}

/// Waits until the shutdown is cancelled; forever if logind is lost.
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
