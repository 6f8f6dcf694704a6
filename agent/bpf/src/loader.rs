//! Loads the programs into the kernel, or adopts the ones that run there.
//!
//! Three cases, from the cheapest: everything runs already, from the same object (adopt it, load nothing);
//! the maps exist but come from another object (load, replace the programs, keep the maps); nothing exists
//! (load, attach, pin). Every program is attached on its own: a failure becomes a row of the capabilities and
//! nothing more. The programs attached on demand ([`super::Traffic`]) are attached for a test and detached
//! again.

use super::KernelError;
use super::bpf_log::BpfLog;
use super::capability::{Capability, Hook, LISTENER_STATE, PROGRAMS, Program};
use super::offsets::{self, Offsets};
use super::pins::{Current, MAPS, META, Pins, Sizes};
use super::sys;
use aya::maps::{Array, Map, MapData};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{
    BtfTracePoint, CgroupAttachMode, CgroupSkb, CgroupSkbAttachType, Iter, ProgramFd, SockOps,
};
use aya::{Ebpf, EbpfError, EbpfLoader};
use beelet_ebpf_abi::{ABI_VERSION, MAGIC, Meta};
use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// `statfs.f_type` of cgroup2 (include/uapi/linux/magic.h).
const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;

/// The loaded kernel half.
pub(super) struct Loaded {
    /// Maps by name.
    pub(super) maps: BTreeMap<&'static str, MapData>,
    /// Links without a pin, which end when this process drops them.
    pub(super) links: Vec<FdLink>,
    pub(super) capabilities: Vec<Capability>,
    /// Log of the programs, if their object was built with one.
    pub(super) log: Option<BpfLog>,
    /// True if an earlier instance's programs kept the listener maps up to date.
    pub(super) adopted: bool,
}

/// The object to load and its target.
pub(super) struct Request<'a> {
    pub(super) object: &'a [u8],
    pub(super) digest: [u8; 32],
    pub(super) cgroup: &'a Path,
    pub(super) pins: Option<&'a Pins>,
    pub(super) current: Current,
    pub(super) kernel_btf: &'a super::btf::Btf,
    /// The kernel's release: major and minor.
    pub(super) release: (u32, u32),
    pub(super) sizes: Sizes,
    /// As in [`super::KernelOptions::without`].
    pub(super) without: &'static [&'static str],
}

/// Starts the kernel half.
///
/// During a replacement the old and the new programs are attached at the same time. Those that would send an
/// event twice check `Meta::instance`, so writing that field is the moment of change: an agent that dies
/// before the write leaves the old programs active, and after it the new ones; the next start tidies up.
///
/// Only the old programs see an event that began before the new ones were attached. An old program that reads
/// `Meta::instance` after the write would skip that event, and no program would count it; so the write waits
/// until all running programs have ended.
///
/// # Errors
/// Nothing could be loaded at all. Failures of single programs are in [`Loaded::capabilities`].
pub(super) fn load(request: &Request<'_>) -> Result<Loaded, KernelError> {
    let earlier = match (&request.current, request.pins) {
        (Current::Complete(meta), Some(pins)) => Some((*meta, pins)),
        _ => None,
    };
    let same = earlier.is_some_and(|(meta, _)| meta.digest == request.digest);
    match earlier {
        Some((_, pins)) if same => pins.promote_links()?,
        Some((_, pins)) => pins.discard_new_links(),
        None => {}
    }
    // The log isn't pinned, so an object with a log is loaded again at each start.
    let logs = request.object.windows(8).any(|window| window == b"AYA_LOGS");
    let offsets = Offsets::resolve(request.kernel_btf, request.release).without(request.without);
    if let Some((_, pins)) = earlier
        && same
        && !logs
        && PROGRAMS
            .iter()
            .all(|program| spared(program, &offsets).is_some() || is_alive(pins, program, request.cgroup))
    {
        remove_needless_links(pins, &offsets);
        return adopt(pins, &offsets);
    }
    let reuse_same = same && !logs;
    let instance = match earlier {
        Some((meta, _)) if reuse_same => meta.instance,
        Some((meta, _)) => meta.instance.wrapping_add(1),
        None => 1,
    };
    let mut ebpf = open_object(request, &offsets, instance, earlier.map(|(_, pins)| pins))?;
    let mut maps = extract_maps(&mut ebpf)?;
    let log = BpfLog::open(&mut ebpf);
    let mut meta = earlier.map_or_else(|| fresh_meta(request.digest), |(meta, _)| meta);
    if earlier.is_none()
        && let Some(pins) = request.pins
    {
        pin_maps(pins, &mut maps, &meta)?;
    }
    let kernel_types = aya::Btf::from_sys_fs()
        .map_err(|error| KernelError::new(format!("could not read the kernel's BTF: {error}")))?;
    let mut attach = Attach {
        request,
        offsets: &offsets,
        kernel_types: &kernel_types,
        ebpf: &mut ebpf,
        reuse_same,
        links: Vec::new(),
    };
    let capabilities = attach.all(&maps, &mut meta)?;
    let links = std::mem::take(&mut attach.links);
    if earlier.is_some_and(|(meta, _)| meta.instance != instance)
        && let Err(error) = sys::wait_for_running_programs()
    {
        tracing::warn!(
            "could not wait for running BPF programs; an event of this moment may be missed: {error}"
        );
    }
    write_meta(&maps, &Meta { complete: 1, instance, digest: request.digest, ..meta })?;
    if let Some(pins) = request.pins {
        pins.promote_links()?;
        remove_needless_links(pins, &offsets);
    }
    Ok(Loaded { maps, links, capabilities, adopted: earlier.is_some(), log })
}

