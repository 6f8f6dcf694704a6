//! What the volume claims of a pod are bound to, as the API server says it now, and what storage plugins
//! bring to it. Volumes of kinds that storage plugins have taken over are spoken of in CSI's words from here
//! on.

use std::{collections::BTreeMap, sync::Arc};

use beelet_csi::{Csi, Source, Wanted};
use beelet_model::storage::{Claimed, Published, Storage};
use beelet_policy::{
    node::fit::NodeView,
    volumes::{
        claims::{self, ClaimName},
        migration, removed_kinds,
    },
};
use futures::future::join_all;
use k8s_openapi::api::core::v1 as core;

use crate::error::Error;

/// Reads the claims that containers of the pod use, by volume.
///
/// # Errors
/// One isn't there or isn't bound, or is not for this pod or this node; or nobody answers. Or nothing makes
/// one of the pod's own volumes.
pub(crate) async fn read(
    storage: Option<&dyn Storage>,
    pod: &core::Pod,
    node: Option<Arc<NodeView>>,
) -> Result<BTreeMap<String, Claimed>, Error> {
    let (mounts, devices) = claims::used(pod);
    let used = || {
        volumes(pod)
            .filter(|volume| mounts.contains(volume.name.as_str()) || devices.contains(volume.name.as_str()))
    };
    let (mut found, mut volumes, mut whys) = (BTreeMap::new(), Vec::new(), Vec::new());
    for volume in used() {
        if let Err(why) = claims::check_kind(volume, namespace_of(pod)) {
            volumes.push(volume.name.clone());
            whys.push(why);
        }
    }
    let claimed = used().filter_map(|volume| Some((volume, claims::claim_of(pod, volume)?)));
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
            claims::check_node(&claimed.volume, node).map_err(|why| Error::Volume {
                volume: volume.clone(),
                why: format!("node affinity check failed: {why}"),
            })?;
        }
    }
    Ok(found)
}

/// The pod's namespace.
pub(crate) fn namespace_of(pod: &core::Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("default")
}

fn volumes(pod: &core::Pod) -> impl Iterator<Item = &core::Volume> {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten())
}

/// Has storage plugins bring the pod's volumes, all at a time, or, `again`, those that it has once more; what
/// they brought, by volume.
///
/// # Errors
/// One can't, or not yet.
pub(crate) async fn publish(
    csi: &Csi,
    storage: Option<&dyn Storage>,
    pod: &core::Pod,
    claims: &BTreeMap<String, Claimed>,
    again: bool,
) -> Result<BTreeMap<String, Published>, Error> {
    let Some(storage) = storage else { return Ok(BTreeMap::new()) };
    let (mounts, devices) = claims::used(pod);
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let group = context.and_then(|context| context.fs_group);
    let used = |volume: &&core::Volume| {
        mounts.contains(volume.name.as_str()) || devices.contains(volume.name.as_str())
    };
    let migrated = |volume: &core::Volume| migration::of_pod(volume, namespace_of(pod))?.ok();
    let used: Vec<_> = volumes(pod).filter(used).map(|volume| (volume, migrated(volume))).collect();
    let wanted = used.iter().filter_map(|(volume, migrated)| {
        if let Some(source) = &volume.csi {
            let (name, read_only) = (volume.name.as_str(), source.read_only == Some(true));
            let source = Source::Inline(source);
            return Some((volume, Wanted { pod, name, source, read_only, group, again }));
        }
        let (found, read_only) = match (migrated, claims.get(&volume.name)) {
            (Some(found), _) => (found, migration::is_read_only(volume)),
            (None, Some(claimed)) => (&*claimed.volume, claimed.read_only),
            (None, None) => return None,
        };
        let source = Source::Persistent(found, found.spec.as_ref()?.csi.as_ref()?);
        let name = found.metadata.name.as_deref().unwrap_or_default();
        Some((volume, Wanted { pod, name, source, read_only, group, again }))
    });
    let bring = wanted.map(async |(volume, wanted)| {
        let brought = csi.publish(storage, wanted).await;
        let brought =
            brought.map_err(|error| Error::Volume { volume: volume.name.clone(), why: error.to_string() })?;
        Ok((volume.name.clone(), brought))
    });
    join_all(bring).await.into_iter().collect()
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
    let bound = claims::bound_volume(pod, name, &claim).map_err(failed)?;
    let found = storage.volume(bound).await;
    let found = found.map_err(|why| failed(format!("failed to fetch PV {bound} from API server: {why}")))?;
    claims::check_volume(pod, volume, &claim, &found).map_err(failed)?;
    if removed_kinds::is_removed_of_claim(&found) {
        return Err(removed_kinds::no_plugin(bound));
    }
    let found = match migration::of_claim(&found) {
        Some(migrated) => migrated?,
        None => found,
    };
    Ok(Claimed { volume: Arc::new(found), claim: Arc::new(claim), read_only: name.read_only })
}
