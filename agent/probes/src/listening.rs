//! Checks TCP ports with the kernel: looks up all due probes together, and the probes of an edge at once.
//!
//! An edge is a hint, never a verdict: its address is looked up on arrival, so that a listener that closed
//! and opened again, was one of several, or never began to listen is seen in its current state.

use std::{net::IpAddr, sync::Arc, time::Duration};

use beelet_policy::probe::{
    Outcome, ProbeKind,
    listener::{Queues, Sighting, Verdict},
};
use tracing::{debug, info};

use super::{
    answer::Answer,
    ids::Id,
    manager::{Probes, Purpose, monotonic},
    worker::{Hint, Worker, now},
};
use beelet_bpf::{AcceptQueues, CheckedNetns, Edge, Found, Listener};

/// Time to the first recheck if the socket table doesn't show yet what an edge announced; it doubles for each
/// further one, over a second in total. The caller of listen() may lose the CPU in the middle of the call,
/// and to a quota for a tenth of a second.
const RECHECK: Duration = Duration::from_millis(1);
const RECHECKS: u8 = 10;
/// Wait of liveness and startup probes before a listener's end counts: an exiting process closes its
/// listeners before its exit can be known.
const EXIT_KNOWN: Duration = Duration::from_millis(100);
/// Time to the first recheck of a queue that isn't empty; it doubles for each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Result of a lookup at a probe's address.
pub(super) enum Lookup {
    /// No socket listens.
    Absent,
    /// A socket listens.
    Listening(AcceptQueues),
    /// Unknown, with the reason as a sentence.
    Unknown(String),
}

impl Lookup {
    /// Converts the result of a lookup by itself.
    pub(super) fn of(found: Found) -> Self {
        match found {
            Found::Listener(queues) => Self::Listening(queues),
            _ => Self::Absent,
        }
    }

    pub(super) fn sighting(&self) -> Option<Sighting> {
        match self {
            Self::Absent => Some(Sighting::Absent),
            Self::Listening(queues) => Some(Sighting::Listening(judged(queues))),
            Self::Unknown(_) => None,
        }
    }
}

/// Returns the fields of the queues that are judged.
fn judged(queues: &AcceptQueues) -> Queues {
    Queues { listeners: queues.listeners, waiting: queues.waiting, full: queues.full, heads: queues.heads }
}

impl Probes {
    /// Checks the ports of these probes, and records the results.
    pub(super) async fn poll(&mut self, ids: &[Id]) {
        if ids.is_empty() {
            return;
        }
        let started = now();
        let lookups = self.lookups(ids);
        let looked = now();
        let latency = looked.saturating_sub(started) / u32::try_from(ids.len()).unwrap_or(1).max(1);
        for (id, lookup) in ids.iter().copied().zip(lookups) {
            if self.goes_on(id, &lookup, looked, latency) {
                continue;
            }
            if self.workers.get(id).is_some_and(|worker| worker.edge.is_some()) {
                self.settle_edge(id, &lookup).await;
            } else {
                self.settle(id, &lookup, looked, latency).await;
            }
        }
    }

    /// Returns true if a steady probe succeeded again; then the check is counted, and nothing else is to be
    /// done.
    fn goes_on(&mut self, id: Id, lookup: &Lookup, at: Duration, latency: Duration) -> bool {
        let Lookup::Listening(queues) = lookup else { return false };
        let queues = judged(queues);
        if !queues.has_empty() || queues.are_full() {
            return false;
        }
        let Some(hot) = self.workers.steady_mut(id) else { return false };
        hot.looked = (at, latency);
        hot.tally.count(Outcome::Success, latency);
        true
    }

