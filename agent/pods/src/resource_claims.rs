//! Resource claims of a pod (DRA): prepared before its sandbox, and taken back once nothing of the pod runs.

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
    /// Has drivers prepare the claims of a pod.
    ///
    /// # Errors
    /// A driver is not there, or cannot prepare a claim.
    pub(crate) async fn prepare(&self, plan: &PodPlan) -> Result<(), Error> {
        let object = || Object::pod(&plan.pod);
        let preparing = Box::pin(self.dra.prepare(self.storage.as_deref(), &plan.pod));
        let subject = "its resource claims, which drivers prepare";
        self.events.while_waiting(object, subject, preparing).await.map_err(Error::Unprepared)
    }

    /// Returns true if the pod has claims that are prepared.
    pub(crate) fn has_any(&self, plan: &PodPlan) -> bool {
        self.dra.has(&plan.uid)
    }

    /// Has drivers take back the claims of a pod, once nothing of the pod runs and before any reader of its
    /// status learns that: a reader may take its devices for free then (`SyncTerminatingPod`).
    ///
    /// # Errors
    /// A driver is not there, or cannot take a claim back.
    pub(crate) async fn unprepare(&self, plan: &PodPlan) -> Result<(), Error> {
        let object = || Object::pod(&plan.pod);
        let table = Arc::clone(&self.table.borrow());
        let taking_back = Box::pin(self.dra.unprepare(&plan.uid, &table));
        let subject = "drivers to take back its resource claims";
        self.events.while_waiting(object, subject, taking_back).await.map_err(|error| {
            let message = format!("Failed to unprepare dynamic resources: {error}");
            self.events.warning(object(), "FailedUnprepareDynamicResources", message);
            Error::StillPrepared(error)
        })
    }
}
