//! What the parts of the node ask of the pods' manager, and what they tell it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use beelet_policy::probe::{ProbeKind, ProbeResult};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{failure::Refusal, origin::Origin, status::OomFacts, table::PodName};

/// What others ask of the pods.
#[derive(Clone, Debug)]
pub enum Request {
    /// What the runtime was seen to have.
    Runtime(RuntimePods),
    /// A probe's published state changed.
    Probe(ProbeUpdate),
    /// Ends a pod for good: evicted, preempted, refused. Its containers and its sandbox are stopped, its
    /// cgroup and volumes removed; then its phase is `Failed`, over restarts of the agent too (unless it was
    /// [refused](Failure::is_refusal)), until its manifest changes or [`Request::Retry`] comes. Asked again,
    /// the first reason stays and the shorter grace counts. Nothing happens to a pod that isn't known or has
    /// ended by itself.
    Fail {
        /// The pod.
        uid: String,
        /// One word, `status.reason`.
        reason: String,
        /// A sentence, `status.message`.
        message: String,
        /// What its containers get to end by themselves; `None` for the pod's own grace period.
        grace: Option<Duration>,
    },
    /// Ends a pod for good that is not let in, as [`Request::Fail`] does with the pod's own grace period.
    Refuse {
        /// The pod.
        uid: String,
        /// One word, `status.reason`.
        reason: String,
        /// A sentence, `status.message`.
        message: String,
        /// Says when another try may succeed.
        refusal: Refusal,
    },
    /// The runtime's word that a container has ended, asked for because something else said so first.
    Exited {
        /// The pod.
        uid: String,
        /// The container's last status.
        status: Box<cri::ContainerStatus>,
    },
    /// The kernel killed a process of a container for want of memory.
    OomKilled(OomUpdate),
    /// A pod's new amounts are in force in its cgroups: which, by the runtime's identifier of a running
    /// container, and by the UID those of the pod as a whole; or why they can't be yet.
    Enacted {
        /// The pod.
        uid: String,
        /// Amounts, or a sentence.
        amounts: Result<BTreeMap<String, Option<core::ResourceRequirements>>, String>,
    },
    /// Starts containers again at once, without a restart delay; those that run are stopped first. Also tries
    /// again at once what could not be started (an image that was not there). One that has ended for good
    /// stays so.
    Restart {
        /// The pod.
        uid: String,
        /// The runtime's identifiers of the containers.
        containers: BTreeSet<String>,
    },
    /// Adds an ephemeral container to a static pod: it stays with the pod. Nothing happens to a pod that
    /// isn't known, ends, or has one of that name.
    Debug {
        /// The pod.
        uid: String,
        /// The container.
        container: Box<core::EphemeralContainer>,
    },
    /// Says how a static pod is to go whose manifest a person takes out. The pod is not terminated by this,
    /// but by [`Request::Terminate`]; of one that is terminated already the sooner end counts. Nothing
    /// happens to a pod that isn't known.
    Delete {
        /// The pod.
        uid: String,
        /// What its containers get to end by themselves; `None` for the pod's own grace period.
        grace: Option<Duration>,
        /// Takes the pod out of the view of people. What is left of it stays the manager's, which goes on to
        /// end it.
        force: bool,
    },
    /// Terminates a static pod on request, also where a manifest of its UID is there again by then: that one
    /// is another pod, which starts with nothing of this one once this one is gone. Nothing happens to a pod
    /// that isn't known.
    Terminate {
        /// The pod.
        uid: String,
    },
    /// Lets a pod that was ended by [`Request::Fail`] or [`Request::Refuse`] run again, as if it were new:
    /// once it has given back all it had.
    Retry {
        /// The pod.
        uid: String,
    },
}

/// What the runtime listed of one pod.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Its sandboxes.
    pub sandboxes: Vec<cri::PodSandbox>,
    /// Its containers.
    pub containers: Vec<cri::Container>,
}

/// All our pods in the runtime, and which of them changed since the last time.
#[derive(Clone, Debug)]
pub struct RuntimePods {
    /// By UID.
    pub pods: BTreeMap<String, RuntimePod>,
    /// UIDs of pods with anything new.
    pub changed: BTreeSet<String>,
    /// By UID what was listed of those that changed, in the first answer of all: who looks at one next need
    /// not ask for it. A runtime goes through all it has for each list that it is asked for.
    pub listed: BTreeMap<String, Listed>,
    /// When the runtime was asked.
    pub asked_at: Instant,
    /// The time before, it gave no answer.
    pub recovered: bool,
}

/// As much of a pod as its sandbox tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimePod {
    /// Its name.
    pub name: PodName,
    /// Seconds its containers get to end by themselves.
    pub grace: Duration,
    /// The manifest it came from.
    pub manifest: Option<PathBuf>,
    /// What the manifest said then, as a hash.
    pub hash: Option<String>,
    /// The same without the amounts that may change while the pod runs.
    #[serde(default)]
    pub shape: Option<String>,
    /// The source that wanted it.
    #[serde(default)]
    pub origin: Origin,
}

impl RuntimePod {
    /// Returns true if this can be a pod of ours with this UID. Folders are named by UID and name, and
    /// removed with the pod: what would lead out of their place was never ours, whoever says so.
    #[must_use]
    pub fn is_sound(&self, uid: &str) -> bool {
        let is_name = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['/', '\0']);
        [uid, &self.name.namespace, &self.name.name].into_iter().all(is_name)
    }
}

/// A probe's new state for one container instance.
#[derive(Clone, Debug)]
pub struct ProbeUpdate {
    /// The pod.
    pub uid: String,
    /// The container's name.
    pub container: String,
    /// The runtime's identifier of the instance that was probed.
    pub container_id: String,
    /// Which probe.
    pub kind: ProbeKind,
    /// Its new state.
    pub result: ProbeResult,
    /// Whether the container must be restarted for it.
    pub restart: bool,
    /// When the kernel saw what caused it, `CLOCK_MONOTONIC` nanoseconds.
    pub kernel_ns: Option<u64>,
}

/// An OOM kill in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomUpdate {
    /// The pod.
    pub uid: String,
    /// The runtime's identifier of the container.
    pub id: String,
    /// What the kernel said.
    pub facts: OomFacts,
}
