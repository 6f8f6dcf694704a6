//! Finds the images in use: by any container of the runtime, with or without beelet's label, dead ones
//! included; by a pod's volume; by the sandboxes.

use std::collections::HashSet;

use beelet_proto::cri;

use super::lease::full_name;
use beelet_cri::{Error, Runtime};
use beelet_model::table::PodTable;

/// Names and ids of images in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage(HashSet<String>);

impl Usage {
    /// Queries the runtime and the pods' volumes.
    pub(super) async fn query(
        runtime: &Runtime,
        table: &PodTable,
        sandbox_image: Option<&str>,
    ) -> Result<Self, Error> {
        let containers = runtime.containers.list(None).await?;
        let mut used = HashSet::new();
        for container in &containers {
            let spec = container.image.as_ref().map(|spec| spec.image.as_str());
            let names = [Some(container.image_ref.as_str()), Some(container.image_id.as_str()), spec];
            used.extend(names.into_iter().flatten().filter(|name| !name.is_empty()).map(full_name));
        }
        used.extend(volume_images(table).map(full_name));
        used.extend(sandbox_image.map(full_name));
        Ok(Self(used))
    }

    /// Returns true if the image is in use under any of its names.
    pub(super) fn has(&self, image: &cri::Image) -> bool {
        names(image).any(|name| self.0.contains(&full_name(name)))
    }
}

/// Returns an image's id, tags and digests.
pub(super) fn names(image: &cri::Image) -> impl Iterator<Item = &str> {
    let others = image.repo_tags.iter().chain(&image.repo_digests).map(String::as_str);
    std::iter::once(image.id.as_str()).chain(others)
}

/// Returns the images that pods mount as volumes (KEP-4639).
fn volume_images(table: &PodTable) -> impl Iterator<Item = &str> {
    let here = table.pods.values().filter(|entry| !entry.is_gone());
    let volumes = here.flat_map(|entry| entry.pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()));
    volumes.filter_map(|volume| volume.image.as_ref()?.reference.as_deref())
}
