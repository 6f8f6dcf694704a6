//! Reads the machine's CPUs and NUMA nodes, where anything is pinned.

use std::path::Path;

use beelet_config::Config;
use beelet_pinning::machine::{self, MachineTopology, SYSTEM, Source, Whole};

/// Kernel folder with one subfolder per huge page size.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// Returns the source of the machine's CPUs and NUMA nodes, where anything is pinned.
pub(super) fn inspect(config: &Config, memory: u64) -> Option<Source> {
    let read = move || {
        let whole = Whole { memory, huge_pages: machine::huge_pages(Path::new(HUGE_PAGES))? };
        MachineTopology::read(Path::new(SYSTEM), &whole)
    };
    config.pinning.is_on().then(|| Source::new(read))
}
