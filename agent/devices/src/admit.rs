//! Admits pods to their devices, one pod at a time per resource: the ledger decides, the plugins prepare, the
//! checkpoint is written, and only then may the pod start.
//!
//! Pods that want different resources do not wait for each other ([`super::turns`]). A pod deleted before its
//! plugin has answered gets nothing, and the admission does not wait for the plugin.
//!
//! A missing plugin makes a pod wait for a while. Any other obstacle ends the pod with the kubelet's reason,
//! and the pod is retried when the obstacle may have disappeared.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use beelet_policy::devices::{
    AllocateError, ContainerRequest,
    admission::{self, Admission, Aligner, Next, contended},
    container_requests,
    registration::is_extended_resource_name,
};
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{self, JoinSet},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tracing::{debug, error, info};

use super::{
    Active,
    checkpoint::Written,
    ledger::{Ledger, Shared},
    plugin,
    refusals::{AdmitError, DeviceRefusal, Refusals, UNEXPECTED},
    turns::{Resources, Turns},
};
use beelet_model::{request::Request, table::PodName};
use beelet_state::events::Recorder;

/// Maximum number of queued pods. Further requests are not received until one leaves the queue.
const MAX_QUEUED: usize = 1024;
/// Delay before a pod may retry after a failed checkpoint write.
const WRITE_RETRY: Duration = Duration::from_secs(5);

/// State of the pod's containers.
#[derive(Clone, Debug, Default)]
pub struct Circumstances {
    /// Running containers.
    pub running: BTreeSet<String>,
    /// Init containers that have terminated permanently.
    pub ended: BTreeSet<String>,
    /// The pod had devices before (it had a sandbox once), so it waits where a new pod would be refused.
    pub restarting: bool,
}

/// Request of a pod.
#[derive(Debug)]
pub(super) struct Asked {
    pod: Arc<core::Pod>,
    circumstances: Circumstances,
    aligner: Option<Box<dyn Aligner>>,
    answer: Answer,
}

type Answer = oneshot::Sender<Result<(), DeviceRefusal>>;

/// Requests admission of a pod; returns at once if the pod wants no devices.
pub(super) async fn ask(
    shared: &Shared,
    admissions: &mpsc::Sender<Asked>,
    pod: &Arc<core::Pod>,
    circumstances: Circumstances,
    aligner: Option<Box<dyn Aligner>>,
) -> Result<(), DeviceRefusal> {
    let wants = container_requests(pod).is_ok_and(|wishes| {
        let mut limits = wishes.iter().flat_map(|wish| &wish.limits);
        limits.any(|(resource, _)| {
            is_extended_resource_name(resource) || shared.with_ledger(|l| l.devices.knows(resource))
        })
    });
    if !wants {
        return Ok(());
    }
    let (answer, answered) = oneshot::channel();
    let asked = Asked { pod: Arc::clone(pod), circumstances, aligner, answer };
    if admissions.send(asked).await.is_err() {
        return Ok(()); // no devices are handed out here
    }
    let ending = || DeviceRefusal::Wait {
        message: "the agent is stopping".to_owned(),
        until: Instant::now() + WRITE_RETRY,
    };
    answered.await.unwrap_or_else(|_| Err(ending()))
}

/// Task that schedules admissions, with the data that each admission shares.
#[derive(Debug)]
pub(super) struct Admitter {
    desk: Arc<Desk>,
    asked: mpsc::Receiver<Asked>,
}

#[derive(Debug)]
struct Desk {
    shared: Arc<Shared>,
    written: watch::Receiver<Written>,
    active: watch::Receiver<Active>,
    refusals: Refusals,
}

impl Admitter {
    pub(super) fn new(
        shared: Arc<Shared>,
        asked: mpsc::Receiver<Asked>,
        written: watch::Receiver<Written>,
        active: watch::Receiver<Active>,
        requests: mpsc::Sender<Request>,
        events: Recorder,
    ) -> Self {
        let refusals = Refusals { shared: Arc::clone(&shared), requests, events };
        Self { desk: Arc::new(Desk { shared, written, active, refusals }), asked }
    }

    /// Runs until `shutdown`; admissions under way then stop as after kill -9.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let desk = Arc::clone(&self.desk);
        let (mut changes, mut active) = (desk.shared.node.subscribe(), desk.active.clone());
        let mut turns: Turns<Asked> = Turns::new();
        let mut under_way = JoinSet::new();
        let mut resources_of: HashMap<task::Id, Resources> = HashMap::new();
        loop {
            turns.retain(|asked| !asked.answer.is_closed());
            while let Some((resources, asked)) = turns.next() {
                let task = under_way.spawn(Arc::clone(&desk).serve(asked));
                resources_of.insert(task.id(), resources);
            }
            desk.shared.metrics.queued.set(i64::try_from(turns.waiting()).unwrap_or(i64::MAX));
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(ended) = under_way.join_next_with_id() => {
                    let id = match ended {
                        Ok((id, ())) => id,
                        Err(failed) => {
                            error!(error = %failed, "an admission task failed; the pod retries");
                            failed.id()
                        }
                    };
                    if let Some(resources) = resources_of.remove(&id) {
                        turns.done(&resources);
                    }
                }
                asked = self.asked.recv(), if turns.waiting() < MAX_QUEUED => {
                    let Some(asked) = asked else { return };
                    turns.add(desk.resources(&asked.pod), asked);
                }
                changed = changes.changed() => {
                    if changed.is_err() { return }
                    desk.let_refused_try_again().await;
                }
                Ok(()) = active.changed() => desk.free_ended(),
            }
        }
    }
}

