//! The programs that count the bytes and packets of pods' sockets. Every packet passes these programs, which
//! costs a pod one or two per cent of its bulk throughput (docs/decisions/0010-socket-costs.md), so they are
//! attached only while a subscriber reads the counters. The programs come from the same object as the others
//! and count into the pinned maps; their links are not pinned and end with this process.

use super::KernelError;
use super::capability::PROGRAMS;
use super::loader;
use super::pins::{Pins, Sizes};
use aya::programs::links::FdLink;
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Attaches and detaches the traffic programs. Clones share them.
#[derive(Clone, Debug)]
pub struct Traffic(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    object: Cow<'static, [u8]>,
    pins: Pins,
    sizes: Sizes,
    cgroup: PathBuf,
    /// Links of the programs while they are attached.
    links: Mutex<Vec<FdLink>>,
}

impl Traffic {
    /// Returns a detached value. The maps of `object` must be pinned at `pins`.
    pub(super) fn new(object: Cow<'static, [u8]>, pins: Pins, sizes: Sizes, cgroup: PathBuf) -> Traffic {
        Traffic(Arc::new(Shared { object, pins, sizes, cgroup, links: Mutex::default() }))
    }

    /// Attaches the programs. Blocks for some ten milliseconds, while the kernel verifies them again.
    ///
    /// # Errors
    /// The kernel refuses the programs.
    pub fn attach(&self) -> Result<(), KernelError> {
        let shared = &*self.0;
        let mut links = shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        if !links.is_empty() {
            return Ok(());
        }
        let mut loader = loader::loader_of(&shared.sizes, Some(&shared.pins));
        // These programs don't depend on the kernel's types, and reading those takes memory.
        let mut ebpf = loader.btf(None).load(&shared.object).map_err(|error| loader::not_loaded(&error))?;
        let on_demand = PROGRAMS.iter().filter(|program| program.is_on_demand());
        *links = on_demand
            .map(|program| loader::attach_to_packets(&mut ebpf, program, &shared.cgroup))
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Detaches the programs; the counters stay.
    pub fn detach(&self) {
        self.0.links.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
