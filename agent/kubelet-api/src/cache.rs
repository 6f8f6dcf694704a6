//! Bounded cache of verdicts. A client with ten thousand names only causes further requests to the API
//! server.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beelet_base::clock::After as _;
use tokio::time::Instant;

/// Values by key, each until its expiry.
pub(crate) struct Cache<K, V> {
    most: usize,
    entries: Mutex<HashMap<K, (V, Instant)>>,
}

impl<K: Eq + Hash + Clone, V: Clone> Cache<K, V> {
    /// Returns a cache for at most `most` entries.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, entries: Mutex::default() }
    }

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        let entries = self.lock();
        let (value, until) = entries.get(key)?;
        (*until > Instant::now()).then(|| value.clone())
    }

    /// Returns the last value, even after its expiry.
    pub(crate) fn last(&self, key: &K) -> Option<V> {
        self.lock().get(key).map(|(value, _)| value.clone())
    }

    pub(crate) fn forget(&self, key: &K) {
        self.lock().remove(key);
    }

    pub(crate) fn insert(&self, key: K, value: V, ttl: Duration) {
        let now = Instant::now();
        let mut entries = self.lock();
        if entries.len() >= self.most {
            entries.retain(|_, (_, until)| *until > now);
        }
        if entries.len() >= self.most {
            // The entry that expires first.
            let first = entries.iter().min_by_key(|(_, (_, until))| *until).map(|(key, _)| key.clone());
            if let Some(first) = first {
                entries.remove(&first);
            }
        }
        entries.insert(key, (value, now.after(ttl)));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, (V, Instant)>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_value_counts_for_its_time_and_the_oldest_makes_room() {
        let cache = Cache::new(2);
        cache.insert("a", 1, Duration::from_secs(10));
        cache.insert("b", 2, Duration::from_secs(5));
        assert_eq!((cache.get(&"a"), cache.get(&"b"), cache.get(&"c")), (Some(1), Some(2), None));
        cache.insert("c", 3, Duration::from_secs(20));
        assert_eq!((cache.get(&"a"), cache.get(&"b"), cache.get(&"c")), (Some(1), None, Some(3)));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!((cache.get(&"a"), cache.get(&"c")), (None, Some(3)));
        assert_eq!((cache.last(&"a"), cache.last(&"b")), (Some(1), None));
        cache.forget(&"a");
        assert_eq!(cache.last(&"a"), None);
    }
}
