//! The CPU manager, which assigns exclusive CPUs to containers (`cpumanager/policy_static.go`).
//!
//! A container of a Guaranteed pod that requests whole CPUs gets them from the shared pool, which all other
//! containers use. Reserved CPUs stay in the pool (with `strict-cpu-reservation`, they are in neither). The
//! containers after an init container reuse its CPUs; a sidecar keeps its CPUs.

pub(crate) mod distributed;
pub mod options;
pub(crate) mod packed;
mod pod;
pub mod reclaim;
pub(super) mod resize;
pub mod restart;
mod state;
pub mod view;

use std::{collections::BTreeMap, sync::Arc};

use beelet_units::quantity::Quantity;

use super::{
    cpu_set::CpuSet,
    error::{PinningError, Reason, Refusal},
    gates::Gates,
    hints::{Hint, ProviderHints},
    machine::{CpuTopology, Level},
    needs::{ContainerNeeds, Kind, Needs},
    nodes::{NodeSet, Subsets},
};
use crate::{devices::topology::TopologyPolicy, resources::CPU};
use distributed::Distribution;
use options::StaticOptions;
use packed::{ClaimError, Manner};
pub use state::{Assignments, CpuState};

/// The settings, in the words of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuSettings {
    /// `cpuManagerPolicy`
    pub policy: String,
    /// `cpuManagerPolicyOptions`
    pub options: BTreeMap<String, String>,
    /// `reservedSystemCPUs`: exactly these CPUs are reserved.
    pub reserved: CpuSet,
    /// Amount of CPU that Node Allocatable reserves, if the configuration names no CPUs.
    pub amount: Option<Quantity>,
}

/// The CPU manager.
#[derive(Debug, Clone)]
pub struct CpuManager {
    policy: Policy,
    pod_level: bool,
    state: CpuState,
    /// CPUs that init containers leave to later containers, by pod: admissions of pods may interleave.
    reuse: BTreeMap<String, CpuSet>,
}

#[derive(Debug, Clone)]
enum Policy {
    None,
    Static(Static),
}

/// The parts of the static policy that do not change.
#[derive(Debug, Clone)]
struct Static {
    topology: Arc<CpuTopology>,
    options: StaticOptions,
    reserved: CpuSet,
    /// The reserved CPUs with all CPUs on their cores.
    reserved_cores: CpuSet,
}

impl CpuManager {
    /// Creates the manager for these settings; its state is empty until [`Self::start`].
    ///
    /// # Errors
    /// A setting is invalid, or invalid on this machine.
    pub fn new(
        settings: &CpuSettings,
        topology: &Arc<CpuTopology>,
        alignment: TopologyPolicy,
        gates: Gates,
    ) -> Result<Self, PinningError> {
        let policy = match settings.policy.as_str() {
            "none" if settings.options.is_empty() => Policy::None,
            "none" => return Err(PinningError::new("None policy: received unsupported options")),
            "static" => Policy::Static(Static::new(settings, topology, alignment, gates)?),
            other => return Err(PinningError::new(format!("unknown policy: {other:?}"))),
        };
        let pod_level = gates.pod_level_managers;
        Ok(Self { policy, pod_level, state: CpuState::default(), reuse: BTreeMap::new() })
    }

