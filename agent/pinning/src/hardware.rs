//! CPUs that go offline or come online while the agent runs: the managers start again on the new machine, and
//! running pods keep all that is still there.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use beelet_base::blocking::blocking;
use beelet_policy::pinning::{
    CpuSet, CpuTopology, PinningError, Pins,
    cpus::{self, CpuManager},
    memory::{self, MemoryManager},
    topology::TopologyManager,
};
use beelet_state::events::NodeEvents;
use tracing::warn;

use super::{
    Desk, OpenError,
    machine::{MachineTopology, Source},
};

/// The machine as it was last read.
#[derive(Debug)]
pub(super) struct Hardware {
    source: Source,
    settings: beelet_config::Pinning,
    events: NodeEvents,
    known: Mutex<MachineTopology>,
}

impl Hardware {
    pub(super) fn new(
        source: Source,
        settings: beelet_config::Pinning,
        events: NodeEvents,
        known: MachineTopology,
    ) -> Self {
        Self { source, settings, events, known: Mutex::new(known) }
    }

    /// Returns the machine if its CPUs or its nodes differ from those of the last call. A machine that cannot
    /// be read has not changed.
    async fn changed(&self) -> Option<(MachineTopology, MachineTopology)> {
        let source = self.source.clone();
        let now = blocking("reading the machine's CPUs", move || source.read()).await;
        let now = now.inspect_err(|error| warn!(%error, "cannot read the machine's CPUs")).ok()?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // The amounts of memory change with every huge page.
        if (&known.cpus, &known.nodes) == (&now.cpus, &now.nodes) {
            return None;
        }
        Some((std::mem::replace(&mut *known, now.clone()), now))
    }
}

impl Desk {
    /// Starts the managers again if CPUs have gone offline or come online. Pods keep the CPUs and the memory
    /// that are still there; the others are lost, and run on in the shared pool.
    pub(super) async fn follow_hardware(&self) {
        let Some((before, now)) = self.hardware.changed().await else { return };
        let change = change(&before, &now);
        let new = managers(&self.hardware.settings, &now).map_err(|error| error.to_string());
        let moved = new.and_then(|new| {
            self.with(|book| {
                let (new, lost) = moved(&book.pins, new).map_err(|error| error.to_string())?;
                let kept = new.cpus.state().containers.len();
                (book.pins, book.freed) = (new, true);
                book.lost.extend(lost.iter().cloned());
                Ok((kept, lost.len()))
            })
        });
        match moved {
            Ok((kept, lost)) => {
                let message = format!(
                    "{change}: {kept} pods keep what they have, {lost} pods do not (events of these pods follow)"
                );
                self.hardware.events.warning("MachineChanged", &message);
                self.changed();
            }
            Err(error) => {
                let message = format!("{change}, and the settings do not fit the machine any more: {error}");
                self.hardware.events.warning("MachineChanged", &message);
            }
        }
    }
}

/// Creates the managers for a machine, which must have all reserved memory. Their states are empty.
pub(super) fn managers(
    settings: &beelet_config::Pinning,
    machine: &MachineTopology,
) -> Result<Pins, OpenError> {
    let of = |field: &'static str| move |error: PinningError| OpenError::new(field, error.to_string());
    let topology =
        TopologyManager::new(&settings.topology, &machine.nodes).map_err(of("topologyManagerPolicy"))?;
    let cpus = CpuTopology::new(&machine.cpus).map_err(of("cpuManagerPolicy"))?;
    let cpus = CpuManager::new(&settings.cpus, &Arc::new(cpus), topology.policy(), settings.gates);
    let cpus = cpus.map_err(of("cpuManagerPolicy"))?;
    let memory = MemoryManager::new(&settings.memory, &machine.memory, settings.gates);
    let memory = memory.map_err(of("reservedMemory"))?;
    refuse_overdrawn(&memory)?;
    Ok(Pins { topology, cpus, memory })
}

/// Refuses reservations above a node's size: the kubelet starts, and counts about 2^64 free bytes there.
fn refuse_overdrawn(memory: &MemoryManager) -> Result<(), OpenError> {
    let mut fresh = memory.clone();
    let started = fresh.start(None);
    started.map_err(|error| OpenError::new("reservedMemory", error.to_string()))?;
    let overdrawn: Vec<String> = fresh
        .state()
        .ledger
        .overdrawn()
        .map(|(node, resource)| format!("{resource} of NUMA node {node}"))
        .collect();
    if overdrawn.is_empty() {
        return Ok(());
    }
    let message = format!(
        "the configuration reserves more than the machine has of {}: lower the amount in reservedMemory, and \
         kubeReserved, systemReserved or evictionHard by as much",
        overdrawn.join(" and of ")
    );
    Err(OpenError::new("reservedMemory", message))
}

/// Gives the pods of `old` what they have in `new`, as far as it is there. Returns the pods that lose theirs.
fn moved(old: &Pins, mut new: Pins) -> Result<(Pins, BTreeSet<String>), PinningError> {
    let mut lost = BTreeSet::new();
    lost.extend(cpus::restart::recover(&mut new.cpus, &old.cpus.file())?);
    lost.extend(memory::restart::recover(&mut new.memory, &old.memory.file())?);
    Ok((new, lost))
}

/// Describes the difference of two machines.
fn change(before: &MachineTopology, now: &MachineTopology) -> String {
    let cpus = |machine: &MachineTopology| machine.cpus.iter().map(|cpu| cpu.cpu).collect::<CpuSet>();
    let (before, now) = (cpus(before), cpus(now));
    let parts = [(before.difference(&now), "offline"), (now.difference(&before), "online")];
    let parts = parts.iter().filter(|(cpus, _)| !cpus.is_empty());
    let parts: Vec<String> = parts.map(|(cpus, state)| format!("CPUs {cpus} are {state}")).collect();
    if parts.is_empty() { "the machine's NUMA nodes changed".to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use beelet_policy::pinning::{
        Cpu, Gates,
        cpus::CpuSettings,
        memory::{MemoryNode, MemorySettings, Reservation},
        topology::TopologySettings,
    };
    use beelet_units::quantity::Quantity;

    use super::*;

    #[test]
    fn a_machine_with_less_memory_than_is_reserved_gets_no_managers() {
        let reserved: BTreeMap<String, Quantity> =
            [("memory".to_owned(), Quantity::from_units(1 << 30))].into();
        let settings = beelet_config::Pinning {
            cpus: CpuSettings {
                policy: "none".to_owned(),
                options: BTreeMap::new(),
                reserved: CpuSet::default(),
                amount: None,
            },
            memory: MemorySettings {
                policy: "Static".to_owned(),
                reserved_memory: vec![Reservation { node: 0, limits: reserved.clone() }],
                reserved,
            },
            topology: TopologySettings::default(),
            gates: Gates::default(),
            reconcile_period: Duration::from_secs(10),
        };
        let managers_of = |memory: u64| {
            let machine = MachineTopology {
                cpus: vec![Cpu { cpu: 0, core: 0, socket: 0, numa: 0, uncore: None }],
                nodes: Vec::new(),
                memory: vec![MemoryNode { id: 0, memory, huge_pages: BTreeMap::new() }],
            };
            managers(&settings, &machine).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(managers_of(2 << 30), Ok(()));
        let error = managers_of(512 << 20).unwrap_err();
        assert!(error.contains("reserves more than the machine has of memory of NUMA node 0"), "{error}");
    }
}
