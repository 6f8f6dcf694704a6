//! Publishes volumes of storage plugins again and again while their pods run, where the driver wants that
//! (`requiresRepublish`): what it was given, such as tokens, ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::work::Work;
use beelet_model::{
    storage::Storage,
    table::{PodName, PodTable},
};
use beelet_policy::volumes::{claims::may_be_of_driver, csi};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    claims,
    error::Error,
    launch::Launcher,
    rounds::{Rounds, runs_with, uid},
};

/// How often: about as often as the kubelet looks at a pod.
const PERIOD: Duration = Duration::from_secs(60);
/// Pods at a time: a driver that hangs holds up few others.
const AT_A_TIME: usize = 16;

/// Publishes until `cancel`.
pub fn follow(
    table: watch::Receiver<Arc<PodTable>>,
    launcher: Arc<Launcher>,
    cancel: CancellationToken,
) -> Work {
    Box::pin(async move {
        let Some(storage) = launcher.storage.clone() else { return cancel.cancelled().await };
        let is_wanted = |pod: &Pod| runs_with(pod, may_be_of_driver);
        let mut rounds = Rounds::new(table, &launcher.csi, PERIOD, is_wanted);
        let mut told: BTreeSet<String> = BTreeSet::new();
        let work = async {
            loop {
                let pods = rounds.next().await;
                let all = round(pods, &launcher, &*storage).await;
                told.retain(|uid| rounds.knows(uid));
                for (pod, published) in all {
                    match published {
                        Ok(()) => drop(told.remove(uid(&pod))),
                        Err(error) if told.insert(uid(&pod).to_owned()) => {
                            warn!(pod = %PodName::of(&pod), "volumes can't be published again: {error}");
                        }
                        Err(_) => {}
                    }
                }
            }
        };
        cancel.run_until_cancelled(work).await;
    })
}

/// Publishes once; what came of it.
async fn round(
    pods: Vec<Arc<Pod>>,
    launcher: &Launcher,
    storage: &dyn Storage,
) -> Vec<(Arc<Pod>, Result<(), Error>)> {
    let here = launcher.csi.drivers().borrow().clone();
    let mut wants: BTreeMap<String, bool> = BTreeMap::new();
    let mut due = Vec::new();
    for pod in pods {
        for driver in launcher.csi.drivers_of(uid(&pod)).await {
            // One that isn't here is asked as soon as it comes.
            if here.contains_key(&driver) && !wants.contains_key(&driver) {
                // Nobody answers: the next round asks again.
                let object = storage.driver(&driver).await.ok().flatten();
                wants.insert(driver.clone(), csi::is_republished(object.as_ref()));
            }
            if wants.get(&driver) == Some(&true) {
                due.push(pod);
                break;
            }
        }
    }
    let publish = due.into_iter().map(async |pod| {
        let published = match claims::read(Some(storage), &pod, None).await {
            Ok(claims) => claims::publish(&launcher.csi, Some(storage), &pod, &claims, true).await.map(drop),
            Err(error) => Err(error),
        };
        (pod, published)
    });
    stream::iter(publish).buffer_unordered(AT_A_TIME).collect().await
}
