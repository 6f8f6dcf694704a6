//! The settings of the CPU, memory and topology managers, checked as far as that needs no machine.
//!
//! Rules and defaults: pkg/kubelet/apis/config/validation and the constructors of the managers.

use std::{collections::BTreeMap, time::Duration};

use beelet_policy::{
    pinning::{
        CpuSet, Gates,
        cpus::{CpuSettings, options::StaticOptions},
        memory::{MemorySettings, Reservation},
        topology::{TopologyManager, TopologySettings},
    },
    resources::{MEMORY, huge_pages},
};
use beelet_units::quantity::Quantity;

use super::error::Problem;
use super::kubelet::{KubeletWire, ReservedMemoryWire};
use super::words::{duration, word};

/// The kubelet's default of `cpuManagerReconcilePeriod`.
const RECONCILE: Duration = Duration::from_secs(10);
/// The largest number of a NUMA node that fits into a mask.
const MOST_NODE: i64 = 63;

/// The gates that have an effect.
const GATES: [&str; 5] = [
    "CPUManagerPolicyAlphaOptions",
    "CPUManagerPolicyBetaOptions",
    "InPlacePodVerticalScalingExclusiveCPUs",
    "PodLevelResources",
    "PodLevelResourceManagers",
];

/// The settings of pinning. The machine's own amounts (`amount`, `reserved`) are still to be filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Pinning {
    /// Settings of the CPU manager.
    pub cpus: CpuSettings,
    /// Settings of the memory manager.
    pub memory: MemorySettings,
    /// Settings of the topology manager.
    pub topology: TopologySettings,
    /// Gates that change decisions.
    pub gates: Gates,
    /// Time between two comparisons of the containers' CPUs with the decided ones.
    pub reconcile_period: Duration,
}

impl Pinning {
    /// Returns true if any of the three managers has something to do.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.cpus.policy != "none" || self.memory.policy != "None" || self.topology.policy != "none"
    }

    /// Returns true if containers may have CPUs of their own.
    #[must_use]
    pub fn has_exclusive_cpus(&self) -> bool {
        self.cpus.policy == "static"
    }
}

/// Reads all settings of pinning, and writes the values in effect back.
pub(super) fn resolve(wire: &mut KubeletWire, partly: &mut Vec<Problem>) -> Result<Pinning, Problem> {
    let gates = gates(wire.feature_gates.as_ref(), partly)?;
    Ok(Pinning {
        cpus: cpus(wire, gates)?,
        memory: memory(wire)?,
        topology: topology(wire)?,
        gates,
        reconcile_period: duration(&mut wire.cpu_manager_reconcile_period, RECONCILE),
    })
}

/// Reads the feature gates. A gate of the kubelet without an effect here is a warning.
fn gates(wire: Option<&BTreeMap<String, bool>>, partly: &mut Vec<Problem>) -> Result<Gates, Problem> {
    let mut gates = Gates::default();
    for (name, enabled) in wire.into_iter().flatten() {
        let field = || format!("featureGates.{name}");
        let is_free = super::gates::check(name, *enabled).map_err(|error| Problem::new(field(), error))?;
        if GATES.contains(&name.as_str()) {
            gates.set(name, *enabled);
        } else if is_free {
            let message = "has no effect: beelet does not have this gate";
            partly.push(Problem::new(field(), message));
        }
    }
    Ok(gates)
}

fn cpus(wire: &mut KubeletWire, gates: Gates) -> Result<CpuSettings, Problem> {
    let policy =
        word("cpuManagerPolicy", &mut wire.cpu_manager_policy, [("none", "none"), ("static", "static")])?;
    wire.cpu_manager_policy_options.take_if(|options| options.is_empty());
    let options = wire.cpu_manager_policy_options.clone().unwrap_or_default();
    let field = "cpuManagerPolicyOptions";
    if policy == "none" && !options.is_empty() {
        let message = "needs cpuManagerPolicy: static; take the options out, or set that policy";
        return Err(Problem::new(field, message));
    }
    StaticOptions::read(&options, gates).map_err(|error| Problem::new(field, error.to_string()))?;
    // The list itself was checked with the other reservations.
    let reserved = wire.reserved_system_cpus.as_deref().and_then(CpuSet::parse).unwrap_or_default();
    Ok(CpuSettings { policy: policy.to_owned(), options, reserved, amount: None })
}

