//! Which events go to the API server, and as what: the same event again raises a count, many similar ones
//! become one, and an object that has too much to tell is not heard for a while.
//!
//! Follows `EventCorrelator` of client-go (`tools/record/events_cache.go`) with its defaults.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use jiff::Timestamp;

/// Things that are remembered of each kind.
const REMEMBERED: usize = 4096;
/// Events of an object that may come at once, and the time until it has one more.
const BURST: f64 = 25.0;
const REFILL: Duration = Duration::from_secs(300);
/// So many different messages for one reason within this time become one event.
const SIMILAR: usize = 10;
const WITHIN: Duration = Duration::from_secs(600);
/// What such an event begins with.
const COMBINED: &str = "(combined from similar events): ";

/// What makes two events the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The object, as a text of the caller's.
    pub object: String,
    /// `Normal` or `Warning`.
    pub kind: &'static str,
    /// One word.
    pub reason: String,
    /// A sentence; None: of many similar ones.
    pub message: Option<String>,
}

/// An event that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// What it is; with its message.
    pub key: Key,
    /// When it happened first.
    pub first: Timestamp,
    /// When it happened last.
    pub last: Timestamp,
    /// How often it has happened in all.
    pub count: u32,
}

/// An event to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// By which it is known here.
    pub key: Key,
    /// The name under which the API server has it; None: it is a new one.
    pub name: Option<String>,
    /// A sentence.
    pub message: String,
    /// When it happened first.
    pub first: Timestamp,
    /// When it happened last.
    pub last: Timestamp,
    /// How often.
    pub count: u32,
}

/// Remembers what was told.
#[derive(Debug)]
pub struct Correlator {
    /// Since when events are this agent's to tell.
    began: Timestamp,
    buckets: Recent<String, (f64, Timestamp)>,
    similar: Recent<Key, (BTreeSet<String>, Timestamp)>,
    /// How often an event had happened when it was seen last.
    seen: Recent<Key, u32>,
    told: Recent<Key, Told>,
}

#[derive(Clone, Debug)]
struct Told {
    name: Option<String>,
    first: Timestamp,
    count: u32,
}

impl Correlator {
    /// Nothing was told yet. What was counted before `began`, an earlier agent told.
    #[must_use]
    pub fn new(began: Timestamp) -> Self {
        Self {
            began,
            buckets: Recent::default(),
            similar: Recent::default(),
            seen: Recent::default(),
            told: Recent::default(),
        }
    }

    /// The event as it is to be written; None if its object reported too many lately.
    pub fn event(&mut self, event: &Incoming, now: Timestamp) -> Option<Outgoing> {
        let before = self.seen.get(&event.key).copied().filter(|before| *before < event.count);
        let own = event.first >= self.began;
        let times = before.map_or(if own { event.count } else { 1 }, |before| event.count - before);
        self.seen.put(event.key.clone(), event.count);
        let text = event.key.message.clone().unwrap_or_default();
        let (key, message) = self.combined(&event.key, text, now);
        let told = self.told.get(&key).cloned();
        let told = match told {
            Some(told) => Told { count: told.count.saturating_add(times), ..told },
            None => Told { name: None, first: if own { event.first } else { event.last }, count: times },
        };
        self.told.put(key.clone(), told.clone());
        self.admitted(&event.key.object, now).then_some(Outgoing {
            key,
            name: told.name,
            message,
            first: told.first,
            last: event.last,
            count: told.count,
        })
    }

    /// The API server has the event under this name now; None: it has lost it.
    pub fn written(&mut self, key: &Key, name: Option<String>) {
        if let Some(told) = self.told.get(key).cloned() {
            self.told.put(key.clone(), Told { name, ..told });
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
        self.similar.put(family.clone(), (messages, now));
        if many { (family, format!("{COMBINED}{message}")) } else { (key.clone(), message) }
    }

    fn admitted(&mut self, object: &str, now: Timestamp) -> bool {
        let (tokens, last) = self.buckets.get(object).copied().unwrap_or((BURST, now));
        let tokens = (tokens + elapsed(last, now).as_secs_f64() / REFILL.as_secs_f64()).min(BURST);
        let admitted = tokens >= 1.0;
        self.buckets.put(object.to_owned(), (if admitted { tokens - 1.0 } else { tokens }, now));
        admitted
    }
}

/// The time from `since` to `now`; none if the clock was set back.
fn elapsed(since: Timestamp, now: Timestamp) -> Duration {
    now.duration_since(since).try_into().unwrap_or_default()
}

/// A map that forgets what was not put for longest.
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

