//! Fuzzing: what procfs says of the machine.

use beelet_eviction::machine;

/// `/proc/meminfo` and `/proc/loadavg`.
pub(crate) fn machine(text: &str) {
    let _ = (machine::meminfo(text), machine::threads(text));
}
