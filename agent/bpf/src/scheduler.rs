//! The scheduler of the tuner's top rung: loads the callbacks of `ebpf/src/scheduler.rs` into one
//! `sched_ext_ops` of the kernel, and sets the pods' shares.
//!
//! Only the link's descriptor keeps the scheduler loaded: nothing is pinned, so the kernel restores its own
//! scheduler when the agent ends, for any reason. Must never be loaded twice, and decides nothing: shares and
//! limits come from `policy`. The code is linked by hand, because aya supports neither `struct_ops` nor
//! kfuncs (docs/decisions/0026-scheduler.md).

use super::btf::{Btf, BtfError};
use super::loader::not_loaded;
use super::offsets::Offsets;
use super::{KernelError, read_kernel_btf, sys};
use aya::EbpfLoader;
use aya::maps::{Array, HashMap, Map, MapData};
use aya_obj::generated::bpf_insn;
use beelet_ebpf_abi::CgroupKey;
use beelet_ebpf_abi::fields::group;
use beelet_ebpf_abi::scheduler::{
    End, FIRST_KFUNC, KFUNCS, Limit, MACHINE, MAX_CPUS, Share, Turn, WATCHDOG_MS, WEIGHT_OF_ONE_CPU,
    WINDOW_NS, class,
};
use beelet_units::scheduling::{SchedulingClass, SchedulingShare};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The object that `cargo xtask build-ebpf` made, aligned as an ELF parser requires.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../ebpf/prebuilt/beelet-scheduler.bpf.o"
));

/// The structure whose members are the callbacks.
const OPS: &str = "sched_ext_ops";
/// The map value that passes the structure to the kernel.
const OPS_VALUE: &str = "bpf_struct_ops_sched_ext_ops";
/// The scheduler's name in `/sys/kernel/sched_ext/root/ops`.
const NAME: &str = "beelet";
/// `SCX_OPS_ENQ_LAST`: the kernel also enqueues the only runnable thread of a CPU when its slice ends.
const FLAGS: u64 = 2;
/// Callbacks, each a program of the object and a member of [`OPS`]; true if it may sleep.
const CALLBACKS: [(&str, bool); 7] = [
    ("select_cpu", false),
    ("enqueue", false),
    ("dispatch", false),
    ("running", false),
    ("stopping", false),
    ("init", true),
    ("exit", true),
];

/// Folders of the pods' cgroups.
#[derive(Clone, Copy, Debug)]
pub struct PodFolders<'a> {
    /// The pods' root, on cgroup2.
    pub root: &'a Path,
    /// The folder of Burstable pods.
    pub burstable: &'a Path,
    /// The folder of BestEffort pods.
    pub best_effort: &'a Path,
}

/// Unrequested end of the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerEnd {
    /// The kernel's reason and message.
    pub reason: String,
}

/// The loaded scheduler; dropping the value ends it.
pub struct Scheduler {
    shares: HashMap<MapData, CgroupKey, Share>,
    limits: HashMap<MapData, CgroupKey, Limit>,
    end: Array<MapData, End>,
    known: BTreeMap<u64, SchedulingShare>,
    limited: BTreeMap<u64, u64>,
    /// The kernel ends a timer as soon as no descriptor of its map is open.
    _timer: Map,
    _link: OwnedFd,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler")
            .field("known", &self.known)
            .field("limited", &self.limited)
            .finish_non_exhaustive()
    }
}

impl Scheduler {
    /// Checks that this kernel supports the scheduler, before anything is loaded.
    ///
    /// # Errors
    /// The kernel lacks sched_ext, or its BTF lacks a required type.
    pub fn supported() -> Result<(), KernelError> {
        Ops::find(&read_kernel_btf()?).map(drop)
    }

    /// Loads the scheduler: from then on it schedules every thread of the machine without a real-time class.
    ///
    /// # Errors
    /// This kernel does not support or refuses the scheduler, or another scheduler is loaded.
    pub fn start(folders: &PodFolders<'_>) -> Result<Scheduler, KernelError> {
        Scheduler::start_object(OBJECT, folders)
    }

