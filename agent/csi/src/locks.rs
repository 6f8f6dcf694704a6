//! Locks of volumes: one task works on a volume at a time.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use tokio::sync::OwnedMutexGuard;

use crate::{VolumeId, lock};

/// A lock for each volume that a task works on.
#[derive(Debug, Default)]
pub(crate) struct VolumeLocks(Mutex<BTreeMap<VolumeId, Arc<tokio::sync::Mutex<()>>>>);

impl VolumeLocks {
    /// Waits for the lock of a volume.
    pub(crate) async fn hold(&self, volume: &VolumeId) -> OwnedMutexGuard<()> {
        let one = {
            let mut busy = lock(&self.0);
            busy.retain(|_, one| Arc::strong_count(one) > 1);
            Arc::clone(busy.entry(volume.clone()).or_default())
        };
        one.lock_owned().await
    }
}
