//! Locks of volumes that several pods may share: only one task at a time mounts or unmounts a volume.

use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Names of the locked volumes. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Busy(Arc<(Mutex<BTreeSet<String>>, Condvar)>);

/// Lock of a volume; dropping the value releases it.
pub(crate) struct Held<'b> {
    busy: &'b Busy,
    name: String,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.busy.names().remove(&self.name);
        self.busy.0.1.notify_all();
    }
}

impl Busy {
    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lock of the volume. Only pods of the same volume wait for each other.
    pub(crate) fn hold(&self, name: &str) -> Held<'_> {
        let mut names = self.names();
        while !names.insert(name.to_owned()) {
            names = self.0.1.wait(names).unwrap_or_else(PoisonError::into_inner);
        }
        drop(names);
        Held { busy: self, name: name.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_one_volume_wait_for_each_other_and_for_no_other() {
        let busy = Busy::default();
        let held = busy.hold("a");
        drop(busy.hold("b"));
        let (sender, receiver) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn({
            let busy = busy.clone();
            move || {
                let _held = busy.hold("a");
                sender.send(()).unwrap();
            }
        });
        assert!(receiver.try_recv().is_err());
        drop(held);
        receiver.recv().unwrap();
        waiting.join().unwrap();
    }
}
