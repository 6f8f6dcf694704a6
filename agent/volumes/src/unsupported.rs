//! Refuses volumes of kinds that no plugin supports, with the reason.

use std::path::PathBuf;

use beelet_policy::volumes::{content::Allowance, removed_kinds};
use k8s_openapi::api::core::v1::Volume;

use crate::{
    error::Error,
    plugin::{Location, Spec, Target, VolumePlugin},
};

/// Plugin of all volumes without another plugin.
#[derive(Debug)]
pub(crate) struct UnsupportedVolumes;

/// The kubelet's name of an unknown plugin.
pub(crate) const NAME: &str = "N/A";

impl VolumePlugin for UnsupportedVolumes {
    fn name(&self, _spec: &Spec<'_>) -> Option<&'static str> {
        Some(NAME)
    }

    fn location(&self, _volume: &Volume) -> Location {
        Location::Own
    }

    fn is_read_only(&self, _volume: &Volume) -> bool {
        true
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        _target: &Target<'_>,
        _left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        Err(Error::unmet(match spec.claimed {
            Some(_) => "beelet cannot mount PersistentVolumes of this kind",
            None if spec.volume.git_repo.is_some() => removed_kinds::GIT_REPO,
            None => "beelet cannot make volumes of this kind",
        }))
    }
}
