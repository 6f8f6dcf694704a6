//! Republishes volumes of storage plugins while their pods run, if the driver asks for that
//! (`requiresRepublish`): the tokens and other facts that the driver received expire.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::work::Work;
use beelet_model::{
    objects::Objects,
    storage::{Claimed, Storage},
    table::PodName,
};
use beelet_policy::volumes::{claims::may_be_of_driver, csi};
use futures::{StreamExt, future::join_all, stream};
use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    claims,
    csi::CsiVolumes,
    error::Error,
    plugin::{AttachFacts, Spec},
    resync::{Resync, runs_with, uid},
};

/// Time between two rounds: about the time between two syncs of a pod by the kubelet.
pub(crate) const PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of pods whose volumes are republished at the same time: a hanging driver delays few others.
const AT_A_TIME: usize = 16;

/// Returns true if a pod may have volumes that are republished.
pub(crate) fn is_checked(pod: &Pod) -> bool {
    runs_with(pod, may_be_of_driver)
}

/// Republishes until `cancel`.
pub(crate) fn follow(
    csi: CsiVolumes,
    storage: Option<Arc<dyn Storage>>,
    mut resync: Resync,
    cancel: CancellationToken,
) -> Work {
    Box::pin(async move {
        let Some(storage) = storage else { return cancel.cancelled().await };
        let mut warned: BTreeSet<String> = BTreeSet::new();
        let work = async {
            loop {
                let pods = resync.next().await;
                let all = round(pods, &csi, &*storage).await;
                warned.retain(|uid| resync.knows(uid));
                for (pod, published) in all {
                    match published {
                        Ok(()) => drop(warned.remove(uid(&pod))),
                        Err(error) if warned.insert(uid(&pod).to_owned()) => {
                            warn!(pod = %PodName::of(&pod), "cannot republish volumes: {error}");
                        }
                        Err(_) => {}
                    }
                }
            }
        };
        cancel.run_until_cancelled(work).await;
    })
}

/// Republishes the volumes of these pods once.
async fn round(
    pods: Vec<Arc<Pod>>,
    csi: &CsiVolumes,
    storage: &dyn Storage,
) -> Vec<(Arc<Pod>, Result<(), Error>)> {
    let registered = csi.csi.drivers().borrow().clone();
    let mut asks: BTreeMap<String, bool> = BTreeMap::new();
    let mut due = Vec::new();
    for pod in pods {
        for driver in csi.csi.drivers_of(uid(&pod)).await {
            // The registration of a driver starts a round that checks it.
            if registered.contains_key(&driver) && !asks.contains_key(&driver) {
                // If the API server does not answer, the next round asks again.
                let object = storage.driver(&driver).await.ok().flatten();
                asks.insert(driver.clone(), csi::is_republished(object.as_ref()));
            }
            if asks.get(&driver) == Some(&true) {
                due.push(pod);
                break;
            }
        }
    }
    let republish = due.into_iter().map(async |pod| {
        let published = match claims::read(Some(storage), &pod, None).await {
            Ok(claims) => republish(csi, storage, &pod, &claims).await,
            Err(error) => Err(error),
        };
        (pod, published)
    });
    stream::iter(republish).buffer_unordered(AT_A_TIME).collect().await
}

/// Republishes all volumes of a pod at the same time.
async fn republish(
    csi: &CsiVolumes,
    storage: &dyn Storage,
    pod: &Pod,
    claims: &BTreeMap<String, Claimed>,
) -> Result<(), Error> {
    let facts = AttachFacts { pod, storage: Some(storage), objects: &Objects::default() };
    let publish = claims::used_volumes(pod).map(async |volume| {
        let spec = Spec { volume, claimed: claims.get(&volume.name) };
        csi.publish(spec, facts, true).await.map(drop).map_err(|error| error.of_volume(&volume.name))
    });
    join_all(publish).await.into_iter().collect()
}
