//! The node's disks and drivers from which pods' volumes are mounted.

use crate::{flex::FlexVolumes, local::LocalDisks, remote::RemoteDisks};

/// Disks and drivers of the node. Clones share them.
#[derive(Clone, Debug)]
pub struct Disks {
    pub(crate) local: LocalDisks,
    pub(crate) flex: FlexVolumes,
    pub(crate) remote: RemoteDisks,
}

impl Disks {
    /// Combines the machine's disks, the flexVolume drivers and the network disks.
    #[must_use]
    pub fn new(local: LocalDisks, flex: FlexVolumes, remote: RemoteDisks) -> Self {
        Self { local, flex, remote }
    }
}
