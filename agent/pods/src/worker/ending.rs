//! The termination of a pod: its time window, and the release of its claims, volumes, cgroup and logs.

use std::{sync::Arc, time::Duration};

use beelet_base::blocking::BlockingTasks;
use beelet_policy::pod::{Actions, why::KILL_FAILED};
use beelet_state::events::Object;
use tracing::info;

use super::stops::Window;
use crate::{error::Error, plan::PodPlan, services::EndServices};

/// The termination of a worker's pod.
pub(super) struct Ending {
    services: Arc<EndServices>,
    /// Time window of the termination, if it has begun.
    window: Option<Window>,
    /// The pod has ended and has released its volumes and its cgroup. Its containers and logs may remain.
    released: bool,
}

impl Ending {
    pub(super) fn new(services: &Arc<EndServices>) -> Self {
        Self { services: Arc::clone(services), window: None, released: false }
    }

    /// Returns the window of a termination with this grace period. Another grace period opens a new window.
    pub(super) fn window(&mut self, grace: Duration) -> Window {
        let known = self.window.filter(|window| window.grace == grace);
        *self.window.insert(known.unwrap_or_else(|| Window::new(grace)))
    }

    /// Records the failure of a step that terminates the pod or stops one of its containers or sandboxes
    /// (`killPod` of the kubelet).
    pub(super) fn record_failure(&self, plan: &PodPlan, error: &Error, is_ending: bool) {
        // A failed release of claims has its own event.
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

    /// Releases the pod's claims through their drivers.
    ///
    /// # Errors
    /// A driver is unavailable or fails.
    pub(super) async fn unprepare(&self, plan: &PodPlan) -> Result<(), Error> {
        self.services.claims.unprepare(plan).await
    }

    /// Removes the volumes and the cgroup of a pod that has ended, once.
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
            info!(pod = %plan.name, "pod has ended, removed its volumes and its cgroup");
        }
        self.released = actions.release;
        Ok(())
    }

    /// Closes the window of a finished termination.
    pub(super) fn close(&mut self) {
        self.window = None;
    }

    /// Removes everything but the logs of a pod that is no longer in the runtime.
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
