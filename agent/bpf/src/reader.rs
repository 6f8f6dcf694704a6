//! The thread that reads the ring buffer and publishes typed edges.
//!
//! The thread sleeps in poll(2) until the kernel or [`Reader::stop`] wakes it, and never spins. No state is
//! lost permanently: if an edge could not be delivered (the ring or a channel was full), the thread delivers
//! [`Edge::Lost`], and its subscribers read the maps again.

use super::bpf_log::BpfLog;
use super::edges::{Edge, Hub, PressureKind};
use super::listeners::Listener;
use super::pace::{LOSS_PERIOD, PAUSE, RateLimit, WARNING_PERIOD, Wakes};
use super::stale_counters::StaleCounters;
use super::sweep::Sweeper;
use super::{KernelError, monotonic_ns};
use aya::maps::{MapData, PerCpuArray, RingBuf};
use beelet_ebpf_abi::{
    Address, Drops, EventHeader, ExitEvent, ListenerEvent, OomEvent, OomKill, PressureEvent, kind,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::SetOnce;

/// Edges that are sent together: their subscribers are woken once.
const BATCH: usize = 256;
/// New listeners between two checks whether unused addresses fill their map.
const OPENS_PER_SWEEP: u32 = 1024;
/// Process exits after which the reader removes the counters of removed cgroups.
const EXITS_PER_SWEEP: u32 = 256;
/// Time after which the reader removes these counters if fewer processes ended.
const SWEEP_AFTER: Duration = Duration::from_secs(30);

/// The running reader thread.
#[derive(Debug)]
pub(super) struct Reader {
    thread: Option<JoinHandle<()>>,
    stop_poll: Arc<OwnedFd>,
    failed: Arc<SetOnce<String>>,
}

/// State of the thread.
struct Work {
    ring: RingBuf<MapData>,
    drops: PerCpuArray<MapData, Drops>,
    sweeper: Sweeper,
    stale_counters: StaleCounters,
    log: Option<BpfLog>,
    hub: Hub,
    stop_poll: Arc<OwnedFd>,
    /// The drops that subscribers were notified of.
    handled_drops: Drops,
    losses: RateLimit,
    warnings: RateLimit,
    sweeps: RateLimit,
    wakes: Wakes,
    /// Listeners opened since the last sweep.
    opened: u32,
    /// Processes that ended since stale counters were last removed.
    exited: u32,
    /// Deadline of the next removal of stale counters.
    remove_at: Option<Instant>,
}

impl Reader {
    /// Starts the thread. Skips earlier events, in the ring or dropped: the maps have their result.
    ///
    /// # Errors
    /// The drop counters can't be read, or the thread or the eventfd can't be made.
    pub(super) fn start(
        mut ring: RingBuf<MapData>,
        drops: PerCpuArray<MapData, Drops>,
        sweepers: (Sweeper, StaleCounters),
        log: Option<BpfLog>,
        hub: Hub,
    ) -> Result<Reader, KernelError> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            KernelError::new(format!("could not start the reader of kernel events: {what}: {error}"))
        };
        let stop_poll =
            Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed("eventfd", &error))?);
        while ring.next().is_some() {}
        // After the ring, which may have been full: drops until now affect no subscriber, since none exists
        // yet.
        let handled_drops = sum(&drops)?;
        let (sweeper, stale_counters) = sweepers;
        let work = Work {
            ring,
            drops,
            sweeper,
            stale_counters,
            log,
            hub,
            stop_poll: Arc::clone(&stop_poll),
            handled_drops,
            losses: RateLimit::new(LOSS_PERIOD),
            warnings: RateLimit::new(WARNING_PERIOD),
            sweeps: RateLimit::new(LOSS_PERIOD),
            wakes: Wakes::default(),
            opened: 0,
            exited: 0,
            remove_at: None,
        };
        let reason = Arc::new(SetOnce::new());
        let failed_out = Arc::clone(&reason);
        let thread = std::thread::Builder::new()
            .name("kernel-events".to_owned())
            .spawn(move || publish_failure(&failed_out, || work.run()))
            .map_err(|error| failed("thread", &error))?;
        Ok(Reader { thread: Some(thread), stop_poll, failed: reason })
    }

    /// Waits until the thread fails, and returns the reason.
    pub(super) fn failed(&self) -> impl Future<Output = String> + Send + use<> {
        let failed = Arc::clone(&self.failed);
        async move { failed.wait().await.clone() }
    }

    /// Stops the thread and waits for its end.
    pub(super) fn stop(&mut self) {
        if let Err(error) = rustix::io::write(&*self.stop_poll, &1_u64.to_ne_bytes()) {
            tracing::warn!("cannot wake the reader of kernel events to stop it: {error}");
            return;
        }
        if let Some(thread) = self.thread.take() {
            // The thread itself published a panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Publishes the reason for the end of `work`, unless it was stopped.
fn publish_failure(failed: &SetOnce<String>, work: impl FnOnce() -> Result<(), KernelError>) {
    let reason = match std::panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            format!("panicked: {}", text.unwrap_or("no message"))
        }
    };
    // The only thread ends once.
    let _ = failed.set(reason);
}

