//! Pods that stand still for memory that was taken from them.
//!
//! A cgroup above its `memory.high` is not killed: each of its threads that needs memory has to reclaim some
//! first, and is put to sleep for up to two seconds per allocation (`mem_cgroup_handle_over_high` in
//! mm/memcontrol.c). One that grows and has nothing to give back may stand so for minutes: neither alive nor
//! dead, and with its locks held.

use super::Law;

/// A pod all of whose threads stalled for this much of a tick stands still.
const STILL_PERMILLE: u32 = 800;

/// How long a pod has stood still, or is still spared for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standstill {
    ticks: u32,
    spared: u32,
}

impl Standstill {
    /// One more tick of a pod whose memory is `held`. Returns true if it is to be given back.
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

    /// Returns true if no memory is taken from it for now.
    pub(super) fn is_spared(&self) -> bool {
        self.spared > 0
    }

    /// Returns true if there is nothing to remember.
    pub(super) fn is_over(&self) -> bool {
        *self == Self::default()
    }
}
