//! The seam between the agent and a simulated machine (docs/decisions/0028-simulation.md).
//!
//! A simulation runs the whole agent on one thread with a paused clock. On such a thread, blocking work
//! becomes a task of the same thread ([`crate::blocking`]), parts with their own thread run as a task, the
//! clocks of [`crate::clock`] follow the paused one, and connections to the API server are the simulated
//! network's. Everywhere else the seam has no effect. Must never change what the agent does, only where the
//! work runs, which clock it reads, and which network carries its bytes.

use std::cell::{Cell, RefCell};
use std::io;
use std::marker::PhantomData;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite};

/// A connection of the simulated network, or the real one in its place.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Opens a connection to a host name or address, e.g. `127.0.0.1`.
type Network = Rc<dyn Fn(&str) -> io::Result<Box<dyn Stream>>>;

thread_local! {
    static BOOT: Cell<Option<Boot>> = const { Cell::new(None) };
    static NETWORK: RefCell<Option<Network>> = const { RefCell::new(None) };
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
        NETWORK.set(None);
    }
}

impl Simulated {
    /// Sets the function that opens the connections of this thread.
    #[must_use]
    pub fn with_network(self, open: impl Fn(&str) -> io::Result<Box<dyn Stream>> + 'static) -> Self {
        NETWORK.set(Some(Rc::new(open)));
        self
    }
}

/// Opens a connection to `host` by the simulated network.
///
/// # Errors
/// The simulated host refuses the connection, or this thread has no network.
pub fn connect(host: &str) -> io::Result<Box<dyn Stream>> {
    let network = NETWORK.with_borrow(Clone::clone);
    network.map_or_else(|| Err(io::ErrorKind::NetworkUnreachable.into()), |open| open(host))
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
