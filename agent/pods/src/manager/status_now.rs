//! A pod's status, out of all that the manager knows of it.

use beelet_model::status::has_ended;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

use super::{Managed, Parts};
use crate::{runtime_view::Observation, status::Inputs};

impl Managed {
    /// Its status as of now. Until the runtime was asked, what was known before the restart stands.
    pub(super) fn status_now(&self, parts: &Parts) -> core::PodStatus {
        let Self { kept, seen, .. } = self;
        let nothing = Observation::default();
        let control = self.control.borrow();
        let inputs = Inputs {
            pod: &self.pod,
            seen: seen.as_deref().unwrap_or(&nothing),
            waiting: &self.waiting,
            condemned: &control.verdicts.condemned,
            last_codes: &control.verdicts.last_codes,
            probes: &kept.probes,
            oom: &kept.oom,
            previous: kept.status.as_deref(),
            failure: kept.failure.as_ref(),
            holds_claims: self
                .pod
                .metadata
                .uid
                .as_deref()
                .is_some_and(|uid| parts.deps.devices.claims.has(uid)),
            resize: &self.resize,
            node: &parts.deps.node.facts,
            runtime_name: &parts.runtime_name,
            now: Timestamp::now(),
        };
        match (seen, &kept.status) {
            (None, Some(known)) => inputs.known(known),
            (Some(seen), Some(known)) if kept.failure.is_none() && is_forgotten(known, seen) => {
                inputs.as_forgotten(known)
            }
            _ => inputs.status(),
        }
    }
}

/// Returns true if a pod that has ended is one of whose containers the runtime no longer knows all: its
/// status says more than can be seen.
fn is_forgotten(known: &core::PodStatus, seen: &Observation) -> bool {
    let usual = known.init_container_statuses.iter().chain(&known.container_statuses);
    let statuses = usual.chain(&known.ephemeral_container_statuses).flatten();
    let mut ran = statuses.filter(|status| status.container_id.is_some());
    has_ended(Some(known))
        && (seen.containers.is_empty() || ran.any(|status| seen.newest(&status.name).is_none()))
}
