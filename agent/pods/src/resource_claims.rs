//! Resource claims of a pod (DRA): prepared before its sandbox is created, and unprepared once all containers
//! of the pod have stopped.

use std::sync::Arc;

use beelet_dra::Dra;
use beelet_model::{storage::Storage, table::PodTable};
use beelet_state::events::{Object, Recorder};
use tokio::sync::watch;

use crate::{error::Error, plan::PodPlan};

/// Resource claims and their drivers.
#[derive(Clone, Debug)]
pub(crate) struct ResourceClaims {
    pub(crate) dra: Dra,
    pub(crate) storage: Option<Arc<dyn Storage>>,
    pub(crate) table: watch::Receiver<Arc<PodTable>>,
    pub(crate) events: Recorder,
}

impl ResourceClaims {
    /// Prepares the claims of a pod through their drivers.
    ///
    /// # Errors
    /// A driver is unavailable, or cannot prepare a claim.
    pub(crate) async fn prepare(&self, plan: &PodPlan) -> Result<(), Error> {
        let object = || Object::pod(&plan.pod);
        let preparing = Box::pin(self.dra.prepare(self.storage.as_deref(), &plan.pod));
        let subject = "drivers to prepare resource claims";
        self.events.while_waiting(object, subject, preparing).await.map_err(Error::Unprepared)
    }

    /// Returns true if the pod has prepared claims.
    pub(crate) fn has_any(&self, plan: &PodPlan) -> bool {
        self.dra.has(&plan.uid)
    }

    /// Unprepares the claims of a pod through their drivers. The call comes after all containers have stopped
    /// and before the pod's status shows its end: readers of that status consider the devices free
    /// (`SyncTerminatingPod`).
    ///
    /// # Errors
    /// A driver is unavailable, or cannot unprepare a claim.
    pub(crate) async fn unprepare(&self, plan: &PodPlan) -> Result<(), Error> {
        let object = || Object::pod(&plan.pod);
        let table = Arc::clone(&self.table.borrow());
        let unpreparing = Box::pin(self.dra.unprepare(&plan.uid, &table));
        let subject = "drivers to unprepare resource claims";
        self.events.while_waiting(object, subject, unpreparing).await.map_err(|error| {
            let message = format!("Failed to unprepare dynamic resources: {error}");
            self.events.warning(object(), "FailedUnprepareDynamicResources", message);
            Error::StillPrepared(error)
        })
    }
}
