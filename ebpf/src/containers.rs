//! Cgroups below the pods' root: the pod and QoS class of each, and its counters.
//!
//! Must never allocate: all maps are preallocated, because these functions run under the run-queue lock.

use aya_ebpf::{Global, helpers::bpf_probe_read_kernel};
use beelet_ebpf_abi::{
    ABSENT, ANCESTRY_SLOTS, Ancestry, CONTAINER_BITS as DEFAULT_BITS, Counters, HOME_FACTOR, SLOT_TRIES,
    Settings, qos,
};

use crate::{
    atomic::exchange,
    events::dropped,
    kernel::{
        OFF_CGROUP_ANCESTOR_IDS, OFF_CGROUP_ANCESTORS, OFF_CGROUP_KN, OFF_CGROUP_LEVEL, OFF_KERNFS_ID, load,
    },
    maps::{ANCESTRY, CONTAINERS, SETTINGS, SLOTS},
};

/// Maximum depth of the search; no cgroup2 hierarchy is deeper in practice. Deeper cgroups count as the
/// machine's.
const MAX_LEVEL: u32 = 16;

/// [`SLOT_TRIES`], known to the verifier but not to the compiler, which would unroll the loops.
static TRIES: Global<u32> = Global::new(SLOT_TRIES);

/// Entries of the table, as a power of two; the agent sizes it for the node's pods.
#[unsafe(no_mangle)]
pub(crate) static CONTAINER_BITS: Global<u32> = Global::new(DEFAULT_BITS);

/// The pod of a cgroup.
#[derive(Clone, Copy)]
pub(crate) struct Pod {
    /// Id of the pod's own cgroup; 0 if the cgroup does not belong to a pod.
    pub(crate) id: u64,
    /// QoS class, from [`qos`].
    pub(crate) qos: u32,
}

impl Pod {
    const NONE: Pod = Pod { id: 0, qos: 0 };

    #[inline(always)]
    pub(crate) fn is_none(self) -> bool {
        self.id == 0
    }
}

/// Returns this CPU's counters of a cgroup below the pods' root; `None` if the table is full.
#[inline(always)]
pub(crate) fn counters(cgroup_id: u64) -> Option<*mut Counters> {
    let at_home = CONTAINERS.get_ptr_mut(place(cgroup_id, 0))?;
    // SAFETY: this CPU's live element.
    if unsafe { (*at_home).cgroup_id } == cgroup_id {
        return Some(at_home);
    }
    CONTAINERS.get_ptr_mut(slot_of(cgroup_id))
}

/// Returns the slot of a cgroup with [`counters`]; [`ABSENT`] if the table is full.
#[inline(always)]
pub(crate) fn slot(cgroup_id: u64) -> u32 {
    let home = place(cgroup_id, 0);
    match CONTAINERS.get_ptr(home) {
        // SAFETY: this CPU's live element.
        Some(found) if unsafe { (*found).cgroup_id } == cgroup_id => home,
        _ => slot_of(cgroup_id),
    }
}

/// Returns the slot of a cgroup, allocates one if needed, and assigns this CPU's element of it to the cgroup;
/// [`ABSENT`] if the table is full.
#[inline(never)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn slot_of(cgroup_id: u64) -> u32 {
    // The search for the cgroup's own slot comes first: a slot before it may have become free since.
    let mut slot = first(cgroup_id, |owner| load(owner) == cgroup_id);
    if slot == ABSENT {
        slot = first(cgroup_id, |owner| {
            let before = exchange(owner, 0, cgroup_id);
            // Another CPU may have been first, for the same cgroup.
            before == 0 || before == cgroup_id
        });
    }
    match CONTAINERS.get_ptr_mut(slot) {
        // SAFETY: this CPU's live element.
        Some(found) => unsafe { own(found, cgroup_id) },
        None => dropped(|drops| &raw mut drops.containers_full),
    }
    slot
}

/// Returns the first of a cgroup's slots whose owner satisfies `is`; [`ABSENT`] if none does.
#[inline(always)]
fn first(cgroup_id: u64, is: impl Fn(&mut u64) -> bool) -> u32 {
    let mut found = ABSENT;
    let mut tried = 0;
    while tried < TRIES.load() {
        let slot = place(cgroup_id, tried);
        // SAFETY: a live element; every writer changes it as one word.
        if let Some(owner) = SLOTS.get_ptr_mut(slot)
            && is(unsafe { &mut (*owner).cgroup_id })
        {
            found = slot;
            break;
        }
        tried += 1;
    }
    found
}

/// Assigns this CPU's element of a slot to the slot's owner.
///
/// # Safety
/// `found` is a live element.
#[inline(always)]
unsafe fn own(found: *mut Counters, cgroup_id: u64) {
    // SAFETY: guaranteed by the caller.
    let before = unsafe { (*found).cgroup_id };
    if before != 0 && before != cgroup_id {
        // The agent clears the slots that it frees, but a socket may outlive its cgroup and count afterwards.
        let words = found.cast::<u64>();
        for word in 0..size_of::<Counters>() / size_of::<u64>() {
            // SAFETY: within the element. Volatile: the compiler would call `memset`, which BPF lacks.
            unsafe { words.add(word).write_volatile(0) };
        }
    }
    // Code that runs in between on this CPU and counts for the same cgroup writes the same value.
    // SAFETY: guaranteed by the caller.
    unsafe { (*found).cgroup_id = cgroup_id };
}

