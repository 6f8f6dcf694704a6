//! Reads the machine's CPUs and NUMA nodes, where anything is pinned.

use std::{path::Path, sync::Arc};

use anyhow::{Context as _, Result};

use beelet_base::blocking::blocking;
use beelet_config::Config;
use beelet_pinning::machine::{self, MachineTopology, SYSTEM, Whole};

/// Kernel folder with one subfolder per huge page size.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// Reads the machine's CPUs and NUMA nodes, where anything is pinned.
///
/// # Errors
/// The kernel's folders can't be read.
pub(super) async fn inspect(config: &Config, memory: u64) -> Result<Option<Arc<MachineTopology>>> {
    if !config.pinning.is_on() {
        return Ok(None);
    }
    let read = move || {
        let whole = Whole { memory, huge_pages: machine::huge_pages(Path::new(HUGE_PAGES))? };
        MachineTopology::read(Path::new(SYSTEM), &whole)
    };
    let read = blocking("reading the machine's CPUs and NUMA nodes", read).await;
    let what = "the machine's CPUs and NUMA nodes are unknown: set cpuManagerPolicy: none, memoryManagerPolicy: None \
                and topologyManagerPolicy: none to run without them";
    Ok(Some(Arc::new(read.context(what)?)))
}
