//! Verdicts of a tcpSocket probe from the kernel's view of a port: listening, not listening, or stalled.
//!
//! A connect() succeeds while the accept queue has room, even if the application hangs. The kernel mode reads
//! the queue itself and can distinguish a listener that accepts its connections from one that lets them wait.
//! Must never call a listener stalled that is only slow: connections must have waited for the whole of the
//! probe's timeout without one accept, or the queue must be full (then the kernel drops handshakes and
//! connect() would fail too).
//!
//! A probe chooses by its [`QueueRule`] which of both fails it. Under `Room` it fails exactly where connect()
//! would.
//!
//! In a `SO_REUSEPORT` group each member has a queue of its own, and the kernel picks one of them for a new
//! connection by its address. The group is stalled only if every member is; a member with an empty queue has
//! done its work.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The accept queues of all sockets that listen at one address, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queues {
    /// Number of listeners: one, or the members of a `SO_REUSEPORT` group.
    pub listeners: u32,
    /// Number of listeners with a waiting connection.
    pub waiting: u32,
    /// Number of listeners that accept no more connections (`sk_ack_backlog > sk_max_ack_backlog`,
    /// `sk_acceptq_is_full` in include/net/sock.h).
    pub full: u32,
    /// Identity of the connections at the heads of the queues. Any accept changes it; 0 if the kernel cannot
    /// provide it.
    pub heads: u64,
}

impl Queues {
    /// Returns true if some queue is empty, so that a new connection is accepted at once.
    #[must_use]
    pub const fn has_empty(&self) -> bool {
        self.waiting < self.listeners || self.waiting == 0
    }

    /// Returns true if every queue is full.
    #[must_use]
    pub const fn are_full(&self) -> bool {
        self.listeners > 0 && self.full >= self.listeners
    }
}

/// The state of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sighting {
    /// No socket listens.
    Absent,
    /// At least one socket listens.
    Listening(Queues),
}

/// The meaning of a sighting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// The application accepts connections.
    Listening,
    /// The kernel would refuse connections.
    NotListening,
    /// Connections wait without being accepted.
    Stalled {
        /// Time since which no accept has been seen.
        since: Duration,
    },
    /// Connections wait; the next check decides whether the application accepts them.
    Pending {
        /// Latest time for the next check.
        until: Duration,
    },
}

/// The state of the accept queues that fails a probe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueueRule {
    /// A full queue, or connections that waited for the probe's timeout without one accept: a stalled
    /// listener fails.
    #[default]
    #[serde(rename = "fail")]
    Accepted,
    /// A full queue alone, as with connect(): a stalled listener passes.
    #[serde(rename = "pass")]
    Room,
}

/// The connections at the heads of an address's accept queues, from one check to the next.
///
/// ```
/// use std::time::Duration;
/// use beelet_policy::probe::listener::{Queues, QueueWatch, Sighting, Verdict};
///
/// let (second, mut watch) = (Duration::from_secs, QueueWatch::default());
/// let waits = Sighting::Listening(Queues { listeners: 1, waiting: 1, full: 0, heads: 7 });
/// assert_eq!(watch.judge(second(10), second(1), waits), Verdict::Pending { until: second(11) });
/// assert_eq!(watch.judge(second(11), second(1), waits), Verdict::Stalled { since: second(10) });
/// let moved = Sighting::Listening(Queues { listeners: 1, waiting: 1, full: 0, heads: 8 });
/// assert_eq!(watch.judge(second(20), second(1), moved), Verdict::Listening);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueWatch {
    /// The heads when first seen, and the time.
    held: Option<(u64, Duration)>,
    rule: QueueRule,
}

impl QueueWatch {
    /// Returns a watch that has seen nothing and judges by `rule`.
    #[must_use]
    pub const fn new(rule: QueueRule) -> Self {
        Self { held: None, rule }
    }

    /// Judges one check. `timeout` is the probe's.
    pub fn judge(&mut self, now: Duration, timeout: Duration, seen: Sighting) -> Verdict {
        let strict = self.judge_strictly(now, timeout, seen);
        let is_full = matches!(seen, Sighting::Listening(queues) if queues.are_full());
        match strict {
            Verdict::Stalled { .. } | Verdict::Pending { .. } if self.rule == QueueRule::Room && !is_full => {
                Verdict::Listening
            }
            verdict => verdict,
        }
    }

    /// Returns true if the last check found connections that had waited for `timeout` without one accept:
    /// [`QueueRule::Accepted`] fails the probe then.
    #[must_use]
    pub fn is_stalled(&self, now: Duration, timeout: Duration) -> bool {
        self.held.is_some_and(|(heads, since)| heads != 0 && now >= since.saturating_add(timeout))
    }

    fn judge_strictly(&mut self, now: Duration, timeout: Duration, seen: Sighting) -> Verdict {
        let queues = match seen {
            Sighting::Absent => {
                self.held = None;
                return Verdict::NotListening;
            }
            Sighting::Listening(queues) => queues,
        };
        if queues.are_full() {
            let since = match self.held {
                Some((heads, since)) if heads == queues.heads => since,
                _ => now,
            };
            self.held = Some((queues.heads, since));
            return Verdict::Stalled { since };
        }
        if queues.has_empty() {
            self.held = None;
            return Verdict::Listening;
        }
        match self.held {
            // Without the heads' identity, an equal length of a queue proves nothing.
            _ if queues.heads == 0 => Verdict::Listening,
            Some((heads, since)) if heads == queues.heads => {
                let until = since.saturating_add(timeout);
                if now >= until { Verdict::Stalled { since } } else { Verdict::Pending { until } }
            }
            // An accept happened since the last check, as the probe requires.
            Some(_) => {
                self.held = Some((queues.heads, now));
                Verdict::Listening
            }
            None => {
                self.held = Some((queues.heads, now));
                Verdict::Pending { until: now.saturating_add(timeout) }
            }
        }
    }

