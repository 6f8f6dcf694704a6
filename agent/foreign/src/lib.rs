//! The pods of another owner, a kubelet or any other client of CRI, as a pod table.
//!
//! The observer requests only lists and statuses from the runtime, and must never call `GetContainerEvents`:
//! containerd has one subscription for it, the kubelet's. Changes are detected by inotify on the pods' cgroup
//! folders, with periodic lists as the safety net. Values that CRI does not report (readiness, the spec, the
//! QoS class) stay unset.

mod hints;
mod table;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use beelet_base::work::Work;
use beelet_proto::cri;
use futures::future::try_join_all;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use self::hints::Hints;
use beelet_cgroups::Cgroups;
use beelet_cri::{Error, Runtime};
use beelet_model::table::{Complete, PodTable};

/// Longest and shortest interval between two lists.
const AT_LEAST: Duration = Duration::from_secs(10);
const AT_MOST: Duration = Duration::from_secs(1);
/// Delay after a hint: a container's cgroup exists shortly before the runtime reports the container as
/// running.
const SETTLE: Duration = Duration::from_millis(150);
/// Concurrent status requests.
const STATUSES: usize = 16;
/// Time without an answer, three lists, after which the observer is unhealthy.
const UNHEALTHY: Duration = Duration::from_secs(30);

/// Metrics of the observer. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    lists: Counter,
    failures: Counter,
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("beelet_observe_lists", "Lists requested from the runtime", self.lists.clone());
        registry.register("beelet_observe_list_failures", "Failed lists", self.failures.clone());
    }
}

/// Health of the runtime: the time of its last answer. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Pulse(Arc<Mutex<Option<Instant>>>);

impl Pulse {
    fn beat(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Checks that the runtime has answered recently.
    ///
    /// # Errors
    /// Fails if the last answer is too old or missing.
    pub fn check(&self) -> Result<(), NoAnswer> {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(at) if at.elapsed() < UNHEALTHY => Ok(()),
            Some(at) => Err(NoAnswer::For(at.elapsed())),
            None => Err(NoAnswer::Yet),
        }
    }
}

/// Missing answer of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// The last answer is this old.
    #[error("the container runtime has not answered for {} s", .0.as_secs())]
    For(Duration),
    /// The runtime has never answered.
    #[error("the container runtime has not answered yet")]
    Yet,
}

/// Inputs of an observer.
#[derive(Debug)]
pub struct Parts {
    /// Container runtime.
    pub runtime: Runtime,
    /// Name of the runtime, as in `containerd://<id>`.
    pub runtime_name: String,
    /// Name of the node.
    pub node: String,
    /// Cgroups of the containers, for hints.
    pub cgroups: Arc<Cgroups>,
    /// Published pod table.
    pub table: watch::Sender<Arc<PodTable>>,
    /// Set once the table has all pods.
    pub complete: Complete,
    /// Metrics.
    pub metrics: Metrics,
}

/// Observes a node.
#[derive(Debug)]
pub struct Observer {
    runtime: Runtime,
    runtime_name: String,
    node: String,
    hints: Hints,
    table: watch::Sender<Arc<PodTable>>,
    complete: Complete,
    metrics: Metrics,
    pulse: Pulse,
    known: Details,
}

/// Cached statuses of listed sandboxes and containers, valid while their listed state is unchanged.
#[derive(Debug, Default)]
struct Details {
    containers: HashMap<String, cri::ContainerStatus>,
    sandboxes: HashMap<String, cri::PodSandboxStatus>,
}

impl Observer {
    /// Creates an observer; `pulse` records each answer of the runtime.
    #[must_use]
    pub fn new(parts: Parts, pulse: Pulse) -> Self {
        let Parts { runtime, runtime_name, node, cgroups, table, complete, metrics } = parts;
        let (hints, known) = (Hints::new(cgroups), Details::default());
        Self { runtime, runtime_name, node, hints, table, complete, metrics, pulse, known }
    }

    /// Keeps the table up to date until `shutdown`.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let mut said = None;
            loop {
                let started = Instant::now();
                // Watching starts first, so that the list misses no change.
                self.hints.watch().await;
                let Some(looked) = shutdown.run_until_cancelled(self.list()).await else { return };
                match looked {
                    Ok(()) => said = None,
                    Err(error) => {
                        self.metrics.failures.inc();
                        if said.replace(error.kind) != Some(error.kind) {
                            tracing::warn!("cannot list the pods (will retry): {error}");
                        }
                    }
                }
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = self.hints.next() => {}
                    () = sleep_until(started + AT_LEAST) => continue,
                }
                let pause = SETTLE.max(AT_MOST.saturating_sub(started.elapsed()));
                if shutdown.run_until_cancelled(sleep(pause)).await.is_none() {
                    return;
                }
            }
        })
    }

    /// Lists the runtime once, and publishes a changed table.
    async fn list(&mut self) -> Result<(), Error> {
        self.metrics.lists.inc();
        let (sandboxes, containers) =
            tokio::try_join!(self.runtime.sandboxes.list(None), self.runtime.containers.list(None))?;
        self.refresh(&sandboxes, &containers).await?;
        self.pulse.beat();
        let look = table::Listing {
            node: &self.node,
            runtime: &self.runtime_name,
            sandboxes: &sandboxes,
            containers: &containers,
            sandbox_details: &self.known.sandboxes,
            container_details: &self.known.containers,
        };
        let before = Arc::clone(&self.table.borrow());
        if let Some(table) = look.table(&before) {
            self.table.send_replace(Arc::new(table));
        }
        // Only the first time.
        let _ = self.complete.set(());
        Ok(())
    }

    /// Requests the statuses of new or changed sandboxes and containers, and drops those of removed ones.
    async fn refresh(
        &mut self,
        sandboxes: &[cri::PodSandbox],
        containers: &[cri::Container],
    ) -> Result<(), Error> {
        let Details { containers: known, sandboxes: known_sandboxes } = &mut self.known;
        let listed: HashMap<&str, i32> = containers.iter().map(|c| (c.id.as_str(), c.state)).collect();
        known.retain(|id, detail| listed.get(id.as_str()) == Some(&detail.state));
        let listed: HashMap<&str, i32> = sandboxes.iter().map(|s| (s.id.as_str(), s.state)).collect();
        known_sandboxes.retain(|id, detail| listed.get(id.as_str()) == Some(&detail.state));
        let new: Vec<&str> =
            containers.iter().map(|c| c.id.as_str()).filter(|id| !known.contains_key(*id)).collect();
        for some in new.chunks(STATUSES) {
            let asked = some.iter().map(|id| gone_is_none(self.runtime.containers.status(id, false)));
            for status in try_join_all(asked).await?.into_iter().flatten().filter_map(|answer| answer.status)
            {
                known.insert(status.id.clone(), status);
            }
        }
        let new: Vec<&str> =
            sandboxes.iter().map(|s| s.id.as_str()).filter(|id| !known_sandboxes.contains_key(*id)).collect();
        for some in new.chunks(STATUSES) {
            let asked = some.iter().map(|id| gone_is_none(self.runtime.sandboxes.status(id, false)));
            for status in try_join_all(asked).await?.into_iter().flatten().filter_map(|answer| answer.status)
            {
                known_sandboxes.insert(status.id.clone(), status);
            }
        }
        Ok(())
    }
}

/// Treats "not found" as None: the object was removed after the list.
async fn gone_is_none<T>(call: impl Future<Output = Result<T, Error>>) -> Result<Option<T>, Error> {
    match call.await {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}