    /// Settles a regular check.
    async fn settle(&mut self, id: Id, lookup: &Lookup, at: Duration, latency: Duration) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some((_, port)) = worker.in_kernel() else { return };
        let Some(sighting) = lookup.sighting() else {
            // The kernel can't say: the probe connects instead.
            if !worker.may_ask(at) {
                return;
            }
            debug!(pod = %worker.name, port, "the kernel can't check for a listener; the probe connects");
            self.launch(id, Purpose::Instead);
            return;
        };
        let (verdict, would_fail) = worker.judge(at, sighting);
        if would_fail {
            self.parts.metrics.tolerated.inc();
            info!(pod = %worker.name, container = %worker.key.container, kind = worker.key.kind.name(), port,
                "connections wait and the application accepts none; `stalled=fail` would fail this probe");
        }
        if verdict == Verdict::NotListening && !worker.has_seen_listener {
            if worker.may_ask(at) {
                self.launch(id, Purpose::Confirm);
            }
            return;
        }
        if let Verdict::Pending { until } = verdict {
            let waited = at.saturating_add(worker.timeout).saturating_sub(until);
            let again = at.saturating_add(FIRST_PAUSE.max(waited)).min(until);
            let again = worker.hot.due.map_or(again, |due| due.min(again));
            self.timetable.set(id, &mut worker.hot.due, again);
            return;
        }
        self.record(id, &answer(verdict, port), latency).await;
        if verdict == Verdict::Listening {
            self.workers.succeeded(id, at);
        }
    }

    /// Looks up the addresses of these probes, in order.
    pub(super) fn lookups(&self, ids: &[Id]) -> Vec<Lookup> {
        let target = |id: &Id| {
            let worker = self.workers.get(*id)?;
            worker.hot.steady.or_else(|| worker.place())
        };
        let targets: Vec<_> = ids.iter().map(target).collect();
        let asked: Vec<_> = targets.iter().copied().flatten().collect();
        let mut found = match self.parts.checker.as_ref().map(|checker| checker.lookup(&asked)) {
            Some(Ok(found)) => found.into_iter(),
            Some(Err(error)) => {
                debug!(%error, "cannot look up listeners; sock_diag confirms them");
                Vec::new().into_iter()
            }
            None => Vec::new().into_iter(),
        };
        let mut lookups = Vec::with_capacity(ids.len());
        for (id, target) in ids.iter().zip(targets) {
            let found = if target.is_some() { found.next() } else { None };
            lookups.push(match found {
                Some(Found::Listener(queues)) => Lookup::Listening(queues),
                other => self.without_a_listener(*id, other),
            });
        }
        lookups
    }

    /// Returns the result for a probe's address if a lookup `found` no listener, or could not be made.
    fn without_a_listener(&self, id: Id, found: Option<Found>) -> Lookup {
        let Some(worker) = self.workers.get(id) else {
            return Lookup::Unknown("the probe was removed".to_owned());
        };
        match (found, worker.in_kernel(), worker.ip) {
            (Some(_), Some((netns, port)), Some(ip)) => self.second_opinion(netns, port, ip),
            (None, Some((netns, port)), Some(ip)) => by_sock_diag(netns, port, ip),
            (_, _, None) => Lookup::Unknown("the pod has no address yet".to_owned()),
            (_, None, _) => Lookup::Unknown("the kernel doesn't answer this probe".to_owned()),
        }
    }

    /// Confirms a lookup without a result: the lookup misses a listener bound to a device, and our own table
    /// lacks one that existed before us, or was opened while the table was full. The namespace's socket list
    /// decides before the probe fails. Without such a list, the lookup and the table decide.
    fn second_opinion(&self, netns: &Arc<CheckedNetns>, port: u16, ip: IpAddr) -> Lookup {
        let why = match by_sock_diag(netns, port, ip) {
            Lookup::Unknown(why) => why,
            known => return known,
        };
        let cookie = netns.handle().cookie();
        let in_table = self.parts.listeners.as_ref().map(|table| table.is_listening(cookie, port, &[ip]));
        match in_table {
            Some(Ok(Some(_))) => Lookup::Unknown(why),
            _ => Lookup::Absent,
        }
    }

    pub(super) async fn drain_edges(&mut self) {
        while let Some(edge) = self.parts.edges.try_recv() {
            match edge {
                Edge::ListenerOpened { listener, at_ns } => {
                    self.on_edge(&listener, Hint::Opened, at_ns).await;
                }
                Edge::ListenerClosed { listener, at_ns } => {
                    self.on_edge(&listener, Hint::Closed(listener.cookie), at_ns).await;
                }
                Edge::Lost => self.recheck_all(),
                // Edges for other parts.
                _ => {}
            }
        }
    }

    /// Handles the opening or closing of a listener anywhere on the machine.
    async fn on_edge(&mut self, listener: &Listener, hint: Hint, at_ns: u64) {
        let ids = self.probes_at(listener.netns_cookie, listener.port);
        let ids: Vec<Id> = ids
            .into_iter()
            .filter(|id| self.workers.get(*id).is_some_and(|worker| reaches(listener, worker.ip)))
            .collect();
        if ids.is_empty() {
            return;
        }
        for id in &ids {
            if let Some(worker) = self.workers.get_mut(*id) {
                worker.edge = Some((hint, at_ns));
                worker.rechecks = 0;
                // Port 0 is that of a listener whose port is not known (`probes_at`).
                worker.has_seen_listener |= listener.port != 0;
            }
        }
        let lookups = self.lookups(&ids);
        for (id, lookup) in ids.into_iter().zip(lookups) {
            self.settle_edge(id, &lookup).await;
        }
    }

    /// Judges an edge by the current state.
    async fn settle_edge(&mut self, id: Id, lookup: &Lookup) {
        let now = now();
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some((hint, at_ns)) = worker.edge.filter(|_| worker.in_kernel().is_some()) else { return };
        worker.has_seen_listener |= matches!(lookup, Lookup::Listening(_));
        let listening = match (hint, lookup) {
            (Hint::Opened | Hint::Missed, Lookup::Listening(_)) => true,
            // An exiting process closes its listeners first. The probe waits, and does not fail for that: the
            // exit is known by then.
            (Hint::Closed(_) | Hint::Missed, Lookup::Absent) if worker.key.kind != ProbeKind::Readiness => {
                worker.edge = Some((Hint::Gone, at_ns));
                self.timetable.set(id, &mut worker.hot.due, now + EXIT_KNOWN);
                return;
            }
            // A listener that the kernel has never had can't have closed: a connection decides.
            (Hint::Closed(_) | Hint::Missed | Hint::Gone, Lookup::Absent) if !worker.has_seen_listener => {
                if !worker.in_flight {
                    self.launch(id, Purpose::Confirm);
                }
                return;
            }
            (Hint::Closed(_) | Hint::Missed | Hint::Gone, Lookup::Absent) => false,
            // The socket table is about to show the change, so check again in a moment. Or our table is ahead
            // of it, and the socket list is unavailable (a kernel without tcp_diag).
            (Hint::Opened, Lookup::Absent) | (_, Lookup::Unknown(_)) if worker.rechecks < RECHECKS => {
                return self.recheck(id, now);
            }
            (Hint::Closed(cookie), Lookup::Listening(queues))
                if queues.cookie == cookie && worker.rechecks < RECHECKS =>
            {
                return self.recheck(id, now);
            }
            (_, Lookup::Unknown(_)) => {
                worker.edge = None;
                if !worker.in_flight {
                    self.launch(id, Purpose::Instead);
                }
                return;
            }
            // Another listener exists; or the new one has closed again, which the next edge announces.
            _ => {
                worker.edge = None;
                if matches!(hint, Hint::Closed(_) | Hint::Gone) {
                    // The closed listener's waiting connections ended with it.
                    worker.hot.queues.reset();
                }
                return;
            }
        };
        if let Some(sighting) = lookup.sighting() {
            // Records waiting connections, and drops those of a closed listener.
            worker.hot.queues.judge(now, worker.timeout, sighting);
        }
        self.judge_edge(id, listening).await;
    }

    /// Judges the edge of a probe, now that it is known whether the port has a listener.
    pub(super) async fn judge_edge(&mut self, id: Id, listening: bool) {
        let now = now();
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some((_, port)) = worker.in_kernel() else { return };
        let Some((_, at_ns)) = worker.edge.take() else { return };
        let verdict = if listening { Verdict::Listening } else { Verdict::NotListening };
        let answer = answer(verdict, port);
        let latency = Duration::from_nanos(monotonic(now).saturating_sub(at_ns));
        let before = worker.state.published();
        let transition = worker.state.edge(now, listening);
        if worker.state.due(now) || transition.is_some() {
            worker.keep(&answer, latency);
        }
        if let Some(transition) = transition {
            self.parts.metrics.edges.inc();
            if transition.result != before {
                self.record_event(id, &answer);
            }
            self.send(id, transition, Some(at_ns)).await;
        }
    }

    fn recheck(&mut self, id: Id, now: Duration) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let pause = RECHECK * (1 << worker.rechecks);
        worker.rechecks += 1;
        self.timetable.set(id, &mut worker.hot.due, now.saturating_add(pause));
    }

    /// Returns the probes that the kernel answers for a port of a network namespace. Port 0 stands for all
    /// ports: a listener from before the programs were attached, whose port the kernel had chosen, has lost
    /// the port by the time its end is sent (tcp_set_state releases the port before the tracepoint).
    fn probes_at(&self, cookie: u64, port: u16) -> Vec<Id> {
        let ports = if port == 0 { 0..=u16::MAX } else { port..=port };
        let found = self.by_port.range((cookie, *ports.start())..=(cookie, *ports.end()));
        found.flat_map(|(_, ids)| ids.iter().copied()).collect()
    }

    /// Checks every probe that the kernel answers, as if an edge had come, because edges were lost.
    fn recheck_all(&mut self) {
        let now = now();
        let looks = |worker: &Worker| worker.in_kernel().is_some() && worker.container_id.is_some();
        let ids: Vec<Id> =
            self.workers.iter().filter(|(_, worker)| looks(worker)).map(|(id, _)| id).collect();
        for id in ids {
            let Some(worker) = self.workers.get_mut(id) else { continue };
            worker.edge = Some((Hint::Missed, monotonic(now)));
            self.timetable.set(id, &mut worker.hot.due, now);
        }
    }
}

