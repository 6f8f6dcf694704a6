//! Shared parts of `plan cpus`, `plan memory` and `plan topology`: their fields, and a node that executes the
//! steps.

mod fields;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::api::resource::Quantity as ApiQuantity};
use serde::Serialize;
use serde_json::{Map, Value, json};

pub(crate) use self::fields::{
    CpuField, CpuManagerField, MemoryManagerField, NodeField, PluginField, Quantities, ReservationField,
    Step, TopologyField,
};
use self::fields::{DeviceField, Op};
use crate::pod_name;
use beelet_policy::{
    devices::{Device, Devices, PluginOptions, container_requests},
    pinning::{
        Cpu, CpuSet, CpuTopology, Gates, Hint, Needs, NodeSet, PinningError, Pins, Refusal,
        cpus::{CpuManager, CpuSettings},
        devices::PodDevices,
        hints::ProviderHints,
        memory::{MemoryManager, MemoryNode, MemorySettings, Reservation, ledger::Block},
        pins::Alignment,
        topology::{self, TopologyManager, TopologySettings},
    },
    resources::CPU,
};
use beelet_units::{field::FieldError, quantity::Quantity};

/// Maximum number of nodes of a set for which the answer has all hints; with more nodes the hints are too
/// many to read.
const SHOWN_NODES: u32 = 8;

/// The fields that a restart of one kind of scenario may change.
pub(crate) trait With {
    fn apply(&self, setup: &mut Setup);
}

/// Overwrites a field if `new` has a value.
pub(crate) fn replace<T: Clone>(field: &mut T, new: Option<&T>) {
    if let Some(new) = new {
        field.clone_from(new);
    }
}

/// The machine and the configuration.
#[derive(Clone, Default)]
pub(crate) struct Setup {
    pub(crate) gates: BTreeMap<String, bool>,
    pub(crate) topology_manager: Option<TopologyField>,
    pub(crate) reserved: Quantities,
    pub(crate) topology: Option<Vec<CpuField>>,
    pub(crate) nodes: Option<Vec<NodeField>>,
    pub(crate) cpus: Option<CpuManagerField>,
    pub(crate) memory: Option<MemoryManagerField>,
    pub(crate) plugins: Vec<PluginField>,
}

/// Parses an amount from a list.
fn amounts(list: &Quantities, path: &str) -> Result<BTreeMap<String, Quantity>, FieldError> {
    let read = |(name, text): (&String, &ApiQuantity)| match Quantity::try_from(text) {
        Ok(quantity) => Ok((name.clone(), quantity)),
        Err(error) => Err(FieldError::new(name, error.to_string()).under(path)),
    };
    list.iter().map(read).collect()
}

/// A failed step: rejected by the agent, or invalid in the scenario.
enum Failed {
    Field(FieldError),
    Configuration(PinningError),
}

impl From<FieldError> for Failed {
    fn from(error: FieldError) -> Self {
        Self::Field(error)
    }
}

impl From<PinningError> for Failed {
    fn from(error: PinningError) -> Self {
        Self::Configuration(error)
    }
}

impl Setup {
    fn gates(&self) -> Gates {
        let mut gates = Gates::default();
        self.gates.iter().for_each(|(name, enabled)| gates.set(name, *enabled));
        gates
    }

    /// Returns the topology manager; a scenario of CPUs alone has the NUMA nodes of its CPUs.
    pub(crate) fn topology_manager(&self) -> Result<TopologyManager, PinningError> {
        let settings = self.topology_manager.as_ref().map_or_else(TopologySettings::default, |field| {
            let TopologyField { policy, scope, options } = field.clone();
            TopologySettings { policy, scope: scope.unwrap_or_else(|| "container".into()), options }
        });
        let nodes: Vec<topology::Node> = match &self.nodes {
            Some(nodes) => {
                let node =
                    |node: &NodeField| topology::Node { id: node.id, distances: node.distances.clone() };
                nodes.iter().map(node).collect()
            }
            None => {
                let nodes: std::collections::BTreeSet<u32> =
                    self.topology.iter().flatten().map(|cpu| cpu.numa).collect();
                nodes.into_iter().map(|id| topology::Node { id, distances: None }).collect()
            }
        };
        TopologyManager::new(&settings, &nodes)
    }