    /// Loads the scheduler from another object, for tests.
    ///
    /// # Errors
    /// As [`Scheduler::start`].
    pub fn start_object(object: &[u8], folders: &PodFolders<'_>) -> Result<Scheduler, KernelError> {
        let kernel = read_kernel_btf()?;
        let ops = Ops::find(&kernel)?;
        let offsets = Offsets::of_scheduler(&kernel);
        offsets.require(group::SCHEDULER)?;
        let globals = Globals::find(folders, &ops)?;
        let mut loaded = Loaded::new(object, &offsets, &globals)?;
        let mut value = ops.value();
        for (name, sleeps) in CALLBACKS {
            let program = loaded.program(name, sleeps, &ops)?;
            value.callback(&ops, name, program.as_fd())?;
            loaded.programs.push(program);
        }
        let mut shares: HashMap<MapData, CgroupKey, Share> = loaded.map("SHARES")?;
        for (cgroup_id, weight) in [(MACHINE, globals.cpus * WEIGHT_OF_ONE_CPU), (globals.burstable, 1)] {
            let share = Share { vtime: 0, weight: weight.max(1), class: class::SHARED };
            shares
                .insert(CgroupKey { cgroup_id }, share, 0)
                .map_err(|error| KernelError::map("SHARES", &error))?;
        }
        let nothing = Turn {
            since_ns: 0,
            share: 0,
            container: 0,
            shared_ns: 0,
            best_effort_ns: 0,
            window: 0,
            class: class::NONE,
            reserved: 0,
        };
        let mut turns: Array<MapData, Turn> = loaded.map("TURNS")?;
        for cpu in 0..globals.cpus {
            turns.set(cpu, nothing, 0).map_err(|error| KernelError::map("TURNS", &error))?;
        }
        let (limits, end, timer) = (loaded.map("LIMITS")?, loaded.map("END")?, loaded.extract("TIMER")?);
        let refused = |what: &str| {
            let what = what.to_owned();
            move |error: std::io::Error| KernelError::io(&what, &error)
        };
        let map = sys::struct_ops_map(ops.value_type, value.bytes.len(), loaded.btf.as_fd())
            .map_err(refused("the kernel refused the scheduler's map"))?;
        sys::map_update(map.as_fd(), 0, &value.bytes).map_err(refused("the kernel refused the scheduler"))?;
        let link = sys::struct_ops_link(map.as_fd()).map_err(|error| match error.kind() {
            std::io::ErrorKind::ResourceBusy => KernelError::new(
                "another scheduler is loaded: end it first; `cat /sys/kernel/sched_ext/root/ops` shows its name",
            ),
            _ => KernelError::io("the kernel refused to start the scheduler", &error),
        })?;
        let (known, limited) = (BTreeMap::new(), BTreeMap::new());
        let scheduler = Scheduler { shares, limits, end, known, limited, _timer: timer, _link: link };
        // The kernel returns a link even if it checks and rejects the callbacks only afterwards.
        match scheduler.ended()? {
            None => Ok(scheduler),
            Some(end) => Err(KernelError::new(format!("the kernel unloaded the scheduler: {}", end.reason))),
        }
    }

    /// Sets the shares of pods by their cgroup ids, and the CPU limits of containers by their cgroup ids, in
    /// thousandths of a CPU. Writes only changes.
    ///
    /// # Errors
    /// A map is full, or the kernel refused.
    pub fn share_out(
        &mut self,
        pods: &BTreeMap<u64, SchedulingShare>,
        limits: &BTreeMap<u64, u64>,
    ) -> Result<(), KernelError> {
        let failed = |error: aya::maps::MapError| KernelError::map("SHARES", &error);
        for gone in self.known.keys().filter(|id| !pods.contains_key(id)) {
            // The entry may be missing because the map was full.
            let _ = self.shares.remove(&CgroupKey { cgroup_id: *gone });
        }
        self.known.retain(|id, _| pods.contains_key(id));
        for (&cgroup_id, pod) in pods {
            if self.known.get(&cgroup_id) == Some(pod) {
                continue;
            }
            let key = CgroupKey { cgroup_id };
            let vtime = self.shares.get(&key, 0).map_or(0, |share| share.vtime);
            let share = Share { vtime, weight: pod.weight.max(1), class: number_of(pod.class) };
            self.shares.insert(key, share, 0).map_err(failed)?;
            self.known.insert(cgroup_id, *pod);
        }
        for gone in self.limited.keys().filter(|id| !limits.contains_key(id)) {
            let _ = self.limits.remove(&CgroupKey { cgroup_id: *gone });
        }
        self.limited.retain(|id, _| limits.contains_key(id));
        for (&cgroup_id, &milli_cpus) in limits {
            if self.limited.get(&cgroup_id) == Some(&milli_cpus) {
                continue;
            }
            let quota_ns = (WINDOW_NS / 1000).saturating_mul(milli_cpus).max(1);
            let limit = Limit { quota_ns, ..Limit::default() };
            self.limits
                .insert(CgroupKey { cgroup_id }, limit, 0)
                .map_err(|error| KernelError::map("LIMITS", &error))?;
            self.limited.insert(cgroup_id, milli_cpus);
        }
        Ok(())
    }

