//! Every map of the object. The maps are BTF-defined, so bpftool shows each key and value with its field
//! names, and the agent pins them under these names.

use core::ptr::null;

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, bpf_map_type::BPF_MAP_TYPE_TASK_STORAGE},
    btf_maps::{Array, HashMap, LruHashMap, PerCpuArray, RingBuf},
    macros::btf_map,
};
use beelet_ebpf_abi::{
    ANCESTRY_SLOTS, Address, AddressCount, Ancestry, CgroupKey, Counters, Drops, ExitedKey, ListenerRecord,
    MAX_ADDRESSES, MAX_CONTAINERS, MAX_EXITED, MAX_LISTENERS, MAX_TASKS, Meta, Pressure, RING_BYTES, Running,
    Settings, Shares, Slot, SocketCookie, TaskKey, TaskState, reclaim,
};

/// The listening sockets.
#[btf_map]
pub(crate) static LISTENERS: HashMap<SocketCookie, ListenerRecord, MAX_LISTENERS> = HashMap::new();

/// Number of listening sockets at each address.
///
/// An entry whose count fell to zero stays: deleting it here would race with an `open` on another CPU that
/// has just looked up the entry, and that listener's count would be lost. The agent sweeps old zero entries
/// and verifies the counts afterwards (agent/bpf/src/sweep.rs).
#[btf_map]
pub(crate) static ADDRESSES: HashMap<Address, AddressCount, MAX_ADDRESSES> = HashMap::new();

/// The only channel to user space. Untyped, because it carries records of several kinds, and libbpf refuses a
/// value type here.
#[btf_map]
pub(crate) static EVENTS: RingBuf<(), RING_BYTES> = RingBuf::new();

/// Counts of lost events.
#[btf_map]
pub(crate) static DROPS: PerCpuArray<Drops, 1> = PerCpuArray::new();

/// Mark of our pins, and the agent's settings for all programs.
#[btf_map]
pub(crate) static META: Array<Meta, 1> = Array::new();

/// The agent's settings for the counting programs.
#[btf_map]
pub(crate) static SETTINGS: Array<Settings, 1> = Array::new();

/// Counters of each cgroup below the pods' root: a hash table of our own (containers.rs), because a lookup in
/// the kernel's is a call, which costs as much as all the rest of a switch between threads (decisions/0014).
#[btf_map]
pub(crate) static CONTAINERS: PerCpuArray<Counters, MAX_CONTAINERS> = PerCpuArray::new();

/// The owner of each element of `CONTAINERS`. The agent frees the slots of removed cgroups
/// (agent/bpf/src/stale_counters.rs).
#[btf_map]
pub(crate) static SLOTS: Array<Slot, MAX_CONTAINERS, { BPF_F_MMAPABLE as usize }> = Array::new();

/// The cgroups that had the CPUs while each cgroup waited. Separate from `CONTAINERS`, which the scheduler's
/// hooks touch much more often; the agent reads only the elements of cgroups that waited.
#[btf_map]
pub(crate) static HOLDERS: PerCpuArray<Shares, MAX_CONTAINERS> = PerCpuArray::new();

/// The cgroups whose threads had to free memory that they needed, by the kind of reclaim.
#[btf_map]
pub(crate) static RECLAIMERS: PerCpuArray<Shares, { reclaim::KINDS }> = PerCpuArray::new();

/// State of the pressure edges.
///
/// Preallocated, as all hashes here: the scheduler's hooks make entries, and allocation is forbidden there.
#[btf_map]
pub(crate) static PRESSURE: HashMap<CgroupKey, Pressure, MAX_CONTAINERS> = HashMap::new();

/// The running thread of each CPU.
#[btf_map]
pub(crate) static RUNNING: PerCpuArray<Running, 1> = PerCpuArray::new();

/// Cache of the pods of cgroups, indexed by the lowest bits of the cgroup's id.
#[btf_map]
pub(crate) static ANCESTRY: PerCpuArray<Ancestry, ANCESTRY_SLOTS> = PerCpuArray::new();

/// Wait state of each thread before Linux 6.4. On later kernels the agent makes the map with a single entry.
#[btf_map]
pub(crate) static TASKS: HashMap<TaskKey, TaskState, MAX_TASKS> = HashMap::new();

/// Wait state of each thread from Linux 6.4 on.
#[btf_map]
pub(crate) static TASK_STORAGE: TaskStorage<TaskState> = TaskStorage::new();

/// Processes whose end was sent lately.
#[btf_map]
pub(crate) static EXITED: LruHashMap<ExitedKey, u64, MAX_EXITED> = LruHashMap::new();

/// A BTF-defined map of type `BPF_MAP_TYPE_TASK_STORAGE`, which aya-ebpf lacks. Its fields carry only types,
/// which the loader reads from the BTF (libbpf's `__uint` and `__type`).
#[repr(C)]
pub(crate) struct TaskStorage<T> {
    r#type: *const [i32; BPF_MAP_TYPE_TASK_STORAGE as usize],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; BPF_F_NO_PREALLOC as usize],
}

impl<T> TaskStorage<T> {
    const fn new() -> Self {
        Self { r#type: null(), key: null(), value: null(), max_entries: null(), map_flags: null() }
    }
}

// SAFETY: the pointers are null and never followed: the map lives in the kernel.
unsafe impl<T> Sync for TaskStorage<T> {}