    /// Returns true if a connection waited in every queue when last seen.
    #[must_use]
    pub const fn has_waiting(&self) -> bool {
        self.held.is_some()
    }

    /// Drops the state for a new container.
    pub fn reset(&mut self) {
        self.held = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Plays checks, one per second, at a probe with a timeout of two seconds. A check is `-` (absent), or
    /// listeners, waiting, full and heads as four digits. Expectation: `L`, `N`, `S<since>` or `P<until>`.
    fn check(checks: &str, expectation: &str) {
        check_by(QueueRule::Accepted, checks, expectation);
    }

    /// The same by `rule`. A `!` follows a verdict if the strict rule calls the listener stalled.
    fn check_by(rule: QueueRule, checks: &str, expectation: &str) {
        let mut watch = QueueWatch::new(rule);
        let verdicts: Vec<String> = checks
            .split_whitespace()
            .enumerate()
            .map(|(second, check)| {
                let digit = |at: usize| u32::from(check.as_bytes()[at] - b'0');
                let seen = match check {
                    "-" => Sighting::Absent,
                    _ => Sighting::Listening(Queues {
                        listeners: digit(0),
                        waiting: digit(1),
                        full: digit(2),
                        heads: digit(3).into(),
                    }),
                };
                let (now, timeout) = (Duration::from_secs(second as u64), Duration::from_secs(2));
                let verdict = match watch.judge(now, timeout, seen) {
                    Verdict::Listening => "L".to_owned(),
                    Verdict::NotListening => "N".to_owned(),
                    Verdict::Stalled { since } => format!("S{}", since.as_secs()),
                    Verdict::Pending { until } => format!("P{}", until.as_secs()),
                };
                let is_tolerated = rule == QueueRule::Room && watch.is_stalled(now, timeout);
                verdict + if is_tolerated { "!" } else { "" }
            })
            .collect();
        assert_eq!(verdicts.join(" "), expectation, "{checks}");
    }

    #[test]
    fn an_empty_queue_is_listening_and_a_missing_listener_is_not() {
        check("1000 - 1000", "L N L");
    }

    #[test]
    fn connections_unaccepted_for_the_timeout_stall_the_listener() {
        check("1101 1101 1101 1101", "P2 P2 S0 S0");
        check("1101 1101 1101 1000", "P2 P2 S0 L");
    }

    #[test]
    fn an_accept_restarts_the_wait() {
        check("1101 1102 1102 1102", "P2 L P3 S1");
        check("1101 1102 1103 1104", "P2 L L L");
    }

    #[test]
    fn under_the_rule_of_room_only_a_full_queue_or_no_listener_fails() {
        let check = |checks, expectation| check_by(QueueRule::Room, checks, expectation);
        check("1101 1101 1101 1101 1102", "L L L! L! L");
        check("1101 1101 1101 1111 1000", "L L L! S0! L");
        check("1111 1112 - 1000", "S0 S1 N L");
        check("2201 2201 2201 2221", "L L L! S0!");
    }

    #[test]
    fn a_full_queue_is_stalled_at_once() {
        check("1111 1111 1112 1000", "S0 S0 S2 L");
        check("1101 1111", "P2 S0");
    }

    #[test]
    fn a_group_is_stalled_only_if_all_its_members_are() {
        check("2101 2101 2101 2101", "L L L L");
        check("2201 2201 2201", "P2 P2 S0");
        check("2211 2211 2211", "P2 P2 S0");
        check("2221 2111", "S0 L");
    }

    #[test]
    fn without_the_heads_identity_only_a_full_queue_is_stalled() {
        check("1100 1100 1100 1110", "L L L S3");
    }

    #[test]
    fn a_closed_listener_ends_the_wait() {
        check("1101 - 1101 1101 1101", "P2 N P4 P4 S2");
    }

    proptest! {
        /// Under `Room` a check fails exactly if nothing listens or every queue is full, with any history.
        #[test]
        fn room_judges_each_look_alone(steps in prop::collection::vec((0..3_u32, 0..3_u32, 0..3_u32, 0..3_u64, 0..5000_u64), 1..50)) {
            let mut watch = QueueWatch::new(QueueRule::Room);
            let mut now = 0;
            for (listeners, waiting, full, heads, millis) in steps {
                now += millis;
                let queues = Queues { listeners, waiting: waiting.min(listeners), full: full.min(listeners), heads };
                let seen = if listeners == 0 { Sighting::Absent } else { Sighting::Listening(queues) };
                let verdict = watch.judge(Duration::from_millis(now), Duration::from_secs(1), seen);
                let passes = listeners > 0 && !queues.are_full();
                prop_assert_eq!(verdict == Verdict::Listening, passes);
                let is_pending = matches!(verdict, Verdict::Pending { .. });
                prop_assert!(!is_pending);
            }
        }

        /// A listener is never stalled while its heads change within the timeout and its queue is not full.
        #[test]
        fn no_stall_while_connections_are_taken(steps in prop::collection::vec((1..1_000_000_u64, 0..2000_u64), 1..50)) {
            let mut watch = QueueWatch::default();
            let (mut now, mut heads) = (0, 0_u64);
            for (change, millis) in steps {
                now += millis;
                heads = heads.wrapping_add(change);
                let queues = Queues { listeners: 1, waiting: 1, full: 0, heads };
                let verdict =
                    watch.judge(Duration::from_millis(now), Duration::from_millis(2000), Sighting::Listening(queues));
                let stalled = matches!(verdict, Verdict::Stalled { .. });
                prop_assert!(!stalled);
            }
        }
    }
}
