//! `plan topology`: the NUMA nodes on which the providers of devices, CPUs and memory agree; from their hints
//! alone, or all together over a sequence of events.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    Scenario,
    pinning::{
        CpuField, CpuManagerField, MemoryManagerField, NodeField, PinningOutput, Play, PluginField,
        Quantities, Setup, Step, TopologyField, With, node_list, replace,
    },
};
use beelet_policy::pinning::{Hint, NodeSet, hints::ProviderHints, nodes::NODE_NUMBERS};
use beelet_units::field::FieldError;

/// Hints by resource; `None` for a resource without a preference.
type HintsField = BTreeMap<String, Option<Vec<HintField>>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct TopologyScenario {
    name: String,
    topology_manager: TopologyField,
    numa_nodes: Vec<NodeField>,
    #[serde(default)]
    hints: Option<Vec<Option<HintsField>>>,
    #[serde(default)]
    topology: Option<Vec<CpuField>>,
    #[serde(default)]
    reserved: Option<Quantities>,
    #[serde(default)]
    feature_gates: BTreeMap<String, bool>,
    #[serde(default)]
    cpu_manager: Option<CpuManagerField>,
    #[serde(default)]
    memory_manager: Option<MemoryManagerField>,
    #[serde(default)]
    devices: Option<Vec<PluginField>>,
    #[serde(default)]
    steps: Option<Vec<Step<Changes>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HintField {
    numa: Option<Vec<u32>>,
    preferred: bool,
}

/// The fields that a restart may change.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Changes {
    #[serde(default)]
    topology_manager: Option<TopologyField>,
    #[serde(default)]
    numa_nodes: Option<Vec<NodeField>>,
    #[serde(default)]
    topology: Option<Vec<CpuField>>,
    #[serde(default)]
    reserved: Option<Quantities>,
    #[serde(default)]
    feature_gates: Option<BTreeMap<String, bool>>,
    #[serde(default)]
    cpu_manager: Option<CpuManagerField>,
    #[serde(default)]
    memory_manager: Option<MemoryManagerField>,
    #[serde(default)]
    devices: Option<Vec<PluginField>>,
}

/// Overwrites an optional field if `new` has a value.
fn replace_option<T: Clone>(field: &mut Option<T>, new: &Option<T>) {
    if new.is_some() {
        field.clone_from(new);
    }
}

impl With for Changes {
    fn apply(&self, setup: &mut Setup) {
        replace_option(&mut setup.topology_manager, &self.topology_manager);
        replace_option(&mut setup.nodes, &self.numa_nodes);
        replace_option(&mut setup.topology, &self.topology);
        replace_option(&mut setup.cpus, &self.cpu_manager);
        replace_option(&mut setup.memory, &self.memory_manager);
        replace(&mut setup.reserved, self.reserved.as_ref());
        replace(&mut setup.gates, self.feature_gates.as_ref());
        replace(&mut setup.plugins, self.devices.as_ref());
    }
}

/// The answer to a scenario of either kind.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum TopologyOutput {
    Merged(MergedOutput),
    Played(PinningOutput),
}

#[derive(Serialize, Default)]
pub(crate) struct MergedOutput {
    error: Option<String>,
    admitted: bool,
    affinity: Value,
    preferred: bool,
}

impl Scenario for TopologyScenario {
    type Output = TopologyOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<TopologyOutput, FieldError> {
        let setup = Setup {
            gates: self.feature_gates.clone(),
            topology_manager: Some(self.topology_manager.clone()),
            reserved: self.reserved.clone().unwrap_or_default(),
            topology: self.topology.clone(),
            nodes: Some(self.numa_nodes.clone()),
            cpus: self.cpu_manager.clone(),
            memory: self.memory_manager.clone(),
            plugins: self.devices.clone().unwrap_or_default(),
        };
        match (&self.hints, &self.steps) {
            (Some(hints), None) => merge(&setup, hints).map(TopologyOutput::Merged),
            (None, Some(steps)) => {
                let play = Play { setup, files: (None, None), running: None, steps };
                play.decide().map(TopologyOutput::Played)
            }
            (Some(_), Some(_)) => Err(FieldError::new("hints", "does not belong to a scenario with steps")),
            (None, None) => Err(FieldError::new("steps", "is missing; a scenario has steps or hints")),
        }
    }
}

/// Merges the hints alone.
fn merge(setup: &Setup, providers: &[Option<HintsField>]) -> Result<MergedOutput, FieldError> {
    let providers: Result<Vec<ProviderHints>, FieldError> =
        providers.iter().map(|provider| provider_hints(provider.as_ref())).collect();
    let providers = providers?;
    let manager = match setup.topology_manager() {
        Ok(manager) => manager,
        Err(error) => return Ok(MergedOutput { error: Some(error.to_string()), ..MergedOutput::default() }),
    };
    let merged = manager.merge(&providers);
    Ok(MergedOutput {
        error: None,
        admitted: merged.admitted,
        affinity: node_list(merged.hint),
        preferred: merged.hint.preferred,
    })
}

fn provider_hints(provider: Option<&HintsField>) -> Result<ProviderHints, FieldError> {
    let hint = |field: &HintField| {
        let wrong = field.numa.iter().flatten().find(|node| **node >= NODE_NUMBERS);
        match wrong {
            Some(node) => Err(FieldError::new("hints", format!("NUMA node {node}: 63 is the highest"))),
            None => {
                let nodes = field.numa.as_ref().map(|nodes| nodes.iter().copied().collect::<NodeSet>());
                Ok(Hint { nodes, preferred: field.preferred })
            }
        }
    };
    let hints = |(resource, list): (&String, &Option<Vec<HintField>>)| {
        let list = list.as_ref().map(|list| list.iter().map(hint).collect()).transpose();
        Ok((resource.clone(), list?))
    };
    provider.into_iter().flatten().map(hints).collect()
}
