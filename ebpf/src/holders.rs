//! The cgroups that had a CPU while threads of a container waited for it: containers', or the machine's.
//!
//! Each CPU remembers its last stretches, during each of which one cgroup's threads had it. When a thread
//! gets the CPU after a long wait, the program walks these backwards over the length of the wait. So a switch
//! within one cgroup costs nothing, a switch between two writes two words, and only waits of at least
//! `PRESSURE_FLOOR_NS` need the walk. For the scheduler's hook only: no other code runs in between on this
//! CPU.

use aya_ebpf::Global;
use beelet_ebpf_abi::{HALF_LIFE_BITS, NOBODY, Running, STRETCHES, Stretch};

use crate::{
    containers::slot,
    maps::{HOLDERS, RUNNING},
    shares::{add, age},
    tasks::Task,
};

/// [`STRETCHES`], known to the verifier but not to the compiler, which would unroll the loop.
static WALKED: Global<u32> = Global::new(STRETCHES as u32);

/// Records that the thread `next`, of that cgroup, has this CPU from `now` on.
#[inline(always)]
pub(crate) fn begin_stretch(cpu: &mut Running, next: Task, cgroup_id: u64, now: u64) {
    // Only the idle thread of each CPU has this number.
    let cgroup_id = if next.pid() == 0 { NOBODY } else { cgroup_id };
    if cpu.stretches[ring_index(cpu.newest)].cgroup_id != cgroup_id {
        cpu.newest = cpu.newest.wrapping_add(1);
        cpu.stretches[ring_index(cpu.newest)] = Stretch { cgroup_id, since_ns: now };
    }
}

/// Masks an index of the ring. The mask is hidden from the compiler, which may drop it as needless although
/// older verifiers require it.
#[inline(always)]
fn ring_index(number: u64) -> usize {
    core::hint::black_box(number) as usize % STRETCHES
}

/// Charges the wait of a container's thread to the cgroups that had the CPU: `all` nanoseconds, `here` of
/// them at this CPU, until `now` on the run queue's clock. Returns the rest without a known holder.
///
/// The verifier checks this function by itself, as [`charge`].
#[inline(never)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn waited_for(cgroup_id: u64, all: u64, here: u64, now: u64) -> u64 {
    let slot = slot(cgroup_id);
    let (Some(found), Some(cpu)) = (HOLDERS.get_ptr_mut(slot), RUNNING.get_ptr(0)) else { return all };
    // SAFETY: this CPU's live elements, and no other code runs in between.
    let (found, cpu) = unsafe { (&mut *found, &*cpu) };
    age(found, cgroup_id, now.wrapping_add(cpu.ahead_ns) >> HALF_LIFE_BITS);
    found.total = found.total.wrapping_add(all);
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

/// Adds time during which `holder` had the CPU to the shares of a slot's owner. Returns the holder's new sum.
#[inline(never)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn charge(slot: u32, holder: u64, part_ns: u64) -> u64 {
    let Some(found) = HOLDERS.get_ptr_mut(slot) else { return 0 };
    // SAFETY: as in `waited_for`.
    add(unsafe { &mut *found }, holder, part_ns)
}
