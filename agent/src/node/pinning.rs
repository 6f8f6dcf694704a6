//! Opens the pins of CPUs and memory, with the amounts that this machine keeps back.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context as _, Result};
use beelet_base::blocking::spawn_blocking;
use beelet_policy::{
    node::reservations::hard_eviction,
    resources::{CPU, MEMORY, huge_pages::PREFIX},
};
use tokio::sync::{mpsc, watch};

use super::{facts, opened::Node};
use beelet_model::request::Request;
use beelet_pinning::{Active, Parts, Pinning, Task, Watcher};

/// Opens the pins as an earlier agent or a kubelet left them, with the task that keeps them.
///
/// # Errors
/// The configuration can't be on this machine; the sentence names the field.
pub(super) async fn open(
    node: &Node,
    active: watch::Receiver<Active>,
    requests: mpsc::Sender<Request>,
) -> Result<(Pinning, Option<Task>)> {
    let services = &node.services;
    let config = &services.config;
    let mut settings = config.pinning.clone();
    // `reservedSystemCPUs` names the CPUs; otherwise their number counts.
    settings.cpus.amount = Some(config.reserved(CPU)).filter(|_| settings.cpus.reserved.is_empty());
    settings.memory.reserved = reserved_memory(node);
    let parts = Parts {
        settings,
        machine: node.machine.topology.clone(),
        folder: config.beelet.kubelet_dir.clone(),
        runtime: services.runtime.clone(),
        cgroups: Arc::clone(&node.cgroups),
        cgroup_config: node.cgroup_config.clone(),
        table: services.table.clone(),
        active,
        requests,
        metrics: services.metrics.pinning.clone(),
        events: services.events.clone(),
        node_name: config.node_name.clone(),
    };
    Ok(spawn_blocking(move || Pinning::open(parts)).await.context("the pins could not be opened")??)
}

/// Returns the part that measures the use of exclusive CPUs.
pub(super) fn watcher(node: &Node, pinning: &Pinning) -> Watcher {
    let services = &node.services;
    Watcher {
        pinning: pinning.clone(),
        table: services.table.clone(),
        cgroups: Arc::clone(&node.cgroups),
        cgroup_config: node.cgroup_config.clone(),
        gates: services.config.pinning.gates,
        proc: "/proc".into(),
        metrics: services.metrics.pinning.clone(),
        report: services.stats.pinned.clone(),
    }
}

/// The memory that Node Allocatable keeps back: for the system, for the node's agents, and below the hard
/// eviction thresholds.
fn reserved_memory(node: &Node) -> BTreeMap<String, beelet_units::quantity::Quantity> {
    let config = &node.services.config;
    let capacity = facts::capacity(config, &node.machine).capacity;
    let mut reserved = hard_eviction(&capacity, &config.eviction.thresholds);
    for name in config.system_reserved.keys().chain(config.kube_reserved.keys()) {
        reserved.entry(name.clone()).or_default();
    }
    reserved.retain(|name, _| name == MEMORY || name.starts_with(PREFIX));
    for (name, amount) in &mut reserved {
        *amount = [*amount, config.reserved(name)].into_iter().sum();
    }
    reserved
}
