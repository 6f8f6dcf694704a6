//! Volumes that are images. The runtime mounts them itself: the agent only pulls the image for each
//! container.

use std::path::PathBuf;

use beelet_policy::volumes::content::Allowance;
use k8s_openapi::api::core::v1::Volume;

use crate::{
    error::Error,
    plugin::{Location, Spec, Target, VolumePlugin},
};

/// Plugin of image volumes (KEP-4639).
#[derive(Debug)]
pub(crate) struct ImageVolumes;

/// Returns the kubelet's name of the plugin of image volumes.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    spec.volume.image.is_some().then_some("kubernetes.io/image")
}

impl VolumePlugin for ImageVolumes {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &Volume) -> Location {
        Location::Own
    }

    fn is_read_only(&self, _volume: &Volume) -> bool {
        true
    }

    fn set_up(
        &self,
        _spec: &Spec<'_>,
        _target: &Target<'_>,
        _left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        Ok(None)
    }
}
