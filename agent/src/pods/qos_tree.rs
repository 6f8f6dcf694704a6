//! Keeps the cgroups above the pods (kubepods, burstable, besteffort) at the values that the pods on the
//! node ask for.

use std::{collections::BTreeMap, sync::Arc};

use beelet_policy::cgroups::{CgroupConfig, node_cgroups};
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::watch, task::spawn_blocking};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::table::PodTable;
use crate::cgroups::Cgroups;

type Values = BTreeMap<String, BTreeMap<String, String>>;

/// The values for these pods; a sentence if a pod's amounts can't be read.
pub fn values(pods: &[&core::Pod], config: &CgroupConfig) -> Result<Values, String> {
    let decided = node_cgroups(pods, config).map_err(|e| e.to_string())?;
    Ok(decided.into_iter().map(|cgroup| (cgroup.path, cgroup.files)).collect())
}

/// Writes `wanted`, parents raised first and lowered last.
pub async fn write(cgroups: &Arc<Cgroups>, wanted: Values) -> Result<(), String> {
    let cgroups = Arc::clone(cgroups);
    let written = spawn_blocking(move || cgroups.ensure_all(&wanted).map_err(|e| e.to_string()));
    written.await.unwrap_or_else(|e| Err(format!("an internal task failed: {e}")))
}

/// Follows the table until `shutdown`. Pods that have ended count no more.
pub async fn follow(
    mut table: watch::Receiver<Arc<PodTable>>,
    cgroups: Arc<Cgroups>,
    config: CgroupConfig,
    shutdown: CancellationToken,
) {
    let mut written: Option<Values> = None;
    loop {
        let now = Arc::clone(&table.borrow_and_update());
        let pods: Vec<&core::Pod> =
            now.pods.values().map(|entry| &entry.pod).filter(|pod| is_active(pod)).collect();
        match values(&pods, &config) {
            Ok(wanted) if written.as_ref() != Some(&wanted) => match write(&cgroups, wanted.clone()).await {
                Ok(()) => {
                    debug!(pods = pods.len(), "QoS cgroups fit the pods");
                    written = Some(wanted);
                }
                Err(error) => warn!(
                    error,
                    "the QoS cgroups could not be written; they are tried again with the next change"
                ),
            },
            Ok(_) => {}
            Err(error) => warn!(error, "the QoS cgroups can't be computed"),
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = table.changed() => if changed.is_err() { return },
        }
    }
}

fn is_active(pod: &core::Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    !matches!(phase, Some("Succeeded" | "Failed"))
}
