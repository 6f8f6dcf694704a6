//! Publishes volumes of storage plugins again and again while their pods run, where the driver wants that
//! (`requiresRepublish`): what it was given, such as tokens, ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_model::{
    pod::is_active,
    storage::Storage,
    table::{PodName, PodTable},
};
use beelet_policy::{claims::is_claim, csi};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{claims, error::Error, launch::Launcher};

/// How often: about as often as the kubelet looks at a pod.
const PERIOD: Duration = Duration::from_secs(60);
/// Pods at a time: a driver that hangs holds up few others.
const AT_A_TIME: usize = 16;

/// Publishes until `cancel`.
pub async fn follow(
    table: watch::Receiver<Arc<PodTable>>,
    launcher: Arc<Launcher>,
    cancel: CancellationToken,
) {
    let Some(storage) = launcher.storage.clone() else { return cancel.cancelled().await };
    let mut told: BTreeSet<PodName> = BTreeSet::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            () = cancel.cancelled() => return,
        }
        let pods = Arc::clone(&table.borrow());
        let round = round(&pods, &launcher, &*storage);
        let Some(failed) = cancel.run_until_cancelled(round).await else { return };
        for (name, error) in &failed {
            if !told.contains(name) {
                warn!(pod = %name, "volumes can't be published again: {error}");
            }
        }
        told = failed.into_keys().collect();
    }
}

/// Publishes once; what failed, by pod.
async fn round(table: &PodTable, launcher: &Launcher, storage: &dyn Storage) -> BTreeMap<PodName, Error> {
    let pods: Vec<(PodName, Arc<Pod>)> = table
        .pods
        .iter()
        .filter(|(_, entry)| may_need_it(&entry.pod))
        .map(|(name, entry)| (name.clone(), Arc::new(entry.pod.clone())))
        .collect();
    let mut wants: BTreeMap<String, bool> = BTreeMap::new();
    let mut due = Vec::new();
    for (name, pod) in pods {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        for driver in launcher.csi.drivers_of(&uid).await {
            if !wants.contains_key(&driver) {
                // Nobody answers: the next round asks again.
                let object = storage.driver(&driver).await.ok().flatten();
                wants.insert(driver.clone(), csi::is_republished(object.as_ref()));
            }
            if wants.get(&driver) == Some(&true) {
                due.push((name, pod));
                break;
            }
        }
    }
    let publish = due.into_iter().map(async |(name, pod)| {
        let claims = claims::read(Some(storage), &pod, None).await;
        let published = match claims {
            Ok(claims) => claims::publish(&launcher.csi, Some(storage), &pod, &claims, true).await,
            Err(error) => Err(error),
        };
        published.err().map(|error| (name, error))
    });
    stream::iter(publish).buffer_unordered(AT_A_TIME).filter_map(async |failed| failed).collect().await
}

/// Returns true if a pod runs, and may have volumes of storage plugins.
fn may_need_it(pod: &Pod) -> bool {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let mut plugins = volumes.filter(|volume| volume.csi.is_some() || is_claim(volume));
    pod.metadata.deletion_timestamp.is_none() && is_active(pod) && plugins.next().is_some()
}
