//! The end of a pod: its time window, and the return of its claims, its volumes, its cgroup and its logs.

use std::{sync::Arc, time::Duration};

use beelet_base::blocking::BlockingTasks;
use beelet_policy::pod::{Actions, why::KILL_FAILED};
use beelet_state::events::Object;
use tracing::info;

use super::stops::Window;
use crate::{error::Error, plan::PodPlan, services::EndServices};

/// The end of a worker's pod.
pub(super) struct Ending {
    services: Arc<EndServices>,
    /// Time in which the pod must have ended, once it must.
    window: Option<Window>,
    /// The pod has ended, and has given back all but its containers and logs.
    released: bool,
}

impl Ending {
    pub(super) fn new(services: &Arc<EndServices>) -> Self {
        Self { services: Arc::clone(services), window: None, released: false }
    }

    /// The window of an end with this grace period. A shorter grace period opens a window of its own.
    pub(super) fn window(&mut self, grace: Duration) -> Window {
        let known = self.window.filter(|window| window.grace == grace);
        *self.window.insert(known.unwrap_or_else(|| Window::new(grace)))
    }

    /// Records the failure of a step that ends the pod, or stops a part of it (`killPod` of the kubelet).
    pub(super) fn record_failure(&self, plan: &PodPlan, error: &Error, is_ending: bool) {
        // Drivers that don't take claims back have an event of their own.
        let has_event = matches!(error, Error::StillPrepared(_));
        if !has_event && (is_ending || matches!(error, Error::Kill(_))) {
            let message = format!("error killing pod: {error}");
            self.services.reports.events.warning(Object::pod(&plan.pod), KILL_FAILED, message);
        }
    }

    /// Returns true if drivers have prepared claims for the pod.
    pub(super) fn has_claims(&self, plan: &PodPlan) -> bool {
        self.services.claims.has_any(plan)
    }

    /// Has drivers take back the pod's claims.
    ///
    /// # Errors
    /// A driver is not there, or cannot.
    pub(super) async fn unprepare(&self, plan: &PodPlan) -> Result<(), Error> {
        self.services.claims.unprepare(plan).await
    }

    /// Takes away the volumes and the cgroup of a pod that has ended, once.
    ///
    /// # Errors
    /// A volume or a cgroup is still in use.
    pub(super) async fn release_ended(
        &mut self,
        plan: &Arc<PodPlan>,
        actions: &Actions,
        tasks: &BlockingTasks,
    ) -> Result<(), Error> {
        if actions.release && !self.released {
            self.services.teardown.release_ended(plan, tasks).await?;
            info!(pod = %plan.name, "pod has ended, and its volumes and its cgroup are given back");
        }
        self.released = actions.release;
        Ok(())
    }

    /// Forgets the window of an end that is over.
    pub(super) fn close(&mut self) {
        self.window = None;
    }

    /// Takes away everything but the logs of a pod of which nothing is left in the runtime.
    ///
    /// # Errors
    /// A volume or a cgroup is still in use.
    pub(super) async fn release(&self, plan: &Arc<PodPlan>, tasks: &BlockingTasks) -> Result<(), Error> {
        self.services.teardown.release(plan, tasks).await
    }

    /// Removes the pod's logs.
    ///
    /// # Errors
    /// The folder cannot be removed.
    pub(super) async fn remove_logs(&self, plan: &Arc<PodPlan>, tasks: &BlockingTasks) -> Result<(), Error> {
        self.services.teardown.remove_logs(plan, tasks).await
    }
}
