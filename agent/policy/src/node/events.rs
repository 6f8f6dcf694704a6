//! Correlation of events for the API server: a repeated event raises a count, many similar ones become one,
//! and an object with too many events is muted for a while.
//!
//! Follows `EventCorrelator` of client-go (`tools/record/events_cache.go`) with its defaults.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use jiff::Timestamp;

/// Maximum number of remembered entries of each kind.
const REMEMBERED: usize = 4096;
/// Number of events of an object that may come at once, and the time until one more may.
const BURST: f64 = 25.0;
const REFILL: Duration = Duration::from_secs(300);
/// Number of different messages for one reason that become one event, and the time within which they must
/// come.
const SIMILAR: usize = 10;
const WITHIN: Duration = Duration::from_secs(600);
/// Prefix of a combined event's message.
const COMBINED: &str = "(combined from similar events): ";

/// Identity of an event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The object, in a text form of the caller's choice.
    pub object: String,
    /// `Normal` or `Warning`.
    pub kind: &'static str,
    /// The reason, in one word.
    pub reason: String,
    /// The message; `None` for many similar ones.
    pub message: Option<String>,
}

/// An event that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// Identity of the event, with its message.
    pub key: Key,
    /// First occurrence.
    pub first: Timestamp,
    /// Last occurrence.
    pub last: Timestamp,
    /// Total number of occurrences.
    pub count: u32,
}

/// An event to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Identity of the event in the correlator.
    pub key: Key,
    /// Name of the event on the API server; `None` for a new one.
    pub name: Option<String>,
    /// The message.
    pub message: String,
    /// First occurrence.
    pub first: Timestamp,
    /// Last occurrence.
    pub last: Timestamp,
    /// Number of occurrences.
    pub count: u32,
}

/// The correlator's memory of published events.
#[derive(Debug)]
pub struct Correlator {
    /// Time since which this agent publishes events.
    began: Timestamp,
    buckets: Recent<String, (f64, Timestamp)>,
    similar: Recent<Key, (BTreeSet<String>, Timestamp)>,
    /// Number of occurrences of each event when last seen.
    seen: Recent<Key, u32>,
    published: Recent<Key, Published>,
}

#[derive(Clone, Debug)]
struct Published {
    name: Option<String>,
    first: Timestamp,
    count: u32,
}

impl Correlator {
    /// Creates an empty correlator. An earlier agent has published the events counted before `began`.
    #[must_use]
    pub fn new(began: Timestamp) -> Self {
        Self {
            began,
            buckets: Recent::default(),
            similar: Recent::default(),
            seen: Recent::default(),
            published: Recent::default(),
        }
    }

    /// Returns the event to write; `None` if its object has sent too many recently.
    pub fn event(&mut self, event: &Incoming, now: Timestamp) -> Option<Outgoing> {
        let before = self.seen.get(&event.key).copied().filter(|before| *before < event.count);
        let own = event.first >= self.began;
        let times = before.map_or(if own { event.count } else { 1 }, |before| event.count - before);
        self.seen.insert(event.key.clone(), event.count);
        let text = event.key.message.clone().unwrap_or_default();
        let (key, message) = self.combined(&event.key, text, now);
        let published = self.published.get(&key).cloned();
        let published = match published {
            Some(published) => Published { count: published.count.saturating_add(times), ..published },
            None => Published { name: None, first: if own { event.first } else { event.last }, count: times },
        };
        self.published.insert(key.clone(), published.clone());
        self.admitted(&event.key.object, now).then_some(Outgoing {
            key,
            name: published.name,
            message,
            first: published.first,
            last: event.last,
            count: published.count,
        })
    }

    /// Records the event's name on the API server; `None` if the server has lost it.
    pub fn written(&mut self, key: &Key, name: Option<String>) {
        if let Some(published) = self.published.get(key).cloned() {
            self.published.insert(key.clone(), Published { name, ..published });
        }
    }

    fn combined(&mut self, key: &Key, message: String, now: Timestamp) -> (Key, String) {
        let family = Key { message: None, ..key.clone() };
        let known = self.similar.get(&family).cloned().filter(|(_, last)| elapsed(*last, now) <= WITHIN);
        let (mut messages, _) = known.unwrap_or_default();
        messages.insert(message.clone());
        let many = messages.len() >= SIMILAR;
        if messages.len() > SIMILAR {
            messages.pop_first();
        }
        self.similar.insert(family.clone(), (messages, now));
        if many { (family, format!("{COMBINED}{message}")) } else { (key.clone(), message) }
    }

    fn admitted(&mut self, object: &str, now: Timestamp) -> bool {
        let (tokens, last) = self.buckets.get(object).copied().unwrap_or((BURST, now));
        let tokens = (tokens + elapsed(last, now).as_secs_f64() / REFILL.as_secs_f64()).min(BURST);
        let admitted = tokens >= 1.0;
        self.buckets.insert(object.to_owned(), (if admitted { tokens - 1.0 } else { tokens }, now));
        admitted
    }
}