impl Work {
    /// Runs until stopped; an error is the reason for the end of events.
    fn run(mut self) -> Result<(), KernelError> {
        loop {
            let owes = self.drain();
            if let Some(log) = &mut self.log {
                log.flush();
            }
            let now = Instant::now();
            let mut fds = vec![PollFd::from_borrowed_fd(self.stop_poll.as_fd(), PollFlags::IN)];
            let wait = if self.wakes.are_too_many(now) {
                Some(PAUSE)
            } else {
                fds.push(PollFd::from_borrowed_fd(self.ring.as_fd(), PollFlags::IN));
                fds.extend(self.log.iter().map(|log| PollFd::from_borrowed_fd(log.as_fd(), PollFlags::IN)));
                let owed_at = self.losses.next().filter(|_| owes);
                self.remove_at.into_iter().chain(owed_at).min().map(|at| at.saturating_duration_since(now))
            };
            let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
            match poll(&mut fds, wait.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    return Err(KernelError::io("ended: poll on the ring buffer failed", &error.into()));
                }
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
        }
    }

    /// Publishes the events in the ring. Returns true if subscribers are still to be notified of a loss.
    fn drain(&mut self) -> bool {
        let mut batch = Vec::new();
        while let Some(edge) = self.ring.next().map(|record| decode(&record)) {
            let edge = edge.unwrap_or_else(|unknown| {
                // A record of a newer object: the maps have its content.
                tracing::warn!("unknown record kind from the kernel programs: {unknown}");
                Edge::Lost
            });
            self.opened += u32::from(matches!(edge, Edge::ListenerOpened { .. }));
            self.exited += u32::from(matches!(edge, Edge::ContainerExited { .. }));
            batch.push(edge);
            if batch.len() == BATCH {
                self.hub.send(&batch);
                batch.clear();
            }
        }
        self.hub.send(&batch);
        // After the ring: a drop means that it was full, so there was something to read.
        let before = self.handled_drops;
        let seen = sum(&self.drops).unwrap_or_else(|error| {
            tracing::warn!("{error}");
            before
        });
        let is_due = seen != before && self.losses.is_due(Instant::now());
        let new = if is_due { seen } else { before };
        // Before subscribers read the maps again: they are right when this is done.
        self.sweep(new.addresses_full != before.addresses_full);
        self.remove_stale_counters(new.containers_full != before.containers_full);
        if is_due {
            if self.warnings.is_due(Instant::now()) {
                tracing::warn!(
                    "the kernel programs lost events, which are read from the maps instead; totals: {new:?}"
                );
            }
            self.handled_drops = new;
        }
        let edges = |drops: Drops| (drops.ring_full, drops.listeners_full, drops.addresses_full);
        if edges(new) != edges(before) {
            self.hub.send(&[Edge::Lost]);
        }
        seen != new
    }

