//! The record of a pod's definition for the next agent.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;

use super::managed::{Managed, hash_of, manifest_hash_of, manifest_of};
use beelet_model::{origin::Origin, request::RuntimePod, table::PodName};
use beelet_policy::admission::outline;
use beelet_spec::resize;

/// Updates the record with the fields of the pod that its removal and admission need, a digest of the whole
/// pod, and its resource amounts, if the pod has changed.
pub(super) fn update_record(managed: &mut Managed) {
    if managed.record_of.as_ref().is_some_and(|of| Arc::ptr_eq(of, &managed.pod)) {
        return;
    }
    managed.record.origin = runtime_pod(&managed.pod);
    managed.record.outline = Some(Arc::new(outline(&managed.pod)));
    managed.record.accepted = Some(resize::Accepted::of(&managed.pod));
    managed.record_of = Some(Arc::clone(&managed.pod));
}

/// Returns the fields of a pod that its removal needs.
pub(super) fn runtime_pod(pod: &core::Pod) -> RuntimePod {
    RuntimePod {
        name: PodName::of(pod),
        grace: beelet_model::pod::grace_period(pod),
        manifest: manifest_of(pod),
        hash: hash_of(pod),
        shape: Some(resize::shape(pod)),
        origin: Origin::of(pod),
        manifest_hash: manifest_hash_of(pod),
        adopted: None,
    }
}