    fn policy_name(&self) -> &'static str {
        match &self.policy {
            Policy::None => "none",
            Policy::Static(_) => "static",
        }
    }

    /// Starts with the content of the state file, if the file exists.
    ///
    /// # Errors
    /// The file is unreadable, is from another policy, or does not match the machine and the settings.
    pub fn start(&mut self, file: Option<&str>) -> Result<(), PinningError> {
        self.reuse.clear();
        self.state = match file {
            Some(file) => CpuState::read(file, self.policy_name(), self.pod_level)?,
            None => CpuState::default(),
        };
        match &self.policy {
            Policy::None => Ok(()),
            Policy::Static(own) => own.check(&mut self.state),
        }
    }

    /// Returns the state file's content.
    #[must_use]
    pub fn file(&self) -> String {
        self.state.write(self.policy_name(), self.pod_level)
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> &CpuState {
        &self.state
    }

    /// Returns the CPUs that may become exclusive (`GetAllocatableCPUs`); none without a policy.
    #[must_use]
    pub fn allocatable(&self) -> CpuSet {
        match &self.policy {
            Policy::None => CpuSet::default(),
            Policy::Static(own) => own.topology.all().difference(&own.reserved),
        }
    }

    /// Returns the exclusive CPUs of a container, or of its pod.
    #[must_use]
    pub fn of(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        self.state.containers.get(uid)?.get(container)
    }

    /// Returns the sets of nodes that could provide a container's CPUs (`GetTopologyHints`).
    #[must_use]
    pub fn hints(&self, needs: &Needs, container: &ContainerNeeds) -> ProviderHints {
        let Policy::Static(own) = &self.policy else { return ProviderHints::new() };
        if container.cpus == 0 || needs.ignored {
            return ProviderHints::new();
        }
        let hints = match self.of(&needs.uid, &container.name) {
            Some(held) if held.len() != container.cpus => Vec::new(),
            Some(held) => own.hints(held, &CpuSet::default(), container.cpus),
            None => own.hints(&own.available(&self.state), &self.reusable(&needs.uid), container.cpus),
        };
        ProviderHints::from([(CPU.to_owned(), Some(hints))])
    }

    /// Assigns CPUs to a container, as far as possible from these nodes (`Allocate`). Does nothing if the
    /// container already has its CPUs, or needs none.
    ///
    /// # Errors
    /// Too few CPUs, or too few whole cores, are free.
    pub fn allocate(
        &mut self,
        needs: &Needs,
        container: &ContainerNeeds,
        nodes: Option<NodeSet>,
    ) -> Result<(), Refusal> {
        let Policy::Static(own) = &self.policy else { return Ok(()) };
        if container.cpus == 0 || needs.ignored {
            return Ok(());
        }
        own.check_cores(&self.state, container.cpus, container.cpus)?;
        let cpus = match self.of(&needs.uid, &container.name) {
            Some(held) => held.clone(),
            None => {
                let reusable = self.reusable(&needs.uid);
                let cpus = own.claim_near(&self.state, container.cpus, nodes, &reusable);
                let cpus = cpus.map_err(Refusal::unexpected)?;
                self.state.shared = self.state.shared.difference(&cpus);
                self.state.assign(&needs.uid, &container.name, cpus.clone());
                cpus
            }
        };
        self.hand_on(&needs.uid, container.kind, &cpus);
        Ok(())
    }

    /// Frees all CPUs of a pod.
    pub fn release(&mut self, uid: &str) {
        self.retain(uid, |_| false);
    }

    /// Frees the CPUs of containers of the pod that are no longer active.
    pub fn retain(&mut self, uid: &str, wanted: impl Fn(&str) -> bool) {
        if matches!(self.policy, Policy::None) {
            return;
        }
        let mut containers = self.state.containers.remove(uid).unwrap_or_default();
        let before = containers.values().fold(CpuSet::default(), |all, set| all.union(set));
        containers.retain(|name, _| wanted(name));
        let of_pod = self.state.pods.get(uid);
        let (before, after) = match of_pod {
            Some(pod) if containers.is_empty() => (before.union(pod), CpuSet::default()),
            // The pod's CPUs become free with its last container.
            Some(_) => (CpuSet::default(), CpuSet::default()),
            None => (before, containers.values().fold(CpuSet::default(), |all, set| all.union(set))),
        };
        self.state.shared = self.state.shared.union(&before.difference(&after));
        if containers.is_empty() {
            self.state.pods.remove(uid);
            self.reuse.remove(uid);
        } else {
            if let Some(reuse) = self.reuse.get_mut(uid) {
                let held = containers.values().fold(CpuSet::default(), |all, set| all.union(set));
                *reuse = reuse.intersection(&held);
            }
            self.state.containers.insert(uid.to_owned(), containers);
        }
    }

    fn reusable(&self, uid: &str) -> CpuSet {
        self.reuse.get(uid).cloned().unwrap_or_default()
    }

    /// Adds the CPUs of an init container to the reusable CPUs; removes those of other containers
    /// (`updateCPUsToReuse`).
    fn hand_on(&mut self, uid: &str, kind: Kind, cpus: &CpuSet) {
        let before = self.reusable(uid);
        let reusable = if kind == Kind::Init { before.union(cpus) } else { before.difference(cpus) };
        self.reuse.insert(uid.to_owned(), reusable);
    }
}

