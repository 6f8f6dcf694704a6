//! Read-only view of the pinned programs and maps, for `beelet bpf`, `beelet doctor --bpf` and the benches.

use super::capability::{Hook, PROGRAMS};
use super::pins::{self, MAPS};
use super::{KernelError, MapMemory, sys};
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray};
use beelet_ebpf_abi::{
    Address, AddressCount, Ancestry, CgroupKey, Counters, Drops, ExitedKey, ListenerRecord, Meta, Part,
    Pressure, Running, Settings, Shares, Slot, SocketCookie, Stretch, TaskKey, TaskState,
};
use serde_json::{Map as Object, Value, json};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A program that is attached by a pinned link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedProgram {
    /// Name of the program and of its link's pin.
    pub name: &'static str,
    /// Attachment point.
    pub hook: String,
    /// The kernel's number for the program.
    pub id: u32,
    /// Instructions that the verifier processed, over all paths; 0 before Linux 5.16.
    pub verified_instructions: u32,
    /// Size of the machine code in bytes.
    pub jitted_bytes: u32,
    /// Number of runs while runs were counted.
    pub runs: u64,
    /// Total time of these runs in nanoseconds.
    pub run_ns: u64,
    /// Number of skipped runs, because the last run on that CPU was not over: newer kernels (7.3, not yet
    /// 6.18) preempt programs on tracepoints. 0 before Linux 5.12.
    pub misses: u64,
}

/// All pinned objects of an agent.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// Folder of the pins.
    pub dir: PathBuf,
    /// SHA-256 of the object that the programs came from, in hex.
    pub digest: String,
    /// Attached programs, in the order of attaching.
    pub programs: Vec<PinnedProgram>,
    /// Maps in the order of their names.
    pub maps: Vec<MapMemory>,
}

/// Guard: while it lives, the kernel counts and times the runs of all programs, at some 20 ns per run.
#[derive(Debug)]
pub struct RunStatistics(#[expect(dead_code, reason = "held for its end")] OwnedFd);

/// Starts counting runs.
///
/// # Errors
/// The kernel refuses (counting needs `CAP_SYS_ADMIN`).
pub fn count_runs() -> Result<RunStatistics, KernelError> {
    aya::sys::enable_stats(aya::sys::Stats::RunTime).map(RunStatistics).map_err(|error| {
        KernelError::new(format!("the kernel refused to count runs of BPF programs: {error}"))
    })
}

/// Inspects the pins under `<bpffs>/<pin_name>`, in this version's folder.
///
/// # Errors
/// The folder has no pins of ours, or the kernel refuses.
pub fn pinned(bpffs: &Path, pin_name: &str) -> Result<Pinned, KernelError> {
    let dir = pins::folder(bpffs, pin_name);
    let meta: Meta = array(&open(&dir, "META")?, "META")?;
    let mut programs = Vec::new();
    for program in PROGRAMS {
        let Ok(link) = sys::object_get(&pins::link_in(&dir, program.name)) else { continue };
        let info = sys::link_state(link.as_fd())
            .and_then(|state| sys::program_info(state.program_id))
            .map_err(|error| KernelError::new(format!("could not inspect {}: {error}", program.name)))?;
        programs.push(PinnedProgram {
            name: program.name,
            hook: match program.hook {
                Hook::Tracepoint(name) => format!("tracepoint {name}"),
                Hook::SockOps => "cgroup sock_ops".to_owned(),
                Hook::SkbIngress => "cgroup skb ingress".to_owned(),
                Hook::SkbEgress => "cgroup skb egress".to_owned(),
                Hook::TaskWalk => "iterator task".to_owned(),
            },
            id: info.id,
            verified_instructions: info.verified_insns,
            jitted_bytes: info.jited_prog_len,
            runs: info.run_cnt,
            run_ns: info.run_time_ns,
            misses: info.recursion_misses,
        });
    }
    let mut maps = std::collections::BTreeMap::new();
    for shape in MAPS {
        maps.insert(shape.name, open(&dir, shape.name)?);
    }
    let digest = meta.digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Pinned { dir, digest, programs, maps: super::maps::memory(&maps)? })
}