    /// Returns the reason if the kernel unloaded the scheduler; `None` while it runs.
    ///
    /// # Errors
    /// The kernel refused to read the map.
    pub fn ended(&self) -> Result<Option<SchedulerEnd>, KernelError> {
        let end = self.end.get(&0, 0).map_err(|error| KernelError::map("END", &error))?;
        if end.kind == 0 {
            return Ok(None);
        }
        let words = [text(&end.reason), text(&end.message)];
        let words: Vec<String> = words.into_iter().filter(|words| !words.is_empty()).collect();
        Ok(Some(SchedulerEnd { reason: words.join(": ") }))
    }
}

/// A class as the kernel programs know it.
fn number_of(class: SchedulingClass) -> u32 {
    match class {
        SchedulingClass::Latency => class::LATENCY,
        SchedulingClass::Shared => class::SHARED,
        SchedulingClass::BestEffort => class::BEST_EFFORT,
    }
}

/// Returns the kernel's text up to the zero byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

/// Numbers that the programs use as constants.
struct Globals {
    pods: u64,
    pods_level: u32,
    burstable: u64,
    best_effort: u64,
    cpus: u32,
    has_set_slice: u32,
}

impl Globals {
    fn find(folders: &PodFolders<'_>, ops: &Ops) -> Result<Globals, KernelError> {
        let id = |path: &Path| {
            std::fs::metadata(path).map(|metadata| metadata.ino()).map_err(|error| {
                KernelError::Cgroup(format!("could not inspect the cgroup {}: {error}", path.display()))
            })
        };
        let cpus = aya::util::nr_cpus()
            .map_err(|(file, error)| KernelError::io(&format!("could not read {file}"), &error))?;
        if cpus > MAX_CPUS {
            return Err(KernelError::new(format!(
                "this machine may have {cpus} CPUs; the scheduler supports up to {MAX_CPUS}"
            )));
        }
        Ok(Globals {
            pods: id(folders.root)?,
            pods_level: level(folders.root)?,
            burstable: id(folders.burstable)?,
            best_effort: id(folders.best_effort)?,
            cpus: cpus as u32,
            has_set_slice: u32::from(ops.knows("HAS_SET_SLICE")),
        })
    }
}

/// Returns the depth of a cgroup below the root of its hierarchy. Every cgroup but the root has the file
/// `cgroup.type`.
fn level(cgroup: &Path) -> Result<u32, KernelError> {
    let depth = cgroup.ancestors().take_while(|path| path.join("cgroup.type").exists()).count();
    if depth == 0 || !cgroup.join("cgroup.procs").exists() {
        return Err(KernelError::Cgroup(format!("{} is not a cgroup2 folder", cgroup.display())));
    }
    u32::try_from(depth).map_err(|_| KernelError::Cgroup(format!("{} is too deep", cgroup.display())))
}

/// The kernel's description of its `sched_ext_ops`.
struct Ops {
    /// Type id of [`OPS`].
    ops_type: u32,
    /// Type id of [`OPS_VALUE`].
    value_type: u32,
    /// Size of a value in bytes.
    size: usize,
    /// Offset of the structure in the value.
    data: usize,
    /// Members to set, by name: index in the structure, and byte offset.
    members: BTreeMap<&'static str, (u32, usize)>,
    /// Ids of the kernel's functions, in the order of [`KFUNCS`].
    functions: Vec<Option<u32>>,
}

