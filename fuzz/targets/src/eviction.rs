//! Fuzzing: what procfs says of the machine.

use beelet_base::machine_memory::MachineMemory;
use beelet_eviction::machine;

/// `/proc/meminfo`, the root's `memory.stat` and `/proc/loadavg`.
pub(crate) fn machine(text: &str) {
    let _ = (MachineMemory::of(text, None), MachineMemory::of(text, Some(text)), machine::threads(text));
}