    fn pins(&self) -> Result<Pins, Failed> {
        let topology = self.topology_manager()?;
        let cpus = self.cpus(&topology)?;
        let memory = self.memory()?;
        Ok(Pins { topology, cpus, memory })
    }

    fn cpus(&self, alignment: &TopologyManager) -> Result<CpuManager, Failed> {
        let amount = amounts(&self.reserved, "reserved")?.get(CPU).copied();
        let mut settings = CpuSettings {
            policy: "none".into(),
            options: BTreeMap::new(),
            reserved: CpuSet::default(),
            amount,
        };
        if let Some(field) = &self.cpus {
            settings.policy.clone_from(&field.policy);
            settings.options.clone_from(&field.options);
            let list = field.reserved_system_cpus.as_deref().unwrap_or_default();
            let wrong = || PinningError::new(format!("unable to parse reserved-cpus list: {list:?}"));
            settings.reserved = CpuSet::parse(list).ok_or_else(wrong)?;
        }
        let cpus: Vec<Cpu> = self
            .topology
            .iter()
            .flatten()
            .map(|field| {
                let CpuField { cpu, core, socket, numa, uncore } = *field;
                Cpu { cpu, core, socket, numa, uncore }
            })
            .collect();
        let topology =
            if self.topology.is_some() { CpuTopology::new(&cpus)? } else { CpuTopology::default() };
        Ok(CpuManager::new(&settings, &Arc::new(topology), alignment.policy(), self.gates())?)
    }

    fn memory(&self) -> Result<MemoryManager, Failed> {
        let reserved = amounts(&self.reserved, "reserved")?;
        let mut settings = MemorySettings { policy: "None".into(), reserved_memory: Vec::new(), reserved };
        if let Some(field) = &self.memory {
            settings.policy.clone_from(&field.policy);
            for (index, reservation) in field.reserved_memory.iter().enumerate() {
                let limits = amounts(&reservation.limits, &format!("reservedMemory[{index}].limits"))?;
                settings.reserved_memory.push(Reservation { node: reservation.numa_node, limits });
            }
        }
        let node = |field: &NodeField| {
            let size = |(text, count): (&String, &u64)| {
                let size = Quantity::parse(text).ok().and_then(|size| u64::try_from(size.value()).ok());
                let wrong =
                    || FieldError::new("numaNodes", format!("{text:?} is not a size of huge pages (2Mi)"));
                Ok((size.filter(|size| *size > 0).ok_or_else(wrong)?, *count))
            };
            let huge_pages: Result<_, FieldError> = field.hugepages.iter().map(size).collect();
            Ok(MemoryNode { id: field.id, memory: field.memory.unwrap_or(0), huge_pages: huge_pages? })
        };
        let nodes: Result<Vec<MemoryNode>, FieldError> = self.nodes.iter().flatten().map(node).collect();
        Ok(MemoryManager::new(&settings, &nodes?, self.gates())?)
    }
}

/// An answer: an error, or the first start, the running pods, and a result for each step.
#[derive(Serialize, Default)]
pub(crate) struct PinningOutput {
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    running: Option<Vec<Value>>,
    results: Vec<Value>,
}

/// The input of a scenario, in addition to its setup.
pub(crate) struct Play<'a, W> {
    pub(crate) setup: Setup,
    /// Contents of the state files of the CPU manager and the memory manager.
    pub(crate) files: (Option<&'a str>, Option<&'a str>),
    pub(crate) running: Option<&'a [Pod]>,
    pub(crate) steps: &'a [Step<W>],
}

/// An admitted pod.
#[derive(Clone)]
struct Admitted {
    name: String,
    pod: Pod,
    needs: Needs,
}

struct Node {
    setup: Setup,
    pins: Pins,
    devices: Devices,
    admitted: Vec<Admitted>,
}