/// Returns the entries of a pinned map, with the names of their fields: one object per entry with `key` and
/// `value`, or `values` (one per CPU) for a per-CPU map. Per-CPU arrays omit entries that were never written.
///
/// # Errors
/// The map is missing or of a kind that can't be listed, or the kernel refuses.
pub fn dump(bpffs: &Path, pin_name: &str, name: &str) -> Result<Vec<Value>, KernelError> {
    let dir = pins::folder(bpffs, pin_name);
    if !MAPS.iter().any(|shape| shape.name == name) {
        let names: Vec<&str> = MAPS.iter().map(|shape| shape.name).collect();
        return Err(KernelError::new(format!("unknown map {name}: the maps are {}", names.join(", "))));
    }
    let map = open(&dir, name)?;
    match name {
        "META" => Ok(vec![json!({"key": 0, "value": array::<Meta>(&map, name)?.show()})]),
        "SETTINGS" => Ok(vec![json!({"key": 0, "value": array::<Settings>(&map, name)?.show()})]),
        "LISTENERS" => hash::<SocketCookie, ListenerRecord>(map, name),
        "ADDRESSES" => hash::<Address, AddressCount>(map, name),
        "PRESSURE" => hash::<CgroupKey, Pressure>(map, name),
        "TASKS" => hash::<TaskKey, TaskState>(map, name),
        "EXITED" => hash::<ExitedKey, u64>(map, name),
        "DROPS" => per_cpu_array::<Drops>(map, name),
        "RUNNING" => per_cpu_array::<Running>(map, name),
        "ANCESTRY" => per_cpu_array::<Ancestry>(map, name),
        "CONTAINERS" => per_cpu_array::<Counters>(map, name),
        "HOLDERS" => per_cpu_array::<Shares>(map, name),
        "RECLAIMERS" => per_cpu_array::<Shares>(map, name),
        "SLOTS" => slots(map, name),
        "EVENTS" => {
            Err(KernelError::new("EVENTS is the ring buffer: only the agent reads its records, each once"))
        }
        _ => Err(KernelError::new(format!("{name} is task storage: the kernel lists no entries of it"))),
    }
}

fn open(dir: &Path, name: &str) -> Result<MapData, KernelError> {
    let path = dir.join(name);
    if !path.exists() {
        return Err(KernelError::new(format!(
            "{} is missing: no agent of this version has pinned its maps there",
            path.display()
        )));
    }
    MapData::from_pin(&path).map_err(|error| KernelError::map(name, &error))
}

fn array<T: aya::Pod>(map: &MapData, name: &str) -> Result<T, KernelError> {
    let map = Map::from_map_data(super::loader::duplicate(map)?).and_then(Array::<MapData, T>::try_from);
    map.and_then(|map| map.get(&0, 0)).map_err(|error| KernelError::map(name, &error))
}

fn slots(map: MapData, name: &str) -> Result<Vec<Value>, KernelError> {
    let map = Map::from_map_data(map).and_then(Array::<MapData, Slot>::try_from);
    let map = map.map_err(|error| KernelError::map(name, &error))?;
    let all = (0_u32..).zip(map.iter());
    let taken = all.filter(|(_, slot)| !matches!(slot, Ok(Slot { cgroup_id: 0 })));
    entries(
        name,
        taken.map(|(index, slot)| Ok((index, slot?))),
        |(index, slot)| json!({"key": index, "value": slot.show()}),
    )
}

fn entries<T>(
    name: &str,
    all: impl Iterator<Item = Result<T, MapError>>,
    show: impl Fn(T) -> Value,
) -> Result<Vec<Value>, KernelError> {
    all.map(|entry| entry.map(&show).map_err(|error| KernelError::map(name, &error))).collect()
}

fn hash<K: aya::Pod + Show, V: aya::Pod + Show>(map: MapData, name: &str) -> Result<Vec<Value>, KernelError> {
    let map = Map::from_map_data(map).and_then(HashMap::<MapData, K, V>::try_from);
    let map = map.map_err(|error| KernelError::map(name, &error))?;
    entries(name, map.iter(), |(key, value)| json!({"key": key.show(), "value": value.show()}))
}

