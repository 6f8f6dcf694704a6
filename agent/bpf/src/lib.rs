//! The only user of bpf(2) in the agent: loads and attaches the kernel programs of `ebpf/`, keeps them pinned
//! while the agent restarts, reads their maps and publishes their edges.
//!
//! The kernel half always starts. [`Kernel::capabilities`] lists what the kernel, the privileges or the
//! machine don't allow, with a fallback for each. Must never decide about pods, which it does not know:
//! sockets, cgroup ids and network namespace cookies in, edges out.

mod bpf_log;
pub mod btf;
mod capability;
mod check;
mod containers;
pub mod edges;
mod error;
mod holders;
mod inspect;
mod listeners;
mod loader;
mod maps;
mod measures;
mod netns;
mod nsid;
pub mod offsets;
mod own_memory;
mod pace;
mod pins;
pub mod quota;
pub mod reader;
mod scheduler;
mod settings;
mod shares;
mod stale_counters;
mod sweep;
mod sys;
mod traffic;

pub use sys::watched;

pub use beelet_ebpf_abi::{Counters, Drops, NOBODY, OomKill, WAIT_BUCKETS};
pub use capability::{Capability, NOT_NEEDED, ProgramInfo, programs};
pub use check::{CheckTarget, CheckedNetns, Checker, Found};
pub use edges::{Edge, Edges, Interest, PressureKind};
pub use error::KernelError;
pub use holders::{Interference, Interfering, Reclaimers};
pub use inspect::{Pinned, PinnedProgram, RunStatistics, count_runs, dump, pinned};
pub use listeners::{Listener, Listeners};
pub use maps::MapMemory;
pub use measures::{Measures, WaitedFor, wait_bucket_floor_ns};
pub use netns::{AcceptQueues, ListeningSocket, NetnsHandle};
pub use own_memory::{release_memory, tame_allocator};
pub use scheduler::{PodFolders, Scheduler, SchedulerEnd};
pub use traffic::Traffic;

use aya::programs::links::FdLink;
use beelet_units::bpf_settings::{BpfMode, PressureEdges};
use edges::Hub;
use maps::Maps;
use pins::{Current, Pins, Sizes};
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The object that `cargo xtask build-ebpf` made, aligned as an ELF parser requires.
static OBJECT: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../ebpf/prebuilt/beelet.bpf.o"));

/// Options of the kernel half.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// Path of the bpf file system, usually `/sys/fs/bpf`. The kernel half mounts one there if the path has
    /// no other mount.
    pub bpffs: PathBuf,
    /// Name of our folder in the bpf file system. No slashes, no dots.
    pub pin_name: String,
    /// The cgroup2 folder above all pods.
    pub cgroup: PathBuf,
    /// Switch for the whole kernel half.
    pub mode: BpfMode,
    /// Replacement for the built-in object, for development.
    pub object: Option<PathBuf>,
    /// Maximum number of pods of the node; sizes the tables of cgroups.
    pub pods: usize,
    /// Thresholds above which waiting is sent as [`Edge::Pressure`].
    pub pressure_edges: PressureEdges,
    /// Kernel fields to ignore, by their names in [`beelet_ebpf_abi::fields`], as if this kernel lacked them:
    /// with this the fallbacks can be tried on any kernel.
    pub without: &'static [&'static str],
}

impl Default for KernelOptions {
    /// The usual paths. The programs for pods also need `cgroup`.
    fn default() -> KernelOptions {
        KernelOptions {
            bpffs: PathBuf::from("/sys/fs/bpf"),
            pin_name: "beelet".to_owned(),
            cgroup: PathBuf::new(),
            mode: BpfMode::default(),
            object: None,
            pods: 512,
            pressure_edges: PressureEdges::default(),
            without: &[],
        }
    }
}

/// The running part of the kernel half.
#[derive(Default)]
pub struct Kernel {
    capabilities: Vec<Capability>,
    adopted: bool,
    /// None if no program could be attached.
    maps: Option<Maps>,
    checker: Option<Checker>,
    traffic: Option<Traffic>,
    hub: Hub,
    links: Vec<FdLink>,
    pins: Option<Pins>,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel")
            .field("capabilities", &self.capabilities)
            .field("adopted", &self.adopted)
            .field("pins", &self.pins)
            .finish_non_exhaustive()
    }
}

impl Kernel {
    /// Starts all programs that can run here. Blocks for some hundred milliseconds at most, or a few if it
    /// adopts an earlier instance's programs.
    #[must_use]
    pub fn start(options: &KernelOptions) -> Kernel {
        let mut kernel = Kernel::default();
        if options.mode == BpfMode::Off {
            kernel.capabilities = capability::all_missing(&KernelError::Off);
            return kernel;
        }
        match kernel.bring_up(options) {
            // A single warning for all rows: they have the same reason.
            Err(error) => {
                tracing::warn!(
                    "BPF is not available here: {error}; every fallback is in use; to fix: {}",
                    error.remedy()
                );
                kernel.capabilities = capability::all_missing(&error);
            }
            Ok(()) => warn_of_missing(&kernel.capabilities),
        }
        kernel
    }