impl<W: With> Play<'_, W> {
    pub(crate) fn decide(&self) -> Result<PinningOutput, FieldError> {
        let mut node = match Node::start(self.setup.clone(), self.files) {
            Ok(node) => node,
            Err(Failed::Field(error)) => return Err(error),
            Err(Failed::Configuration(error)) => {
                return Ok(PinningOutput { error: Some(error.to_string()), ..PinningOutput::default() });
            }
        };
        let running = self.running.map(|pods| crate::each_pod("running", pods, |pod| node.read(pod)));
        let running = running.transpose()?.map(|pods| node.admit_again(pods));
        node.free_stale();
        let mut start = node.common();
        start.insert("allocatable".into(), json!(node.pins.cpus.allocatable()));
        let mut results = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            let result = step.check().and_then(|()| node.play(step));
            results.push(result.map_err(|error| error.under(&format!("steps[{index}]")))?);
        }
        Ok(PinningOutput { error: None, start: Some(start.into()), running, results })
    }
}

impl Node {
    fn start(setup: Setup, (cpus, memory): (Option<&str>, Option<&str>)) -> Result<Self, Failed> {
        let mut pins = setup.pins()?;
        pins.cpus.start(cpus)?;
        pins.memory.start(memory)?;
        let mut devices = Devices::default();
        plug_in(&mut devices, &setup.plugins);
        Ok(Self { setup, pins, devices, admitted: Vec::new() })
    }

    fn read(&self, pod: &Pod) -> Result<Admitted, FieldError> {
        let name = pod_name(pod)?;
        let mut pod = pod.clone();
        if pod.metadata.uid.as_deref().is_none_or(str::is_empty) {
            pod.metadata.uid = Some(name.clone());
        }
        let needs = Needs::read(&pod, self.setup.gates())?;
        container_requests(&pod)?;
        Ok(Admitted { name, pod, needs })
    }

    fn play<W: With>(&mut self, step: &Step<W>) -> Result<Value, FieldError> {
        match step.op {
            Op::Admit => {
                let pod = self.read(step.pod()?).map_err(|error| error.under("pod"))?;
                let mut result = self.admit(&pod);
                self.free_stale();
                result.append(&mut self.common());
                Ok(result.into())
            }
            Op::Remove => {
                let name = step.name()?;
                self.admitted.retain(|pod| pod.name != name);
                self.free_stale();
                Ok(self.ok(None))
            }
            Op::Start => {
                let name = step.name()?;
                let missing = || FieldError::new("container", "is missing; this op needs it");
                let container = step.container.as_deref().ok_or_else(missing)?;
                let pod = self.admitted.iter().find(|pod| pod.name == name).cloned();
                if let Some(pod) = &pod {
                    self.pins.container_starts(&pod.needs, container);
                }
                Ok(self.ok(pod.as_ref()))
            }
            Op::Restart => self.restart(step.with.as_ref()),
            Op::State => {
                let memory = self.setup.cpus.is_none();
                let file = if memory { self.pins.memory.file() } else { self.pins.cpus.file() };
                Ok(json!({"ok": true, "file": file}))
            }
        }
    }

    /// Restarts the agent with the contents of its state files.
    fn restart<W: With>(&mut self, with: Option<&W>) -> Result<Value, FieldError> {
        let files = (self.pins.cpus.file(), self.pins.memory.file());
        let checkpoint = self.devices.checkpoint().write();
        let devices = checkpoint.and_then(|file| Devices::read(&file, Duration::ZERO));
        let devices = devices.map_err(|error| FieldError::new("", error.to_string()))?;
        let mut setup = self.setup.clone();
        if let Some(with) = with {
            with.apply(&mut setup);
        }
        let pods = std::mem::take(&mut self.admitted);
        match Self::start(setup, (Some(&files.0), Some(&files.1))) {
            Ok(node) => *self = Self { devices, ..node },
            Err(Failed::Field(error)) => return Err(error.under("with")),
            Err(Failed::Configuration(error)) => return Ok(json!({"ok": false, "error": error.to_string()})),
        }
        plug_in(&mut self.devices, &self.setup.plugins);
        let pods: Result<Vec<Admitted>, FieldError> = pods.iter().map(|pod| self.read(&pod.pod)).collect();
        let pods = self.admit_again(pods?);
        self.free_stale();
        let mut result = self.common();
        result.insert("ok".into(), json!(true));
        result.insert("pods".into(), json!(pods));
        Ok(result.into())
    }