/// Returns the `n`th slot to try for a cgroup; 0 is its home.
#[inline(always)]
fn place(cgroup_id: u64, n: u32) -> u32 {
    let bits = CONTAINER_BITS.load();
    let home = (cgroup_id.wrapping_mul(HOME_FACTOR) >> (u64::BITS - bits)) as u32;
    (home + n * (n + 1) / 2) & ((1 << bits) - 1)
}

/// Returns the pod of a cgroup through this CPU's cache. For the scheduler's hooks only: no other code may
/// run in between on this CPU.
#[inline(always)]
pub(crate) fn pod_of_cached(cgroup: u64, cgroup_id: u64) -> Pod {
    let Some(settings) = SETTINGS.get_ptr(0) else { return Pod::NONE };
    // SAFETY: the element lives as long as the array. If the agent is changing it, the generation changes
    // afterwards.
    let settings = unsafe { &*settings };
    let Some(slot) = ANCESTRY.get_ptr_mut(cgroup_id as u32 % ANCESTRY_SLOTS as u32) else {
        return Pod::NONE;
    };
    // SAFETY: this CPU's element, and no other code writes it at the same time.
    let slot = unsafe { &mut *slot };
    if slot.cgroup_id == cgroup_id && slot.generation == settings.generation {
        return Pod { id: slot.pod_id, qos: slot.qos };
    }
    let generation = settings.generation;
    let pod = pod_of(cgroup, settings);
    *slot = Ancestry { cgroup_id, pod_id: pod.id, qos: pod.qos, generation };
    pod
}

/// Returns the pod of a cgroup without the cache.
#[inline(always)]
pub(crate) fn pod_of_uncached(cgroup: u64) -> Pod {
    match SETTINGS.get_ptr(0) {
        // SAFETY: as in `pod_of_cached`.
        Some(settings) => pod_of(cgroup, unsafe { &*settings }),
        None => Pod::NONE,
    }
}

/// Searches the ancestors of a cgroup (a `struct cgroup` at that address) for the pods' root.
///
/// `<root>/pod<uid>/...` is a Guaranteed pod, `<root>/burstable/pod<uid>/...` and
/// `<root>/besteffort/pod<uid>/...` are the others. Other cgroups do not belong to a pod.
#[inline(never)]
fn pod_of(cgroup: u64, settings: &Settings) -> Pod {
    if settings.pods_cgroup == 0 || cgroup == 0 {
        return Pod::NONE;
    }
    let level: u32 = peek(cgroup + u64::from(OFF_CGROUP_LEVEL.load()));
    let mut depth = 0;
    while depth < MAX_LEVEL {
        if depth >= level {
            return Pod::NONE;
        }
        if ancestor_id(cgroup, depth) == settings.pods_cgroup {
            break;
        }
        depth += 1;
    }
    if depth >= MAX_LEVEL {
        return Pod::NONE;
    }
    // `depth` is below `level` here, so the ancestor at `depth + 1` exists.
    let first = ancestor_id(cgroup, depth + 1);
    let class = if first == settings.burstable {
        qos::BURSTABLE
    } else if first == settings.best_effort {
        qos::BEST_EFFORT
    } else {
        return Pod { id: first, qos: qos::GUARANTEED };
    };
    if level < depth + 2 {
        return Pod::NONE;
    }
    Pod { id: ancestor_id(cgroup, depth + 2), qos: class }
}

/// Returns the id of a cgroup's ancestor `depth` levels below the root of cgroup2; at its own level, its own
/// id.
#[inline(always)]
fn ancestor_id(cgroup: u64, depth: u32) -> u64 {
    let index = 8 * u64::from(depth);
    if OFF_CGROUP_ANCESTORS.load() != ABSENT {
        return id_of(peek(cgroup + u64::from(OFF_CGROUP_ANCESTORS.load()) + index));
    }
    // Before Linux 6.1 the field holds the ids themselves.
    peek(cgroup + u64::from(OFF_CGROUP_ANCESTOR_IDS.load()) + index)
}

/// Returns the id of the cgroup at an address; 0 for a null address.
#[inline(always)]
pub(crate) fn id_of(cgroup: u64) -> u64 {
    if cgroup == 0 {
        return 0;
    }
    let node: u64 = peek(cgroup + u64::from(OFF_CGROUP_KN.load()));
    if node == 0 { 0 } else { peek(node + u64::from(OFF_KERNFS_ID.load())) }
}

/// Reads kernel memory at an address; returns zero if nothing is mapped there.
#[inline(always)]
pub(crate) fn peek<T: Copy + Default>(address: u64) -> T {
    // SAFETY: the helper checks the address, and fails if nothing is mapped there.
    unsafe { bpf_probe_read_kernel(address as *const T) }.unwrap_or_default()
}
