//! Who had a CPU while threads of a container waited for it: the container, or the machine's cgroup.
//!
//! Each CPU remembers its last stretches, each of which one cgroup's threads had it. When a thread gets the
//! CPU after a long wait, these are walked backwards for as long as it waited. So nothing is done at a switch
//! within one cgroup, two words are written at one to another, and the walk is only for waits of at least
//! `PRESSURE_FLOOR_NS`. For the scheduler's hook alone: nothing comes between on this CPU.

use aya_ebpf::Global;
use beelet_ebpf_abi::{HELD_HALF_LIFE_BITS, Held, Holders, MAX_HELD, NOBODY, Running, STRETCHES, Stretch};

use crate::{
    containers::slot,
    maps::{HOLDERS, RUNNING},
    tasks::Task,
};

/// [`MAX_HELD`] and [`STRETCHES`], which the verifier knows and the compiler doesn't: it would write the
/// loops out.
static HELD: Global<u32> = Global::new(MAX_HELD as u32);
static WALKED: Global<u32> = Global::new(STRETCHES as u32);

/// Notes that the thread `next`, of that cgroup, has this CPU from `now` on.
#[inline(always)]
pub(crate) fn begin_stretch(cpu: &mut Running, next: Task, cgroup_id: u64, now: u64) {
    // The idle thread of each CPU, and nothing else, has this number.
    let cgroup_id = if next.pid() == 0 { NOBODY } else { cgroup_id };
    if cpu.stretches[ring_index(cpu.newest)].cgroup_id != cgroup_id {
        cpu.newest = cpu.newest.wrapping_add(1);
        cpu.stretches[ring_index(cpu.newest)] = Stretch { cgroup_id, since_ns: now };
    }
}

/// A mask, hidden from the compiler, which may find it needless where older verifiers don't.
#[inline(always)]
fn ring_index(number: u64) -> usize {
    core::hint::black_box(number) as usize % STRETCHES
}

/// A thread of a container has waited for `all` nanoseconds, `here` of them at this CPU, until `now` on the
/// run queue's clock. Says who had the CPU. Returns what was found out nothing about.
///
/// A function that the verifier checks by itself, as [`charge`].
#[inline(never)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn waited_for(cgroup_id: u64, all: u64, here: u64, now: u64) -> u64 {
    let slot = slot(cgroup_id);
    let (Some(found), Some(cpu)) = (HOLDERS.get_ptr_mut(slot), RUNNING.get_ptr(0)) else { return all };
    // SAFETY: this CPU's live elements, and nothing comes between.
    let (found, cpu) = unsafe { (&mut *found, &*cpu) };
    age(found, cgroup_id, now.wrapping_add(cpu.ahead_ns) >> HELD_HALF_LIFE_BITS);
    found.waited_ns = found.waited_ns.wrapping_add(all);
    let newest = cpu.newest;
    let (mut left, mut until) = (here, now);
    let mut back = 0;
    while back < WALKED.load() {
        let stretch = cpu.stretches[ring_index(newest.wrapping_sub(u64::from(back)))];
        if left == 0 || stretch.since_ns == 0 || stretch.since_ns > until {
            break;
        }
        let length = until - stretch.since_ns;
        let part = if length < left { length } else { left };
        charge(slot, stretch.cgroup_id, part);
        left -= part;
        until = stretch.since_ns;
        back += 1;
    }
    left
}

/// Halves what is old, and clears what is another cgroup's.
#[inline(always)]
fn age(found: &mut Holders, cgroup_id: u64, epoch: u64) {
    let passed = epoch.wrapping_sub(found.epoch);
    if found.cgroup_id == cgroup_id && passed == 0 {
        return;
    }
    // Nothing is left after 63 halvings. The next is also where the clock went back, as it never does.
    let by = if found.cgroup_id != cgroup_id || passed > 63 { 64 } else { passed };
    found.cgroup_id = cgroup_id;
    found.epoch = epoch;
    found.waited_ns = halved(found.waited_ns, by);
    let mut index = 0;
    while index < HELD.load() {
        let held = &mut found.held[core::hint::black_box(index) as usize % MAX_HELD];
        // Hidden, too: of a loop that only clears, the compiler would make a `memset`, which BPF lacks.
        held.held_ns = halved(held.held_ns, core::hint::black_box(by));
        if held.held_ns == 0 {
            held.cgroup_id = 0;
        }
        index += 1;
    }
}

#[inline(always)]
fn halved(value: u64, by: u64) -> u64 {
    if by > 63 { 0 } else { value >> by }
}

/// Adds time during which `holder` had the CPU to the owner's of a slot. Returns that one's time now.
#[inline(never)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn charge(slot: u32, holder: u64, part_ns: u64) -> u64 {
    let Some(found) = HOLDERS.get_ptr_mut(slot) else { return 0 };
    // SAFETY: as in `waited_for`.
    let found = unsafe { &mut *found };
    let (mut place, mut least) = (0, u64::MAX);
    let mut index = 0;
    while index < HELD.load() {
        let held = found.held[core::hint::black_box(index) as usize % MAX_HELD];
        if held.cgroup_id == holder {
            place = index;
            least = held.held_ns;
            break;
        }
        if held.held_ns < least {
            place = index;
            least = held.held_ns;
        }
        index += 1;
    }
    let held_ns = least.wrapping_add(part_ns);
    found.held[core::hint::black_box(place) as usize % MAX_HELD] = Held { cgroup_id: holder, held_ns };
    held_ns
}