    fn put(&mut self, key: K, value: V) {
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

    fn tell(to: &mut Correlator, object: &str, message: &str, second: i64, count: u32) -> Option<Outgoing> {
        to.event(&incoming(object, message, second, count), at(second))
    }

    #[test]
    fn the_same_event_again_is_the_first_one_with_a_higher_count() {
        let mut correlator = Correlator::new(at(-100));
        let first = tell(&mut correlator, "pod", "a", 1, 1).unwrap();
        assert_eq!((first.name.as_deref(), first.count), (None, 1));
        correlator.written(&first.key, Some("pod.1".to_owned()));
        // Two happened before anybody looked.
        let second = tell(&mut correlator, "pod", "a", 5, 3).unwrap();
        assert_eq!((second.name.as_deref(), second.count), (Some("pod.1"), 3));
        assert_eq!((second.first, second.last), (at(0), at(5)));
        correlator.written(&second.key, None);
        let third = tell(&mut correlator, "pod", "a", 6, 4).unwrap();
        assert_eq!((third.name.as_deref(), third.count), (None, 4));
    }

    #[test]
    fn what_an_earlier_agent_counted_is_not_counted_again() {
        let mut correlator = Correlator::new(at(1));
        assert_eq!(tell(&mut correlator, "pod", "a", 1, 40).unwrap().count, 1);
        // The log forgot it and began anew.
        assert_eq!(tell(&mut correlator, "pod", "a", 2, 1).unwrap().count, 2);
    }

    #[test]
    fn an_object_that_tells_too_much_is_heard_once_per_five_minutes() {
        let mut correlator = Correlator::new(at(-100));
        let heard = (1..=100).filter(|n| tell(&mut correlator, "loud", "a", 0, *n).is_some()).count();
        assert_eq!(heard, 25);
        assert!(tell(&mut correlator, "quiet", "a", 0, 1).is_some());
        assert!(tell(&mut correlator, "loud", "a", 299, 101).is_none());
        // What was not heard is counted.
        assert_eq!(tell(&mut correlator, "loud", "a", 300, 102).unwrap().count, 102);
        assert!(tell(&mut correlator, "loud", "a", 300, 103).is_none());
        // A clock that was set back makes nobody loud or silent.
        assert!(tell(&mut correlator, "loud", "a", -9000, 104).is_none());
    }

    #[test]
    fn ten_similar_messages_become_one_event_and_are_told_apart_again_later() {
        let mut correlator = Correlator::new(at(-100));
        for n in 0..9 {
            let told = tell(&mut correlator, "pod", &n.to_string(), 0, 1).unwrap();
            assert_eq!(told.message, n.to_string());
        }
        let tenth = tell(&mut correlator, "pod", "9", 0, 1).unwrap();
        assert_eq!(tenth.message, "(combined from similar events): 9");
        correlator.written(&tenth.key, Some("pod.10".to_owned()));
        let next = tell(&mut correlator, "pod", "10", 1, 1).unwrap();
        assert_eq!((next.name.as_deref(), next.count), (Some("pod.10"), 2));
        assert_eq!(next.message, "(combined from similar events): 10");
        assert_eq!(tell(&mut correlator, "pod", "11", 700, 1).unwrap().message, "11");
    }

    #[test]
    fn what_was_not_told_for_longest_is_forgotten() {
        let mut recent = Recent::default();
        for n in 0..REMEMBERED + 2 {
            recent.put(n, ());
            recent.put(0, ());
        }
        assert_eq!((recent.values.len(), recent.order.len()), (REMEMBERED, REMEMBERED));
        assert!(recent.get(&0).is_some() && recent.get(&1).is_none());
    }
}
