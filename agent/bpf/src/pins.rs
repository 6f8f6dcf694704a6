//! The pins of maps and links while no agent runs: `<bpffs>/<name>/v<ABI>/`, with the links in `links/`.
//!
//! `META` is pinned first and removed last, so every folder of ours has it, even if an agent died at any
//! moment. A folder without it, or with objects that the agent does not pin, is foreign: an error names it,
//! and the agent never touches it.

use super::KernelError;
use super::capability::PROGRAMS;
use super::offsets;
use super::sys::{self, ObjectKind};
use aya::maps::{Array, Map, MapData, MapType};
use beelet_ebpf_abi::{
    ABI_VERSION, ANCESTRY_SLOTS, Address, AddressCount, Ancestry, CgroupKey, Counters, Drops, ExitedKey,
    ListenerRecord, MAGIC, MAX_ADDRESSES, MAX_CONTAINERS, MAX_EXITED, MAX_LISTENERS, MAX_TASKS, Meta,
    Pressure, RING_BYTES, Running, Settings, Shares, Slot, SocketCookie, TaskKey, TaskState, reclaim,
};
use rustix::mount::{MountFlags, UnmountFlags};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// `statfs.f_type` of a bpf file system (include/uapi/linux/magic.h).
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
/// The subfolder for links.
const LINKS: &str = "links";
/// Suffix of a link that has not yet replaced its predecessor. No dots: bpffs refuses them in names.
const NEW: &str = "_new";
pub(super) const META: &str = "META";

/// A map's shape in this ABI version.
pub(super) struct MapShape {
    pub(super) name: &'static str,
    kind: MapType,
    key: usize,
    value: usize,
    entries: usize,
}

impl MapShape {
    /// Returns the number of entries, if it differs from the object's.
    pub(super) fn resized(&self, sizes: Sizes) -> Option<u32> {
        let entries = self.entries(sizes);
        if entries == self.entries { None } else { u32::try_from(entries).ok() }
    }

    /// Returns the number of entries on this kernel and this node.
    fn entries(&self, sizes: Sizes) -> usize {
        if self.name == TASKS && sizes.task_storage {
            1
        } else if self.entries == MAX_CONTAINERS {
            1 << sizes.container_bits
        } else {
            self.entries
        }
    }
}

/// Parameters of the maps' sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// True if threads are in task storage; the hash for threads has the minimum size then.
    task_storage: bool,
    /// Entries of the per-cgroup maps, as a power of two.
    pub(super) container_bits: u32,
}

impl Sizes {
    /// Returns the sizes for a node of `pods` pods: four entries per pod. A pod has two cgroups or more (its
    /// sandbox's and its containers'), removed cgroups keep their entries for a while, and the table may be
    /// three quarters full (docs/decisions/0014-counters-table.md).
    pub(super) fn of(pods: usize, release: (u32, u32)) -> Sizes {
        let entries = pods.saturating_mul(4).clamp(1 << LEAST_BITS, 1 << MOST_BITS);
        Sizes {
            task_storage: offsets::has_task_storage(release),
            container_bits: entries.next_power_of_two().trailing_zeros(),
        }
    }
}

/// Minimum size of a table, 1,024 entries, as a power of two.
const LEAST_BITS: u32 = 10;
/// Maximum size of a table, 65,536 entries: every CPU has a copy.
const MOST_BITS: u32 = 16;

const fn shape(name: &'static str, kind: MapType, key: usize, value: usize, entries: usize) -> MapShape {
    MapShape { name, kind, key, value, entries }
}

/// The map of waiting threads for kernels without usable task storage.
const TASKS: &str = "TASKS";

