//! A pod's room comes before its sandbox: a worker starts nothing before admission has let its pod in.

use std::sync::Arc;

use beelet_admission::AdmissionRejection;
use beelet_policy::pod::Actions;

use super::Worker;

impl Worker {
    /// Waits for room on the node before anything of the pod is started. False if it was refused: its end is
    /// on its way.
    pub(super) async fn has_room(&self, actions: &Actions) -> bool {
        if actions.create_sandbox.is_none() && actions.start.is_empty() {
            return true;
        }
        let (admission, node) = (&self.launcher.admission, self.launcher.desired.borrow().node.clone());
        let fits = match (&self.plan.refused, node) {
            (Some(rejection), _) => Err(rejection.clone()),
            (None, Some(node)) => admission.fits(&self.plan.pod, &node),
            (None, None) => Ok(()),
        };
        let admitted = match fits {
            Ok(()) => self.admitted().await,
            Err(rejection) => Err(rejection),
        };
        match admitted {
            Ok(()) => true,
            Err(rejection) => {
                admission.refuse(&self.plan.uid, rejection).await;
                false
            }
        }
    }

    /// Waits for room for the amounts that the pod has by then: those of one that waits may change, and it
    /// keeps its place in the queue.
    async fn admitted(&self) -> Result<(), AdmissionRejection> {
        let place = self.launcher.admission.queue(&self.plan.uid);
        let (mut control, mut pod) = (self.control.clone(), Arc::clone(&self.plan.pod));
        loop {
            tokio::select! {
                biased;
                Ok(control) = control.wait_for(|c| c.is_newer_than(&pod)) => {
                    pod = control.updated.as_ref().map_or_else(|| Arc::clone(&pod), Arc::clone);
                }
                admitted = place.admit(&pod) => return admitted,
            }
        }
    }

    /// Returns true if the pod is another by now than the one that is worked on.
    pub(super) fn is_superseded(&self) -> bool {
        self.control.borrow().is_newer_than(&self.plan.pod)
    }
}
