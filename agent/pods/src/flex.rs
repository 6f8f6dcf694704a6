//! What volumes of `flexVolume` drivers need before they can be mounted: that a controller has attached them,
//! where their driver wants that, and their Secrets. On a node of its own nobody attaches them but the agent.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_base::blocking::blocking;
use beelet_model::{
    objects::Objects,
    origin::Origin,
    storage::{Claimed, Storage},
};
use beelet_policy::{
    claims, csi,
    flex_volume::{self, FlexVolume},
};
use beelet_volumes::{FlexVolumes, FlexWanted};
use futures::future::join_all;
use k8s_openapi::{
    ByteString,
    api::core::v1::{Node, Pod, Secret},
};
use tokio::time::timeout;

use crate::{claims::namespace_of, error::Error, launch::Launcher};

/// How long a volume may take to be attached before the pod's worker is told that it isn't.
const ATTACH: Duration = Duration::from_secs(120);

/// Waits for what the volumes need that containers of the pod use, all at a time; by volume.
///
/// # Errors
/// A driver is not here, a volume is not attached, or a Secret is missing.
pub(crate) async fn prepare(
    launcher: &Launcher,
    pod: &Pod,
    claims: &BTreeMap<String, Claimed>,
    objects: &Objects,
) -> Result<BTreeMap<String, FlexWanted>, Error> {
    let storage = launcher.storage.as_deref();
    let prepare = volumes(pod, claims).into_iter().map(async |(volume, found)| {
        let failed = |why: String| Error::Volume { volume: volume.clone(), why };
        let found = found.map_err(failed)?;
        let drivers = launcher.disks.flex();
        let is_attached = attaches(drivers, &volume, &found).await?;
        let device = match storage.filter(|_| is_attached) {
            Some(storage) => {
                drivers.use_by(&found, pod.metadata.uid.as_deref().unwrap_or_default());
                Some(attached(storage, &volume, &found).await.map_err(failed)?)
            }
            None => None,
        };
        let secret = match &found.secret {
            Some(named) => secret(storage, (pod, objects), &found.driver, named).await.map_err(failed)?,
            None => BTreeMap::new(),
        };
        Ok((volume, FlexWanted { volume: found, secret, device }))
    });
    join_all(prepare).await.into_iter().collect()
}

/// The volumes of drivers that containers of a pod use.
fn volumes(pod: &Pod, claims: &BTreeMap<String, Claimed>) -> Vec<(String, Result<FlexVolume, String>)> {
    let (mounts, devices) = claims::used(pod);
    let namespace = namespace_of(pod);
    let all = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let used =
        all.filter(|volume| mounts.contains(volume.name.as_str()) || devices.contains(volume.name.as_str()));
    let found = used.filter_map(|volume| {
        let found = match claims.get(&volume.name) {
            Some(claimed) => flex_volume::of_claim(&claimed.volume, claimed.read_only, namespace)?,
            None => Ok(flex_volume::of_pod(volume, namespace)?),
        };
        Some((volume.name.clone(), found))
    });
    found.collect()
}

/// Returns true if a driver's volumes are attached first. Without the driver, the kubelet's words.
async fn attaches(drivers: &FlexVolumes, volume: &str, found: &FlexVolume) -> Result<bool, Error> {
    let (drivers, driver) = (drivers.clone(), found.driver.clone());
    let asked = blocking("asking a flexVolume driver", move || drivers.attaches(&driver)).await;
    asked.map_err(|why| Error::Claims {
        volumes: vec![volume.to_owned()],
        why: format!("failed to get Plugin from volumeSpec for volume {:?} err={why}", found.name),
    })
}

/// Waits until a controller has attached a volume; its device.
async fn attached(storage: &dyn Storage, volume: &str, found: &FlexVolume) -> Result<String, String> {
    let name = found.unique_name();
    let mut node = storage.node();
    let device = |node: &Option<Arc<Node>>| Some(csi::attached_device(node.as_ref()?, &name)?.to_owned());
    let seen = timeout(ATTACH, node.wait_for(|node| device(node).is_some())).await;
    let seen = seen.ok().and_then(Result::ok).and_then(|node| device(&node));
    seen.ok_or_else(|| {
        format!("Volume not attached according to node status for volume {volume:?} (UniqueName: {name:?})")
    })
}

/// What is in a volume's Secret. It must be of the driver's own type: no pod hands another Secret
/// to a driver.
async fn secret(
    storage: Option<&dyn Storage>,
    (pod, objects): (&Pod, &Objects),
    driver: &str,
    (namespace, name): &(String, String),
) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let failed = |why: String| format!("couldn't get secret {namespace}/{name} err: {why}");
    let found = match storage.filter(|_| Origin::of(pod).is_api()) {
        Some(storage) => storage.secret(namespace, name).await.map_err(|why| failed(why.to_string()))?,
        None => {
            let found: Option<&Secret> = objects.secret(namespace, name);
            found.cloned().ok_or_else(|| failed(format!("secrets {name:?} not found")))?
        }
    };
    if found.type_.as_deref() != Some(driver) {
        return Err(failed(format!("cannot get secret of type {driver}")));
    }
    let data = found.data.unwrap_or_default().into_iter();
    Ok(data.map(|(key, ByteString(value))| (key, value)).collect())
}
