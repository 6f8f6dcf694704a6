//! `plan admission`: admission of a pod.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{Scenario, each_pod, pod_name};
use beelet_policy::{
    admission::{Insufficient, admit, preemption::Policy},
    resources::ResourceList,
};
use beelet_units::{field::FieldError, quantity::Quantity};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct AdmissionScenario {
    name: String,
    allocatable: BTreeMap<String, Quantity>,
    pods: Vec<Pod>,
    pod: Pod,
    #[serde(default)]
    policy: Policy,
}

#[derive(Serialize)]
pub(crate) struct AdmissionOutput {
    admitted: bool,
    reasons: Vec<Insufficient>,
    victims: Vec<String>,
    error: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    why: Vec<String>,
}

impl Scenario for AdmissionScenario {
    type Output = AdmissionOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<AdmissionOutput, FieldError> {
        let names = each_pod("pods", &self.pods, pod_name)?;
        let mut allocatable = ResourceList::default();
        self.allocatable.iter().for_each(|(resource, quantity)| allocatable.set(resource, *quantity));
        let admission = admit(&self.pod, &self.pods, &allocatable, self.policy)?;
        let victims = admission.victims.iter().map(|victim| names[*victim].clone()).collect();
        Ok(AdmissionOutput {
            admitted: admission.admitted,
            reasons: admission.reasons,
            victims,
            error: admission.error,
            why: admission.why,
        })
    }
}