/// Looks up a listener in the namespace's socket list.
fn by_sock_diag(netns: &Arc<CheckedNetns>, port: u16, ip: IpAddr) -> Lookup {
    match netns.handle().accept_queues(port, ip) {
        Ok(Some(queues)) => Lookup::Listening(queues),
        Ok(None) => Lookup::Absent,
        Err(error) => Lookup::Unknown(error.to_string()),
    }
}

/// Converts a verdict to an answer. The same verdict always has the same text, so that its events are counted
/// as one.
pub(super) fn answer(verdict: Verdict, port: u16) -> Answer {
    match verdict {
        Verdict::Listening | Verdict::Pending { .. } => {
            Answer::success(format!("the kernel has a listener on port {port}"))
        }
        Verdict::NotListening => Answer::failure(format!("nothing listens on port {port}")),
        Verdict::Stalled { .. } => {
            Answer::failure(format!("connections wait on port {port} and the application accepts none"))
        }
    }
}

/// Returns true if a connection to `ip` would reach the listener. Without an address yet, every listener
/// counts.
fn reaches(listener: &Listener, ip: Option<IpAddr>) -> bool {
    let Some(ip) = ip else { return true };
    match (listener.address, ip) {
        (IpAddr::V4(own), IpAddr::V4(ip)) => own.is_unspecified() || own == ip,
        (IpAddr::V6(own), IpAddr::V6(ip)) => own.is_unspecified() || own == ip,
        (IpAddr::V6(own), IpAddr::V4(ip)) => {
            listener.dual_stack && (own.is_unspecified() || own.to_ipv4_mapped() == Some(ip))
        }
        (IpAddr::V4(_), IpAddr::V6(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_reached_at_its_own_address_or_at_any() {
        let check = |address: &str, dual_stack, ip: Option<&str>, expect| {
            let listener = Listener {
                cookie: 1,
                netns_cookie: 1,
                family: 0,
                address: address.parse().unwrap(),
                port: 80,
                dual_stack,
                cgroup_id: 0,
                since_ns: 0,
            };
            assert_eq!(reaches(&listener, ip.map(|ip| ip.parse().unwrap())), expect, "{address} {ip:?}");
        };
        check("0.0.0.0", false, Some("10.0.0.7"), true);
        check("0.0.0.0", false, Some("fd00::7"), false);
        check("::", true, Some("10.0.0.7"), true);
        check("::", false, Some("10.0.0.7"), false);
        check("::", false, Some("fd00::7"), true);
        check("10.0.0.7", false, Some("10.0.0.7"), true);
        check("::ffff:10.0.0.7", true, Some("10.0.0.7"), true);
        check("127.0.0.1", false, Some("10.0.0.7"), false);
        check("::1", false, Some("fd00::7"), false);
        check("127.0.0.1", false, None, true);
    }
}
