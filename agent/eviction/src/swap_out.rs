//! Moves cold memory of pods to free swap before a pod is evicted, if swap counts.
//!
//! `beelet_policy::eviction::swap_out` decides the amount; the kernel chooses the pages, and only of pods
//! that may swap: the others' `memory.swap.max` is 0. A request that hangs delays an eviction by two seconds.
//! Must never choose a pod to evict.

use std::{
    sync::Arc,
    time::{Duration, Instant as StdInstant},
};

use beelet_base::blocking::blocking;
use beelet_cgroups::{
    Cgroups, memory,
    reclaim::{self, Pages},
};
use beelet_policy::eviction::{Observation, SwapOut, Threshold, deficit, swap_out};
use beelet_units::quantity::Quantity;
use tokio::{sync::mpsc, time::Instant};
use tracing::{debug, info};

use super::machine;

/// Maximum time of one request.
const LONGEST: Duration = Duration::from_millis(500);
/// Maximum time for which an eviction waits for a request that hangs.
const PATIENCE: Duration = Duration::from_secs(2);

/// The machine's swap, and the way to fill it.
#[derive(Clone)]
pub struct SwapDoor {
    /// Returns the free swap in bytes. May block.
    pub free: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Moves up to this number of bytes of the pods' memory to swap, and returns the bytes by which the pods'
    /// working set shrank. May block, for half a second.
    pub fill: Arc<dyn Fn(u64) -> u64 + Send + Sync>,
}

impl SwapDoor {
    /// Returns the door to this machine's swap; `None` if this kernel cannot take pages on request (cgroup
    /// version 1, Linux before 5.19).
    #[must_use]
    pub fn of_the_machine(cgroups: &Arc<Cgroups>) -> Option<Self> {
        if !reclaim::is_supported(cgroups, machine::PODS) {
            return None;
        }
        let cgroups = Arc::clone(cgroups);
        Some(Self {
            free: Arc::new(|| machine::free_swap().unwrap_or(0)),
            fill: Arc::new(move |bytes| fill(&cgroups, bytes)),
        })
    }
}

fn fill(cgroups: &Cgroups, bytes: u64) -> u64 {
    let used = || memory::of(cgroups, machine::PODS).map_or(0, |memory| memory.working_set);
    let (before, deadline) = (used(), StdInstant::now() + LONGEST);
    let mut taken = reclaim::reclaim_pages(cgroups, machine::PODS, bytes, Pages::AnonFirst, deadline);
    if taken.as_ref().is_err_and(beelet_cgroups::CgroupError::is_unsupported_reclaim) {
        taken = reclaim::reclaim_pages(cgroups, machine::PODS, bytes, Pages::Any, deadline);
    }
    if let Err(error) = taken {
        info!(%error, "cannot move memory of pods to swap");
    }
    before.saturating_sub(used())
}

/// State of the request.
#[derive(Debug, Clone, Copy)]
enum State {
    Idle,
    Running { since: Instant },
    Done { at: Instant, asked: Quantity, moved: Quantity },
}

/// The request in progress, or the last one.
pub(super) struct SwapOuts {
    door: Option<SwapDoor>,
    state: State,
    out: mpsc::Sender<(Quantity, Quantity)>,
    done: mpsc::Receiver<(Quantity, Quantity)>,
}

impl SwapOuts {
    pub(super) fn new(door: Option<SwapDoor>) -> Self {
        let (out, done) = mpsc::channel(1);
        Self { door, state: State::Idle, out, done }
    }

    /// Waits until a request ends.
    pub(super) async fn ended(&mut self) {
        // This value has a sender, so the channel stays open.
        if let Some((asked, moved)) = self.done.recv().await {
            debug!(asked = %asked.binary(), moved = %moved.binary(), "moved memory of pods to swap");
            self.state = State::Done { at: Instant::now(), asked, moved };
        }
    }

    /// Starts a request if that can help; returns true if evictions must wait until its effect is known.
    /// `actionable_for` is the time since the threshold became actionable.
    pub(super) fn must_wait(
        &mut self,
        threshold: &Threshold,
        seen: &Observation,
        read_at: Instant,
        actionable_for: Duration,
    ) -> bool {
        let Some(door) = &self.door else { return false };
        let last = match self.state {
            State::Idle => None,
            State::Running { since } => return threshold.signal.is_memory() && since.elapsed() < PATIENCE,
            State::Done { at, .. } if read_at <= at => return threshold.signal.is_memory(),
            State::Done { at, asked, moved } => Some(SwapOut { asked, moved, age: at.elapsed() }),
        };
        // The free swap is unknown here, since reading it may block.
        let missing = deficit(threshold, seen);
        if swap_out(threshold, seen, actionable_for, missing, last).is_none() {
            return false;
        }
        self.state = State::Running { since: Instant::now() };
        let (door, done, threshold, seen) = (door.clone(), self.out.clone(), threshold.clone(), *seen);
        tokio::spawn(async move {
            let result = blocking("moving memory of pods to swap", move || {
                let free = Quantity::from_units(i64::try_from((door.free)()).unwrap_or(i64::MAX));
                // No request is made, and nothing of the missing amount moves.
                let Some(amount) = swap_out(&threshold, &seen, actionable_for, free, last) else {
                    return (missing, Quantity::ZERO);
                };
                let moved = (door.fill)(u64::try_from(amount.value()).unwrap_or(0));
                (amount, Quantity::from_units(i64::try_from(moved).unwrap_or(i64::MAX)))
            })
            .await;
            // Sending fails only after eviction has ended.
            let _ = done.send(result).await;
        });
        true
    }
}
