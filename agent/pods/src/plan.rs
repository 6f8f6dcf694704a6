//! Plan of a pod: names, cgroup, sandbox, folders and volumes, derived once per worker from the pod's spec.
//! Pure: this module does no I/O.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_policy::{
    node::addresses::host_network_ips,
    pod::{ephemeral_containers, too_much},
    resources::{
        cgroups::{self as values, CgroupConfig, CgroupValues},
        qos::QosClass,
    },
};
use beelet_proto::cri;
use beelet_units::field::FieldError;
use k8s_openapi::api::core::v1 as core;

use crate::{deps::NodeDeps, error::Error};
use beelet_admission::AdmissionRejection;
use beelet_model::{
    failure::{REJECTED, Refusal},
    origin::Origin,
    pod::{HostIps, NodeFacts, container_of, grace_period, log_folder},
    table::PodName,
};
use beelet_spec::{app_armor, cri_config, sysctls};
use beelet_volumes::{PodVolumes, VolumeManager};

/// Properties of the node for every pod's plan.
pub(crate) struct Site<'a> {
    /// The node.
    pub node: &'a NodeFacts,
    /// Parameters of cgroup values.
    pub cgroup_config: &'a CgroupConfig,
    /// Function from a cgroup's path to the runtime's name of the cgroup.
    pub cgroup_parent: &'a dyn Fn(&str) -> String,
    /// Parent folder of all pods' folders.
    pub pods_dir: &'a Path,
    /// Function from a pod to its volumes on disk.
    pub volumes: &'a dyn Fn(&core::Pod) -> PodVolumes,
}

/// Planner of pods on this node.
#[derive(Debug)]
pub(crate) struct Planner {
    pub(crate) node: NodeDeps,
    pub(crate) volumes: VolumeManager,
}

impl Planner {
    /// Returns the plan of a pod.
    pub(crate) fn plan(&self, pod: Arc<core::Pod>) -> Arc<PodPlan> {
        let site = Site {
            node: &self.node.facts,
            cgroup_config: &self.node.cgroup_config,
            cgroup_parent: &|path| self.node.cgroups.paths.cri_parent(path),
            pods_dir: &self.node.pods_dir,
            volumes: &|pod| self.volumes.of_pod(pod),
        };
        Arc::new(PodPlan::new(pod, &site))
    }
}

/// A pod, and the values derived from its spec on this node.
#[derive(Debug)]
pub(crate) struct PodPlan {
    /// The desired pod.
    pub pod: Arc<core::Pod>,
    /// UID of the pod.
    pub uid: String,
    /// Namespace and name of the pod.
    pub name: PodName,
    /// Grace period of the pod's containers.
    pub grace: Duration,
    /// Folder of the pod: volumes, hosts file, termination messages.
    pub folder: PathBuf,
    /// Folder of the pod's logs.
    pub logs: PathBuf,
    /// Volumes of the pod.
    pub volumes: PodVolumes,
    /// The pod has its own user namespace.
    pub own_users: bool,
    /// Ephemeral containers of the pod.
    ephemeral: Vec<core::Container>,
    /// Possible paths of the pod's cgroup, one per QoS class. The class of an orphan without a manifest is
    /// unknown, because the orphan has no spec.
    pub cgroups: Vec<String>,
    /// The node's addresses, which a pod on the host network has too.
    host: HostIps,
    on_host: bool,
    /// Rejection of the pod by this node, independent of other pods.
    pub refused: Option<AdmissionRejection>,
    /// The pod's cgroup with its values, and its sandbox, or the error.
    placement: Result<Placement, PlacementError>,
}

/// Cgroup and sandbox of a pod.
#[derive(Debug)]
struct Placement {
    cgroup: CgroupValues,
    /// Sandbox with attempt 0. The attempt is irrelevant for containers.
    sandbox: cri::PodSandboxConfig,
}

