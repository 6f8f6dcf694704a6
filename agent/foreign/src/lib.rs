//! The pods of somebody else: what runs on a node whose kubelet (or anything that speaks CRI) owns it, as a
//! pod table.
//!
//! It lists and asks for statuses, and calls nothing else of the runtime: above all never
//! `GetContainerEvents`, of which containerd has one subscription, the kubelet's. News come from the pods'
//! cgroups instead (inotify on their folders), and a list now and then is the safety net. What CRI doesn't
//! say (readiness, the spec, the QoS class) is left open.

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

/// The runtime is asked at least this often, and at most this often.
const AT_LEAST: Duration = Duration::from_secs(10);
const AT_MOST: Duration = Duration::from_secs(1);
/// A container's cgroup comes a moment before the runtime calls it running.
const SETTLE: Duration = Duration::from_millis(150);
/// Statuses asked for at a time.
const STATUSES: usize = 16;
/// Without an answer for this long, the node is not observed any more: three looks.
const UNHEALTHY: Duration = Duration::from_secs(30);

/// What observing tells of itself. Clones count together.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    lists: Counter,
    failures: Counter,
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "beelet_observe_lists",
            "Times that the runtime was asked what runs",
            self.lists.clone(),
        );
        registry.register("beelet_observe_list_failures", "Of these, how many failed", self.failures.clone());
    }
}

/// Whether the runtime still answers. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Pulse(Arc<Mutex<Option<Instant>>>);

impl Pulse {
    fn beat(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// # Errors
    /// The runtime has not answered lately.
    pub fn check(&self) -> Result<(), NoAnswer> {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(at) if at.elapsed() < UNHEALTHY => Ok(()),
            Some(at) => Err(NoAnswer::For(at.elapsed())),
            None => Err(NoAnswer::Yet),
        }
    }
}

/// Since when the runtime has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// It did, this long ago.
    #[error("the container runtime has not answered for {} s", .0.as_secs())]
    For(Duration),
    /// It never did.
    #[error("the container runtime has not answered yet")]
    Yet,
}

/// What an observer needs.
#[derive(Debug)]
pub struct Parts {
    /// Asked for lists and statuses.
    pub runtime: Runtime,
    /// The runtime's name, as in `containerd://<id>`.
    pub runtime_name: String,
    /// The node's name.
    pub node: String,
    /// Where containers come and go.
    pub cgroups: Arc<Cgroups>,
    /// Where the pods are put.
    pub table: watch::Sender<Arc<PodTable>>,
    /// Set when they all are there.
    pub complete: Complete,
    /// What it tells of itself.
    pub metrics: Metrics,
}

/// Looks at a node.
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

/// Details that were asked for, as long as what they are of is listed in the same state.
#[derive(Debug, Default)]
struct Details {
    containers: HashMap<String, cri::ContainerStatus>,
    sandboxes: HashMap<String, cri::PodSandboxStatus>,
}

impl Observer {
    /// An observer that hasn't looked yet; `pulse` beats when it does.
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
                // First, so that nothing falls between the list and the watching.
                self.hints.watch().await;
                let Some(looked) = shutdown.run_until_cancelled(self.look()).await else { return };
                match looked {
                    Ok(()) => said = None,
                    Err(error) => {
                        self.metrics.failures.inc();
                        if said.replace(error.kind) != Some(error.kind) {
                            tracing::warn!("what runs here can't be told: {error}; asked again");
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

    /// Asks once, and publishes what is new.
    async fn look(&mut self) -> Result<(), Error> {
        self.metrics.lists.inc();
        let (sandboxes, containers) =
            tokio::try_join!(self.runtime.list_sandboxes(None), self.runtime.list_containers(None))?;
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

    /// Asks for the details of what is new or in another state, and forgets those of what has gone.
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
            let asked = some.iter().map(|id| gone_is_none(self.runtime.container_status(id, false)));
            for status in try_join_all(asked).await?.into_iter().flatten().filter_map(|answer| answer.status)
            {
                known.insert(status.id.clone(), status);
            }
        }
        let new: Vec<&str> =
            sandboxes.iter().map(|s| s.id.as_str()).filter(|id| !known_sandboxes.contains_key(*id)).collect();
        for some in new.chunks(STATUSES) {
            let asked = some.iter().map(|id| gone_is_none(self.runtime.sandbox_status(id, false)));
            for status in try_join_all(asked).await?.into_iter().flatten().filter_map(|answer| answer.status)
            {
                known_sandboxes.insert(status.id.clone(), status);
            }
        }
        Ok(())
    }
}

/// What went between the list and the question is no error.
async fn gone_is_none<T>(call: impl Future<Output = Result<T, Error>>) -> Result<Option<T>, Error> {
    match call.await {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}
