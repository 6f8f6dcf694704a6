//! `plan cpus`: the exclusive CPUs of containers, over a sequence of events.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;

use crate::{
    Scenario,
    pinning::{
        CpuField, CpuManagerField, PinningOutput, Play, Quantities, Setup, Step, TopologyField, With, replace,
    },
};
use beelet_units::field::FieldError;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct CpusScenario {
    name: String,
    policy: String,
    #[serde(default)]
    options: BTreeMap<String, String>,
    topology: Vec<CpuField>,
    #[serde(default, rename = "reservedSystemCPUs")]
    reserved_system_cpus: Option<String>,
    #[serde(default)]
    feature_gates: BTreeMap<String, bool>,
    #[serde(default)]
    topology_manager: Option<TopologyField>,
    #[serde(default)]
    reserved: Quantities,
    #[serde(default)]
    state_file: Option<String>,
    #[serde(default)]
    running: Option<Vec<Pod>>,
    steps: Vec<Step<Changes>>,
}

/// The fields that a restart may change.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Changes {
    #[serde(default)]
    policy: Option<String>,
    #[serde(default)]
    options: Option<BTreeMap<String, String>>,
    #[serde(default)]
    topology: Option<Vec<CpuField>>,
    #[serde(default, rename = "reservedSystemCPUs")]
    reserved_system_cpus: Option<String>,
    #[serde(default)]
    feature_gates: Option<BTreeMap<String, bool>>,
    #[serde(default)]
    topology_manager: Option<TopologyField>,
    #[serde(default)]
    reserved: Option<Quantities>,
}

impl With for Changes {
    fn apply(&self, setup: &mut Setup) {
        if let Some(manager) = &mut setup.cpus {
            replace(&mut manager.policy, self.policy.as_ref());
            replace(&mut manager.options, self.options.as_ref());
            if self.reserved_system_cpus.is_some() {
                manager.reserved_system_cpus.clone_from(&self.reserved_system_cpus);
            }
        }
        if self.topology.is_some() {
            setup.topology.clone_from(&self.topology);
        }
        if self.topology_manager.is_some() {
            setup.topology_manager.clone_from(&self.topology_manager);
        }
        replace(&mut setup.gates, self.feature_gates.as_ref());
        replace(&mut setup.reserved, self.reserved.as_ref());
    }
}

impl Scenario for CpusScenario {
    type Output = PinningOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<PinningOutput, FieldError> {
        let manager = CpuManagerField {
            policy: self.policy.clone(),
            options: self.options.clone(),
            reserved_system_cpus: self.reserved_system_cpus.clone(),
        };
        let setup = Setup {
            gates: self.feature_gates.clone(),
            topology_manager: self.topology_manager.clone(),
            reserved: self.reserved.clone(),
            topology: Some(self.topology.clone()),
            cpus: Some(manager),
            ..Setup::default()
        };
        let files = (self.state_file.as_deref(), None);
        Play { setup, files, running: self.running.as_deref(), steps: &self.steps }.decide()
    }
}
