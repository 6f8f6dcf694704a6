//! Every map of the object. They are BTF-defined, so bpftool shows each key and value with its field names,
//! and they are pinned under these names.

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

/// The sockets that listen now.
#[btf_map]
pub(crate) static LISTENERS: HashMap<SocketCookie, ListenerRecord, MAX_LISTENERS> = HashMap::new();

/// How many sockets listen at each address.
///
/// An entry whose count fell to zero stays: deleting it here would race with an `open` on another CPU that
/// has just looked it up, and that listener's count would be lost. The agent sweeps old zero entries and
/// verifies the counts afterwards (agent/bpf/src/sweep.rs).
#[btf_map]
pub(crate) static ADDRESSES: HashMap<Address, AddressCount, MAX_ADDRESSES> = HashMap::new();

/// The one way to user space. Untyped: records of several kinds go through it, and libbpf refuses a value
/// type here.
#[btf_map]
pub(crate) static EVENTS: RingBuf<(), RING_BYTES> = RingBuf::new();

/// What was lost.
#[btf_map]
pub(crate) static DROPS: PerCpuArray<Drops, 1> = PerCpuArray::new();

/// Marks the pins as ours, and holds what the agent sets for all programs.
#[btf_map]
pub(crate) static META: Array<Meta, 1> = Array::new();

/// What the agent sets for the programs that count.
#[btf_map]
pub(crate) static SETTINGS: Array<Settings, 1> = Array::new();

/// What each cgroup below the pods' root used, waited for and moved: a hash table of our own (containers.rs),
/// because a look-up in the kernel's is a call, which costs as much as all the rest of a switch between
/// threads (decisions/0014).
#[btf_map]
pub(crate) static CONTAINERS: PerCpuArray<Counters, MAX_CONTAINERS> = PerCpuArray::new();

/// The cgroup of each of these. The agent frees those of cgroups that are gone
/// (agent/bpf/src/stale_counters.rs).
#[btf_map]
pub(crate) static SLOTS: Array<Slot, MAX_CONTAINERS, { BPF_F_MMAPABLE as usize }> = Array::new();

/// Who had the CPUs while each of these waited: beside `CONTAINERS`, which the scheduler's hooks touch much
/// more often, and read only of those that waited.
#[btf_map]
pub(crate) static HOLDERS: PerCpuArray<Shares, MAX_CONTAINERS> = PerCpuArray::new();

/// Whose threads had to free memory for what they needed, by the kind of reclaim.
#[btf_map]
pub(crate) static RECLAIMERS: PerCpuArray<Shares, { reclaim::KINDS }> = PerCpuArray::new();

/// What the edges about pressure are decided from.
///
/// Preallocated, as all hashes here: the scheduler's hooks make entries, and nothing may be allocated there.
#[btf_map]
pub(crate) static PRESSURE: HashMap<CgroupKey, Pressure, MAX_CONTAINERS> = HashMap::new();

/// The thread that runs on each CPU.
#[btf_map]
pub(crate) static RUNNING: PerCpuArray<Running, 1> = PerCpuArray::new();

/// Which cgroup belongs to which pod: a cache, by the lowest bits of the id.
#[btf_map]
pub(crate) static ANCESTRY: PerCpuArray<Ancestry, ANCESTRY_SLOTS> = PerCpuArray::new();

/// What each thread is waiting for, below Linux 6.4. The agent gives it a single entry elsewhere.
#[btf_map]
pub(crate) static TASKS: HashMap<TaskKey, TaskState, MAX_TASKS> = HashMap::new();

/// What each thread is waiting for, from Linux 6.4 on.
#[btf_map]
pub(crate) static TASK_STORAGE: TaskStorage<TaskState> = TaskStorage::new();

/// Processes of which the end was sent lately.
#[btf_map]
pub(crate) static EXITED: LruHashMap<ExitedKey, u64, MAX_EXITED> = LruHashMap::new();

/// A BTF-defined map of type `BPF_MAP_TYPE_TASK_STORAGE`, which aya-ebpf lacks. Its fields are only types:
/// the loader reads them from the BTF (libbpf's `__uint` and `__type`).
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