impl Ops {
    fn find(kernel: &Btf) -> Result<Ops, KernelError> {
        let lacks = |_| {
            KernelError::new(
                "this kernel has no sched_ext, which needs Linux 6.12 and CONFIG_SCHED_CLASS_EXT",
            )
        };
        let (ops_type, _) = kernel.structure(OPS).map_err(lacks)?;
        let (value_type, size) = kernel.structure(OPS_VALUE).map_err(lacks)?;
        let (_, data) = kernel.place(OPS_VALUE, "data")?;
        let mut members = BTreeMap::new();
        let callbacks = CALLBACKS.iter().map(|(name, _)| *name);
        for name in callbacks.chain(["flags", "timeout_ms", "name"]) {
            members.insert(name, kernel.place(OPS, name)?);
        }
        let mut functions = Vec::new();
        for kfunc in &KFUNCS {
            let id = kfunc.names.iter().find_map(|name| kernel.function(name));
            if id.is_none() && kfunc.known_by.is_none() {
                return Err(BtfError::NoType(format!("function {}", kfunc.names.join(" or "))).into());
            }
            functions.push(id);
        }
        Ok(Ops {
            ops_type,
            value_type,
            size: size as usize,
            data: data as usize,
            members: byte_places(members),
            functions,
        })
    }

    /// Returns true if the kernel has the function that the global stands for.
    fn knows(&self, global: &str) -> bool {
        KFUNCS.iter().zip(&self.functions).any(|(kfunc, id)| kfunc.known_by == Some(global) && id.is_some())
    }

    /// Returns a value without callbacks.
    fn value(&self) -> Value {
        let mut value = Value { bytes: vec![0; self.size] };
        value.set(self, "flags", &FLAGS.to_ne_bytes());
        value.set(self, "timeout_ms", &WATCHDOG_MS.to_ne_bytes());
        value.set(self, "name", NAME.as_bytes());
        value
    }
}

