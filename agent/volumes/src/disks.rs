//! What is mounted for pods outside of what is theirs alone: the machine's disks, those on networks, and the
//! volumes of drivers.

use std::path::Path;

use crate::{Error, FlexVolumes, LocalDisks, RemoteDisks, SUB_PATHS, mounts};

/// Disks and drivers. Clones share them.
#[derive(Clone, Debug)]
pub struct Disks {
    local: LocalDisks,
    flex: FlexVolumes,
    remote: RemoteDisks,
}

impl Disks {
    /// These three.
    #[must_use]
    pub fn new(local: LocalDisks, flex: FlexVolumes, remote: RemoteDisks) -> Self {
        Self { local, flex, remote }
    }

    pub(crate) fn local(&self) -> &LocalDisks {
        &self.local
    }

    /// The volumes of drivers.
    #[must_use]
    pub fn flex(&self) -> &FlexVolumes {
        &self.flex
    }

    /// The disks on networks.
    #[must_use]
    pub fn remote(&self) -> &RemoteDisks {
        &self.remote
    }

    /// Unmounts all that is mounted in a pod's folder, and what was the pod's alone of disks and devices.
    /// Drivers take away what they have mounted.
    ///
    /// # Errors
    /// A mount is in use, or a driver can't.
    pub fn unmount_all(&self, folder: &Path) -> Result<(), Error> {
        // Parts of volumes come off before the volumes.
        mounts::unmount_below(&folder.join(SUB_PATHS))?;
        self.flex.release(folder)?;
        self.remote.release(folder)?;
        self.local.unmount_all(folder)
    }
}
