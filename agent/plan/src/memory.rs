//! `plan memory`: the NUMA nodes of containers' memory, over a sequence of events.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;

use crate::{
    Scenario,
    pinning::{
        MemoryManagerField, NodeField, PinningOutput, Play, Quantities, ReservationField, Setup, Step,
        TopologyField, With, replace,
    },
};
use beelet_units::field::FieldError;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct MemoryScenario {
    name: String,
    policy: String,
    numa_nodes: Vec<NodeField>,
    #[serde(default)]
    reserved_memory: Vec<ReservationField>,
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
    numa_nodes: Option<Vec<NodeField>>,
    #[serde(default)]
    reserved_memory: Option<Vec<ReservationField>>,
    #[serde(default)]
    feature_gates: Option<BTreeMap<String, bool>>,
    #[serde(default)]
    topology_manager: Option<TopologyField>,
    #[serde(default)]
    reserved: Option<Quantities>,
}

impl With for Changes {
    fn apply(&self, setup: &mut Setup) {
        if let Some(manager) = &mut setup.memory {
            replace(&mut manager.policy, self.policy.as_ref());
            replace(&mut manager.reserved_memory, self.reserved_memory.as_ref());
        }
        if self.numa_nodes.is_some() {
            setup.nodes.clone_from(&self.numa_nodes);
        }
        if self.topology_manager.is_some() {
            setup.topology_manager.clone_from(&self.topology_manager);
        }
        replace(&mut setup.gates, self.feature_gates.as_ref());
        replace(&mut setup.reserved, self.reserved.as_ref());
    }
}

impl Scenario for MemoryScenario {
    type Output = PinningOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<PinningOutput, FieldError> {
        let manager =
            MemoryManagerField { policy: self.policy.clone(), reserved_memory: self.reserved_memory.clone() };
        let setup = Setup {
            gates: self.feature_gates.clone(),
            topology_manager: self.topology_manager.clone(),
            reserved: self.reserved.clone(),
            nodes: Some(self.numa_nodes.clone()),
            memory: Some(manager),
            ..Setup::default()
        };
        let files = (None, self.state_file.as_deref());
        Play { setup, files, running: self.running.as_deref(), steps: &self.steps }.decide()
    }
}