impl Static {
    fn new(
        settings: &CpuSettings,
        topology: &Arc<CpuTopology>,
        alignment: TopologyPolicy,
        gates: Gates,
    ) -> Result<Self, PinningError> {
        let options = StaticOptions::read(&settings.options, gates)?;
        options.check(topology, alignment)?;
        let mut own = Self {
            topology: Arc::clone(topology),
            options,
            reserved: settings.reserved.clone(),
            reserved_cores: CpuSet::default(),
        };
        if own.reserved.is_empty() {
            own.reserved = own.pick_reserved(settings.amount)?;
        }
        if !own.reserved.is_subset(topology.all()) {
            let unknown = own.reserved.difference(topology.all());
            return Err(PinningError::new(format!("reserved CPUs {unknown} are not online")));
        }
        let cores = topology.touched(Level::Core, &own.reserved);
        own.reserved_cores = cores.fold(CpuSet::default(), |all, (_, core)| all.union(core));
        Ok(own)
    }

    /// Returns the reserved CPUs if the settings have only their amount: rounded up, and chosen as for a
    /// container.
    fn pick_reserved(&self, amount: Option<Quantity>) -> Result<CpuSet, PinningError> {
        let amount = amount.filter(|amount| *amount > Quantity::ZERO).ok_or_else(|| {
            let message =
                "the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero";
            PinningError::new(message)
        })?;
        let count = usize::try_from(amount.milli_value()).unwrap_or(0).div_ceil(1000);
        let picked = self.claim(self.topology.all(), count, 0);
        picked.map_err(|error| {
            PinningError::new(format!("unable to reserve the required amount of CPUs: {error}"))
        })
    }

    /// Checks the content of the file, and initialises an empty state (`validateState`).
    fn check(&self, state: &mut CpuState) -> Result<(), PinningError> {
        let all = self.topology.all();
        let online = if self.options.strict { all.difference(&self.reserved) } else { all.clone() };
        if state.shared.is_empty() {
            if !state.containers.is_empty() {
                return Err(PinningError::new("default cpuset cannot be empty"));
            }
            state.shared = online;
            return Ok(());
        }
        let shared = &state.shared;
        if self.options.strict && self.reserved.common(shared) > 0 {
            let message = format!(
                "some of strictly reserved cpus: {} are present in defaultCpuSet: {shared}",
                self.reserved
            );
            return Err(PinningError::new(message));
        }
        if !self.options.strict && !self.reserved.is_subset(shared) {
            let message =
                format!("not all reserved cpus: {} are present in defaultCpuSet: {shared}", self.reserved);
            return Err(PinningError::new(message));
        }
        let mut known = shared.clone();
        for (uid, containers) in &state.containers {
            for (container, cpus) in containers {
                if cpus.common(shared) > 0 {
                    let message = format!(
                        "pod: {uid}, container: {container} cpuset: {cpus} overlaps with default cpuset {shared}"
                    );
                    return Err(PinningError::new(message));
                }
                known = known.union(cpus);
            }
        }
        let known = state.pods.values().fold(known, |known, cpus| known.union(cpus));
        if known != online {
            let message =
                format!("current set of available CPUs {online} doesn't match with CPUs in state {known}");
            return Err(PinningError::new(message));
        }
        Ok(())
    }

    /// Returns the CPUs that are free now (`GetAvailableCPUs`).
    fn available(&self, state: &CpuState) -> CpuSet {
        state.shared.difference(&self.reserved)
    }

    /// Checks `full-pcpus-only`: whole cores, and enough free ones for `more` CPUs (`enforceSMTAlignment`).
    fn check_cores(&self, state: &CpuState, count: usize, more: usize) -> Result<(), Refusal> {
        if !self.options.full_cores {
            return Ok(());
        }
        let per_core = self.topology.average(Level::Core).max(1);
        let refuse = |message: String| {
            Err(Refusal::new(Reason::SmtAlignment, format!("SMT Alignment Error: {message}")))
        };
        if count.checked_rem(per_core) != Some(0) {
            return refuse(format!("requested {count} cpus not multiple cpus per core = {per_core}"));
        }
        let free = state.shared.difference(&self.reserved_cores).len();
        if more > free {
            return refuse(format!(
                "not enough free physical CPUs: available physical CPUs = {free}, requested CPUs = {more}, CPUs per core = {per_core}"
            ));
        }
        Ok(())
    }

