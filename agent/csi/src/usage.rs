//! How much room volumes have, and whether something is wrong with them, as their drivers say it
//! (`pkg/volume/csi/csi_metrics.go`).

use std::path::PathBuf;

use beelet_base::blocking::blocking;
use beelet_model::disk::Room;
use beelet_proto::csi::{NodeGetVolumeStatsRequest, volume_usage::Unit};

use crate::{
    Csi, Error,
    records::{self, VolumeRecord},
};

/// More characters of what a driver says is wrong aren't passed on.
const WORDS: usize = 1024;

/// The room in a volume; and, of a driver that knows it, whether something is wrong with it, and what.
pub type Usage = (Room, Option<(bool, String)>);

/// A volume that a driver has brought to a pod.
#[derive(Clone, Debug)]
pub struct Brought {
    /// Where it is.
    pub path: PathBuf,
    pub(crate) record: VolumeRecord,
}

impl Brought {
    /// The name of the PersistentVolume, or of the pod's own volume.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.record.spec_volume
    }

    /// The driver's name.
    #[must_use]
    pub fn driver(&self) -> &str {
        &self.record.driver_name
    }
}

impl Csi {
    /// The volumes that drivers have brought to the pod with this UID.
    pub async fn volumes_of(&self, uid: &str) -> Vec<Brought> {
        let folder = self.0.folders.pods_dir.join(uid);
        let all = blocking("looking for published volumes", move || records::of_pod(&folder)).await;
        let brought = |(_, record)| Brought { path: self.0.folders.publish_path(&record, uid), record };
        all.into_iter().map(brought).collect()
    }

    /// What a driver says of a volume. None: it doesn't.
    ///
    /// # Errors
    /// The driver isn't there, or can't.
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
