//! `plan preemption`: the pods to preempt.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{Scenario, each_pod, pod_name};
use beelet_policy::{
    admission::preemption::{Policy, Requirement, preempt},
    resources::PodDemand,
};
use beelet_units::{field::FieldError, quantity::Quantity};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct PreemptionScenario {
    name: String,
    preemptor: Pod,
    pods: Vec<Pod>,
    insufficient: BTreeMap<String, Quantity>,
    #[serde(default)]
    policy: Policy,
}

#[derive(Serialize)]
pub(crate) struct PreemptionOutput {
    victims: Vec<String>,
    error: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    why: Vec<String>,
}

impl Scenario for PreemptionScenario {
    type Output = PreemptionOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<PreemptionOutput, FieldError> {
        PodDemand::read(&self.preemptor).map_err(|error| error.under("preemptor"))?;
        let names = each_pod("pods", &self.pods, pod_name)?;
        let needs = self
            .insufficient
            .iter()
            .map(|(resource, quantity)| Requirement::new(resource.as_str(), *quantity));
        let needs: Vec<Requirement> = needs.collect();
        let preemption =
            preempt(&self.preemptor, &self.pods, &needs, self.policy).map_err(|error| error.under("pods"))?;
        let victims = preemption.victims.iter().map(|victim| names[*victim].clone()).collect();
        Ok(PreemptionOutput { victims, error: preemption.error, why: preemption.why })
    }
}