impl Desk {
    /// Returns the resources that a pod's admission competes for.
    fn resources(&self, pod: &core::Pod) -> Resources {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        // Invalid limits are reported by the admission.
        let wishes = container_requests(pod).unwrap_or_default();
        self.shared.with_ledger(|ledger| contended(&ledger.devices, uid, &wishes))
    }

    /// Runs one admission and sends its answer.
    async fn serve(self: Arc<Self>, asked: Asked) {
        let Asked { pod, circumstances, aligner, mut answer } = asked;
        let admitted = self.admit(&pod, (circumstances, aligner), &mut answer).await;
        // The requester may no longer wait: the pod's end releases everything.
        let _ = answer.send(admitted);
    }

    /// Frees the devices of terminated pods for pods that wait or were refused. Later requests free them on
    /// their own.
    fn free_ended(&self) {
        let Some(active) = self.active.borrow().clone() else { return };
        let is_freed = self.shared.with_ledger(|ledger| {
            if ledger.waiting.is_empty() && ledger.refused.is_empty() {
                return false;
            }
            ledger.free_inactive(&active, "")
        });
        if is_freed {
            self.shared.change(|_| ());
        }
    }

    /// Retries pods that were refused for lack of devices when there may be enough.
    async fn let_refused_try_again(&self) {
        let ready: Vec<String> = self.shared.with_ledger(|ledger| {
            let enough = |(_, (resource, count)): &(&String, &(String, usize))| {
                ledger.devices.inventory.options(resource).is_some()
                    && ledger.devices.free(resource) >= *count
            };
            let ready: Vec<String> =
                ledger.refused.iter().filter(enough).map(|(uid, _)| uid.clone()).collect();
            ledger.refused.retain(|uid, _| !ready.contains(uid));
            ready
        });
        for uid in ready {
            info!(uid, "enough devices may be free now; retrying a refused pod");
            if self.refusals.requests.send(Request::Retry { uid }).await.is_err() {
                return;
            }
        }
    }

    async fn admit(
        &self,
        pod: &core::Pod,
        (circumstances, aligner): (Circumstances, Option<Box<dyn Aligner>>),
        answer: &mut Answer,
    ) -> Result<(), DeviceRefusal> {
        let name = PodName::of(pod);
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let wishes = match container_requests(pod) {
            Ok(wishes) => wishes,
            Err(error) => {
                return Err(self.refusals.fail(pod, &uid, UNEXPECTED, error.to_string(), None).await);
            }
        };
        if let Some(missing) = self.awaited_plugin(&uid, &wishes, &circumstances) {
            return Err(self.refusals.wait(pod, &uid, missing));
        }
        let restarting = circumstances.restarting;
        match self.allocate(&uid, wishes, (circumstances, aligner), answer).await {
            Ok(()) => {
                if let Err(cause) = self.written().await {
                    let until = Instant::now() + WRITE_RETRY;
                    return Err(DeviceRefusal::Wait { message: cause, until });
                }
                self.shared.with_ledger(|ledger| (ledger.waiting.remove(&uid), ledger.refused.remove(&uid)));
                debug!(pod = %name, "allocated a pod's devices");
                Ok(())
            }
            Err(trouble) => Err(self.refusals.refuse(pod, &uid, trouble, restarting).await),
        }
    }

