//! What the kernel's view of a port means for a tcpSocket probe: listening, not listening, or stalled since.
//!
//! A connect() succeeds as long as the accept queue has room, whatever the application does. The kernel mode
//! sees the queue itself, so it can tell a listener that takes its connections from one that lets them wait.
//! It must never call a listener stalled that is only slow: connections must have waited for the whole of the
//! probe's timeout without one accept, or the queue must be full (then the kernel drops handshakes and
//! connect() would fail too).
//!
//! In a `SO_REUSEPORT` group each member has a queue of its own, and a new connection goes to one of them by
//! its address. The group is stalled only if every member is; one that has an empty queue has done its work.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The accept queues of everything that listens at one address, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queues {
    /// Listeners: one, or the members of a `SO_REUSEPORT` group.
    pub listeners: u32,
    /// How many of them have a connection waiting.
    pub waiting: u32,
    /// How many of them take no more (`sk_ack_backlog > sk_max_ack_backlog`, `sk_acceptq_is_full` in
    /// include/net/sock.h).
    pub full: u32,
    /// Which connections wait at the heads of the queues. Any accept changes it; 0 if the kernel can't say.
    pub heads: u64,
}

impl Queues {
    /// Returns true if one of them, and so a connection that comes, is taken at once.
    #[must_use]
    pub const fn has_empty(&self) -> bool {
        self.waiting < self.listeners || self.waiting == 0
    }

    /// Returns true if no connection has room.
    #[must_use]
    pub const fn are_full(&self) -> bool {
        self.listeners > 0 && self.full >= self.listeners
    }
}

/// What was seen at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sighting {
    /// Nothing listens there.
    Absent,
    /// Something does.
    Listening(Queues),
}

/// What it means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// Connections are taken.
    Listening,
    /// They would be refused.
    NotListening,
    /// They wait and nobody takes them.
    Stalled {
        /// Since when nothing has been accepted, as far as was seen.
        since: Duration,
    },
    /// Connections wait; whether the application takes them isn't known yet. Look again then.
    Pending {
        /// When to look again, at the latest.
        until: Duration,
    },
}

/// Remembers what waits at the heads of an address's accept queues, from one look to the next.
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
    /// The heads as first seen, and when.
    held: Option<(u64, Duration)>,
}

impl QueueWatch {
    /// Judges one look. `timeout` is the probe's.
    pub fn judge(&mut self, now: Duration, timeout: Duration, seen: Sighting) -> Verdict {
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
            // Without a name for what waits, the same length of a queue proves nothing.
            _ if queues.heads == 0 => Verdict::Listening,
            Some((heads, since)) if heads == queues.heads => {
                let until = since.saturating_add(timeout);
                if now >= until { Verdict::Stalled { since } } else { Verdict::Pending { until } }
            }
            // Something was accepted since the last look: that is what the probe asks.
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

    /// Forgets what it saw: the container is another one.
    pub fn reset(&mut self) {
        self.held = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Plays looks, one a second, at a probe with a timeout of two seconds. A look is `-` (absent), or
    /// listeners, waiting, full and heads as four digits. Expectation: `L`, `N`, `S<since>` or `P<until>`.
    fn check(looks: &str, expectation: &str) {
        let mut watch = QueueWatch::default();
        let verdicts: Vec<String> = looks
            .split_whitespace()
            .enumerate()
            .map(|(second, look)| {
                let digit = |at: usize| u32::from(look.as_bytes()[at] - b'0');
                let seen = match look {
                    "-" => Sighting::Absent,
                    _ => Sighting::Listening(Queues {
                        listeners: digit(0),
                        waiting: digit(1),
                        full: digit(2),
                        heads: digit(3).into(),
                    }),
                };
                let now = Duration::from_secs(second as u64);
                match watch.judge(now, Duration::from_secs(2), seen) {
                    Verdict::Listening => "L".to_owned(),
                    Verdict::NotListening => "N".to_owned(),
                    Verdict::Stalled { since } => format!("S{}", since.as_secs()),
                    Verdict::Pending { until } => format!("P{}", until.as_secs()),
                }
            })
            .collect();
        assert_eq!(verdicts.join(" "), expectation, "{looks}");
    }

    #[test]
    fn an_empty_queue_is_fine_and_no_listener_is_not() {
        check("1000 - 1000", "L N L");
    }

    #[test]
    fn connections_that_nobody_takes_for_the_timeout_stall_it() {
        check("1101 1101 1101 1101", "P2 P2 S0 S0");
        check("1101 1101 1101 1000", "P2 P2 S0 L");
    }

    #[test]
    fn an_accept_starts_the_wait_anew() {
        check("1101 1102 1102 1102", "P2 L P3 S1");
        check("1101 1102 1103 1104", "P2 L L L");
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
    fn without_names_only_a_full_queue_is_stalled() {
        check("1100 1100 1100 1110", "L L L S3");
    }

    #[test]
    fn a_listener_that_goes_takes_the_wait_with_it() {
        check("1101 - 1101 1101 1101", "P2 N P4 P4 S2");
    }

    proptest! {
        /// Nothing is called stalled while its heads change within the timeout and it isn't full.
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