fn byte_places(members: BTreeMap<&'static str, (u32, u32)>) -> BTreeMap<&'static str, (u32, usize)> {
    members.into_iter().map(|(name, (index, byte))| (name, (index, byte as usize))).collect()
}

/// The structure in the layout that the kernel expects.
struct Value {
    bytes: Vec<u8>,
}

impl Value {
    fn set(&mut self, ops: &Ops, member: &str, bytes: &[u8]) {
        let Some((_, byte)) = ops.members.get(member) else { return };
        let at = ops.data + byte;
        if let Some(place) = self.bytes.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Sets a callback to the descriptor of its program.
    fn callback(
        &mut self,
        ops: &Ops,
        name: &str,
        program: std::os::fd::BorrowedFd<'_>,
    ) -> Result<(), KernelError> {
        let fd = u64::try_from(program.as_raw_fd())
            .map_err(|_| KernelError::new(format!("the program {name} has no descriptor")))?;
        self.set(ops, name, &fd.to_ne_bytes());
        Ok(())
    }
}

/// The object with its maps in the kernel and its code ready to load.
struct Loaded {
    object: aya_obj::Object,
    maps: std::collections::HashMap<String, Map>,
    btf: OwnedFd,
    programs: Vec<OwnedFd>,
}

impl Loaded {
    fn new(bytes: &[u8], offsets: &Offsets, globals: &Globals) -> Result<Loaded, KernelError> {
        let mut loader = EbpfLoader::new();
        for (name, value) in &offsets.globals {
            loader.override_global(name, value, true);
        }
        loader.override_global("PODS", &globals.pods, true);
        loader.override_global("PODS_LEVEL", &globals.pods_level, true);
        loader.override_global("BURSTABLE", &globals.burstable, true);
        loader.override_global("BEST_EFFORT", &globals.best_effort, true);
        loader.override_global("CPUS", &globals.cpus, true);
        loader.override_global("HAS_SET_SLICE", &globals.has_set_slice, true);
        // aya makes the maps, with the globals in them; this function links the code to them.
        let mut ebpf = loader.load(bytes).map_err(|error| not_loaded(&error))?;
        let broken = |error: &(dyn std::error::Error + 'static)| {
            KernelError::refused("the BPF object could not be linked", error)
        };
        let mut object = aya_obj::Object::parse(bytes).map_err(|error| broken(&error))?;
        let names: Vec<String> = object.maps.keys().cloned().collect();
        let mut maps = std::collections::HashMap::new();
        for name in names {
            let map = ebpf
                .take_map(&name)
                .ok_or_else(|| KernelError::new(format!("the BPF object has no map {name}")))?;
            maps.insert(name, map);
        }
        let btf = object
            .fixup_and_sanitize_btf(aya::features().btf().unwrap_or(&aya_obj::btf::BtfFeatures::default()))
            .map_err(|error| broken(&error))?
            .map(aya_obj::btf::Btf::to_bytes)
            .ok_or_else(|| KernelError::new("the BPF object has no BTF"))?;
        let btf = sys::btf_load(&btf)
            .map_err(|error| KernelError::io("the kernel refused the scheduler's types", &error))?;
        let sections: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let parsed = object.maps.clone();
        let fds: BTreeMap<&String, RawFd> =
            maps.iter().filter_map(|(name, map)| Some((name, data(map)?.fd().as_fd().as_raw_fd()))).collect();
        let known = parsed.iter().filter_map(|(name, map)| Some((name.as_str(), *fds.get(name)?, map)));
        object.relocate_maps(known, &sections).map_err(|error| broken(&error))?;
        object.relocate_calls(&sections).map_err(|error| broken(&error))?;
        Ok(Loaded { object, maps, btf, programs: Vec::new() })
    }

    /// Removes a map from the object and returns it typed.
    fn map<M>(&mut self, name: &str) -> Result<M, KernelError>
    where
        M: TryFrom<Map, Error = aya::maps::MapError>,
    {
        M::try_from(self.extract(name)?).map_err(|error| KernelError::map(name, &error))
    }

    fn extract(&mut self, name: &str) -> Result<Map, KernelError> {
        let map = self.maps.remove(name);
        map.ok_or_else(|| KernelError::new(format!("the BPF object has no map {name}")))
    }

    /// Loads one program into the kernel.
    fn program(&self, name: &str, sleeps: bool, ops: &Ops) -> Result<OwnedFd, KernelError> {
        let missing = || KernelError::new(format!("the BPF object has no program {name}"));
        let program = self.object.programs.get(name).ok_or_else(missing)?;
        let function = self.object.functions.get(&program.function_key()).ok_or_else(missing)?;
        let mut code = function.instructions.clone();
        call_kernel(&mut code, &ops.functions)?;
        let (member, _) = ops.members.get(name).copied().ok_or_else(missing)?;
        let load = sys::StructOpsProgram {
            name,
            code: &code,
            license: &program.license,
            ops_type: ops.ops_type,
            member,
            sleeps,
            btf: self.btf.as_fd(),
            functions: &function.func_info.func_info,
        };
        sys::struct_ops_program(&load).map_err(|(error, log)| {
            let reason: Vec<&str> =
                log.lines().rev().filter(|line| !line.starts_with("processed")).take(4).collect();
            let reason: Vec<&str> = reason.into_iter().rev().collect();
            KernelError::io(&format!("the kernel refused the program {name} ({})", reason.join("; ")), &error)
        })
    }
}

fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(data) | Map::HashMap(data) => Some(data),
        _ => None,
    }
}

/// Replaces the placeholder numbers with the running kernel's functions. A call of a missing function becomes
/// a no-op, which never runs: a global makes the programs skip the call.
fn call_kernel(code: &mut [bpf_insn], functions: &[Option<u32>]) -> Result<(), KernelError> {
    const CALL: u8 = 0x85; // BPF_JMP | BPF_CALL
    const SET_R0_TO_0: u8 = 0xb7; // BPF_ALU64 | BPF_MOV | BPF_K
    const PSEUDO_KFUNC_CALL: u8 = 2;
    let mut unknown = BTreeSet::new();
    for instruction in code {
        if instruction.code != CALL || instruction.src_reg() != 0 || instruction.imm < FIRST_KFUNC {
            continue;
        }
        let place = usize::try_from(instruction.imm - FIRST_KFUNC).unwrap_or(usize::MAX);
        match functions.get(place) {
            Some(Some(id)) => {
                instruction.set_src_reg(PSEUDO_KFUNC_CALL);
                instruction.imm = id.cast_signed();
            }
            Some(None) => {
                instruction.code = SET_R0_TO_0;
                instruction.imm = 0;
            }
            None => {
                unknown.insert(place);
            }
        }
    }
    if unknown.is_empty() {
        return Ok(());
    }
    Err(KernelError::new(format!("the BPF object calls unknown functions: {unknown:?}")))
}
