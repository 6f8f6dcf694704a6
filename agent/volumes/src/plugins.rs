//! The list of all kinds of volumes.

use std::{path::Path, sync::Arc};

use k8s_openapi::api::core::v1::Volume;

use crate::{
    SUB_PATHS, content,
    csi::{self, CsiVolumes},
    disks::Disks,
    empty_dir,
    error::Error,
    flex, host_path, image, local, mounts, nfs,
    operations::Operations,
    plugin::{Spec, VolumePlugin},
    remote,
    unsupported::{self, UnsupportedVolumes},
};

/// Functions of the kinds that return the kubelet's plugin name of a volume.
const NAMES: [fn(&Spec<'_>) -> Option<&'static str>; 9] = [
    empty_dir::plugin_name,
    host_path::plugin_name,
    content::plugin_name,
    image::plugin_name,
    nfs::plugin_name,
    flex::plugin_name,
    remote::plugin_name,
    local::plugin_name,
    csi::plugin_name,
];

/// The kubelet's plugin name of PersistentVolumes whose place is a path on the machine.
const MACHINE: &str = "kubernetes.io/host-path";

/// Returns the kubelet's plugin name of a pod's volume.
#[must_use]
pub fn plugin_name(volume: &Volume) -> &'static str {
    NAMES.iter().find_map(|name| name(&Spec::of(volume))).unwrap_or(unsupported::NAME)
}

/// The plugins of a node, with the counters of their operations. Clones share them.
#[derive(Clone, Debug)]
pub struct Plugins(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    all: Vec<Box<dyn VolumePlugin>>,
    operations: Operations,
}

impl Default for Plugins {
    /// Has only the kinds that need neither disks nor storage plugins of the node.
    fn default() -> Self {
        Self(Arc::new(Inner { all: of_pods(), operations: Operations::default() }))
    }
}

/// Returns the plugins that need neither disks nor storage plugins of the node.
fn of_pods() -> Vec<Box<dyn VolumePlugin>> {
    vec![
        Box::new(empty_dir::EmptyDirVolumes),
        Box::new(host_path::HostPathVolumes),
        Box::new(content::ContentVolumes),
        Box::new(image::ImageVolumes),
        Box::new(nfs::NfsVolumes),
    ]
}

impl Plugins {
    /// Makes the plugins of all kinds of volumes.
    pub(crate) fn new(csi: CsiVolumes, disks: &Disks, operations: Operations) -> Self {
        let mut all = of_pods();
        // Drivers and disks unmount their volumes in this order.
        all.push(Box::new(disks.flex.clone()));
        all.push(Box::new(disks.remote.clone()));
        all.push(Box::new(disks.local.clone()));
        all.push(Box::new(csi));
        Self(Arc::new(Inner { all, operations }))
    }

    pub(crate) fn operations(&self) -> &Operations {
        &self.0.operations
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &dyn VolumePlugin> {
        self.0.all.iter().map(|plugin| &**plugin)
    }

    /// Returns the plugin of a volume, with the kubelet's name of the plugin.
    pub(crate) fn of(&self, spec: &Spec<'_>) -> (&'static str, &dyn VolumePlugin) {
        let found = self.all().find_map(|plugin| Some((plugin.name(spec)?, plugin)));
        found.unwrap_or((unsupported::NAME, &UnsupportedVolumes))
    }

    /// Returns the kubelet's plugin name of a linked volume, by the volume's place.
    pub(crate) fn name_of_place(&self, folder: &Path, place: &Path) -> &'static str {
        self.all().find_map(|plugin| plugin.name_of_place(folder, place)).unwrap_or(MACHINE)
    }

    /// Unmounts all mounts in a pod's folder, and releases disks and devices that no other pod uses.
    ///
    /// # Errors
    /// A mount is in use, or a driver cannot unmount a volume.
    pub(crate) fn unmount_all(&self, folder: &Path) -> Result<(), Error> {
        // Parts of volumes are unmounted before the volumes.
        mounts::unmount_below(&folder.join(SUB_PATHS))?;
        self.all().try_for_each(|plugin| plugin.tear_down(folder))?;
        mounts::unmount_below(folder)
    }
}
