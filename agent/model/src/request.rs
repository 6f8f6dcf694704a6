//! Requests and reports of the node's parts to the pods' manager.

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

/// A request or report to the pods' manager.
#[derive(Clone, Debug)]
pub enum Request {
    /// Observed state of the runtime.
    Runtime(RuntimePods),
    /// A probe's published state changed.
    Probe(ProbeUpdate),
    /// Ends a pod permanently: evicted, preempted, rejected. Its containers and sandbox are stopped, its
    /// cgroup and volumes removed; then its phase is `Failed`, across agent restarts (unless it was
    /// [rejected](Failure::is_refusal)), until its manifest changes or [`Request::Retry`] comes. A repeated
    /// request keeps the first reason, and the shorter grace period counts. Ignored for an unknown pod or one
    /// that has ended by itself.
    Fail {
        /// UID of the pod.
        uid: String,
        /// `status.reason`, a word.
        reason: String,
        /// `status.message`, a sentence.
        message: String,
        /// Grace period of the containers; `None` for the pod's own.
        grace: Option<Duration>,
    },
    /// Rejects a pod permanently, as [`Request::Fail`] does with the pod's own grace period.
    Refuse {
        /// UID of the pod.
        uid: String,
        /// `status.reason`, a word.
        reason: String,
        /// `status.message`, a sentence.
        message: String,
        /// Condition for another try.
        refusal: Refusal,
    },
    /// Reports the runtime's status of an ended container, read after a hint.
    Exited {
        /// UID of the pod.
        uid: String,
        /// Last status of the container.
        status: Box<cri::ContainerStatus>,
    },
    /// Reports that the kernel OOM-killed a process of a container.
    OomKilled(OomUpdate),
    /// Reports a pod's amounts in force in its cgroups, by the runtime's identifier of a running container,
    /// and by the UID for the pod as a whole; or why they cannot be in force yet.
    Enacted {
        /// UID of the pod.
        uid: String,
        /// Amounts, or a sentence.
        amounts: Result<BTreeMap<String, Option<core::ResourceRequirements>>, String>,
    },
    /// Restarts containers at once, without a restart delay; running ones are stopped first. Also retries
    /// containers that could not start (a missing image). Permanently ended containers stay ended.
    Restart {
        /// UID of the pod.
        uid: String,
        /// Identifiers of the containers at the runtime.
        containers: BTreeSet<String>,
    },
    /// Adds an ephemeral container to a static pod, for the pod's lifetime. Ignored for an unknown or
    /// terminating pod, or one that has a container of this name.
    Debug {
        /// UID of the pod.
        uid: String,
        /// Ephemeral container to add.
        container: Box<core::EphemeralContainer>,
    },
    /// Sets the grace period of a static pod whose manifest a person removes. [`Request::Terminate`]
    /// terminates the pod; for a terminating pod the shorter period counts. Ignored for an unknown pod.
    Delete {
        /// UID of the pod.
        uid: String,
        /// Grace period of the containers; `None` for the pod's own.
        grace: Option<Duration>,
        /// Hides the pod. The manager keeps stopping its remains.
        force: bool,
    },
    /// Terminates a static pod on request, even if a manifest with its UID exists again: that manifest is
    /// another pod, which starts empty once this one is removed. Ignored for an unknown pod.
    Terminate {
        /// UID of the pod.
        uid: String,
    },
    /// Lets a pod that was ended by [`Request::Fail`] or [`Request::Refuse`] run again, as a new pod, once it
    /// has released everything.
    Retry {
        /// UID of the pod.
        uid: String,
    },
}

/// Runtime's lists for one pod.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Sandboxes of the pod.
    pub sandboxes: Vec<cri::PodSandbox>,
    /// Containers of the pod.
    pub containers: Vec<cri::Container>,
}

/// All our pods in the runtime, and those that changed since the last report.
#[derive(Clone, Debug)]
pub struct RuntimePods {
    /// Pods by UID.
    pub pods: BTreeMap<String, RuntimePod>,
    /// UIDs of changed pods.
    pub changed: BTreeSet<String>,
    /// Lists of the changed pods by UID, in the first report only: the next reader need not request them. A
    /// runtime scans all its containers for each list.
    pub listed: BTreeMap<String, Listed>,
    /// Time of the request to the runtime.
    pub asked_at: Instant,
    /// True if the previous request had no answer.
    pub recovered: bool,
}

/// A pod's data from its sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimePod {
    /// Name of the pod.
    pub name: PodName,
    /// Grace period of its containers.
    pub grace: Duration,
    /// Manifest of the pod.
    pub manifest: Option<PathBuf>,
    /// Hash of the manifest's content at the sandbox's creation.
    pub hash: Option<String>,
    /// Hash without the amounts that may change while the pod runs.
    #[serde(default)]
    pub shape: Option<String>,
    /// Source of the pod.
    #[serde(default)]
    pub origin: Origin,
    /// Hash that the agent derives from the manifest of an adopted static pod ([`MANIFEST_HASH`]).
    ///
    /// [`MANIFEST_HASH`]: crate::labels::MANIFEST_HASH
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_hash: Option<String>,
    /// Creation time, in nanoseconds since the epoch, of the newest sandbox of an adopted pod, if a kubelet
    /// created the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<i64>,
}

impl RuntimePod {
    /// Returns true if this can be a pod of ours with this UID. Folders are named by UID and name, and
    /// removed with the pod: a name that leads out of its place was never ours.
    #[must_use]
    pub fn is_sound(&self, uid: &str) -> bool {
        is_sound(&self.name, uid)
    }
}

/// Returns true if this name and this UID can name folders.
#[must_use]
pub fn is_sound(name: &PodName, uid: &str) -> bool {
    let is_name = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['/', '\0']);
    [uid, &name.namespace, &name.name].into_iter().all(is_name)
}

/// A probe's new state for one container instance.
#[derive(Clone, Debug)]
pub struct ProbeUpdate {
    /// UID of the pod.
    pub uid: String,
    /// Name of the container.
    pub container: String,
    /// Identifier of the probed instance at the runtime.
    pub container_id: String,
    /// Kind of the probe.
    pub kind: ProbeKind,
    /// New state.
    pub result: ProbeResult,
    /// True if the container must be restarted.
    pub restart: bool,
    /// Time of the causing kernel event, `CLOCK_MONOTONIC` nanoseconds.
    pub kernel_ns: Option<u64>,
}

/// An OOM kill in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomUpdate {
    /// UID of the pod.
    pub uid: String,
    /// Identifier of the container at the runtime.
    pub id: String,
    /// Report of the kernel.
    pub facts: OomFacts,
}
