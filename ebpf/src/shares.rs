//! Recent amounts of a resource per cgroup, in eight places per CPU: see [`Shares`].

use aya_ebpf::Global;
use beelet_ebpf_abi::{MAX_PARTS, Part, Shares};

/// [`MAX_PARTS`], known to the verifier but not to the compiler, which would unroll the loops.
static PARTS: Global<u32> = Global::new(MAX_PARTS as u32);

/// Halves old amounts, and clears those of another owner.
#[inline(always)]
pub(crate) fn age(found: &mut Shares, cgroup_id: u64, epoch: u64) {
    let passed = epoch.wrapping_sub(found.epoch);
    if found.cgroup_id == cgroup_id && passed == 0 {
        return;
    }
    // After 63 halvings nothing is left. More than 63 also covers a clock that went back, which never
    // happens.
    let by = if found.cgroup_id != cgroup_id || passed > 63 { 64 } else { passed };
    found.cgroup_id = cgroup_id;
    found.epoch = epoch;
    found.total = halved(found.total, by);
    let mut index = 0;
    while index < PARTS.load() {
        let part = &mut found.parts[core::hint::black_box(index) as usize % MAX_PARTS];
        // Hidden as well: the compiler would turn a loop that only clears into a `memset`, which BPF lacks.
        part.amount = halved(part.amount, core::hint::black_box(by));
        if part.amount == 0 {
            part.cgroup_id = 0;
        }
        index += 1;
    }
}

#[inline(always)]
fn halved(value: u64, by: u64) -> u64 {
    if by > 63 { 0 } else { value >> by }
}

/// Adds to the amount of `cgroup_id`. Returns the new amount.
#[inline(always)]
pub(crate) fn add(found: &mut Shares, cgroup_id: u64, amount: u64) -> u64 {
    let (mut place, mut least) = (0, u64::MAX);
    let mut index = 0;
    while index < PARTS.load() {
        let part = found.parts[core::hint::black_box(index) as usize % MAX_PARTS];
        if part.cgroup_id == cgroup_id {
            place = index;
            least = part.amount;
            break;
        }
        if part.amount < least {
            place = index;
            least = part.amount;
        }
        index += 1;
    }
    let amount = least.wrapping_add(amount);
    found.parts[core::hint::black_box(place) as usize % MAX_PARTS] = Part { cgroup_id, amount };
    amount
}
