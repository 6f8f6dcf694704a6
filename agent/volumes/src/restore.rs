//! Volumes of a pod that runs and whose folder, or what the agent wrote there, is gone from the node: removed
//! or unmounted by somebody. What the agent knows is written again (`reconcile` of the kubelet's volume
//! manager does the same); what containers have written is lost, which is told.
//!
//! Must never be asked for a pod whose volumes are not made yet, or are being given back.

use std::fmt;

use beelet_policy::volumes::{claims, content::Allowance, mount_points};
use k8s_openapi::api::core::v1 as core;

use super::{Error, Sources, Volumes, atomic, content, has_content, mounts, open_top};

/// What was gone of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The files, not their folder.
    Files,
    /// The folder, or the file system in memory that was mounted on it.
    Folder,
    /// The folder of an emptyDir, with all that containers had written there.
    Data,
}

/// A volume that is there again. Displayed, it is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Its name.
    pub volume: String,
    /// What was gone.
    pub loss: Loss,
}

impl Restored {
    /// The reason of the event that tells it.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self.loss {
            Loss::Files | Loss::Folder => "VolumeRestored",
            Loss::Data => "VolumeLost",
        }
    }
}

impl fmt::Display for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let volume = &self.volume;
        match self.loss {
            Loss::Files => {
                write!(f, "volume {volume}: its files were gone from the node and are written again")
            }
            Loss::Folder => write!(
                f,
                "volume {volume}: its folder was gone from the node and is made again, with its files; containers that \
                 run see it once they are restarted"
            ),
            Loss::Data => write!(
                f,
                "volume {volume}: its folder was gone from the node, with all that containers had written there; it is \
                 made again, empty, and containers that run see it once they are restarted"
            ),
        }
    }
}

impl Volumes {
    /// Returns true if any volume could be made again by [`Self::restore`].
    #[must_use]
    pub fn are_restorable(&self) -> bool {
        self.volumes.iter().any(|volume| has_content(volume) || volume.empty_dir.is_some())
    }

    /// Makes again what is gone of the volumes that containers mount: those made of objects and emptyDirs.
    pub fn restore(&self, sources: &Sources<'_>) -> Result<Vec<Restored>, Error> {
        let (mounted, _) = claims::used(sources.pod);
        let (mut left, nested) = (Allowance::default(), mount_points::nested(sources.pod));
        let mut restored = Vec::new();
        for volume in self.volumes.iter().filter(|volume| mounted.contains(volume.name.as_str())) {
            let in_volume = |error: Error| error.of_volume(&volume.name);
            if let Some(loss) = self.loss(volume).map_err(in_volume)? {
                let nested = nested.get(volume.name.as_str());
                self.set_up_one(volume, sources, nested, &mut left).map_err(in_volume)?;
                restored.push(Restored { volume: volume.name.clone(), loss });
            }
        }
        Ok(restored)
    }

    fn loss(&self, volume: &core::Volume) -> Result<Option<Loss>, Error> {
        let path = self.path(&volume.name);
        if has_content(volume) {
            return Ok(match open_top(&path, content::in_memory(volume))? {
                None => Some(Loss::Folder),
                Some(top) if !atomic::is_set_up(&top) => Some(Loss::Files),
                Some(_) => None,
            });
        }
        let Some(source) = &volume.empty_dir else { return Ok(None) };
        // What was in the memory is still there for those that have it mounted, and for nobody else.
        let is_mounted = source.medium.as_deref().is_some_and(|medium| !medium.is_empty());
        let is_there = match std::fs::symlink_metadata(&path) {
            Ok(found) => found.is_dir() && (!is_mounted || mounts::is_mount_point(&path)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => return Err(Error::io("look at", &path)(error)),
        };
        Ok((!is_there).then_some(Loss::Data))
    }
}
