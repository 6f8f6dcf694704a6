//! Parsers of the machine's numbers in procfs, for the target `proc_files`.

use beelet_base::machine_memory::MachineMemory;
use beelet_eviction::machine;

/// Tests the parsers of `/proc/meminfo`, the root's `memory.stat` and `/proc/loadavg`.
pub(crate) fn machine(text: &str) {
    let _ = (MachineMemory::of(text, None), MachineMemory::of(text, Some(text)), machine::threads(text));
}