fn per_cpu_array<T: aya::Pod + Show + Default + PartialEq>(
    map: MapData,
    name: &str,
) -> Result<Vec<Value>, KernelError> {
    let map = Map::from_map_data(map).and_then(PerCpuArray::<MapData, T>::try_from);
    let map = map.map_err(|error| KernelError::map(name, &error))?;
    let mut shown = Vec::new();
    for index in 0..map.len() {
        let cpus = map.get(&index, 0).map_err(|error| KernelError::map(name, &error))?;
        if map.len() == 1 || cpus.iter().any(|cpu| *cpu != T::default()) {
            shown.push(json!({"key": index, "values": cpus.iter().map(Show::show).collect::<Vec<_>>()}));
        }
    }
    Ok(shown)
}

/// Converts a record to JSON with the names of its fields.
trait Show {
    fn show(&self) -> Value;
}

macro_rules! show_integers {
    ($($type:ty),+) => {$(
        impl Show for $type {
            fn show(&self) -> Value {
                Value::from(*self)
            }
        }
    )+};
}

show_integers!(u16, u32, u64);

impl<const N: usize> Show for [u8; N] {
    fn show(&self) -> Value {
        Value::from(self.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }
}

impl<const N: usize> Show for [u64; N] {
    fn show(&self) -> Value {
        Value::from(self.to_vec())
    }
}

macro_rules! show_arrays {
    ($($type:ty),+) => {$(
        impl<const N: usize> Show for [$type; N] {
            fn show(&self) -> Value {
                Value::from(self.iter().map(Show::show).collect::<Vec<_>>())
            }
        }
    )+};
}

show_arrays!(Stretch, Part);

macro_rules! show {
    ($($type:ident { $($field:ident),+ })+) => {$(
        impl Show for $type {
            fn show(&self) -> Value {
                // The pattern names every field, so the compiler reports a missing one.
                let $type { $($field),+ } = self;
                let mut object = Object::new();
                $(object.insert(stringify!($field).to_owned(), $field.show());)+
                Value::Object(object)
            }
        }
    )+};
}

show! {
    Meta { magic, abi_version, complete, tracepoint, instance, digest }
    Settings { pods_cgroup, burstable, best_effort, generation, reserved, run_queue_wait_ns, reclaim_ns }
    SocketCookie { cookie }
    ListenerRecord { address, cgroup_id, since_ns, counted, seen_by }
    Address { netns_cookie, address, port, family, dual_stack }
    AddressCount { listeners, last_cookie, changed_ns }
    CgroupKey { cgroup_id }
    Pressure { window_ns, waited_ns, above, edge_ns }
    TaskKey { pid }
    TaskState { runnable_since_ns, arrived_ns, waited_ns, reclaiming_since_ns, task }
    ExitedKey { started_ns, pid, reserved }
    Drops { ring_full, listeners_full, addresses_full, containers_full, tasks_full }
    Running {
        since_ns, ahead_ns, compared_ns, cgroup_id, pod_id, wait_ns, qos, waited, newest, stretches
    }
    Stretch { cgroup_id, since_ns }
    Shares { cgroup_id, epoch, total, parts }
    Part { cgroup_id, amount }
    Ancestry { cgroup_id, pod_id, qos, generation }
    Slot { cgroup_id }
    Counters {
        cgroup_id, on_cpu_ns, switches, preempted_by_same_pod, preempted_by_other_pod, preempted_by_system,
        run_queue_wait_ns, run_queue_waits, memcg_reclaim_ns, memcg_reclaims, direct_reclaim_ns, direct_reclaims, oom_kills, established,
        retransmits, rtt_us, rtt_samples, rx_bytes, rx_packets, tx_bytes, tx_packets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_shown_with_the_names_of_their_fields() {
        let address = Address { netns_cookie: 7, address: [0; 16], port: 80, family: 2, dual_stack: 0 };
        let expected = json!({
            "netns_cookie": 7, "address": "00000000000000000000000000000000", "port": 80, "family": 2, "dual_stack": 0,
        });
        assert_eq!(address.show(), expected);
        let pressure = Pressure { waited_ns: [5, 6], ..Pressure::default() };
        assert_eq!(pressure.show()["waited_ns"], json!([5, 6]));
    }

    #[test]
    fn a_missing_pin_or_an_unknown_map_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = pinned(folder.path(), "beelet").unwrap_err().to_string();
        assert!(error.contains("no agent of this version has pinned"), "{error}");
        let error = dump(folder.path(), "beelet", "NONE").unwrap_err().to_string();
        assert!(error.starts_with("unknown map NONE: the maps are META, LISTENERS"), "{error}");
    }
}
