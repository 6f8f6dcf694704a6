//! The facts for the check of a hand-over: the pods in the runtime, and the pods that the sources name. Reads
//! only.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use beelet_base::blocking::blocking;
use beelet_cluster::{connect, identity, kubeconfig, pods_of, presence::Presence, requests};
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_handover::{found, manifest_changes};
use beelet_manifests::source::{Rules, preview};
use beelet_model::{
    labels::{ANNOTATION_HASH, ANNOTATION_MANIFEST},
    table::PodName,
};
use beelet_policy::handover::{Found, Next, Outcome, Source, Wanted, check};
use beelet_volumes::places;
use k8s_openapi::api::core::v1::Pod;

use super::args::{Agent, HandoverArgs};

/// Facts for the check.
pub(super) struct Survey {
    /// The pods in the runtime that run, by UID.
    found: BTreeMap<String, Found>,
    /// The API server's pods of this node, by UID.
    assigned: BTreeMap<String, Pod>,
    /// The pods of manifests.
    manifests: BTreeMap<PodName, Pod>,
    /// Times of the last change of manifests.
    changes: BTreeMap<PathBuf, i64>,
    /// The next agent's folder of pods.
    pods_dir: PathBuf,
}

impl Survey {
    /// Reads the facts.
    ///
    /// # Errors
    /// The runtime or the API server does not answer, or the configuration names another node than the
    /// kubeconfig.
    pub(super) async fn read(
        args: &HandoverArgs,
        config: &Config,
        runtime: &Runtime,
        next: Agent,
    ) -> Result<Self> {
        let mut found = found::read(runtime).await.context("cannot list the pods of the runtime")?;
        found.retain(|_, pod| pod.runs());
        let assigned = match &args.kubeconfig {
            Some(kubeconfig) => assigned(kubeconfig, config).await?,
            None => BTreeMap::new(),
        };
        let of_api = found.values().find(|pod| pod.source == Source::Api);
        if let Some(pod) = of_api.filter(|_| args.kubeconfig.is_none() && next == Agent::Kubelet) {
            bail!(
                "pod {}/{} is of the API server: give --kubeconfig, so that the check can compare it",
                pod.namespace,
                pod.name
            );
        }
        let (manifests, changes) = of_manifests(config).await;
        let pods_dir = match next {
            Agent::Beelet => config.beelet.pods_dir.clone(),
            Agent::Kubelet => args.root_dir.join("pods"),
        };
        Ok(Self { found, assigned, manifests, changes, pods_dir })
    }

    /// Checks each pod, in the order of names.
    pub(super) fn outcomes(&self, next: Next) -> Vec<(String, Outcome)> {
        let outcome = |found: &Found| check(found, self.wanted(found).as_ref(), next);
        let mut all: Vec<_> = self.found.values().map(|found| (name_of(found), outcome(found))).collect();
        all.sort_by(|one, other| one.0.cmp(&other.0));
        all
    }

    /// Returns the pods that run on under the next agent, by UID.
    pub(super) fn kept(&self, outcomes: &[(String, Outcome)]) -> BTreeMap<String, Found> {
        let kept: Vec<&String> =
            outcomes.iter().filter(|(_, one)| one.runs_on()).map(|(name, _)| name).collect();
        let found = self.found.iter().filter(|(_, found)| kept.contains(&&name_of(found)));
        found.map(|(uid, found)| (uid.clone(), found.clone())).collect()
    }

    /// Returns the sources' definitions of these pods, by UID.
    pub(super) fn definitions(&self, found: &BTreeMap<String, Found>) -> BTreeMap<String, Pod> {
        let definition =
            |(uid, found): (&String, &Found)| Some((uid.clone(), self.wanted(found)?.pod.clone()));
        found.iter().filter_map(definition).collect()
    }

    fn wanted(&self, found: &Found) -> Option<Wanted<'_>> {
        let name = PodName { namespace: found.namespace.clone(), name: found.name.clone() };
        let of_api = self.assigned.get(&found.uid);
        let pod = of_api.or_else(|| self.manifests.get(&name).filter(|_| found.source != Source::Api))?;
        let annotations = pod.metadata.annotations.as_ref();
        let annotation = |key: &str| annotations.and_then(|all| all.get(key));
        let file = annotation(ANNOTATION_MANIFEST).map(Path::new);
        let folder = self.pods_dir.join(&found.uid);
        Some(Wanted {
            pod,
            changed: file.and_then(|file| self.changes.get(file).copied()),
            // A UID that the agent derives is the hash of the manifest.
            uid_in_manifest: of_api.is_none() && annotation(ANNOTATION_HASH) != pod.metadata.uid.as_ref(),
            has_folder: folder.is_dir(),
            places: places(pod, &folder),
        })
    }
}

/// Returns the name of a pod for messages.
pub(super) fn name_of(found: &Found) -> String {
    format!("{}/{}", found.namespace, found.name)
}

/// Reads the pods of the manifests as the agent does, and the age of the files.
async fn of_manifests(config: &Config) -> (BTreeMap<PodName, Pod>, BTreeMap<PathBuf, i64>) {
    let Some(path) = config.static_pod_path.clone() else {
        return (BTreeMap::new(), BTreeMap::new());
    };
    let rules = Rules {
        critical_static_pods: config.beelet.critical_static_pods,
        allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
        state: None,
    };
    let node = config.node_name.clone();
    blocking("reading the manifests", move || {
        let desired = preview(&path, &node, &rules, &BTreeMap::new()).0;
        let pods = desired.pods.into_iter().map(|(name, pod)| (name, (*pod).clone()));
        (pods.collect(), manifest_changes(&path))
    })
    .await
}

/// Reads the pods that the API server assigns to this node, by UID.
async fn assigned(kubeconfig: &Path, config: &Config) -> Result<BTreeMap<String, Pod>> {
    let path = kubeconfig.to_owned();
    let own = blocking("reading the kubeconfig", move || kubeconfig::node_name(&path)).await?;
    if let Some(own) = own.filter(|own| *own != config.node_name) {
        bail!(
            "the kubeconfig is that of node {own}, but the configuration of beelet names node {}: set nodeName to {own}",
            config.node_name
        );
    }
    let options = identity::Options {
        kubeconfig: kubeconfig.to_owned(),
        bootstrap: None,
        cert_dir: config.cert_dir(),
        node_name: config.node_name.clone(),
        rotate: false,
        metrics: identity::Metrics::default(),
        requests: requests::Metrics::default(),
        presence: Presence::default(),
    };
    let (client, _identity) = connect::connect(options).await?;
    let listed = pods_of(&client, &config.node_name).await.context("cannot list the pods of this node")?;
    let mut pods = BTreeMap::new();
    for pod in listed {
        let name = || pod.metadata.name.as_deref().unwrap_or_default();
        let uid = pod.metadata.uid.clone().with_context(|| format!("pod {:?} has no UID", name()))?;
        pods.insert(uid, pod);
    }
    Ok(pods)
}
