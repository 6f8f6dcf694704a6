//! The programs that count the bytes and packets of pods' sockets. Every packet passes them, which takes a
//! pod one or two per cent of its bulk throughput (docs/decisions/0010-socket-costs.md), so they are attached
//! only while somebody reads what they count. They come from the same object as the others and count into
//! the pinned maps; their links are this process's alone and end with it.

use super::KernelError;
use super::capability::PROGRAMS;
use super::loader;
use super::pins::{Pins, Sizes};
use aya::programs::links::FdLink;
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Attaches them, and takes them off. Clones share them.
#[derive(Clone, Debug)]
pub struct Traffic(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    object: Cow<'static, [u8]>,
    pins: Pins,
    sizes: Sizes,
    cgroup: PathBuf,
    /// While they are attached.
    links: Mutex<Vec<FdLink>>,
}

impl Traffic {
    /// Not attached yet. `object` is the one whose maps are at `pins`.
    pub(super) fn new(object: Cow<'static, [u8]>, pins: Pins, sizes: Sizes, cgroup: PathBuf) -> Traffic {
        Traffic(Arc::new(Shared { object, pins, sizes, cgroup, links: Mutex::default() }))
    }

    /// Counts from now on. Blocks for some ten milliseconds, while the kernel checks the programs anew.
    ///
    /// # Errors
    /// The kernel refuses them.
    pub fn attach(&self) -> Result<(), KernelError> {
        let shared = &*self.0;
        let mut links = shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        if !links.is_empty() {
            return Ok(());
        }
        let mut loader = loader::loader_of(&shared.sizes, Some(&shared.pins));
        // Nothing in these programs depends on the kernel's types, and reading those takes memory.
        let mut ebpf = loader.btf(None).load(&shared.object).map_err(|error| loader::not_loaded(&error))?;
        let on_demand = PROGRAMS.iter().filter(|program| program.is_on_demand());
        *links = on_demand
            .map(|program| loader::attach_to_packets(&mut ebpf, program, &shared.cgroup))
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Counts no longer; what was counted stays.
    pub fn detach(&self) {
        self.0.links.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
