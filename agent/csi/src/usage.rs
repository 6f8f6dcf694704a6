//! Capacity, use and condition of volumes, as their drivers report them (`pkg/volume/csi/csi_metrics.go`).

use std::path::PathBuf;

use beelet_base::blocking::blocking;
use beelet_model::disk::Room;
use beelet_proto::csi::{NodeGetVolumeStatsRequest, volume_usage::Unit};

use crate::{
    Csi, Error,
    records::{self, VolumeRecord},
};

/// Maximum number of characters kept of a driver's message about an abnormal condition.
const WORDS: usize = 1024;

/// Capacity and use of a volume, and its condition if the driver reports it: true if abnormal, and a message.
pub type Usage = (Room, Option<(bool, String)>);

/// A volume that a driver has published to a pod.
#[derive(Clone, Debug)]
pub struct Brought {
    /// Path of the published volume.
    pub path: PathBuf,
    pub(crate) record: VolumeRecord,
}

impl Brought {
    /// Returns the name of the PersistentVolume, or of the pod's own volume.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.record.spec_volume
    }

    /// Returns the driver's name.
    #[must_use]
    pub fn driver(&self) -> &str {
        &self.record.driver_name
    }
}

impl Csi {
    /// Returns the volumes that drivers have published to the pod with this UID.
    pub async fn volumes_of(&self, uid: &str) -> Vec<Brought> {
        let folder = self.0.folders.pods_dir.join(uid);
        let all = blocking("looking for published volumes", move || records::of_pod(&folder)).await;
        let brought = |(_, record)| Brought { path: self.0.folders.publish_path(&record, uid), record };
        all.into_iter().map(brought).collect()
    }

    /// Reads the capacity, use and condition of a volume. Returns None if the driver does not report them.
    ///
    /// # Errors
    /// The driver is not registered or fails.
    pub async fn usage(&self, volume: &Brought) -> Result<Option<Usage>, Error> {
        let driver = self.driver(volume.driver())?;
        let abilities = driver.abilities().await?;
        if !abilities.measures {
            return Ok(None);
        }
        let request = NodeGetVolumeStatsRequest {
            volume_id: volume.record.volume_handle.clone(),
            volume_path: volume.path.to_string_lossy().into_owned(),
            staging_target_path: String::new(),
        };
        let answer = driver.volume_stats(request).await?;
        if answer.usage.is_empty() && !abilities.says_condition {
            return Err(Error::Unmet("failed to get usage from response. usage is nil".to_owned()));
        }
        let mut room = Room::default();
        let count = |number: i64| u64::try_from(number).unwrap_or(0);
        for usage in &answer.usage {
            let numbers = (count(usage.total), count(usage.available), count(usage.used));
            match usage.unit() {
                Unit::Bytes => (room.capacity_bytes, room.available_bytes, room.used_bytes) = numbers,
                Unit::Inodes => (room.inodes, room.inodes_free, room.inodes_used) = numbers,
                Unit::Unknown => {}
            }
        }
        let condition = answer.volume_condition.unwrap_or_default();
        let message = condition.message.chars().take(WORDS).collect();
        Ok(Some((room, abilities.says_condition.then_some((condition.abnormal, message)))))
    }
}
