//! The one thread that reads the ring buffer and hands typed edges on.
//!
//! It sleeps in poll(2) until the kernel or [`Reader::stop`] wakes it; it never spins. Nothing is lost for good: where an
//! edge could not be delivered (the ring was full, or the channel) it delivers [`Edge::Lost`], and whoever gets that
//! reads the maps again.

use super::bpf_log::BpfLog;
use super::listeners::Listener;
use super::sweep::Sweeper;
use super::{Edge, KernelError};
use aya::maps::{MapData, PerCpuArray, RingBuf};
use beelet_ebpf_abi::{Address, Drops, EventHeader, ListenerEvent, kind};
use crossbeam_channel::{Receiver, Sender, TrySendError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use tokio::sync::Notify;

/// Edges that wait to be read before the reader waits too, and the ring buffer fills instead.
pub(super) const CHANNEL_EDGES: usize = 4096;
/// After so many new listeners the reader looks whether unused addresses fill their map.
const OPENS_PER_SWEEP: u32 = 1024;

/// How often something could not be handed on at once.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// The channel was full.
    pub(super) channel_full: AtomicU64,
}

/// The running reader thread.
#[derive(Debug)]
pub(super) struct Reader {
    thread: Option<JoinHandle<()>>,
    stop_poll: Arc<OwnedFd>,
    /// Dropping it ends a wait for room in the channel.
    stop_send: Option<Sender<()>>,
}

/// Where edges go.
pub(super) struct Outlet {
    pub(super) edges: Sender<Edge>,
    pub(super) wake: Arc<Notify>,
    pub(super) counters: Arc<Counters>,
}

/// What the thread works with.
struct Work {
    ring: RingBuf<MapData>,
    drops: PerCpuArray<MapData, Drops>,
    sweeper: Sweeper,
    log: Option<BpfLog>,
    outlet: Outlet,
    stop_poll: Arc<OwnedFd>,
    stop_send: Receiver<()>,
    seen_drops: Drops,
    /// Listeners opened since the last sweep.
    opened: u32,
}