    /// Claims CPUs, first those near the nodes (`allocateCPUs`).
    fn claim_near(
        &self,
        state: &CpuState,
        count: usize,
        nodes: Option<NodeSet>,
        reusable: &CpuSet,
    ) -> Result<CpuSet, ClaimError> {
        let free = self.available(state).union(reusable);
        let near = match nodes {
            Some(nodes) => {
                let near = self.near(nodes).intersection(&free);
                let wide = usize::try_from(nodes.len()).unwrap_or(0);
                self.claim(&near, count.min(near.len()), wide)?
            }
            None => CpuSet::default(),
        };
        let rest = count.saturating_sub(near.len());
        Ok(self.claim(&free.difference(&near), rest, 0)?.union(&near))
    }

    /// Returns the CPUs of the nodes, or of their sockets (`getAlignedCPUs`).
    fn near(&self, nodes: NodeSet) -> CpuSet {
        let near = self.topology.of_nodes(nodes);
        if !self.options.align_by_socket {
            return near;
        }
        let sockets = self.topology.touched(Level::Socket, &near);
        sockets.fold(CpuSet::default(), |all, (_, socket)| all.union(socket))
    }

    /// Claims `count` of the free CPUs, in the way of the options (`takeByTopology`).
    fn claim(&self, free: &CpuSet, count: usize, nodes: usize) -> Result<CpuSet, ClaimError> {
        let StaticOptions { full_cores, distribute_nodes, distribute_cores, align_by_uncore, .. } =
            self.options;
        if distribute_nodes {
            let group = if full_cores { self.topology.average(Level::Core).max(1) } else { 1 };
            let align_by_socket = self.options.align_by_socket;
            let wanted = Distribution { group, align_by_socket, nodes };
            return distributed::claim(&self.topology, free, count, wanted);
        }
        let manner = Manner { spread: distribute_cores, uncore: align_by_uncore };
        packed::claim(&self.topology, free, count, manner)
    }

    /// Returns the sets of nodes that have enough free CPUs, and all reusable ones
    /// (`generateCPUTopologyHints`).
    fn hints(&self, available: &CpuSet, reusable: &CpuSet, count: usize) -> Vec<Hint> {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        let subsets = Subsets::of(self.topology.nodes());
        let of_node = |cpus: &CpuSet, node: u32| {
            let group = self.topology.groups(Level::Node).get(&node);
            group.map_or(0, |group| u64::try_from(group.common(cpus)).unwrap_or(0))
        };
        let all = subsets.sums(|node| of_node(self.topology.all(), node));
        let free = available.union(reusable);
        let free = subsets.sums(|node| of_node(&free, node));
        let must: NodeSet = self.topology.touched(Level::Node, reusable).map(|(node, _)| node).collect();
        let enough = |sums: &[u64], index: usize| sums.get(index).is_some_and(|sum| *sum >= count);
        let least = subsets.iter().filter(|(index, _)| enough(&all, *index)).map(|(_, set)| set.len()).min();
        let least = least.unwrap_or(subsets.nodes());
        let possible = subsets.iter().filter(|(index, set)| must.is_subset(*set) && enough(&free, *index));
        let preferred = |set: NodeSet| set.len() == least || self.is_near_by_socket(set, least);
        possible.map(|(_, set)| Hint { nodes: Some(set), preferred: preferred(set) }).collect()
    }

    /// Returns true with `align-by-socket` if the set is on the minimum number of sockets for `least` nodes
    /// (`isHintSocketAligned`).
    fn is_near_by_socket(&self, nodes: NodeSet, least: u32) -> bool {
        let count = |level| self.topology.groups(level).len();
        let per_socket = count(Level::Node).checked_div(count(Level::Socket)).unwrap_or(0);
        if !self.options.align_by_socket || per_socket == 0 {
            return false;
        }
        let sockets = usize::try_from(least).unwrap_or(0).div_ceil(per_socket);
        self.topology.touched(Level::Socket, &self.topology.of_nodes(nodes)).count() == sockets
    }
}
