//! What volumes of `flexVolume` drivers and disks on networks need before they can be mounted: that a
//! controller has attached them, where that is needed, and their Secrets. On a node of its own nobody
//! attaches them but the agent.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_base::blocking::blocking;
use beelet_model::{
    objects::Objects,
    origin::Origin,
    storage::{Claimed, Storage},
};
use beelet_policy::volumes::{
    claims, csi,
    flex_volume::{self, FlexVolume},
    remote_disk::{self, RemoteVolume},
};
use beelet_volumes::{Attached, FlexVolumes, FlexWanted, RemoteWanted};
use futures::future::join_all;
use k8s_openapi::{
    ByteString,
    api::core::v1::{Node, Pod, Secret},
};
use tokio::time::timeout;

use crate::{claims::namespace_of, error::Error, launch::Launcher};

/// How long a volume may take to be attached before the pod's worker is told that it isn't.
const ATTACH: Duration = Duration::from_secs(120);

/// A volume that is attached, or may be.
enum Found {
    Flex(FlexVolume),
    Remote(RemoteVolume),
}

/// What is asked for it.
struct Asking<'a> {
    launcher: &'a Launcher,
    pod: &'a Pod,
    objects: &'a Objects,
}

/// Waits for what the volumes need that containers of the pod use, all at a time; by volume.
///
/// # Errors
/// A driver is not here, a volume is not attached, or a Secret is missing.
pub(crate) async fn prepare(
    launcher: &Launcher,
    pod: &Pod,
    claims: &BTreeMap<String, Claimed>,
    objects: &Objects,
) -> Result<BTreeMap<String, Attached>, Error> {
    let asking = Asking { launcher, pod, objects };
    let prepare = volumes(pod, claims).into_iter().map(async |(volume, found)| {
        let failed = |why: String| Error::Volume { volume: volume.clone(), why };
        let prepared = match found.map_err(failed)? {
            Found::Flex(found) => Attached::Flex(asking.flex(&volume, found).await?),
            Found::Remote(found) => Attached::Remote(asking.remote(&volume, found).await.map_err(failed)?),
        };
        Ok((volume, prepared))
    });
    join_all(prepare).await.into_iter().collect()
}

/// The volumes of that kind that containers of a pod use.
fn volumes(pod: &Pod, claims: &BTreeMap<String, Claimed>) -> Vec<(String, Result<Found, String>)> {
    let (mounts, devices) = claims::used(pod);
    let namespace = namespace_of(pod);
    let all = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let used =
        all.filter(|volume| mounts.contains(volume.name.as_str()) || devices.contains(volume.name.as_str()));
    let found = used.filter_map(|volume| {
        let found = match claims.get(&volume.name) {
            Some(Claimed { volume, read_only, .. }) => {
                let flex = flex_volume::of_claim(volume, *read_only, namespace);
                let remote = || remote_disk::of_claim(volume, *read_only, namespace);
                flex.map(|found| found.map(Found::Flex)).or_else(|| Some(remote()?.map(Found::Remote)))
            }
            None => {
                let flex = flex_volume::of_pod(volume, namespace).map(|found| Ok(Found::Flex(found)));
                flex.or_else(|| Some(remote_disk::of_pod(volume, namespace)?.map(Found::Remote)))
            }
        };
        Some((volume.name.clone(), found?))
    });
    found.collect()
}

impl Asking<'_> {
    fn uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }

    fn storage(&self) -> Option<&dyn Storage> {
        self.launcher.storage.as_deref()
    }

    async fn flex(&self, volume: &str, found: FlexVolume) -> Result<FlexWanted, Error> {
        let failed = |why: String| Error::Volume { volume: volume.to_owned(), why };
        let drivers = self.launcher.disks.flex();
        let is_attached = attaches(drivers, volume, &found).await?;
        let device = match self.storage().filter(|_| is_attached) {
            Some(storage) => {
                drivers.use_by(&found, self.uid());
                Some(attached(storage, volume, &found.unique_name()).await.map_err(failed)?)
            }
            None => None,
        };
        let secret = match &found.secret {
            Some(named) => self.secret(Some(&found.driver), named).await.map_err(failed)?,
            None => BTreeMap::new(),
        };
        Ok(FlexWanted { volume: found, secret, device })
    }

    async fn remote(&self, volume: &str, found: RemoteVolume) -> Result<RemoteWanted, String> {
        if let Some(storage) = self.storage() {
            // A controller keeps a disk from being on two nodes that must not have it both.
            self.launcher.disks.remote().use_by(&found, self.uid());
            attached(storage, volume, &found.disk.unique_name()).await?;
        }
        let secret = match &found.secret {
            Some(named) => {
                let text = |value: Vec<u8>| String::from_utf8_lossy(&value).into_owned();
                self.secret(None, named).await?.into_iter().map(|(key, value)| (key, text(value))).collect()
            }
            None => BTreeMap::new(),
        };
        Ok(RemoteWanted { volume: found, secret })
    }

    /// What is in a volume's Secret. One for a driver must be of the driver's own type: no pod
    /// hands another Secret to it.
    async fn secret(
        &self,
        kind: Option<&str>,
        (namespace, name): &(String, String),
    ) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let failed = |why: String| format!("couldn't get secret {namespace}/{name} err: {why}");
        let found = match self.storage().filter(|_| Origin::of(self.pod).is_api()) {
            Some(storage) => storage.secret(namespace, name).await.map_err(|why| failed(why.to_string()))?,
            None => {
                let found: Option<&Secret> = self.objects.secret(namespace, name);
                found.cloned().ok_or_else(|| failed(format!("secrets {name:?} not found")))?
            }
        };
        if let Some(kind) = kind.filter(|kind| found.type_.as_deref() != Some(*kind)) {
            return Err(failed(format!("cannot get secret of type {kind}")));
        }
        let data = found.data.unwrap_or_default().into_iter();
        Ok(data.map(|(key, ByteString(value))| (key, value)).collect())
    }
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
async fn attached(storage: &dyn Storage, volume: &str, name: &str) -> Result<String, String> {
    let mut node = storage.node();
    let device = |node: &Option<Arc<Node>>| Some(csi::attached_device(node.as_ref()?, name)?.to_owned());
    let seen = timeout(ATTACH, node.wait_for(|node| device(node).is_some())).await;
    let seen = seen.ok().and_then(Result::ok).and_then(|node| device(&node));
    seen.ok_or_else(|| {
        format!("Volume not attached according to node status for volume {volume:?} (UniqueName: {name:?})")
    })
}
