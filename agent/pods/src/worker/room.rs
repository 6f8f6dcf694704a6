//! Admission of a pod, which precedes its sandbox: a worker starts nothing before its pod is admitted.

use std::sync::Arc;

use beelet_admission::{Admission, AdmissionRejection};
use beelet_policy::node::fit::NodeView;
use tokio::sync::watch;

use super::control::Control;
use crate::plan::PodPlan;

/// Waits until the pod is admitted. Returns false if admission refuses the pod.
pub(super) async fn admitted(
    admission: &Admission,
    node: Option<&NodeView>,
    plan: &PodPlan,
    control: &watch::Receiver<Control>,
) -> bool {
    let fits = match (&plan.refused, node) {
        (Some(rejection), _) => Err(rejection.clone()),
        (None, Some(node)) => admission.fits(&plan.pod, node),
        (None, None) => Ok(()),
    };
    let admitted = match fits {
        Ok(()) => queued(admission, plan, control).await,
        Err(rejection) => Err(rejection),
    };
    match admitted {
        Ok(()) => true,
        Err(rejection) => {
            admission.refuse(&plan.uid, rejection).await;
            false
        }
    }
}

/// Waits for admission of the pod's newest resource amounts. A waiting pod whose amounts change keeps its
/// place in the queue.
async fn queued(
    admission: &Admission,
    plan: &PodPlan,
    control: &watch::Receiver<Control>,
) -> Result<(), AdmissionRejection> {
    let place = admission.queue(&plan.uid);
    let (mut control, mut pod) = (control.clone(), Arc::clone(&plan.pod));
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
