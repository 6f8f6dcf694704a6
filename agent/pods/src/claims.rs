//! What the volume claims of a pod are bound to, as the API server says it now.

use std::{collections::BTreeMap, sync::Arc};

use beelet_model::storage::{Claimed, Storage};
use beelet_policy::{
    claims::{self, ClaimName},
    node_fit::NodeView,
};
use futures::future::join_all;
use k8s_openapi::api::core::v1 as core;

use crate::error::Error;

/// Reads the claims that containers of the pod use, by volume.
///
/// # Errors
/// One isn't there or isn't bound, or is not for this pod or this node; or nobody answers.
pub(crate) async fn read(
    storage: Option<&dyn Storage>,
    pod: &core::Pod,
    node: Option<Arc<NodeView>>,
) -> Result<BTreeMap<String, Claimed>, Error> {
    let (mounts, devices) = claims::used(pod);
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let used = volumes
        .filter(|volume| mounts.contains(volume.name.as_str()) || devices.contains(volume.name.as_str()));
    let claimed = used.filter_map(|volume| Some((volume, claims::claim_of(pod, volume)?)));
    let asked = claimed.map(async |(volume, name)| {
        let found = read_one(storage, pod, volume, &name).await;
        (volume.name.clone(), found)
    });
    let (mut found, mut volumes, mut whys) = (BTreeMap::new(), Vec::new(), Vec::new());
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
            claims::check_node(&claimed.volume, node).map_err(|why| Error::Volume {
                volume: volume.clone(),
                why: format!("node affinity check failed: {why}"),
            })?;
        }
    }
    Ok(found)
}

async fn read_one(
    storage: Option<&dyn Storage>,
    pod: &core::Pod,
    volume: &core::Volume,
    name: &ClaimName,
) -> Result<Claimed, String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let failed = |why: String| format!("error processing PVC {namespace}/{}: {why}", name.name);
    let storage = storage.ok_or_else(|| failed("this node has no API server".to_owned()))?;
    let claim = storage.claim(namespace, &name.name).await;
    let claim = claim.map_err(|why| failed(format!("failed to fetch PVC from API server: {why}")))?;
    let bound = claims::bound_volume(pod, name, &claim).map_err(failed)?;
    let found = storage.volume(bound).await;
    let found = found.map_err(|why| failed(format!("failed to fetch PV {bound} from API server: {why}")))?;
    claims::check_volume(pod, volume, &claim, &found).map_err(failed)?;
    Ok(Claimed { volume: Arc::new(found), read_only: name.read_only })
}