fn memory(wire: &mut KubeletWire) -> Result<MemorySettings, Problem> {
    let policies = [("None", "None"), ("Static", "Static")];
    let policy = word("memoryManagerPolicy", &mut wire.memory_manager_policy, policies)?;
    wire.reserved_memory.take_if(|list| list.is_empty());
    let mut reserved_memory: Vec<Reservation> = Vec::new();
    for (index, entry) in wire.reserved_memory.iter().flatten().enumerate() {
        let reservation = reservation(&format!("reservedMemory[{index}]"), entry)?;
        let same = reserved_memory.iter().filter(|other| other.node == reservation.node);
        let mut twice = same.flat_map(|other| other.limits.keys());
        if let Some(resource) = twice.find(|resource| reservation.limits.contains_key(*resource)) {
            let message = format!("{resource} of NUMA node {} is there twice; keep one", reservation.node);
            return Err(Problem::new(format!("reservedMemory[{index}].limits"), message));
        }
        reserved_memory.push(reservation);
    }
    if policy == "Static" && reserved_memory.is_empty() {
        let message = "memoryManagerPolicy Static needs the memory that each NUMA node keeps back, for example \
                       [{numaNode: 0, limits: {memory: 1Gi}}]; the sum is that of kubeReserved, systemReserved and \
                       evictionHard";
        return Err(Problem::new("reservedMemory", message));
    }
    Ok(MemorySettings { policy: policy.to_owned(), reserved_memory, reserved: BTreeMap::new() })
}

fn reservation(field: &str, entry: &ReservedMemoryWire) -> Result<Reservation, Problem> {
    let node = u32::try_from(entry.numa_node).ok().filter(|_| entry.numa_node <= MOST_NODE);
    let node = node.ok_or_else(|| {
        let message = format!("{} is out of range: 0 to {MOST_NODE}", entry.numa_node);
        Problem::new(format!("{field}.numaNode"), message)
    })?;
    let mut limits = BTreeMap::new();
    for (resource, amount) in &entry.limits.0 {
        let field = format!("{field}.limits.{resource}");
        if resource != MEMORY && huge_pages::size_of_resource(resource).is_none() {
            return Err(Problem::new(field, "only memory and huge pages can be reserved on a NUMA node"));
        }
        let amount =
            Quantity::parse(amount).map_err(|error| Problem::new(field.clone(), error.to_string()))?;
        if amount <= Quantity::ZERO {
            return Err(Problem::new(field, "must be more than 0"));
        }
        limits.insert(resource.clone(), amount);
    }
    if limits.is_empty() {
        return Err(Problem::new(format!("{field}.limits"), "must name memory or huge pages"));
    }
    Ok(Reservation { node, limits })
}

