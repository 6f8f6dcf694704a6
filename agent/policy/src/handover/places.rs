//! The folders of a pod's volumes: beelet and a kubelet each have places of their own below the pod's folder,
//! and each agent uses its own place if there are two (beelet) or in any case (a kubelet).

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, Volume};

use super::{
    found::{Found, Maker},
    reason::{Next, Reason},
};
use crate::volumes::claims::used;

/// The places of a pod's volumes on the node, by the volume's name. Links to volumes elsewhere don't count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The volumes with a folder in beelet's place, `volumes/NAME`.
    pub of_beelet: BTreeSet<String>,
    /// The volumes with a folder in a kubelet's place, `volumes/PLUGIN/NAME`.
    pub of_kubelet: BTreeSet<String>,
}

/// Returns a reason for each kind of volumes that the next agent has in another folder than the pod's
/// containers. hostPath volumes and claims have the same place under both agents.
pub(super) fn of_volumes(found: &Found, pod: &Pod, places: &Places, next: Next) -> Vec<Reason> {
    let used = match next {
        Next::Kubelet { .. } => used(pod).0,
        // A container that a kubelet started has the kubelet's folders.
        Next::Beelet(_) => used_under_kubelet(found, pod),
    };
    let is_elsewhere = |volume: &&Volume| {
        used.contains(volume.name.as_str())
            && places.of_beelet.contains(&volume.name)
            && (matches!(next, Next::Kubelet { .. }) || places.of_kubelet.contains(&volume.name))
    };
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let elsewhere: Vec<&Volume> = volumes.filter(is_elsewhere).collect();
    let names = |is: fn(&Volume) -> bool| {
        let names: Vec<&str> =
            elsewhere.iter().filter(|volume| is(volume)).map(|volume| volume.name.as_str()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let lost = names(|volume| volume.empty_dir.is_some()).map(Reason::EmptyDirElsewhere);
    let stale = names(shows_objects).map(Reason::ObjectsElsewhere);
    lost.into_iter().chain(stale).collect()
}

/// Returns true if the agent writes objects of the API server into the volume. The token of a service account
/// is a projected volume of the pod.
fn shows_objects(volume: &Volume) -> bool {
    let Volume { config_map, secret, projected, downward_api, .. } = volume;
    config_map.is_some() || secret.is_some() || projected.is_some() || downward_api.is_some()
}

/// Returns the volumes of the running containers that a kubelet started.
fn used_under_kubelet<'p>(found: &Found, pod: &'p Pod) -> BTreeSet<&'p str> {
    let runs = |name: &str| {
        found.containers.iter().any(|one| one.name == name && one.running && one.maker == Maker::Kubelet)
    };
    let containers =
        pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let mounts = containers.filter(|one| runs(&one.name)).flat_map(|one| one.volume_mounts.iter().flatten());
    mounts.map(|mount| mount.name.as_str()).collect()
}