/// Spec of a pod that cannot run on this node.
#[derive(Debug, thiserror::Error)]
enum PlacementError {
    /// The values of the pod's cgroup cannot be computed.
    #[error(transparent)]
    Cgroup(#[from] FieldError),
    /// The configuration of the pod's sandbox cannot be computed.
    #[error(transparent)]
    Sandbox(#[from] beelet_spec::Error),
}

impl PodPlan {
    /// Plans `pod`.
    pub(crate) fn new(pod: Arc<core::Pod>, site: &Site<'_>) -> Self {
        let (uid, name) = (pod.metadata.uid.clone().unwrap_or_default(), PodName::of(&pod));
        let classes = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];
        let paths = classes.map(|class| values::pod_path(Some(&uid), class, site.cgroup_config));
        let on_host = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
        Self {
            grace: grace_period(&pod),
            folder: site.pods_dir.join(&uid),
            logs: log_folder(&site.node.pod_logs_dir, &name, &uid),
            volumes: (site.volumes)(&pod),
            cgroups: paths.into_iter().flatten().collect(),
            host: site.node.host.clone(),
            on_host,
            refused: refusal(&pod, site.node),
            own_users: pod.spec.as_ref().and_then(|spec| spec.host_users) == Some(false),
            ephemeral: pod.spec.as_ref().map(ephemeral_containers).unwrap_or_default(),
            placement: place(&pod, site),
            pod,
            uid,
            name,
        }
    }

    /// Returns the pod's cgroup, and the values of its files.
    pub(crate) fn cgroup(&self) -> Result<&CgroupValues, Error> {
        Ok(&self.placement()?.cgroup)
    }

    /// Returns the configuration of the pod's sandbox, which the runtime also requires for each container.
    pub(crate) fn sandbox(&self) -> Result<&cri::PodSandboxConfig, Error> {
        Ok(&self.placement()?.sandbox)
    }

    /// Returns the configuration of the pod's sandbox with this attempt number.
    pub(crate) fn sandbox_of_attempt(&self, attempt: u32) -> Result<cri::PodSandboxConfig, Error> {
        let mut config = self.sandbox()?.clone();
        config.metadata.iter_mut().for_each(|metadata| metadata.attempt = attempt);
        Ok(config)
    }

    /// Returns a container's spec.
    pub(crate) fn container(&self, name: &str) -> Result<&core::Container, Error> {
        let of_name = |c: &&core::Container| c.name == name;
        let found = container_of(&self.pod, name).or_else(|| self.ephemeral.iter().find(of_name));
        found.ok_or_else(|| Error::Spec(format!("the pod has no container {name}")))
    }

    /// Returns true for an ephemeral container that was added to a static pod. The API server knows those of
    /// other pods.
    pub(crate) fn is_debugger(&self, name: &str) -> bool {
        self.ephemeral.iter().any(|container| container.name == name) && !Origin::of(&self.pod).is_api()
    }

    /// Returns the container whose PID namespace the ephemeral container of this name shares.
    pub(crate) fn process_target(&self, name: &str) -> Option<&str> {
        let mut all = self.pod.spec.iter().flat_map(|spec| spec.ephemeral_containers.iter().flatten());
        let target = all.find(|c| c.name == name)?.target_container_name.as_deref();
        target.filter(|target| !target.is_empty())
    }

    /// Returns the pod's addresses, the primary address first; `of_sandbox` are the sandbox's addresses.
    pub(crate) fn ips(&self, of_sandbox: &[String]) -> Vec<String> {
        if self.on_host { host_network_ips(&self.host.now(), None) } else { self.host.sorted(of_sandbox) }
    }

    fn placement(&self) -> Result<&Placement, Error> {
        self.placement.as_ref().map_err(Error::of_spec)
    }
}

/// Returns the rejection of a pod by this node, if any. Forbidden settings are checked only for pods of the
/// API server: manifests with these settings are rejected earlier.
fn refusal(pod: &core::Pod, node: &NodeFacts) -> Option<AdmissionRejection> {
    let rejection = |reason: &str, message: String| AdmissionRejection {
        reason: reason.to_owned(),
        message,
        refusal: Refusal::Other,
    };
    if let Some(why) = app_armor::refusal(pod, node) {
        return Some(rejection("AppArmor", why));
    }
    if !Origin::of(pod).is_api() {
        return None;
    }
    if let Some(Err(why)) = pod.spec.as_ref().map(too_much::check) {
        return Some(rejection("UnexpectedAdmissionError", format!("{REJECTED}{why}")));
    }
    let forbidden = pod.spec.as_ref().and_then(|spec| sysctls::refused(spec, &node.allowed_unsafe_sysctls));
    forbidden.map(|why| rejection("SysctlForbidden", why))
}

fn place(pod: &core::Pod, site: &Site<'_>) -> Result<Placement, PlacementError> {
    let cgroup = values::pod_cgroup(pod, site.cgroup_config)?;
    let parent = (site.cgroup_parent)(&cgroup.path);
    let resources = values::sandbox_resources(pod, site.cgroup_config)?;
    Ok(Placement { sandbox: cri_config::sandbox(pod, 0, parent, resources, site.node)?, cgroup })
}

#[cfg(test)]
mod tests {
    use beelet_policy::resources::cgroups::{CgroupVersion, NodeAmounts};
    use beelet_units::quantity::Quantity;
    use serde_json::{Value, json};