    fn bring_up(&mut self, options: &KernelOptions) -> Result<(), KernelError> {
        let object: Cow<'static, [u8]> = match &options.object {
            None => OBJECT.into(),
            Some(path) => read_object(path)?.into(),
        };
        let kernel_btf = read_kernel_btf()?;
        let release = kernel_release();
        let sizes = Sizes::of(options.pods, release);
        let (pins, found, pins_row) = find_pins(options, sizes)?;
        let current = found.as_ref().map_or(Current::Absent, |found| match &found.current {
            Current::Absent => Current::Absent,
            Current::Complete(meta) => Current::Complete(*meta),
        });
        let request = loader::Request {
            object: &object,
            digest: Sha256::digest(&object).into(),
            cgroup: &options.cgroup,
            pins: pins.as_ref(),
            current,
            kernel_btf: &kernel_btf,
            release,
            sizes,
            without: options.without,
        };
        let mut loaded = loader::load(&request)?;
        self.capabilities = std::mem::take(&mut loaded.capabilities);
        self.capabilities.push(pins_row);
        let attached =
            self.capabilities.iter().any(|row| row.program != capability::PINS.name && row.have.is_ok());
        // After attaching the new programs, so that no event goes unseen in between.
        for stale in found.map(|found| found.stale).unwrap_or_default() {
            match Pins::remove_stale(&stale) {
                Ok(()) => tracing::info!("removed {}, pins of another version", stale.display()),
                Err(error) => tracing::warn!("{error}"),
            }
        }
        // Without pins these programs stay attached: their maps could not be found again.
        self.traffic = pins.clone().map(|pins| Traffic::new(object, pins, sizes, options.cgroup.clone()));
        self.pins = pins;
        let (checker, row) = Checker::start(&kernel_btf);
        self.checker = checker;
        self.capabilities.push(row);
        if attached {
            self.adopted = loaded.adopted;
            self.maps = Some(Maps::open(&mut loaded, options, &self.hub)?);
            self.links = loaded.links;
        }
        Ok(())
    }

    /// Returns one row per program and one for the pins, each with its state and its fallback.
    #[must_use]
    pub fn capabilities(&self) -> &[Capability] {
        &self.capabilities
    }

    /// Returns true if programs and maps of an earlier instance were adopted, so that the listener map stayed
    /// complete while no agent ran.
    #[must_use]
    pub fn adopted(&self) -> bool {
        self.adopted
    }

    /// Returns the maps of listening sockets; `None` if no program could be attached.
    #[must_use]
    pub fn listeners(&self) -> Option<Listeners> {
        self.maps.as_ref().map(|maps| maps.listeners.clone())
    }

    /// Returns the switch of the byte counters of pods' sockets, which count only while they have a reader;
    /// `None` if they count always, or never.
    #[must_use]
    pub fn traffic(&self) -> Option<Traffic> {
        self.traffic.clone()
    }

    /// Returns the lookup of listeners and their accept queues; `None` if that program could not be loaded.
    #[must_use]
    pub fn checker(&self) -> Option<Checker> {
        self.checker.clone()
    }

    /// Waits until the reader of kernel events fails, and returns the reason. Without programs, waits
    /// forever.
    pub fn failed(&self) -> impl Future<Output = String> + Send + use<> {
        let failed = self.maps.as_ref().map(|maps| maps.reader.failed());
        async move {
            match failed {
                Some(failed) => failed.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Subscribes to edges from now on. Subscribe before reading the maps to miss nothing. Without programs
    /// no edge ever comes.
    #[must_use]
    pub fn subscribe(&self, interest: Interest) -> Edges {
        self.hub.subscribe(interest)
    }

    /// Returns the counters that the programs keep for each container; `None` if no counting program could be
    /// attached.
    #[must_use]
    pub fn measures(&self) -> Option<Measures> {
        self.maps.as_ref().map(|maps| maps.measures.clone())
    }

    /// Returns the kernel memory of each map.
    #[must_use]
    pub fn memory(&self) -> &[MapMemory] {
        self.maps.as_ref().map_or(&[], |maps| &maps.memory)
    }

    /// Returns the counts of events that the programs could not record or send, over all CPUs, since the maps
    /// were made; `None` without programs.
    ///
    /// # Errors
    /// The kernel refused to read the map.
    pub fn drops(&self) -> Result<Option<Drops>, KernelError> {
        self.maps.as_ref().map(|maps| reader::sum(&maps.drops)).transpose()
    }

    /// Returns the number of edges that found a subscriber's channel full, since the start.
    #[must_use]
    pub fn channel_full(&self) -> u64 {
        self.hub.dropped()
    }

    /// Returns the folder with this version's pinned maps and links; `None` if they are not pinned.
    #[must_use]
    pub fn pins(&self) -> Option<&Path> {
        self.pins.as_ref().map(Pins::dir)
    }

    /// Stops the reader. With `keep_pins` the programs run on and the next instance adopts them. Otherwise
    /// the pins are removed, and the bpf file system is unmounted if this instance mounted it.
    ///
    /// # Errors
    /// A pin could not be removed.
    pub fn stop(mut self, keep_pins: bool) -> Result<(), KernelError> {
        if let Some(maps) = &mut self.maps {
            maps.reader.stop();
        }
        self.links.clear();
        if let Some(traffic) = &self.traffic {
            traffic.detach();
        }
        match &self.pins {
            Some(pins) if !keep_pins => pins.remove_all(),
            _ => Ok(()),
        }
    }
}

fn warn_of_missing(capabilities: &[Capability]) {
    for row in capabilities {
        if let Err(why) = &row.have {
            tracing::warn!("{} is not available here ({why}); fallback: {}", row.program, row.fallback);
        }
    }
}

/// Removes the pins of every instance and version under `<bpffs>/<pin_name>`. The programs end unless a
/// process still holds them. Returns false if there were no pins.
///
/// # Errors
/// The folder holds foreign files (which are left alone), or a pin can't be removed.
pub fn remove_pins(bpffs: &Path, pin_name: &str) -> Result<bool, KernelError> {
    let pins = Pins::open(bpffs, pin_name)?;
    // Everything is removed, so the sizes of the maps don't matter.
    let found = pins.inspect(Sizes::of(0, kernel_release()))?;
    let any = !found.stale.is_empty() || pins.dir().exists();
    for stale in found.stale {
        Pins::remove_stale(&stale)?;
    }
    pins.remove_all()?;
    Ok(any)
}

/// Returns the read-only globals of the object and their values for this kernel, for loaders other than
/// [`Kernel`] (tests, benches). A global that the result lacks keeps its default.
///
/// # Errors
/// The kernel does not describe its types.
pub fn globals() -> Result<Vec<(&'static str, u32)>, KernelError> {
    Ok(offsets::Offsets::resolve(&read_kernel_btf()?, kernel_release()).globals)
}

/// Returns the built-in object.
#[must_use]
pub fn built_in_object() -> &'static [u8] {
    OBJECT
}

/// Returns `CLOCK_MONOTONIC`, the programs' own clock, in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Returns the kernel's release, major and minor; (0, 0) if it can't be parsed.
fn kernel_release() -> (u32, u32) {
    release_of(&rustix::system::uname().release().to_string_lossy())
}

fn release_of(text: &str) -> (u32, u32) {
    let mut numbers = text.split(['.', '-', '+']).map_while(|part| part.parse().ok());
    numbers.next().zip(numbers.next()).unwrap_or((0, 0))
}

fn read_object(path: &Path) -> Result<Vec<u8>, KernelError> {
    std::fs::read(path).map_err(|error| {
        KernelError::io(&format!("could not read the BPF object {}", path.display()), &error)
    })
}

fn read_kernel_btf() -> Result<btf::Btf, KernelError> {
    const PATH: &str = "/sys/kernel/btf/vmlinux";
    let bytes = std::fs::read(PATH)
        .map_err(|error| KernelError::io(&format!("cannot read this kernel's BTF: {PATH}"), &error))?;
    btf::Btf::parse(bytes).map_err(|error| KernelError::new(format!("{PATH} is {error}")))
}

type PinsFound = (Option<Pins>, Option<pins::Found>, Capability);

/// Opens the folder for pins and inspects it; the last value is its row of the capabilities. Only foreign
/// files in the folder are an error.
fn find_pins(options: &KernelOptions, sizes: Sizes) -> Result<PinsFound, KernelError> {
    let row = |have| Capability::new(&capability::PINS, None, have);
    let opened = Pins::open(&options.bpffs, &options.pin_name).and_then(|pins| {
        let found = pins.inspect(sizes)?;
        Ok((pins, found))
    });
    match opened {
        Ok((pins, found)) => Ok((Some(pins), Some(found), row(Ok(())))),
        Err(error @ KernelError::NoFileSystem { .. }) => Ok((None, None, row(Err(error)))),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_two_numbers() {
        for (text, expected) in [
            ("6.1.0-49-amd64", (6, 1)),
            ("7.3-rc2", (7, 3)),
            ("5.15.0+", (5, 15)),
            ("6.18.44-fc-v669", (6, 18)),
            ("strange", (0, 0)),
        ] {
            assert_eq!(release_of(text), expected, "{text}");
        }
    }
}
