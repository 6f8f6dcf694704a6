//! Protects the images of containers that are about to be created. A worker holds a lease on the image from
//! before its lookup or pull until the container exists; from then on the container itself counts as use.
//!
//! Garbage collection may remove an image only between [`Leases::begin_removal`] and the end of the
//! [`Removal`], and gets no removal for a leased image. A lease on an image under removal waits for its end.
//! So a worker either keeps its image, or learns that it must look it up (and pull) again. Must never do any
//! I/O.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

/// Leases of a node; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Leases {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    ended: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Number of leases per name or id.
    held: HashMap<String, usize>,
    /// Names per removal under way.
    removing: HashMap<u64, Vec<String>>,
    /// Number of removals begun.
    begun: u64,
}

impl State {
    fn is_being_removed(&self, key: &String) -> bool {
        self.removing.values().any(|keys| keys.contains(key))
    }

    fn hold(&mut self, key: &str) {
        *self.held.entry(key.to_owned()).or_default() += 1;
    }
}

/// Guard that protects an image from removal.
#[derive(Debug)]
pub struct Lease {
    leases: Leases,
    keys: Vec<String>,
    /// Number of removals begun when the name was leased.
    begun: u64,
}

/// Guard that keeps an image from being leased.
#[derive(Debug)]
pub struct Removal {
    leases: Leases,
    number: u64,
}

impl Leases {
    /// Leases the image with this name, digest or id, whether or not it is on the node. Waits for the end of
    /// a removal of that image.
    pub async fn acquire(&self, name: &str) -> Lease {
        let key = full_name(name);
        let begun = self.hold(&key).await.0;
        Lease { leases: self.clone(), keys: vec![key], begun }
    }

    /// Begins the removal of the image with `names` (its id, tags and digests); None if any of them is
    /// leased.
    pub(crate) fn begin_removal<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Option<Removal> {
        let keys: Vec<String> = names.into_iter().map(full_name).collect();
        let mut state = self.state();
        if keys.iter().any(|key| state.held.contains_key(key)) {
            return None;
        }
        state.begun += 1;
        let number = state.begun;
        state.removing.insert(number, keys);
        Some(Removal { leases: self.clone(), number })
    }

    /// Returns true if any of these names is leased now.
    pub(crate) fn any_held<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> bool {
        let state = self.state();
        names.into_iter().any(|name| state.held.contains_key(&full_name(name)))
    }

    /// Holds `key`, after any removal of it. Returns the number of removals begun, and true if it waited for
    /// one.
    async fn hold(&self, key: &String) -> (u64, bool) {
        let mut waited = false;
        loop {
            // Created before the check, so that the end of a removal in between is not missed.
            let ended = self.shared.ended.notified();
            {
                let mut state = self.state();
                if !state.is_being_removed(key) {
                    state.hold(key);
                    return (state.begun, waited);
                }
            }
            waited = true;
            ended.await;
        }
    }

    /// Locks the state; never hold the guard across an await.
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Extends the lease to the id that the name resolved to. Returns false if there was a removal in the
    /// meantime: the image may be missing and must be looked up again.
    #[must_use = "if false, the image may be missing"]
    pub async fn extend(&mut self, id: &str) -> bool {
        let key = full_name(id);
        let (begun, waited) = self.leases.hold(&key).await;
        self.keys.push(key);
        let unchanged = begun == self.begun && !waited;
        self.begun = begun;
        unchanged
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.leases.state();
        for key in &self.keys {
            if let Some(count) = state.held.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    state.held.remove(key);
                }
            }
        }
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        self.leases.state().removing.remove(&self.number);
        self.leases.shared.ended.notify_waiters();
    }
}

/// Completes a name as every runtime lists it: `busybox` is `docker.io/library/busybox:latest`
/// (github.com/distribution/reference, `ParseNormalizedNamed` and `TagNameOnly`). An id is returned
/// unchanged.
#[must_use]
pub fn full_name(name: &str) -> String {
    if name.starts_with("sha256:") {
        return name.to_owned();
    }
    let first = name.split('/').next().unwrap_or_default();
    let has_host = name.contains('/')
        && (first.contains(['.', ':']) || first == "localhost" || first.chars().any(char::is_uppercase));
    let hosted = match (has_host, name.contains('/')) {
        (true, _) => name.replacen("index.docker.io/", "docker.io/", 1),
        (false, true) => format!("docker.io/{name}"),
        (false, false) => format!("docker.io/library/{name}"),
    };
    // A digest makes the tag redundant.
    if let Some((path, digest)) = hosted.split_once('@') {
        return format!("{}@{digest}", without_tag(path));
    }
    if without_tag(&hosted).len() == hosted.len() { format!("{hosted}:latest") } else { hosted }
}

fn without_tag(name: &str) -> &str {
    match name.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => path,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn at_once<T>(what: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(Duration::ZERO, what).await.ok()
    }

    #[test]
    fn names_are_completed_as_the_runtime_does() {
        let check = |name: &str, expected: &str| assert_eq!(full_name(name), expected);
        check("busybox", "docker.io/library/busybox:latest");
        check("busybox:1.36", "docker.io/library/busybox:1.36");
        check("me/app", "docker.io/me/app:latest");
        check("localhost/app", "localhost/app:latest");
        check("localhost:5000/app", "localhost:5000/app:latest");
        check("registry.k8s.io/pause:3.9", "registry.k8s.io/pause:3.9");
        check("app@sha256:00", "docker.io/library/app@sha256:00");
        check("app:1@sha256:00", "docker.io/library/app@sha256:00");
        check("sha256:00", "sha256:00");
        check("", "docker.io/library/:latest");
    }

    #[tokio::test]
    async fn what_is_leased_is_not_removed_under_any_of_its_names() {
        let leases = Leases::default();
        let names = ["sha256:1", "docker.io/library/app:1"];
        let lease = leases.acquire("app:1").await;
        assert!(leases.begin_removal(names).is_none());
        assert!(leases.begin_removal(["sha256:2", "docker.io/library/app:2"]).is_some());
        let second = leases.acquire("app:1").await;
        drop(lease);
        assert!(leases.begin_removal(names).is_none());
        drop(second);
        assert!(leases.begin_removal(names).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_waits_for_the_end_of_a_removal() {
        let leases = Leases::default();
        let removal = leases.begin_removal(["sha256:1", "docker.io/library/app:1"]).unwrap();
        assert!(at_once(leases.acquire("app:1")).await.is_none());
        assert!(at_once(leases.acquire("other:1")).await.is_some());
        let waiting = tokio::spawn({
            let leases = leases.clone();
            async move { leases.acquire("app:1").await }
        });
        tokio::task::yield_now().await;
        drop(removal);
        let lease = waiting.await.unwrap();
        assert!(leases.any_held(["app:1"]));
        drop(lease);
        assert!(!leases.any_held(["app:1"]));
    }

    #[tokio::test]
    async fn a_removal_between_name_and_id_is_reported() {
        let leases = Leases::default();
        let mut lease = leases.acquire("app:2").await;
        // A removal of the same image under another name, before app:2 was resolved to it.
        drop(leases.begin_removal(["sha256:1", "docker.io/library/app:1"]).unwrap());
        assert!(!lease.extend("sha256:1").await, "the image may be missing");
        assert!(lease.extend("sha256:1").await, "the second lookup holds the image");
        assert!(leases.begin_removal(["sha256:1"]).is_none());
    }
}
