//! The PersistentVolumes that the claims of a pod are bound to, read from the API server. A PersistentVolume
//! of a migrated in-tree kind is translated here into a volume of the storage plugin that replaces the kind.

use std::{collections::BTreeMap, sync::Arc};

use beelet_model::storage::{Claimed, Storage};
use beelet_policy::{
    node::fit::NodeView,
    volumes::{
        claims::{self, ClaimName},
        migration, removed_kinds,
    },
};
use futures::future::join_all;
use k8s_openapi::api::core::v1 as core;

use crate::{error::Error, plugin::namespace_of};

/// Reads the claims that containers of the pod use, by volume.
///
/// # Errors
/// A claim does not exist or is not bound, its PersistentVolume is not for this pod or this node, the API
/// server does not answer, or no plugin supports one of the pod's own volumes.
pub(crate) async fn read(
    storage: Option<&dyn Storage>,
    pod: &core::Pod,
    node: Option<Arc<NodeView>>,
) -> Result<BTreeMap<String, Claimed>, Error> {
    let (mut found, mut volumes, mut whys) = (BTreeMap::new(), Vec::new(), Vec::new());
    for volume in used_volumes(pod) {
        if let Err(why) = claims::check_kind(volume, namespace_of(pod)) {
            volumes.push(volume.name.clone());
            whys.push(why.to_string());
        }
    }
    let claimed = used_volumes(pod).filter_map(|volume| Some((volume, claims::claim_of(pod, volume)?)));
    let asked = claimed.map(async |(volume, name)| {
        let found = read_one(storage, pod, volume, &name).await;
        (volume.name.clone(), found)
    });
    for (volume, claimed) in join_all(asked).await {
        match claimed {
            Ok(claimed) => drop(found.insert(volume, claimed)),
            Err(why) => {
                volumes.push(volume);
                whys.push(why);
            }
        }
    }
    if !volumes.is_empty() {
        return Err(Error::Claims { volumes, why: whys.join("; ") });
    }
    if let Some(node) = &node {
        for (volume, claimed) in &found {
            claims::check_node(&claimed.volume, node).map_err(|why| {
                Error::unmet(format!("node affinity check failed: {why}")).of_volume(volume)
            })?;
        }
    }
    Ok(found)
}

/// Returns the volumes of a pod that its containers mount or use as block devices.
pub(crate) fn used_volumes(pod: &core::Pod) -> impl Iterator<Item = &core::Volume> {
    let (mounts, devices) = claims::used(pod);
    let is_used = move |volume: &&core::Volume| {
        mounts.contains(volume.name.as_str()) || devices.contains(volume.name.as_str())
    };
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()).filter(is_used)
}

async fn read_one(
    storage: Option<&dyn Storage>,
    pod: &core::Pod,
    volume: &core::Volume,
    name: &ClaimName,
) -> Result<Claimed, String> {
    let namespace = namespace_of(pod);
    let failed = |why: String| format!("error processing PVC {namespace}/{}: {why}", name.name);
    let storage = storage.ok_or_else(|| failed("this node has no API server".to_owned()))?;
    let claim = storage.claim(namespace, &name.name).await;
    let claim = claim.map_err(|why| failed(format!("failed to fetch PVC from API server: {why}")))?;
    let bound = claims::bound_volume(pod, name, &claim).map_err(|why| failed(why.to_string()))?;
    let found = storage.volume(bound).await;
    let found = found.map_err(|why| failed(format!("failed to fetch PV {bound} from API server: {why}")))?;
    claims::check_volume(pod, volume, &claim, &found).map_err(|why| failed(why.to_string()))?;
    if removed_kinds::is_removed_of_claim(&found) {
        return Err(removed_kinds::no_plugin(bound));
    }
    let found = match migration::of_claim(&found) {
        Some(migrated) => migrated.map_err(|why| why.to_string())?,
        None => found,
    };
    Ok(Claimed { volume: Arc::new(found), claim: Arc::new(claim), read_only: name.read_only })
}