/// Returns the time from `since` to `now`; zero if the clock was set back.
fn elapsed(since: Timestamp, now: Timestamp) -> Duration {
    now.duration_since(since).try_into().unwrap_or_default()
}

/// A map that drops its least recently inserted entry.
#[derive(Debug)]
struct Recent<K, V> {
    values: HashMap<K, (V, u64)>,
    order: BTreeMap<u64, K>,
    next: u64,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { values: HashMap::new(), order: BTreeMap::new(), next: 0 }
    }
}

impl<K: Clone + Eq + Hash, V> Recent<K, V> {
    fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: std::borrow::Borrow<Q>,
    {
        self.values.get(key).map(|(value, _)| value)
    }

    fn insert(&mut self, key: K, value: V) {
        if let Some((_, at)) = self.values.insert(key.clone(), (value, self.next)) {
            self.order.remove(&at);
        }
        self.order.insert(self.next, key);
        self.next += 1;
        if self.order.len() > REMEMBERED
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.values.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    fn incoming(object: &str, message: &str, second: i64, count: u32) -> Incoming {
        let key = Key {
            object: object.to_owned(),
            kind: "Normal",
            reason: "Pulled".to_owned(),
            message: Some(message.to_owned()),
        };
        Incoming { key, first: at(0), last: at(second), count }
    }

    fn publish(
        to: &mut Correlator,
        object: &str,
        message: &str,
        second: i64,
        count: u32,
    ) -> Option<Outgoing> {
        to.event(&incoming(object, message, second, count), at(second))
    }

    #[test]
    fn the_same_event_again_is_the_first_one_with_a_higher_count() {
        let mut correlator = Correlator::new(at(-100));
        let first = publish(&mut correlator, "pod", "a", 1, 1).unwrap();
        assert_eq!((first.name.as_deref(), first.count), (None, 1));
        correlator.written(&first.key, Some("pod.1".to_owned()));
        // Two occurrences came before the next pass.
        let second = publish(&mut correlator, "pod", "a", 5, 3).unwrap();
        assert_eq!((second.name.as_deref(), second.count), (Some("pod.1"), 3));
        assert_eq!((second.first, second.last), (at(0), at(5)));
        correlator.written(&second.key, None);
        let third = publish(&mut correlator, "pod", "a", 6, 4).unwrap();
        assert_eq!((third.name.as_deref(), third.count), (None, 4));
    }

    #[test]
    fn events_of_an_earlier_agent_are_not_counted_again() {
        let mut correlator = Correlator::new(at(1));
        assert_eq!(publish(&mut correlator, "pod", "a", 1, 40).unwrap().count, 1);
        // The log dropped the event and restarted its count.
        assert_eq!(publish(&mut correlator, "pod", "a", 2, 1).unwrap().count, 2);
    }

    #[test]
    fn an_object_with_too_many_events_gets_one_per_five_minutes() {
        let mut correlator = Correlator::new(at(-100));
        let heard = (1..=100).filter(|n| publish(&mut correlator, "loud", "a", 0, *n).is_some()).count();
        assert_eq!(heard, 25);
        assert!(publish(&mut correlator, "quiet", "a", 0, 1).is_some());
        assert!(publish(&mut correlator, "loud", "a", 299, 101).is_none());
        // Muted occurrences are counted.
        assert_eq!(publish(&mut correlator, "loud", "a", 300, 102).unwrap().count, 102);
        assert!(publish(&mut correlator, "loud", "a", 300, 103).is_none());
        // A clock that was set back does not change an object's budget.
        assert!(publish(&mut correlator, "loud", "a", -9000, 104).is_none());
    }

    #[test]
    fn ten_similar_messages_become_one_event_and_are_separate_again_later() {
        let mut correlator = Correlator::new(at(-100));
        for n in 0..9 {
            let published = publish(&mut correlator, "pod", &n.to_string(), 0, 1).unwrap();
            assert_eq!(published.message, n.to_string());
        }
        let tenth = publish(&mut correlator, "pod", "9", 0, 1).unwrap();
        assert_eq!(tenth.message, "(combined from similar events): 9");
        correlator.written(&tenth.key, Some("pod.10".to_owned()));
        let next = publish(&mut correlator, "pod", "10", 1, 1).unwrap();
        assert_eq!((next.name.as_deref(), next.count), (Some("pod.10"), 2));
        assert_eq!(next.message, "(combined from similar events): 10");
        assert_eq!(publish(&mut correlator, "pod", "11", 700, 1).unwrap().message, "11");
    }

    #[test]
    fn the_least_recently_published_event_is_dropped() {
        let mut recent = Recent::default();
        for n in 0..REMEMBERED + 2 {
            recent.insert(n, ());
            recent.insert(0, ());
        }
        assert_eq!((recent.values.len(), recent.order.len()), (REMEMBERED, REMEMBERED));
        assert!(recent.get(&0).is_some() && recent.get(&1).is_none());
    }
}