    /// Returns a message if no plugin serves one of the pod's resources yet. Soon after the agent's start the
    /// plugin may still register; a registered plugin will still list its devices.
    fn awaited_plugin(
        &self,
        uid: &str,
        wishes: &[ContainerRequest<'_>],
        now: &Circumstances,
    ) -> Option<String> {
        let early = self.shared.now() < self.shared.settings.plugin_wait;
        let needed = wishes
            .iter()
            .filter(|wish| !now.running.contains(wish.container) && !now.ended.contains(wish.container));
        let limits = needed.flat_map(|wish| &wish.limits).filter(|(_, count)| *count > 0);
        self.shared.with_ledger(|ledger| {
            let overdue = ledger.waiting.get(uid).is_some_and(|w| self.refusals.overdue(w));
            let missing = |resource: &str| {
                is_extended_resource_name(resource)
                    && !ledger.devices.knows(resource)
                    && (early || (ledger.plugins.contains_key(resource) && !overdue))
            };
            let (resource, _) = limits.into_iter().find(|(resource, _)| missing(resource))?;
            Some(format!("waiting for the device plugin of {resource}, which has not registered yet"))
        })
    }

    /// Runs the admission against ledger and plugins. Stops when the requester no longer waits.
    async fn allocate(
        &self,
        uid: &str,
        wishes: Vec<ContainerRequest<'_>>,
        (circumstances, aligner): (Circumstances, Option<Box<dyn Aligner>>),
        answer: &mut Answer,
    ) -> Result<(), AdmitError> {
        let circumstances = admission::Circumstances {
            running: circumstances.running,
            ended: circumstances.ended,
            ..admission::Circumstances::default()
        };
        let limits = wishes.iter().flat_map(|wish| &wish.limits);
        let wanted: BTreeSet<String> = limits.map(|(resource, _)| (*resource).to_owned()).collect();
        let free = |ledger: &Ledger| -> Vec<usize> {
            wanted.iter().map(|resource| ledger.devices.free(resource)).collect()
        };
        let before = self.shared.with_ledger(|ledger| free(ledger));
        self.entering(uid);
        let mut admission = Admission::new(uid, wishes, circumstances).aligned_by(aligner);
        let mut outcome = tokio::select! {
            outcome = self.step_by_step(&mut admission, uid) => outcome,
            () = answer.closed() => Err(AdmitError::Unasked),
        };
        let freed = self.shared.with_ledger(|ledger| {
            // Checked under the lock: a pod that ends later is found in the ledger, and its devices are
            // freed.
            if answer.is_closed() {
                outcome = Err(AdmitError::Unasked);
            }
            if outcome.is_err() {
                admission.abort(&mut ledger.devices);
                ledger.entering.remove(uid);
            }
            free(ledger) != before
        });
        // An attempt without effect is not published: the waiting pod would wake itself without end.
        if freed || matches!(outcome, Ok(true)) {
            self.shared.change(|_| ());
        }
        outcome.map(drop)
    }

    /// From now on the pod may hold devices, although the set of active pods may not contain it yet.
    fn entering(&self, uid: &str) {
        let mut seen = self.active.clone();
        seen.mark_unchanged();
        self.shared.with_ledger(|ledger| ledger.entering.insert(uid.to_owned(), seen));
    }

    /// Performs the admission's steps; returns true if devices were allocated.
    async fn step_by_step(&self, admission: &mut Admission<'_>, uid: &str) -> Result<bool, AdmitError> {
        let mut allocated = false;
        loop {
            let next = self.shared.with_ledger(|ledger| admission.next(&mut ledger.devices));
            match next.map_err(AdmitError::Refused)? {
                Next::Done => return Ok(allocated),
                Next::Free => self.free_inactive(uid),
                Next::Ask { resource, question } => {
                    let (plugin, _) = self.plugin(&resource)?;
                    let answer = plugin.preferred(&question).await;
                    let answer = answer.map_err(|s| trouble("GetPreferredAllocation", &resource, &s))?;
                    admission.preferred(question, &answer);
                }
                Next::Allocate { resource, ids, .. } => {
                    let (plugin, _) = self.plugin(&resource)?;
                    let begun = Instant::now();
                    let response = plugin.allocate(&ids).await;
                    self.shared.metrics.allocated(&resource, begun.elapsed());
                    let response = response.map_err(|s| trouble("Allocate", &resource, &s))?;
                    self.shared.with_ledger(|ledger| admission.allocated(&mut ledger.devices, response));
                    allocated = true;
                }
            }
        }
    }

    fn plugin(
        &self,
        resource: &str,
    ) -> Result<(plugin::Plugin, beelet_policy::devices::PluginOptions), AdmitError> {
        let gone = || AllocateError::PluginGone { resource: resource.to_owned() };
        self.shared.plugin(resource).ok_or_else(|| AdmitError::Refused(gone().into()))
    }

    fn free_inactive(&self, uid: &str) {
        let Some(active) = self.active.borrow().clone() else { return };
        self.shared.with_ledger(|ledger| ledger.free_inactive(&active, uid));
    }

    /// Waits until the checkpoint contains the committed changes.
    async fn written(&self) -> Result<(), String> {
        let wanted = *self.shared.dirty.borrow();
        let mut written = self.written.clone();
        let written = written.wait_for(|written| written.covers(wanted)).await;
        match written {
            Ok(written) => written.trouble().map_or(Ok(()), Err),
            Err(_) => Err("the agent is stopping".to_owned()),
        }
    }
}

fn trouble(call: &str, resource: &str, status: &Status) -> AdmitError {
    let message =
        format!("device plugin {call} rpc failed for {resource} with err: {}", plugin::in_words(status));
    // tonic's status for a missing or broken connection; a plugin's own errors have other codes.
    let lost = matches!(status.code(), Code::Unavailable | Code::Cancelled)
        || std::error::Error::source(status).is_some();
    if lost { AdmitError::Lost(message) } else { AdmitError::Plugin(message) }
}