    /// Admits the running pods again; removes a rejected pod before the next admission.
    fn admit_again(&mut self, pods: Vec<Admitted>) -> Vec<Value> {
        let admit = |pod: Admitted| {
            let mut result = self.admit(&pod);
            if result.get("ok") != Some(&json!(true)) {
                self.pins.release(&pod.needs.uid);
                self.devices.holders.forget(&pod.needs.uid);
            }
            result.insert("pod".into(), json!(pod.name));
            result.into()
        };
        pods.into_iter().map(admit).collect()
    }

    fn admit(&mut self, pod: &Admitted) -> Map<String, Value> {
        let mut alignment = Alignment::default();
        // The limits of the pod are quantities, because the pod was parsed before.
        let wishes = container_requests(&pod.pod).unwrap_or_default();
        let machine = self.pins.topology.nodes();
        let mut devices = PodDevices::new(&mut self.devices, &pod.needs.uid, wishes, machine);
        let decision = self.pins.admit(&pod.needs, &mut devices, &mut alignment);
        self.admitted.retain(|other| other.name != pod.name);
        let mut result = match decision {
            Ok(()) => {
                let mut result = self.of_pod(pod);
                if self.is_aligned() {
                    result.insert("affinity".into(), affinities(&alignment));
                }
                self.admitted.push(pod.clone());
                result
            }
            Err(Refusal { reason, message }) => {
                let result = json!({"ok": false, "reason": reason.as_str(), "message": message});
                result.as_object().cloned().unwrap_or_default()
            }
        };
        if self.is_aligned() && machine.len() <= SHOWN_NODES {
            result.insert("hints".into(), hints(&alignment));
        }
        result
    }

    fn is_aligned(&self) -> bool {
        self.setup.topology_manager.as_ref().is_some_and(|field| field.policy != "none")
    }

    /// Frees the resources of pods that are not admitted, and of containers that are in no spec.
    fn free_stale(&mut self) {
        let Self { pins, devices, admitted, .. } = self;
        let pod = |uid: &str| admitted.iter().find(|pod| pod.needs.uid == uid);
        pins.retain(|uid, container| {
            pod(uid).is_some_and(|pod| pod.needs.containers.iter().any(|other| other.name == container))
        });
        devices.holders.free_inactive(|uid| pod(uid).is_some());
    }

    fn ok(&self, pod: Option<&Admitted>) -> Value {
        let mut result = self.common();
        result.insert("ok".into(), json!(true));
        if let Some(pod) = pod {
            result.append(&mut self.of_pod(pod));
        }
        result.into()
    }

    /// Returns the state of the node.
    fn common(&self) -> Map<String, Value> {
        let mut result = Map::new();
        result.insert("shared".into(), json!(self.pins.cpus.state().shared));
        if self.pins.memory.is_static() {
            let nodes = self.pins.memory.state().ledger.nodes.iter().map(|(number, node)| {
                let free: BTreeMap<&String, u64> =
                    node.tables.iter().map(|(resource, table)| (resource, table.free)).collect();
                let cells: Vec<u32> = node.cells.iter().collect();
                (number.to_string(), json!({"free": free, "assignments": node.assignments, "cells": cells}))
            });
            result.insert("nodes".into(), Value::Object(nodes.collect()));
        }
        result
    }

