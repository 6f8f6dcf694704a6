//! Expands the volumes of claims on the node, before a pod starts and while the pod runs (`NodeExpandVolume`
//! of the kubelet). The plugin expands the volume and records the size in the claim's status.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::work::Work;
use beelet_model::storage::{Claimed, Storage};
use beelet_policy::volumes::claims::is_claim;
use beelet_state::events::{Object, Recorder};
use futures::{StreamExt, future::join_all, stream};
use k8s_openapi::api::core::v1::{Pod, Volume};
use tokio_util::sync::CancellationToken;

use crate::{
    claims,
    error::Error,
    plugin::{ExpandFacts, Spec},
    plugins::Plugins,
    resync::{Resync, runs_with, uid},
};

/// Time between two checks of all claims: about the kubelet's period.
pub(crate) const PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of pods that are checked at the same time: a hanging driver delays few others.
const AT_A_TIME: usize = 16;

/// Expands the volumes of a pod that is about to start.
///
/// # Errors
/// A volume stays smaller than its claim, so the pod must not start.
pub(crate) async fn at_mount(
    plugins: &Plugins,
    storage: Option<&dyn Storage>,
    pod: &Pod,
    claims: &BTreeMap<String, Claimed>,
) -> Result<(), Error> {
    let Some(storage) = storage else { return Ok(()) };
    let facts = ExpandFacts { pod, storage, mounted: false };
    let all = claims.iter().map(async |(volume, claimed)| {
        let expanded = expand(plugins, claimed, facts).await;
        expanded.map_err(|why| Error::unmet(why).of_volume(volume))
    });
    join_all(all).await.into_iter().collect()
}

async fn expand(plugins: &Plugins, claimed: &Claimed, facts: ExpandFacts<'_>) -> Result<(), String> {
    let none = Volume::default();
    let (_, plugin) = plugins.of(&Spec { volume: &none, claimed: Some(claimed) });
    plugin.expand(claimed, facts).await
}

/// Parts that the periodic expansion needs.
#[derive(Debug)]
pub(crate) struct Deps {
    pub(crate) plugins: Plugins,
    pub(crate) storage: Option<Arc<dyn Storage>>,
    pub(crate) events: Recorder,
}

/// Returns true if the claims of a pod are checked periodically.
pub(crate) fn is_checked(pod: &Pod) -> bool {
    runs_with(pod, is_claim)
}

/// Expands the volumes of running pods, until `cancel`.
pub(crate) fn follow(deps: Deps, mut resync: Resync, cancel: CancellationToken) -> Work {
    Box::pin(async move {
        let Some(storage) = deps.storage.clone() else { return cancel.cancelled().await };
        let work = async {
            loop {
                let all = resync.next().await.into_iter().map(|pod| expand_all(&deps, &*storage, pod));
                stream::iter(all).buffer_unordered(AT_A_TIME).collect::<Vec<()>>().await;
            }
        };
        cancel.run_until_cancelled(work).await;
    })
}

/// Expands the volumes of a running pod that plugins can expand on the node.
async fn expand_all(deps: &Deps, storage: &dyn Storage, pod: Arc<Pod>) {
    let expandable = join_all(deps.plugins.all().map(|plugin| plugin.expandable(uid(&pod)))).await;
    let expandable: BTreeSet<String> = expandable.into_iter().flatten().collect();
    if expandable.is_empty() {
        return;
    }
    // If the API server does not answer, the next round asks again.
    let Ok(claims) = claims::read(Some(storage), &pod, None).await else { return };
    let facts = ExpandFacts { pod: &pod, storage, mounted: true };
    for claimed in claims.values().filter(|claimed| expandable.contains(claimed.name())) {
        if let Err(why) = expand(&deps.plugins, claimed, facts).await {
            deps.events.warning(Object::pod(&pod), "VolumeResizeFailed", why);
        }
    }
}
