//! The seam between the agent and a simulated machine (docs/decisions/0028-simulation.md).
//!
//! A simulation runs the whole agent on one thread with a paused clock. On such a thread, blocking work
//! becomes a task of the same thread ([`crate::blocking`]), parts with their own thread run as a task, and
//! the clocks of [`crate::clock`] follow the paused one. Everywhere else the seam has no effect. Must never
//! change what the agent does, only where the work runs and which clock it reads.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

thread_local! {
    static BOOT: Cell<Option<Boot>> = const { Cell::new(None) };
}

/// The simulated machine's boot: the time since boot at one instant.
#[derive(Clone, Copy)]
struct Boot {
    at: Instant,
    uptime: Duration,
}

/// Marks this thread as a simulation's until it is dropped.
#[derive(Debug)]
pub struct Simulated(PhantomData<*const ()>);

impl Drop for Simulated {
    fn drop(&mut self) {
        BOOT.set(None);
    }
}

/// Marks this thread as a simulation's, on a machine that booted `uptime` ago.
#[must_use]
pub fn begin(uptime: Duration) -> Simulated {
    BOOT.set(Some(Boot { at: Instant::now(), uptime }));
    Simulated(PhantomData)
}

/// Returns true on a simulation's thread.
#[must_use]
pub fn is_on() -> bool {
    BOOT.get().is_some()
}

/// Returns the simulated time since boot; None outside of a simulation.
pub(crate) fn since_boot() -> Option<Duration> {
    BOOT.get().map(|boot| boot.uptime.saturating_add(boot.at.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{blocking::spawn_blocking, clock::monotonic_ns};

    #[test]
    fn a_simulations_clock_counts_from_its_boot() {
        let uptime = Duration::from_secs(1 << 30);
        let simulated = begin(uptime);
        assert!(is_on() && u128::from(monotonic_ns()) >= uptime.as_nanos());
        drop(simulated);
        assert!(!is_on() && u128::from(monotonic_ns()) < uptime.as_nanos());
    }

    #[tokio::test]
    async fn blocking_work_stays_on_a_simulations_thread() {
        let here = std::thread::current().id();
        let there = || std::thread::current().id();
        assert_ne!(spawn_blocking(there).await.unwrap(), here);
        let _simulated = begin(Duration::ZERO);
        assert_eq!(spawn_blocking(there).await.unwrap(), here);
        assert_eq!(crate::blocking::BlockingTasks::default().run(there).await, here);
    }
}