    use super::*;

    fn plan(change: impl FnOnce(&mut Value)) -> PodPlan {
        let mut pod = json!({
            "metadata": {"namespace": "shop", "name": "web-n1", "uid": "u1"},
            "spec": {
                "terminationGracePeriodSeconds": 7,
                "containers": [{"name": "main", "resources": {"requests": {"cpu": "100m"}}}],
                "volumes": [{"name": "art", "image": {"reference": "art:1"}}],
            },
        });
        change(&mut pod);
        let amount = |text: &str| Quantity::parse(text).unwrap();
        let amounts = NodeAmounts::new(amount("4"), amount("8Gi"), amount("0"), amount("0"));
        let site = Site {
            node: &beelet_spec::fixtures::node(),
            cgroup_config: &CgroupConfig::new(CgroupVersion::V2, amounts),
            cgroup_parent: &|path| format!("/machine{path}"),
            pods_dir: Path::new("/pods"),
            volumes: &|pod| PodVolumes::of(pod, Path::new("/pods"), &beelet_volumes::Plugins::default()),
        };
        PodPlan::new(Arc::new(serde_json::from_value(pod).unwrap()), &site)
    }

    #[test]
    fn names_folders_and_grace_follow_from_the_pod() {
        let plan = plan(|_| {});
        assert_eq!((plan.uid.as_str(), plan.name.to_string().as_str()), ("u1", "shop/web-n1"));
        assert_eq!(plan.grace, Duration::from_secs(7));
        assert_eq!(plan.folder, Path::new("/pods/u1"));
        assert_eq!(plan.logs, Path::new("/logs/shop_web-n1_u1"));
        assert_eq!(plan.volumes.images().map(|(name, _)| name).collect::<Vec<_>>(), ["art"]);
        assert!(plan.container("main").is_ok());
        let missing = plan.container("other").unwrap_err();
        assert_eq!(missing.to_string(), "the pod has no container other");
        assert!(!missing.is_transient());
    }

    #[test]
    fn the_sandbox_is_in_the_pods_cgroup_and_counts_its_attempts() {
        let plan = plan(|_| {});
        let cgroup = plan.cgroup().unwrap();
        assert_eq!(cgroup.path, "/kubepods/burstable/podu1");
        assert_eq!(cgroup.files.get("cpu.weight").map(String::as_str), Some("4"));
        let sandbox = plan.sandbox_of_attempt(3).unwrap();
        let linux = sandbox.linux.unwrap();
        assert_eq!(linux.cgroup_parent, "/machine/kubepods/burstable/podu1");
        assert_eq!(linux.resources.unwrap().cpu_shares, 102);
        assert_eq!(sandbox.metadata.unwrap().attempt, 3);
        assert_eq!(plan.sandbox().unwrap().metadata.as_ref().unwrap().attempt, 0);
    }