/// Returns the `Meta` that the programs find before any of them is attached.
fn fresh_meta(digest: [u8; 32]) -> Meta {
    Meta { magic: MAGIC, abi_version: ABI_VERSION, complete: 0, tracepoint: 0, instance: 0, digest }
}

/// Returns the reason for leaving a program out on this kernel, if there is one.
fn spared(program: &Program, offsets: &Offsets) -> Option<&'static str> {
    program.spared.filter(|(fields, _)| offsets.require(*fields).is_ok()).map(|(_, why)| why)
}

/// Removes the links of programs that are left out or attached on demand here: an earlier agent, or an
/// earlier kernel, kept them attached.
fn remove_needless_links(pins: &Pins, offsets: &Offsets) {
    let needless = |program: &&Program| program.is_on_demand() || spared(program, offsets).is_some();
    for program in PROGRAMS.iter().filter(needless) {
        pins.remove_link(program.name);
    }
}

/// Adopts the running programs without loading anything.
fn adopt(pins: &Pins, offsets: &Offsets) -> Result<Loaded, KernelError> {
    let mut maps = BTreeMap::new();
    for shape in MAPS {
        let map =
            MapData::from_pin(pins.map(shape.name)).map_err(|error| KernelError::map(shape.name, &error))?;
        maps.insert(shape.name, map);
    }
    let capabilities = PROGRAMS
        .iter()
        .map(|program| Capability::new(&program.info(), spared(program, offsets), Ok(())))
        .collect();
    Ok(Loaded { maps, links: Vec::new(), capabilities, adopted: true, log: None })
}

/// Returns true if a program's pinned link exists and is still attached to the right target, or if the
/// program needs no link.
fn is_alive(pins: &Pins, program: &Program, cgroup: &Path) -> bool {
    let link = || sys::object_get(&pins.link(program.name)).and_then(|link| sys::link_state(link.as_fd()));
    match program.hook {
        Hook::TaskWalk => true,                     // the walk is over
        Hook::SkbIngress | Hook::SkbEgress => true, // attached on demand
        Hook::Tracepoint(_) => link().is_ok(),
        Hook::SockOps => link().is_ok_and(|state| {
            std::fs::metadata(cgroup).is_ok_and(|metadata| state.cgroup_id == Some(metadata.ino()))
        }),
    }
}