/// Every map that is pinned. `META` comes first.
pub(super) const MAPS: &[MapShape] = &[
    shape(META, MapType::Array, 4, size_of::<Meta>(), 1),
    shape("LISTENERS", MapType::Hash, size_of::<SocketCookie>(), size_of::<ListenerRecord>(), MAX_LISTENERS),
    shape("ADDRESSES", MapType::Hash, size_of::<Address>(), size_of::<AddressCount>(), MAX_ADDRESSES),
    shape("EVENTS", MapType::RingBuf, 0, 0, RING_BYTES),
    shape("DROPS", MapType::PerCpuArray, 4, size_of::<Drops>(), 1),
    shape("SETTINGS", MapType::Array, 4, size_of::<Settings>(), 1),
    shape("CONTAINERS", MapType::PerCpuArray, 4, size_of::<Counters>(), MAX_CONTAINERS),
    shape("HOLDERS", MapType::PerCpuArray, 4, size_of::<Shares>(), MAX_CONTAINERS),
    shape("RECLAIMERS", MapType::PerCpuArray, 4, size_of::<Shares>(), reclaim::KINDS),
    shape("SLOTS", MapType::Array, 4, size_of::<Slot>(), MAX_CONTAINERS),
    shape("PRESSURE", MapType::Hash, size_of::<CgroupKey>(), size_of::<Pressure>(), MAX_CONTAINERS),
    shape("RUNNING", MapType::PerCpuArray, 4, size_of::<Running>(), 1),
    shape("ANCESTRY", MapType::PerCpuArray, 4, size_of::<Ancestry>(), ANCESTRY_SLOTS),
    shape(TASKS, MapType::Hash, size_of::<TaskKey>(), size_of::<TaskState>(), MAX_TASKS),
    shape("TASK_STORAGE", MapType::TaskStorage, 4, size_of::<TaskState>(), 0),
    shape("EXITED", MapType::LruHash, size_of::<ExitedKey>(), 8, MAX_EXITED),
];

/// Our folder on a bpf file system.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    bpffs: PathBuf,
    base: PathBuf,
    dir: PathBuf,
    mounted: bool,
}

/// Pins of an earlier instance in the folder of this ABI version.
#[derive(Debug)]
pub(super) enum Current {
    /// No pins, or unfinished ones, which count as none.
    Absent,
    /// Maps and links that an earlier instance finished.
    Complete(Meta),
}

/// Result of inspecting our folder.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) current: Current,
    /// Folders of other ABI versions.
    pub(super) stale: Vec<PathBuf>,
}

impl Pins {
    /// Finds or mounts the bpf file system.
    ///
    /// # Errors
    /// [`KernelError::NoFileSystem`]: the kernel half then works without pins.
    pub(super) fn open(bpffs: &Path, name: &str) -> Result<Pins, KernelError> {
        let no_file_system = |why| KernelError::NoFileSystem { bpffs: bpffs.to_path_buf(), why };
        if name.is_empty() || name.contains(['/', '.']) {
            return Err(no_file_system(format!(
                "the pin name {name:?} is invalid: bpffs allows neither slashes nor dots in a name"
            )));
        }
        let mounted = ensure_mounted(bpffs).map_err(no_file_system)?;
        let base = bpffs.join(name);
        let dir = folder(bpffs, name);
        Ok(Pins { bpffs: bpffs.to_path_buf(), base, dir, mounted })
    }