    /// Returns all resources of a pod.
    fn of_pod(&self, pod: &Admitted) -> Map<String, Value> {
        let uid = &pod.needs.uid;
        let mut result = Map::new();
        result.insert("ok".into(), json!(true));
        let cpus = self.pins.cpus.state();
        result.insert("cpus".into(), json!(cpus.containers.get(uid).cloned().unwrap_or_default()));
        if let Some(of_pod) = cpus.pods.get(uid) {
            result.insert("podCpus".into(), json!(of_pod));
        }
        let memory = self.pins.memory.state();
        let containers = memory.containers.get(uid).into_iter().flatten();
        let containers = containers.map(|(name, list)| (name.clone(), blocks(list)));
        result.insert("memory".into(), Value::Object(containers.collect()));
        if let Some(of_pod) = memory.pods.get(uid) {
            result.insert("podMemory".into(), blocks(of_pod));
        }
        let mut devices: BTreeMap<&str, BTreeMap<&str, BTreeMap<String, usize>>> = BTreeMap::new();
        for (container, held) in self.devices.holders.held(uid).into_iter().flatten() {
            for (resource, held) in held {
                let counts = self.counts(resource, held.ids());
                devices.entry(container).or_default().insert(resource, counts);
            }
        }
        result.insert("devices".into(), json!(devices));
        result
    }

    /// Returns the number of devices by their nodes.
    fn counts(&self, resource: &str, ids: impl IntoIterator<Item = String>) -> BTreeMap<String, usize> {
        let all = self.devices.inventory.devices_of(resource);
        let mut counts = BTreeMap::new();
        for id in ids {
            let near = all.iter().find(|device| device.id == id).map_or(&[][..], |device| &device.numa_nodes);
            let near: NodeSet = near.iter().filter_map(|node| u32::try_from(*node).ok()).collect();
            let near = if near.is_empty() { "none".to_owned() } else { near.to_string() };
            let count: &mut usize = counts.entry(near).or_default();
            *count = count.saturating_add(1);
        }
        counts
    }
}

/// Registers all device plugins, with healthy devices only.
fn plug_in(devices: &mut Devices, plugins: &[PluginField]) {
    for plugin in plugins {
        devices.inventory.register(&plugin.resource, PluginOptions::default());
        let device = |field: &DeviceField| Device {
            id: field.id.clone(),
            health: beelet_policy::devices::Health::Healthy,
            numa_nodes: field.numa_nodes.clone(),
        };
        devices.inventory.list(&plugin.resource, plugin.devices.iter().map(device));
    }
}

fn blocks(blocks: &[Block]) -> Value {
    let block = |block: &Block| {
        let nodes: Vec<u32> = block.nodes.iter().collect();
        json!({"numa": nodes, "resource": block.resource, "size": block.size})
    };
    blocks.iter().map(block).collect::<Vec<_>>().into()
}

/// Returns the nodes of a hint; null for any nodes.
pub(crate) fn node_list(hint: Hint) -> Value {
    hint.nodes.map(|nodes| nodes.iter().collect::<Vec<u32>>()).into()
}

fn affinities(alignment: &Alignment) -> Value {
    let affinity = |(container, hint): &(String, Hint)| {
        (container.clone(), json!({"numa": node_list(*hint), "preferred": hint.preferred}))
    };
    Value::Object(alignment.affinities.iter().map(affinity).collect())
}

fn hints(alignment: &Alignment) -> Value {
    let of_resource = |hints: &Option<Vec<Hint>>| match hints {
        None => Value::Null,
        Some(hints) => {
            let sets = |preferred: bool| {
                let sets =
                    hints.iter().filter(|hint| hint.preferred == preferred).filter_map(|hint| hint.nodes);
                let mut sets: Vec<String> = sets.map(|nodes| nodes.to_string()).collect();
                sets.sort();
                sets
            };
            json!({"preferred": sets(true), "other": sets(false)})
        }
    };
    let of_container = |(container, providers): &(String, Vec<ProviderHints>)| {
        let resources = providers.iter().flatten().map(|(name, hints)| (name.clone(), of_resource(hints)));
        (container.clone(), Value::Object(resources.collect()))
    };
    Value::Object(alignment.hints.iter().map(of_container).collect())
}