/// Parses the object, sets its globals and makes its maps, or reuses the pinned ones.
fn open_object(
    request: &Request<'_>,
    offsets: &Offsets,
    instance: u32,
    pins: Option<&Pins>,
) -> Result<Ebpf, KernelError> {
    let mut loader = loader_of(&request.sizes, pins);
    for (name, value) in &offsets.globals {
        loader.override_global(name, value, true);
    }
    loader.override_global("INSTANCE", &instance, true);
    loader.load(request.object).map_err(|error| not_loaded(&error))
}

/// Returns a loader that makes maps of these sizes, or reuses the pinned ones.
pub(super) fn loader_of<'a>(sizes: &'a Sizes, pins: Option<&Pins>) -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    loader.allow_unsupported_maps(); // task storage, which only the programs use
    loader.override_global("CONTAINER_BITS", &sizes.container_bits, true);
    for shape in MAPS {
        if let Some(entries) = shape.resized(*sizes) {
            loader.map_max_entries(shape.name, entries);
        }
        if let Some(pins) = pins {
            loader.map_pin_path(shape.name, pins.map(shape.name));
        }
    }
    loader
}

/// Explains why an object could not be loaded. If the kernel refuses every map, aya takes it for a kernel
/// without globals and complains about a missing section, so this function tests that case itself.
pub(super) fn not_loaded(error: &EbpfError) -> KernelError {
    match Array::<MapData, u32>::create(1, 0) {
        Ok(_) => KernelError::refused("the BPF object could not be loaded", error),
        Err(refused) => KernelError::refused("the kernel refuses BPF maps", &refused),
    }
}

fn extract_maps(ebpf: &mut Ebpf) -> Result<BTreeMap<&'static str, MapData>, KernelError> {
    let mut maps = BTreeMap::new();
    for shape in MAPS {
        let map = ebpf
            .take_map(shape.name)
            .ok_or_else(|| KernelError::new(format!("the BPF object has no map {}", shape.name)))?;
        let data = match map {
            Map::Array(data)
            | Map::HashMap(data)
            | Map::LruHashMap(data)
            | Map::PerCpuArray(data)
            | Map::RingBuf(data) => data,
            Map::Unsupported(data) => data, // task storage: only the programs use it
            other => {
                return Err(KernelError::new(format!(
                    "the BPF object's map {} has an unexpected kind: {other:?}",
                    shape.name
                )));
            }
        };
        maps.insert(shape.name, data);
    }
    Ok(maps)
}

/// Pins new maps: META first, with our mark and `complete` 0.
fn pin_maps(pins: &Pins, maps: &mut BTreeMap<&'static str, MapData>, meta: &Meta) -> Result<(), KernelError> {
    pins.create()?;
    write_meta(maps, meta)?;
    for shape in MAPS {
        let Some(map) = maps.get(shape.name) else { continue };
        let place = pins.map(shape.name);
        map.pin(&place)
            .map_err(|error| KernelError::refused(&format!("could not pin {}", place.display()), &error))?;
    }
    Ok(())
}

fn write_meta(maps: &BTreeMap<&'static str, MapData>, meta: &Meta) -> Result<(), KernelError> {
    let failed =
        |error: &dyn std::fmt::Display| KernelError::new(format!("could not write the map {META}: {error}"));
    let data = maps.get(META).ok_or_else(|| failed(&"the object lacks it"))?;
    let copy = duplicate(data)?;
    let mut map: Array<MapData, Meta> =
        Map::from_map_data(copy).and_then(Array::try_from).map_err(|error| failed(&error))?;
    map.set(0, *meta, 0).map_err(|error| failed(&error))
}

/// Returns a second handle of the same map.
pub(super) fn duplicate(data: &MapData) -> Result<MapData, KernelError> {
    let fd =
        data.fd().as_fd().try_clone_to_owned().map_err(|error| {
            KernelError::new(format!("could not duplicate a BPF map's descriptor: {error}"))
        })?;
    MapData::from_fd(fd).map_err(|error| KernelError::new(format!("could not inspect a BPF map: {error}")))
}