    /// Inspects our folder without changing it.
    ///
    /// # Errors
    /// [`KernelError::Foreign`]: the path holds foreign files, and the kernel half stays off.
    pub(super) fn inspect(&self, sizes: Sizes) -> Result<Found, KernelError> {
        let foreign = |path: &Path, what: &str| {
            KernelError::Foreign(format!(
                "{} is {what}, which beelet did not make, and is left alone; remove it, or configure another path for \
                 beelet (bpffs and pinName in its configuration)",
                path.display()
            ))
        };
        let mut found = Found { current: Current::Absent, stale: Vec::new() };
        match std::fs::symlink_metadata(&self.base) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(foreign(&self.base, &format!("unreadable ({error})"))),
            Ok(metadata) if !metadata.is_dir() => return Err(foreign(&self.base, "not a folder")),
            Ok(_) => {}
        }
        for entry in entries(&self.base).map_err(|error| foreign(&self.base, &error.to_string()))? {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let version = name.strip_prefix('v').and_then(|digits| digits.parse::<u32>().ok());
            if version.is_none() || !entry.is_dir() {
                return Err(foreign(&entry, "something"));
            }
            let meta = read_meta(&entry).map_err(|what| foreign(&entry.join(META), &what))?;
            if meta.is_none() && !is_empty(&entry) {
                return Err(foreign(&entry, "a folder of pins without our META map"));
            }
            if version == Some(ABI_VERSION) {
                self.check_current().map_err(|(path, what)| foreign(&path, &what))?;
                found.current = match meta {
                    Some(meta) if meta.complete == 1 && self.maps_fit(sizes) => Current::Complete(meta),
                    _ => Current::Absent,
                };
            } else {
                found.stale.push(entry);
            }
        }
        Ok(found)
    }

    /// Checks that the folder of this version holds only objects that the agent pins.
    fn check_current(&self) -> Result<(), (PathBuf, String)> {
        let unreadable =
            |path: &Path, error: &std::io::Error| (path.to_path_buf(), format!("unreadable ({error})"));
        for entry in entries(&self.dir).map_err(|error| unreadable(&self.dir, &error))? {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name == LINKS {
                for link in entries(&entry).map_err(|error| unreadable(&entry, &error))? {
                    expect_kind(&link, ObjectKind::Link)?;
                }
            } else if MAPS.iter().any(|shape| shape.name == name) {
                expect_kind(&entry, ObjectKind::Map)?;
            } else {
                return Err((entry, "an object".to_owned()));
            }
        }
        Ok(())
    }

    /// Returns true if every map is pinned and has the shape of this version.
    fn maps_fit(&self, sizes: Sizes) -> bool {
        MAPS.iter().all(|shape| {
            let info = MapData::from_pin(self.map(shape.name)).and_then(|map| map.info());
            info.is_ok_and(|info| {
                info.map_type().is_ok_and(|kind| kind == shape.kind)
                    && info.key_size() as usize == shape.key
                    && info.value_size() as usize == shape.value
                    && info.max_entries() as usize == shape.entries(sizes)
            })
        })
    }

    /// Makes the folders of this version, empty.
    pub(super) fn create(&self) -> Result<(), KernelError> {
        self.remove_current()?;
        let links = self.dir.join(LINKS);
        std::fs::create_dir_all(&links).map_err(|error| {
            KernelError::new(format!("could not make the folder {} for pins: {error}", links.display()))
        })
    }

    /// Removes the pins of this version; each object ends with its last user.
    pub(super) fn remove_current(&self) -> Result<(), KernelError> {
        remove_tree(&self.dir)
    }

    /// Removes a folder that [`Pins::inspect`] reported as stale.
    pub(super) fn remove_stale(path: &Path) -> Result<(), KernelError> {
        remove_tree(path)
    }

    /// Removes the pins and our folder, and unmounts the file system if this instance mounted it.
    pub(super) fn remove_all(&self) -> Result<(), KernelError> {
        self.remove_current()?;
        match std::fs::remove_dir(&self.base) {
            Err(error) if !matches!(error.kind(), std::io::ErrorKind::NotFound) => {
                return Err(KernelError::new(format!("could not remove {}: {error}", self.base.display())));
            }
            _ => {}
        }
        if self.mounted && only_the_kernels_own(&self.bpffs) {
            rustix::mount::unmount(&self.bpffs, UnmountFlags::empty()).map_err(|error| {
                KernelError::new(format!("could not unmount {}: {error}", self.bpffs.display()))
            })?;
        }
        Ok(())
    }

    /// Returns the folder of this version.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the pin path of a map.
    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the pin path of a program's link.
    pub(super) fn link(&self, program: &str) -> PathBuf {
        link_in(&self.dir, program)
    }

    /// Returns the pin path of a link before it replaces the old one.
    pub(super) fn new_link(&self, program: &str) -> PathBuf {
        self.dir.join(LINKS).join(format!("{program}{NEW}"))
    }

    /// Renames every new link over its predecessor, which ends with that.
    pub(super) fn promote_links(&self) -> Result<(), KernelError> {
        for program in PROGRAMS {
            let (new, place) = (self.new_link(program.name), self.link(program.name));
            match std::fs::rename(&new, &place) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(KernelError::new(format!(
                        "a link could not be pinned at {}: {error}",
                        place.display()
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the link of a program that is no longer needed.
    pub(super) fn remove_link(&self, program: &str) {
        let _ = std::fs::remove_file(self.link(program)); // most have none
    }

    /// Removes every new link that was not promoted.
    pub(super) fn discard_new_links(&self) {
        for program in PROGRAMS {
            let _ = std::fs::remove_file(self.new_link(program.name));
        }
    }
}

/// Returns the path of the folder for this version's pins, which may not exist.
pub(super) fn folder(bpffs: &Path, name: &str) -> PathBuf {
    bpffs.join(name).join(format!("v{ABI_VERSION}"))
}

/// Returns the path of a program's link below a folder of pins.
pub(super) fn link_in(dir: &Path, program: &str) -> PathBuf {
    dir.join(LINKS).join(program)
}

/// Mounts a bpf file system at `path` unless one is mounted there; returns true if it mounted one.
fn ensure_mounted(path: &Path) -> Result<bool, String> {
    let shown = path.display();
    if !path.exists() {
        std::fs::create_dir_all(path)
            .map_err(|error| format!("{shown} is missing and could not be made: {error}"))?;
    }
    let kind =
        rustix::fs::statfs(path).map_err(|error| format!("could not inspect {shown}: {error}"))?.f_type;
    if kind as u64 == BPF_FS_MAGIC {
        return Ok(false);
    }
    let device = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.dev());
    if let Some(parent) = path.parent()
        && device(path).ok() != device(parent).ok()
    {
        return Err(format!("{shown} is the mount point of another file system, not of a bpf one"));
    }
    if !is_empty(path) {
        return Err(format!("{shown} is not a bpf file system, and not empty, so none is mounted over it"));
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("bpf", path, "bpf", flags, c"mode=0700")
        .map_err(|error| format!("could not mount a bpf file system at {shown}: {error}"))?;
    tracing::info!("mounted a bpf file system at {shown}");
    Ok(true)
}

/// Reads the META map of a folder; `None` if it is missing. An error describes the foreign object in its
/// place.
fn read_meta(dir: &Path) -> Result<Option<Meta>, String> {
    let path = dir.join(META);
    if !path.exists() {
        return Ok(None);
    }
    expect_kind(&path, ObjectKind::Map).map_err(|(_, what)| what)?;
    let unreadable = |error: &dyn std::fmt::Display| format!("unreadable ({error})");
    let data = MapData::from_pin(&path).map_err(|error| unreadable(&error))?;
    let info = data.info().map_err(|error| unreadable(&error))?;
    if info.value_size() as usize != size_of::<Meta>() || info.map_type().ok() != Some(MapType::Array) {
        // Another version's META may be longer; ours is never shorter than the common head.
        return Err("a map of another shape".to_owned());
    }
    let map: Array<MapData, Meta> =
        Map::from_map_data(data).and_then(Array::try_from).map_err(|error| unreadable(&error))?;
    let meta = map.get(&0, 0).map_err(|error| unreadable(&error))?;
    if meta.magic == MAGIC { Ok(Some(meta)) } else { Err("a map without our mark".to_owned()) }
}

fn expect_kind(path: &Path, expected: ObjectKind) -> Result<(), (PathBuf, String)> {
    let kind = sys::object_get(path).and_then(|fd| sys::object_kind(fd.as_fd()));
    match kind {
        Ok(kind) if kind == expected => Ok(()),
        Ok(kind) => Err((path.to_path_buf(), format!("a BPF {}", format!("{kind:?}").to_lowercase()))),
        Err(error) => Err((path.to_path_buf(), format!("not a BPF object ({error})"))),
    }
}

/// Returns the paths in a folder.
fn entries(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    std::fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path())).collect()
}

/// Returns true if a folder is empty, or holds only our empty folder for links.
fn is_empty(dir: &Path) -> bool {
    entries(dir).is_ok_and(|found| {
        found.iter().all(|path| path.ends_with(LINKS) && entries(path).is_ok_and(|links| links.is_empty()))
    })
}

/// Returns true if a bpf file system has no pins but the two that the kernel itself makes
/// (kernel/bpf/preload).
fn only_the_kernels_own(bpffs: &Path) -> bool {
    entries(bpffs).is_ok_and(|found| {
        found.iter().all(|path| path.ends_with("maps.debug") || path.ends_with("progs.debug"))
    })
}

/// Removes a folder of ours, META last, so that the rest of an interrupted removal is still known as ours.
fn remove_tree(dir: &Path) -> Result<(), KernelError> {
    let failed = |path: &Path, error: &std::io::Error| {
        KernelError::new(format!("could not remove {}: {error}", path.display()))
    };
    let absent_is_fine = |path: &Path, result: std::io::Result<()>| match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(path, &error)),
        _ => Ok(()),
    };
    if !dir.exists() {
        return Ok(());
    }
    let mut inside = entries(dir).map_err(|error| failed(dir, &error))?;
    inside.sort_by_key(|path| (path.ends_with(META), path.clone()));
    for path in inside {
        if path.is_dir() {
            for link in entries(&path).map_err(|error| failed(&path, &error))? {
                absent_is_fine(&link, std::fs::remove_file(&link))?;
            }
            absent_is_fine(&path, std::fs::remove_dir(&path))?;
        } else {
            absent_is_fine(&path, std::fs::remove_file(&path))?;
        }
    }
    absent_is_fine(dir, std::fs::remove_dir(dir))
}
