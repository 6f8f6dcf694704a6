//! What the worker of a pod begins with: what is known of the pod from before.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1 as core;

use super::{Control, PodRecord, Terminate, assigned::Deletion};
use beelet_model::status::has_ended;

/// The restart counts of the next containers of a pod, as far as it has had any.
pub(super) fn next_counts(status: Option<&core::PodStatus>) -> BTreeMap<String, u32> {
    let all = status
        .into_iter()
        .flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses).flatten());
    let ran = all.filter(|status| status.container_id.is_some());
    ran.filter_map(|status| {
        Some((status.name.clone(), u32::try_from(status.restart_count).ok()?.checked_add(1)?))
    })
    .collect()
}

/// What a worker begins with.
pub(super) fn control_of(
    kept: &PodRecord,
    deletion: Option<&Deletion>,
    counts: Arc<BTreeMap<String, u32>>,
) -> Control {
    let failed = kept.failure.as_ref().map(|failure| Terminate { grace: failure.grace });
    let deleted = deletion.map(|deletion| Terminate { grace: Some(deletion.grace) });
    let ended = kept.failure.is_none() && has_ended(kept.status.as_deref());
    let mut control = Control { failed: deleted.or(failed), ended, counts, ..Control::default() };
    let started = kept.probes.iter().filter(|(_, facts)| facts.started == Some(true));
    control.verdicts.started = started.map(|(id, _)| id.clone()).collect();
    control.verdicts.hooked.clone_from(&kept.hooked);
    control
}