    #[test]
    fn addresses_are_the_sandboxs_but_for_pods_on_the_nodes_network() {
        let of_sandbox = ["10.0.0.7".to_owned(), "fd00::7".to_owned()];
        assert_eq!(plan(|_| {}).ips(&of_sandbox), of_sandbox);
        // The pod has one address of each family, the node's family first, in any order of the runtime's
        // list.
        let all = ["fd00::7", "10.0.0.7", "10.0.0.8"].map(str::to_owned);
        assert_eq!(plan(|_| {}).ips(&all), of_sandbox);
        let on_host = plan(|pod| pod["spec"]["hostNetwork"] = true.into());
        assert_eq!(on_host.ips(&of_sandbox), ["192.0.2.1"]);
    }

    #[test]
    fn a_pod_without_a_spec_has_the_cgroup_paths_of_all_classes() {
        let plan = plan(|pod| pod["spec"] = json!({"containers": []}));
        let expected = ["/kubepods/podu1", "/kubepods/burstable/podu1", "/kubepods/besteffort/podu1"];
        assert_eq!(plan.cgroups, expected);
    }

    #[test]
    fn a_pod_that_cannot_run_has_an_error_and_can_be_removed() {
        let plan = plan(|pod| pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "much".into());
        let why = plan.sandbox().unwrap_err();
        assert!(why.to_string().contains("spec.containers[0].resources.requests"), "{why}");
        assert!(plan.cgroup().is_err() && !why.is_transient());
        assert_eq!(plan.cgroups.len(), 3);
    }

    #[test]
    fn a_pod_of_the_api_server_with_excessive_requests_is_refused() {
        let refused = |field: &str, value: &Value| {
            let plan = plan(|pod| {
                pod["metadata"]["annotations"] = json!({"kubernetes.io/config.source": "api"});
                pod["spec"]["containers"][0][field] = value.clone();
            });
            plan.refused.map(|rejection| format!("{}: {}", rejection.reason, rejection.message))
        };
        let names = |count: usize| -> Value {
            let amounts = (0..count).map(|n| (format!("example.com/r{n}"), json!("1")));
            json!({"limits": amounts.collect::<serde_json::Map<_, _>>()})
        };
        let parts = |count: usize| -> Value {
            (0..count).map(|n| json!({"name": "art", "mountPath": format!("/{n}"), "subPath": "x"})).collect()
        };
        assert_eq!(refused("resources", &names(256)), None);
        assert_eq!(
            refused("resources", &names(257)).unwrap(),
            "UnexpectedAdmissionError: Pod was rejected: spec: names 257 different resources in its requests, limits \
             and overhead; the agent supports at most 256 per pod: name fewer resources"
        );
        assert_eq!(refused("volumeMounts", &parts(999)), None);
        let why = refused("volumeMounts", &parts(1000)).unwrap();
        assert!(
            why.contains("spec: needs 1001 mounts for its volumes, subPaths and block devices;"),
            "{why}"
        );
        let why = refused("workingDir", &"/a".repeat(2049).into()).unwrap();
        assert!(why.contains("spec.containers[0].workingDir: the path "), "{why}");
    }

    #[test]
    fn forbidden_settings_are_refused_for_pods_of_the_api_server_only() {
        let check = |context: Value, expected: Option<&str>| {
            let planned = |source: &str| {
                let plan = plan(|pod| {
                    pod["metadata"]["annotations"] = json!({"kubernetes.io/config.source": source});
                    pod["spec"]["securityContext"] = context.clone();
                });
                plan.refused.map(|rejection| rejection.reason)
            };
            assert_eq!(planned("api").as_deref(), expected, "{context}");
            assert_eq!(planned("file"), None, "{context}");
        };
        let sysctl = |name: &str| json!({"sysctls": [{"name": name, "value": "1"}]});
        check(sysctl("net.ipv4.tcp_syncookies"), None);
        check(sysctl("kernel.msgmax"), Some("SysctlForbidden"));
        check(sysctl("vm.swappiness"), Some("SysctlForbidden"));
        check(json!({"windowsOptions": {"hostProcess": true}}), None);
    }
}