/// Attaches one program after the other.
struct Attach<'a> {
    request: &'a Request<'a>,
    offsets: &'a Offsets,
    kernel_types: &'a aya::Btf,
    ebpf: &'a mut Ebpf,
    /// True if the existing links come from this very object and stay.
    reuse_same: bool,
    links: Vec<FdLink>,
}

impl Attach<'_> {
    /// Attaches the programs that this kernel needs. `Meta::tracepoint` is written as soon as the tracepoint
    /// for listeners is attached.
    fn all(
        &mut self,
        maps: &BTreeMap<&'static str, MapData>,
        meta: &mut Meta,
    ) -> Result<Vec<Capability>, KernelError> {
        let mut rows = Vec::new();
        for program in PROGRAMS {
            let spared = spared(program, self.offsets);
            let attached = if spared.is_some() { Ok(()) } else { self.program(program) };
            if program.name == LISTENER_STATE {
                meta.tracepoint = u32::from(attached.is_ok());
                write_meta(maps, meta)?;
            }
            rows.push(Capability::new(&program.info(), spared, attached));
        }
        Ok(rows)
    }

    fn program(&mut self, program: &Program) -> Result<(), KernelError> {
        if self.reuse_same
            && let Some(pins) = self.request.pins
            && is_alive(pins, program, self.request.cgroup)
        {
            return Ok(());
        }
        self.offsets.require(program.fields)?;
        match program.hook {
            Hook::Tracepoint(name) => self.tracepoint(program, name),
            Hook::TaskWalk => self.walk(program),
            Hook::SockOps => self.sock_ops(program),
            Hook::SkbIngress | Hook::SkbEgress => self.packets(program),
        }
    }

    /// Attaches a tracepoint program. A tracing link can't be updated, so the new one is attached before the
    /// old one is removed. In between both see each event; the programs are idempotent, or check
    /// `Meta::instance`.
    fn tracepoint(&mut self, program: &Program, name: &str) -> Result<(), KernelError> {
        if program.name == LISTENER_STATE {
            offsets::check_set_state(self.request.kernel_btf)?;
        }
        let kernel_types = self.kernel_types;
        let loaded: &mut BtfTracePoint = find(self.ebpf, program)?;
        loaded.load(name, kernel_types).map_err(|error| refused(&error))?;
        let attached = loaded.attach().and_then(|id| loaded.take_link(id));
        let link = attached.map_err(|error| not_attached(&error))?;
        self.keep(program, link.into())
    }

    /// Runs the program for each existing thread.
    fn walk(&mut self, program: &Program) -> Result<(), KernelError> {
        let kernel_types = self.kernel_types;
        let loaded: &mut Iter = find(self.ebpf, program)?;
        loaded.load("task", kernel_types).map_err(|error| refused(&error))?;
        let attached = loaded.attach().and_then(|id| loaded.take_link(id));
        let link = attached.map_err(|error| not_attached(&error))?;
        let mut walk = link.into_file().map_err(|error| not_attached(&error))?;
        // The program prints nothing: reading to the end runs it.
        walk.read_to_end(&mut Vec::new())
            .map(drop)
            .map_err(|error| KernelError::refused("the walk over the threads was cut short", &error))
    }

    /// Loads a program of the pods' root cgroup and attaches it, or replaces the one attached there.
    fn sock_ops(&mut self, program: &Program) -> Result<(), KernelError> {
        let cgroup = open_cgroup(self.request.cgroup)?;
        let living = self.request.pins.filter(|pins| is_alive(pins, program, self.request.cgroup));
        let living = living.and_then(|pins| sys::object_get(&pins.link(program.name)).ok());
        let loaded: &mut SockOps = find(self.ebpf, program)?;
        loaded.load().map_err(|error| refused(&error))?;
        if let Some(link) = &living {
            return replace(link.as_fd(), loaded.fd());
        }
        let attached = loaded.attach(&cgroup, ON_CGROUP).and_then(|id| loaded.take_link(id));
        let link = FdLink::try_from(attached.map_err(|error| not_attached(&error))?);
        self.keep(program, link.map_err(|error| no_link(&error))?)
    }

    /// Loads and attaches a program for the packets of the pods' root cgroup.
    fn packets(&mut self, program: &Program) -> Result<(), KernelError> {
        let link = attach_to_packets(self.ebpf, program, self.request.cgroup)?;
        self.keep(program, link)
    }

    /// Pins a link under a temporary name, to be renamed when all links exist; without pins, holds it.
    fn keep(&mut self, program: &Program, link: FdLink) -> Result<(), KernelError> {
        let Some(pins) = self.request.pins else {
            self.links.push(link);
            return Ok(());
        };
        if program.is_on_demand() {
            return Ok(()); // attaching works; dropping the link detaches the program
        }
        let new = pins.new_link(program.name);
        let _ = std::fs::remove_file(&new); // left by an instance that died right here
        let pinned: PinnedLink =
            link.pin(&new).map_err(|error| KernelError::refused("the link could not be pinned", &error))?;
        drop(pinned); // the pin holds it now
        Ok(())
    }
}

