//! The check before a hand-over: which pods keep running under the next agent, and which would restart.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use super::{
    adopt,
    found::{Found, FoundContainer, Maker, Source},
    hash::container_hash_of,
    places::{Places, of_volumes},
    reason::{Next, Reason},
};
use crate::pod::{is_sidecar, restarts};

/// The first minor version of Kubernetes whose kubelets digest only the name and the image of a container.
const NAME_AND_IMAGE: u32 = 31;
/// The first minor version whose kubelets resize containers in place (InPlacePodVerticalScaling), and record
/// the amounts in force in `actuated_pods_state`.
const RESIZES: u32 = 33;
/// The first minor version whose kubelets keep the readiness of running containers at their start
/// (ChangeContainerStatusOnKubeletRestart is off).
const KEEPS_READINESS: u32 = 35;

/// A pod that a source names.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// For a static pod, the time of the last change of its file, in nanoseconds since the epoch.
    pub changed: Option<i64>,
    /// True if the UID is in the manifest itself, so that every agent uses the same one.
    pub uid_in_manifest: bool,
    /// True if the next agent's folder of pods has a folder of the pod, with its volumes.
    pub has_folder: bool,
    /// The places of the pod's volumes in that folder.
    pub places: Places,
}

/// Result of the check of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The next agent takes the pod over. Nothing of the pod restarts.
    Kept,
    /// The next agent restarts at least a part of the pod.
    Restarts(Vec<Reason>),
    /// The pod runs on, but the next agent has volumes of the pod in other folders than its containers.
    LosesVolumes(Vec<Reason>),
    /// The next agent does not touch the pod.
    LeftAlone(adopt::LeftAlone),
    /// The API server has the pod's deletion, which the next agent continues.
    Leaving,
    /// No source of beelet names the pod, so that beelet would stop it. A wrong staticPodPath or nodeName has
    /// the same effect.
    Unwanted,
}

impl Outcome {
    /// Returns true if the hand-over changes nothing for the pod: the next agent takes the pod over, or
    /// continues its deletion.
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        matches!(self, Self::Kept | Self::Leaving)
    }

    /// Returns true if everything of the pod runs on under the next agent.
    #[must_use]
    pub fn runs_on(&self) -> bool {
        matches!(self, Self::Kept | Self::LosesVolumes(_))
    }
}

/// Something of a pod that did not run on under the next agent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// The runtime has nothing of the pod any more.
    #[error("the pod is gone")]
    Pod,
    /// No sandbox of the pod is ready.
    #[error("the pod's sandbox was stopped")]
    Sandbox,
    /// The container ended, or another instance of it runs.
    #[error("container {0} does not run on")]
    Container(String),
}

/// Compares a pod with its state before the hand-over. `pod` is the definition of its source. Returns the
/// first loss. The success of a container that no agent restarts does not count, nor does the end of a pod
/// that was being deleted.
#[must_use]
pub fn loss(before: &Found, now: Option<&Found>, pod: &Pod) -> Option<Loss> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let Some(now) = now else { return Some(Loss::Pod) };
    // An agent stops the sandbox and the sidecars of a pod that is complete.
    let is_complete = is_complete(now, pod);
    if before.is_ready() && !now.is_ready() && !is_complete {
        return Some(Loss::Sandbox);
    }
    let is_regular = |one: &FoundContainer| {
        let has_succeeded = now.instance(one).is_some_and(|one| one.exit_code == Some(0));
        let ends = |spec: &PodSpec| {
            let main = spec.containers.iter().find(|main| main.name == one.name);
            let init = spec.init_containers.iter().flatten().find(|init| init.name == one.name);
            has_succeeded && main.is_some_and(|main| !restarts(spec, main, 0))
                || init.is_some_and(|init| if is_sidecar(init) { is_complete } else { has_succeeded })
        };
        pod.spec.as_ref().is_some_and(ends)
    };
    let mut ended = before.containers.iter().filter(|one| one.running && !now.runs_on(one));
    ended.find(|one| !is_regular(one)).map(|one| Loss::Container(one.name.clone()))
}

/// Returns true if all of the pod's own containers ended, and none of them restarts.
fn is_complete(now: &Found, pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    spec.containers.iter().all(|main| {
        let ended = newest(now, &main.name).filter(|made| !made.running);
        ended.and_then(|made| made.exit_code).is_some_and(|code| !restarts(spec, main, code))
    })
}

