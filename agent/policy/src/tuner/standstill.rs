//! Pods that stand still for memory that was taken from them.
//!
//! The kernel does not kill a cgroup above its `memory.high`: each thread that needs memory must reclaim some
//! first, and sleeps for up to two seconds per allocation (`mem_cgroup_handle_over_high` in mm/memcontrol.c).
//! A growing cgroup without anything to reclaim may remain in this state for minutes: neither alive nor dead,
//! and holding its locks.

use super::Law;

/// Share of a tick in which all threads of a pod must have stalled for it to count as standing still.
const STILL_PERMILLE: u32 = 800;

/// The time that a pod has stood still, or remains spared afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standstill {
    ticks: u32,
    spared: u32,
}

impl Standstill {
    /// Records a tick of a pod whose memory is `held`. Returns true if the memory must be restored.
    pub(super) fn tick(&mut self, law: &Law, held: bool, still_permille: Option<u32>) -> bool {
        self.spared = self.spared.saturating_sub(1);
        let stands = held && still_permille.is_some_and(|permille| permille >= STILL_PERMILLE);
        self.ticks = if stands { self.ticks.saturating_add(1) } else { 0 };
        if law.standstill_ticks == 0 || self.ticks < law.standstill_ticks {
            return false;
        }
        *self = Self { ticks: 0, spared: law.retry_ticks };
        true
    }

    /// Returns true if no memory is taken from the pod for now.
    pub(super) fn is_spared(&self) -> bool {
        self.spared > 0
    }

    /// Returns true if the state can be dropped.
    pub(super) fn is_over(&self) -> bool {
        *self == Self::default()
    }
}