fn refused(error: &(dyn std::error::Error + 'static)) -> KernelError {
    KernelError::refused("the kernel refused the program", error)
}

fn no_link(error: &(dyn std::error::Error + 'static)) -> KernelError {
    KernelError::refused("the kernel returned no link", error)
}

/// With links the kernel always allows several programs on one cgroup, and refuses the flag that asks for it.
const ON_CGROUP: CgroupAttachMode = CgroupAttachMode::Single;

/// Loads a program for packets and attaches it; dropping the link detaches it.
pub(super) fn attach_to_packets(
    ebpf: &mut Ebpf,
    program: &Program,
    cgroup: &Path,
) -> Result<FdLink, KernelError> {
    let cgroup = open_cgroup(cgroup)?;
    let kind = match program.hook {
        Hook::SkbEgress => CgroupSkbAttachType::Egress,
        _ => CgroupSkbAttachType::Ingress,
    };
    let loaded: &mut CgroupSkb = find(ebpf, program)?;
    loaded.load().map_err(|error| refused(&error))?;
    let attached = loaded.attach(&cgroup, kind, ON_CGROUP).and_then(|id| loaded.take_link(id));
    FdLink::try_from(attached.map_err(|error| not_attached(&error))?).map_err(|error| no_link(&error))
}

/// Finds the object's program and casts it to the expected kind.
fn find<'b, P>(ebpf: &'b mut Ebpf, program: &Program) -> Result<&'b mut P, KernelError>
where
    &'b mut P: TryFrom<&'b mut aya::programs::Program, Error = aya::programs::ProgramError>,
{
    let found = ebpf.program_mut(program.name).ok_or_else(|| no_program(program))?;
    found.try_into().map_err(|error| KernelError::refused("the object's program is of another kind", &error))
}

fn not_attached(error: &(dyn std::error::Error + 'static)) -> KernelError {
    KernelError::refused("the kernel refused to attach", error)
}

/// Atomically replaces the program behind a link.
fn replace(
    link: std::os::fd::BorrowedFd<'_>,
    program: Result<&ProgramFd, aya::programs::ProgramError>,
) -> Result<(), KernelError> {
    let program = program.map_err(|error| KernelError::refused("the program has no descriptor", &error))?;
    sys::link_update(link, program.as_fd())
        .map_err(|error| KernelError::refused("the kernel refused to replace the program", &error))
}

fn no_program(program: &Program) -> KernelError {
    KernelError::new(format!("the BPF object has no program {}", program.name))
}

/// Opens the pods' root cgroup, which must be a cgroup2 one.
fn open_cgroup(path: &Path) -> Result<std::fs::File, KernelError> {
    let shown = path.display();
    let file = std::fs::File::open(path)
        .map_err(|error| KernelError::Cgroup(format!("could not open the cgroup {shown}: {error}")))?;
    let kind = rustix::fs::fstatfs(&file)
        .map_err(|error| KernelError::Cgroup(format!("could not inspect {shown}: {error}")))?;
    if kind.f_type as u64 != CGROUP2_SUPER_MAGIC {
        return Err(KernelError::Cgroup(format!("{shown} is not a cgroup2 folder")));
    }
    Ok(file)
}