/// Checks one pod of the runtime.
#[must_use]
pub fn check(found: &Found, wanted: Option<&Wanted<'_>>, next: Next) -> Outcome {
    if let Next::Beelet(sources) = next
        && let adopt::Adoption::LeftAlone(why) = adopt::adoption(found, true, sources)
    {
        return Outcome::LeftAlone(why);
    }
    let Some(wanted) = wanted else { return Outcome::Unwanted };
    if wanted.pod.metadata.deletion_timestamp.is_some() {
        return Outcome::Leaving;
    }
    let mut reasons = Vec::new();
    if found.sandboxes.iter().filter(|sandbox| sandbox.ready).count() > 1 {
        reasons.push(Reason::ManySandboxes);
    }
    reasons.extend((!wanted.has_folder).then_some(Reason::OtherFolder));
    reasons.extend(of_manifest(found, wanted, next));
    if is_resizing(wanted.pod) {
        reasons.push(Reason::Resizing);
    }
    reasons.extend(of_amounts(found, wanted.pod, next));
    for container in lasting(wanted.pod) {
        let Some(made) = newest(found, &container.name).filter(|made| made.running) else { continue };
        reasons.extend(of_container(container, made, next));
    }
    let restarts = !reasons.is_empty();
    reasons.extend(of_volumes(found, wanted.pod, &wanted.places, next));
    match reasons {
        reasons if reasons.is_empty() || !found.runs() => Outcome::Kept,
        reasons if restarts => Outcome::Restarts(reasons),
        reasons => Outcome::LosesVolumes(reasons),
    }
}

/// Returns the reason to restart a static pod as a whole.
fn of_manifest(found: &Found, wanted: &Wanted<'_>, next: Next) -> Option<Reason> {
    if found.source == Source::Api || wanted.uid_in_manifest {
        return None;
    }
    match next {
        Next::Beelet(_) => {
            // A pod of the agent's own has the UID that the agent derives.
            let is_own = wanted.pod.metadata.uid.as_deref() == Some(&found.uid);
            let created = found.newest_sandbox().unwrap_or_default();
            let same = is_own || adopt::is_same_manifest(wanted.changed, created);
            (!same).then_some(Reason::ManifestChanged)
        }
        // Adopted from a kubelet, the pod has a kubelet's UID.
        Next::Kubelet { .. } => {
            let of_kubelet = found.sandboxes.iter().any(|sandbox| sandbox.maker == Maker::Kubelet);
            (!of_kubelet).then_some(Reason::OtherUid)
        }
    }
}

/// Returns the reason to restart a container whose amounts only a restart changes: a kubelet that has no
/// record of the amounts in force takes them for 0 (`computePodResizeAction`).
fn of_amounts(found: &Found, pod: &Pod, next: Next) -> Option<Reason> {
    let Next::Kubelet { minor: RESIZES.. } = next else { return None };
    // The record of a kubelet that ran the pod is still there.
    if found.has_any_of(Maker::Kubelet) {
        return None;
    }
    let restarts = |container: &&Container| {
        let mut policies = container.resize_policy.iter().flatten();
        let has_amounts = container.resources.as_ref().is_some_and(|resources| {
            [&resources.requests, &resources.limits].into_iter().flatten().any(|list| !list.is_empty())
        });
        has_amounts && policies.any(|policy| policy.restart_policy == "RestartContainer")
    };
    lasting(pod).find(restarts).map(|container| Reason::UnknownAmounts(container.name.clone()))
}

/// Returns true if the next agent reports a running container with a readiness probe as not ready until its
/// first probe, although the container was ready under the old agent.
#[must_use]
pub fn forgets_readiness(next: Next) -> bool {
    matches!(next, Next::Kubelet { minor } if minor < KEEPS_READINESS)
}

/// Returns the reason to restart a running container.
fn of_container(spec: &Container, made: &FoundContainer, next: Next) -> Option<Reason> {
    let current = container_hash_of(&spec.name, spec.image.as_deref().unwrap_or_default());
    let is_current = made.hash.as_deref() == Some(current.as_str());
    let name = || made.name.clone();
    match (next, made.maker) {
        (_, Maker::Kubelet) if is_current => None,
        (Next::Kubelet { minor }, Maker::Beelet) if minor < NAME_AND_IMAGE => {
            Some(Reason::WholeDigest(name()))
        }
        // The kubelet compares a digest of its own format with its own.
        (Next::Kubelet { minor }, Maker::Kubelet) if minor < NAME_AND_IMAGE => None,
        (Next::Kubelet { .. }, _) if !is_current => Some(Reason::OldDigest(name())),
        // beelet leaves digests alone that it cannot judge.
        (Next::Beelet(_), Maker::Beelet) if !is_current && is_short(made) => Some(Reason::OtherImage(name())),
        _ => None,
    }
}

/// Returns true if the digest has at most 32 bits: older versions of beelet wrote 64.
fn is_short(made: &FoundContainer) -> bool {
    made.hash.as_ref().is_some_and(|hash| hash.len() <= 8)
}

/// Returns the containers that run for the pod's whole life. An agent restarts a running init container of
/// another kind only if it fails.
fn lasting(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| {
        let sidecars = spec.init_containers.iter().flatten().filter(|init| is_sidecar(init));
        sidecars.chain(&spec.containers)
    })
}

fn newest<'f>(found: &'f Found, name: &str) -> Option<&'f FoundContainer> {
    found.containers.iter().filter(|one| one.name == name).max_by_key(|one| one.attempt)
}

/// Returns true if the status of the pod has an unfinished resize (KEP-1287).
fn is_resizing(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| {
        one.status == "True" && matches!(one.type_.as_str(), "PodResizePending" | "PodResizeInProgress")
    })
}
