//! What is kept of a pod itself for an agent after this one.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;

use super::{Managed, hash_of, manifest_of};
use beelet_model::{origin::Origin, request::RuntimePod, table::PodName};
use beelet_spec::resize;

impl Managed {
    /// Keeps as much of the pod as takes it away again, and its amounts. A digest of all of it is among that,
    /// and the pod changes less often than its status.
    pub(super) fn keep_pod(&mut self) {
        if self.kept_of.as_ref().is_some_and(|of| Arc::ptr_eq(of, &self.pod)) {
            return;
        }
        self.kept.origin = runtime_pod(&self.pod);
        self.kept.accepted = Some(resize::Accepted::of(&self.pod));
        self.kept_of = Some(Arc::clone(&self.pod));
    }
}

/// As much of a pod as takes it away again.
pub(super) fn runtime_pod(pod: &core::Pod) -> RuntimePod {
    RuntimePod {
        name: PodName::of(pod),
        grace: beelet_model::pod::grace_period(pod),
        manifest: manifest_of(pod),
        hash: hash_of(pod),
        shape: Some(resize::shape(pod)),
        origin: Origin::of(pod),
    }
}
