//! The inputs of the measurement of faults for node repair.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use beelet_policy::node::repair::Fault;
use beelet_repair::{Inputs, KERNEL_LOG, TAINTED};
use tokio::sync::watch;

use super::Services;

/// Returns the inputs for this node, whose faults go to `faults`.
pub(crate) fn inputs(services: &Services, faults: watch::Sender<Option<Vec<Fault>>>) -> Inputs {
    let config = &services.config;
    let own =
        [&config.beelet.kubelet_dir, &config.beelet.state_dir, &config.beelet.pods_dir, &config.pod_logs_dir];
    let folders: BTreeSet<PathBuf> = own.into_iter().cloned().collect();
    let health = services.health.clone();
    Inputs {
        silence: Arc::new(move || health.silence()),
        space: services.doors.space.clone(),
        folders: folders.into_iter().collect(),
        kernel_log: KERNEL_LOG.into(),
        tainted: TAINTED.into(),
        faults,
    }
}