fn topology(wire: &mut KubeletWire) -> Result<TopologySettings, Problem> {
    let policies = ["none", "best-effort", "restricted", "single-numa-node"].map(|name| (name, name));
    let policy = word("topologyManagerPolicy", &mut wire.topology_manager_policy, policies)?;
    let scopes = ["container", "pod"].map(|name| (name, name));
    let scope = word("topologyManagerScope", &mut wire.topology_manager_scope, scopes)?;
    wire.topology_manager_policy_options.take_if(|options| options.is_empty());
    let options = wire.topology_manager_policy_options.clone().unwrap_or_default();
    let settings = TopologySettings { policy: policy.to_owned(), scope: scope.to_owned(), options };
    // Under the policy `none` the kubelet reads no option.
    TopologyManager::new(&settings, &[])
        .map_err(|error| Problem::new("topologyManagerPolicyOptions", error.to_string()))?;
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::parse;

    fn read(body: &str) -> Result<(Pinning, Vec<String>), String> {
        let text = format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{body}");
        match parse(Path::new("test.yaml"), &text) {
            Ok((config, warnings)) => {
                Ok((config.pinning, warnings.into_iter().map(|warning| warning.field).collect()))
            }
            Err(faults) => Err(faults.errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")),
        }
    }

    #[test]
    fn nothing_is_pinned_by_default() {
        let (pinning, warnings) = read("").unwrap();
        assert!(!pinning.is_on() && !pinning.has_exclusive_cpus() && warnings.is_empty());
        assert_eq!((pinning.gates, pinning.reconcile_period), (Gates::default(), RECONCILE));
    }

    #[test]
    fn settings_are_read_in_the_kubelets_words() {
        let (pinning, warnings) = read(
            "cpuManagerPolicy: static\nreservedSystemCPUs: 0,4\ncpuManagerReconcilePeriod: 5s\n\
             cpuManagerPolicyOptions: {full-pcpus-only: \"true\", align-by-socket: \"true\"}\n\
             featureGates: {CPUManagerPolicyAlphaOptions: true, PodLevelResourceManagers: true}\n\
             memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 1, limits: {memory: 1Gi, hugepages-2Mi: 2Mi}}]\n\
             topologyManagerPolicy: restricted\ntopologyManagerScope: pod\n\
             topologyManagerPolicyOptions: {max-allowable-numa-nodes: \"16\"}\n",
        )
        .unwrap();
        assert_eq!(warnings, Vec::<String>::new());
        assert!(pinning.is_on() && pinning.has_exclusive_cpus());
        assert_eq!(pinning.cpus.reserved.to_string(), "0,4");
        assert_eq!(pinning.cpus.options["full-pcpus-only"], "true");
        assert_eq!(pinning.reconcile_period, Duration::from_secs(5));
        assert!(pinning.gates.cpu_alpha_options && pinning.gates.pod_level_managers);
        assert_eq!(pinning.memory.reserved_memory[0].node, 1);
        assert_eq!(pinning.memory.reserved_memory[0].limits["memory"].value(), 1 << 30);
        assert_eq!(
            (pinning.topology.policy.as_str(), pinning.topology.scope.as_str()),
            ("restricted", "pod")
        );
    }

    #[test]
    fn a_gate_without_an_effect_is_a_warning_and_an_unknown_one_an_error() {
        let (pinning, warnings) = read("featureGates: {KubeletPSI: true, PodsAPI: true}").unwrap();
        assert_eq!((pinning.gates, warnings), (Gates::default(), vec!["featureGates.PodsAPI".to_owned()]));
        let error = read("featureGates: {Some: true}").unwrap_err();
        assert!(error.contains("featureGates.Some: unrecognized feature gate: Some"), "{error}");
    }

    #[test]
    fn wrong_settings_are_refused_with_their_field() {
        for (body, expected) in [
            ("cpuManagerPolicy: dynamic", "cpuManagerPolicy: \"dynamic\" is not one of none, static"),
            ("cpuManagerPolicyOptions: {full-pcpus-only: \"true\"}", "needs cpuManagerPolicy: static"),
            ("cpuManagerPolicy: static\ncpuManagerPolicyOptions: {x: \"true\"}", "unknown CPU Manager"),
            (
                "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {align-by-socket: \"true\"}",
                "not enabled, but option \"align-by-socket\" provided",
            ),
            ("memoryManagerPolicy: BestEffort", "is not one of None, Static"),
            ("memoryManagerPolicy: Static", "reservedMemory: memoryManagerPolicy Static needs"),
            ("reservedMemory: [{numaNode: 64, limits: {memory: 1Gi}}]", "64 is out of range"),
            ("reservedMemory: [{numaNode: -1, limits: {memory: 1Gi}}]", "-1 is out of range"),
            ("reservedMemory: [{numaNode: 0, limits: {cpu: 1}}]", "only memory and huge pages"),
            ("reservedMemory: [{numaNode: 0, limits: {memory: 0}}]", "must be more than 0"),
            ("reservedMemory: [{numaNode: 0, limits: {}}]", "must name memory"),
            (
                "reservedMemory: [{numaNode: 0, limits: {memory: 1}}, {numaNode: 0, limits: {memory: 2}}]",
                "memory of NUMA node 0 is there twice",
            ),
            (
                "topologyManagerPolicy: restricted\ntopologyManagerPolicyOptions: {x: \"true\"}",
                "unknown Topology Manager",
            ),
            (
                "topologyManagerPolicy: restricted\n\
                 topologyManagerPolicyOptions: {max-allowable-numa-nodes: \"2\"}",
                "8 at least",
            ),
        ] {
            let error = read(body).unwrap_err();
            assert!(error.contains(expected), "{body}: {error}");
        }
    }
}