    /// Removes the counters of removed cgroups after enough processes have ended, or some time after the
    /// first exit.
    fn remove_stale_counters(&mut self, full: bool) {
        if self.exited == 0 && !full && self.remove_at.is_none() {
            return;
        }
        let now = Instant::now();
        let at = *self.remove_at.get_or_insert(now + SWEEP_AFTER);
        if self.exited < EXITS_PER_SWEEP && now < at && !full {
            return;
        }
        // A cgroup found removed for the first time loses its counters the next time, so schedule one.
        self.remove_at = (self.exited > 0).then_some(now + SWEEP_AFTER);
        self.exited = 0;
        match self.stale_counters.sweep(full) {
            Ok(0) => {}
            Ok(removed) => tracing::debug!("freed the counters of {removed} removed cgroups"),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Removes unused addresses, once per period at most.
    fn sweep(&mut self, full: bool) {
        if !full && (self.opened < OPENS_PER_SWEEP || !self.sweeps.is_due(Instant::now())) {
            return;
        }
        self.opened = 0;
        match self.sweeper.sweep(monotonic_ns(), full) {
            Ok(0) => {}
            Ok(removed) => tracing::info!("removed {removed} addresses without listeners"),
            Err(error) if self.warnings.is_due(Instant::now()) => tracing::warn!("{error}"),
            Err(error) => tracing::debug!("{error}"),
        }
    }
}

/// Returns the drops summed over all CPUs.
pub(super) fn sum(drops: &PerCpuArray<MapData, Drops>) -> Result<Drops, KernelError> {
    let values = drops.get(&0, 0).map_err(|error| KernelError::map("DROPS", &error))?;
    Ok(values.iter().fold(Drops::default(), |sum, cpu| Drops {
        ring_full: sum.ring_full + cpu.ring_full,
        listeners_full: sum.listeners_full + cpu.listeners_full,
        addresses_full: sum.addresses_full + cpu.addresses_full,
        containers_full: sum.containers_full + cpu.containers_full,
        tasks_full: sum.tasks_full + cpu.tasks_full,
    }))
}

/// Decodes one record. `Err` has the record's kind if this version does not know it, or if the record is too
/// short for it.
pub fn decode(record: &[u8]) -> Result<Edge, u32> {
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
        kind::EXITED => exit_event(header, &mut bytes).map(|event| exited(&event)).ok_or(header.kind),
        kind::OOM_KILL => oom_event(header, &mut bytes).map(|event| oom_kill(&event)).ok_or(header.kind),
        kind::PRESSURE => {
            pressure_event(header, &mut bytes).and_then(|event| pressure_edge(&event)).ok_or(header.kind)
        }
        unknown => Err(unknown),
    }
}

fn exited(event: &ExitEvent) -> Edge {
    // wait(2): the signal, or 0, in seven bits; then the core-file flag; then the exit code.
    let signal = event.status & 0x7f;
    let code = if signal == 0 { (event.status >> 8) & 0xff } else { 0 };
    let EventHeader { at_ns, cgroup_id, .. } = event.header;
    Edge::ContainerExited { cgroup_id, pid: event.pid, own_pid: event.own_pid, code, signal, at_ns }
}

fn oom_kill(event: &OomEvent) -> Edge {
    let EventHeader { at_ns, cgroup_id, .. } = event.header;
    Edge::OomKill { cgroup_id, kill: event.kill.in_bytes(rustix::param::page_size() as u64), at_ns }
}

fn pressure_edge(event: &PressureEvent) -> Option<Edge> {
    let EventHeader { at_ns, cgroup_id, .. } = event.header;
    let kind = PressureKind::from_abi(event.pressure)?;
    Some(Edge::Pressure { cgroup_id, kind, above: event.above != 0, value: event.waited_ns, at_ns })
}

fn exit_event(header: EventHeader, bytes: &mut Bytes<'_>) -> Option<ExitEvent> {
    let (pid, own_pid) = (bytes.u32()?, bytes.u32()?);
    Some(ExitEvent { header, pid, own_pid, status: bytes.u32()?, reserved: bytes.u32()? })
}

fn oom_event(header: EventHeader, bytes: &mut Bytes<'_>) -> Option<OomEvent> {
    let kill = OomKill {
        pid: bytes.u32()?,
        reserved: bytes.u32()?,
        total_vm: bytes.u64()?,
        anon_rss: bytes.u64()?,
        file_rss: bytes.u64()?,
        shmem_rss: bytes.u64()?,
    };
    Some(OomEvent { header, kill })
}

fn pressure_event(header: EventHeader, bytes: &mut Bytes<'_>) -> Option<PressureEvent> {
    let (pressure, above) = (bytes.u32()?, bytes.u32()?);
    Some(PressureEvent { header, pressure, above, waited_ns: bytes.u64()? })
}

fn listener_event(header: EventHeader, bytes: &mut Bytes<'_>) -> Option<ListenerEvent> {
    Some(ListenerEvent {
        header,
        cookie: bytes.u64()?,
        since_ns: bytes.u64()?,
        address: Address {
            netns_cookie: bytes.u64()?,
            address: bytes.split()?,
            port: u16::from_ne_bytes(bytes.split()?),
            family: u16::from_ne_bytes(bytes.split()?),
            dual_stack: bytes.u32()?,
        },
    })
}

/// Splits fields off the front of a record.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn split<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.split().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.split().map(u64::from_ne_bytes)
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
    fn a_thread_that_fails_publishes_the_reason() {
        let check = |work: fn() -> Result<(), KernelError>, expected: Option<&str>| {
            let failed = SetOnce::new();
            publish_failure(&failed, work);
            assert_eq!(failed.get().map(String::as_str), expected);
        };
        check(|| Ok(()), None);
        check(|| Err(KernelError::new("ended: poll")), Some("ended: poll"));
        check(|| std::panic::panic_any("an invalid slot"), Some("panicked: an invalid slot"));
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

    fn words(kind: u32, after_header: &[u32]) -> Vec<u8> {
        let mut bytes = record(kind)[..24].to_vec();
        for word in after_header {
            bytes.extend(word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn an_exit_has_a_code_or_a_signal() {
        let check = |status: u32, code: u32, signal: u32| {
            let edge =
                Edge::ContainerExited { cgroup_id: 42, pid: 700, own_pid: 1, code, signal, at_ns: 1000 };
            assert_eq!(decode(&words(kind::EXITED, &[700, 1, status, 0])), Ok(edge), "{status:#x}");
        };
        check(0, 0, 0);
        check(0x0300, 3, 0);
        check(0xff00, 255, 0);
        check(9, 0, 9);
        check(0x8b, 0, 11); // with a core file
        assert_eq!(decode(&words(kind::EXITED, &[700, 1, 0])), Err(kind::EXITED));
    }

    #[test]
    fn an_oom_kill_has_the_memory_of_the_process() {
        let page = rustix::param::page_size() as u64;
        let edge = Edge::OomKill {
            cgroup_id: 42,
            kill: OomKill {
                pid: 700,
                reserved: 0,
                total_vm: 4 * page,
                anon_rss: 3 * page,
                file_rss: 2 * page,
                shmem_rss: page,
            },
            at_ns: 1000,
        };
        let record = words(kind::OOM_KILL, &[700, 0, 4, 0, 3, 0, 2, 0, 1, 0]);
        assert_eq!(decode(&record), Ok(edge));
        assert_eq!(decode(&record[..63]), Err(kind::OOM_KILL));
    }

    #[test]
    fn pressure_has_a_kind_and_a_direction() {
        let edge = |kind, above| Edge::Pressure { cgroup_id: 42, kind, above, value: 5, at_ns: 1000 };
        let record = |pressure, above| words(kind::PRESSURE, &[pressure, above, 5, 0]);
        assert_eq!(decode(&record(0, 1)), Ok(edge(PressureKind::RunQueue, true)));
        assert_eq!(decode(&record(1, 0)), Ok(edge(PressureKind::Reclaim, false)));
        assert_eq!(decode(&record(2, 0)), Err(kind::PRESSURE));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes);
        }
    }
}