impl Reader {
    /// Starts the thread. Events that are in the ring already are discarded: the maps say what they led to.
    ///
    /// # Errors
    /// The drop counters can't be read, or no thread or eventfd can be made.
    pub(super) fn start(
        mut ring: RingBuf<MapData>,
        drops: PerCpuArray<MapData, Drops>,
        sweeper: Sweeper,
        log: Option<BpfLog>,
        outlet: Outlet,
    ) -> Result<Reader, KernelError> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            KernelError::new(format!("the reader of kernel events could not start: {what}: {error}"))
        };
        let stop_poll =
            Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed("no eventfd", &error))?);
        let (stop_send, stop_receiver) = crossbeam_channel::bounded(0);
        let seen_drops = sum(&drops)?;
        while ring.next().is_some() {}
        let work = Work {
            ring,
            drops,
            sweeper,
            log,
            outlet,
            stop_poll: Arc::clone(&stop_poll),
            stop_send: stop_receiver,
            seen_drops,
            opened: 0,
        };
        let thread = std::thread::Builder::new()
            .name("kernel-events".to_owned())
            .spawn(move || work.run())
            .map_err(|error| failed("no thread", &error))?;
        Ok(Reader { thread: Some(thread), stop_poll, stop_send: Some(stop_send) })
    }

    /// Ends the thread and waits for it.
    pub(super) fn stop(&mut self) {
        drop(self.stop_send.take());
        if let Err(error) = rustix::io::write(&*self.stop_poll, &1_u64.to_ne_bytes()) {
            tracing::warn!("the reader of kernel events could not be woken to stop: {error}");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the reader of kernel events had panicked");
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Work {
    fn run(mut self) {
        loop {
            if !self.drain() {
                return;
            }
            if let Some(log) = &mut self.log {
                log.flush();
            }
            let mut fds = vec![
                PollFd::from_borrowed_fd(self.stop_poll.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.ring.as_fd(), PollFlags::IN),
            ];
            fds.extend(self.log.iter().map(|log| PollFd::from_borrowed_fd(log.as_fd(), PollFlags::IN)));
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("no kernel events any more: poll on the ring buffer failed: {error}");
                    let _ = self.outlet.edges.try_send(Edge::Lost); // whoever listens looks once more
                    self.outlet.wake.notify_one();
                    return;
                }
            }
            if !fds[0].revents().is_empty() {
                return;
            }
        }
    }

    /// Hands on what is in the ring; false when it is time to stop.
    fn drain(&mut self) -> bool {
        let mut any = false;
        while let Some(edge) = self.ring.next().map(|record| decode(&record)) {
            let edge = edge.unwrap_or_else(|unknown| {
                // A record of a newer object: the maps have what it says.
                tracing::warn!("an unknown record of kind {unknown} came from the kernel programs");
                Edge::Lost
            });
            any = true;
            self.opened += u32::from(matches!(edge, Edge::ListenerOpened { .. }));
            if !self.send(edge) {
                return false;
            }
        }
        // After the ring: a drop means that it was full, so there was something to read.
        let before = self.seen_drops;
        match sum(&self.drops) {
            Ok(drops) => self.seen_drops = drops,
            Err(error) => tracing::warn!("{error}"),
        }
        // Before anyone is told to read the maps again: they are right when this is done.
        self.sweep(self.seen_drops.addresses_full != before.addresses_full);
        if self.seen_drops != before {
            tracing::warn!(
                "the kernel programs lost something ({:?}); the maps are read again",
                self.seen_drops
            );
            any = true;
            if !self.send(Edge::Lost) {
                return false;
            }
        }
        if any {
            self.outlet.wake.notify_one();
        }
        true
    }

    /// Makes room for new addresses, now and then.
    fn sweep(&mut self, full: bool) {
        if self.opened < OPENS_PER_SWEEP && !full {
            return;
        }
        self.opened = 0;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now_ns =
            u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0);
        match self.sweeper.sweep(now_ns, full) {
            Ok(0) => {}
            Ok(removed) => tracing::info!("removed {removed} addresses that nobody listens on any more"),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Hands one edge on. If there is no room, counts that and waits for room for one [`Edge::Lost`] in its place;
    /// meanwhile the ring buffer fills, and beyond that the programs count drops.
    fn send(&self, edge: Edge) -> bool {
        match self.outlet.edges.try_send(edge) {
            Ok(()) => true,
            Err(TrySendError::Disconnected(_)) => false,
            Err(TrySendError::Full(_)) => {
                self.outlet.counters.channel_full.fetch_add(1, Ordering::Relaxed);
                self.outlet.wake.notify_one();
                crossbeam_channel::select! {
                    send(self.outlet.edges, Edge::Lost) -> sent => sent.is_ok(),
                    recv(self.stop_send) -> _ => false,
                }
            }
        }
    }
}

/// All drops of all CPUs.
pub(super) fn sum(drops: &PerCpuArray<MapData, Drops>) -> Result<Drops, KernelError> {
    let values = drops.get(&0, 0).map_err(|error| KernelError::map("DROPS", &error))?;
    Ok(values.iter().fold(Drops::default(), |sum, cpu| Drops {
        ring_full: sum.ring_full + cpu.ring_full,
        listeners_full: sum.listeners_full + cpu.listeners_full,
        addresses_full: sum.addresses_full + cpu.addresses_full,
    }))
}

/// Reads one record; `Err` with the kind of one that this version doesn't know, or that is too short for its kind.
fn decode(record: &[u8]) -> Result<Edge, u32> {
    let mut bytes = Bytes(record);
    let header = EventHeader {
        kind: bytes.u32().unwrap_or(0),
        cpu: bytes.u32().unwrap_or(0),
        at_ns: bytes.u64().unwrap_or(0),
        cgroup_id: bytes.u64().unwrap_or(0),
    };
    match header.kind {
        kind::LISTENER_OPENED | kind::LISTENER_CLOSED => {
            let event = listener_event(header, &mut bytes).ok_or(header.kind)?;
            let listener = Listener::new(event.cookie, &event.address, header.cgroup_id, event.since_ns);
            let at_ns = header.at_ns;
            Ok(if header.kind == kind::LISTENER_OPENED {
                Edge::ListenerOpened { listener, at_ns }
            } else {
                Edge::ListenerClosed { listener, at_ns }
            })
        }
        unknown => Err(unknown),
    }
}

fn listener_event(header: EventHeader, bytes: &mut Bytes<'_>) -> Option<ListenerEvent> {
    Some(ListenerEvent {
        header,
        cookie: bytes.u64()?,
        since_ns: bytes.u64()?,
        address: Address {
            netns_cookie: bytes.u64()?,
            address: bytes.take()?,
            port: u16::from_ne_bytes(bytes.take()?),
            family: u16::from_ne_bytes(bytes.take()?),
            dual_stack: bytes.u32()?,
        },
    })
}

/// Takes fields off the front of a record.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(kind: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(3_u32.to_ne_bytes());
        for word in [1000_u64, 42, 77, 900, 5] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend([127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(8080_u16.to_ne_bytes());
        bytes.extend(2_u16.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        assert_eq!(bytes.len(), size_of::<ListenerEvent>());
        bytes
    }

    #[test]
    fn a_record_becomes_an_edge() {
        let listener = Listener {
            cookie: 77,
            netns_cookie: 5,
            family: 2,
            address: "127.0.0.1".parse().unwrap(),
            port: 8080,
            dual_stack: false,
            cgroup_id: 42,
            since_ns: 900,
        };
        let opened = Edge::ListenerOpened { listener: listener.clone(), at_ns: 1000 };
        assert_eq!(decode(&record(kind::LISTENER_OPENED)), Ok(opened));
        assert_eq!(
            decode(&record(kind::LISTENER_CLOSED)),
            Ok(Edge::ListenerClosed { listener, at_ns: 1000 })
        );
        assert_eq!(decode(&record(99)), Err(99));
        assert_eq!(decode(&record(kind::LISTENER_OPENED)[..71]), Err(kind::LISTENER_OPENED));
        assert_eq!(decode(&[]), Err(0));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes);
        }
    }
}
