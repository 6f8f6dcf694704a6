//! Brings one sandbox or one container to life: cgroup, folders, volumes, image, CRI calls. And takes
//! away what a pod leaves on disk and in cgroups when it is gone.

use beelet_base::folder::{READABLE, make_folder};
use beelet_model::pod::container_of;
use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use beelet_policy::{cgroups as values, pod::Start, qos::QosClass};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::{hosts, observe::SandboxDetail, termination};
use beelet_admission::Admission;
use beelet_base::walk::remove_folder;
use beelet_cgroups::Cgroups;
use beelet_cri::Runtime;
use beelet_devices::Devices;
use beelet_images::{
    Lease, Leases,
    pull::{Image, PullError, Puller},
};
use beelet_model::{desired::Desired, objects::Objects, pod::NodeFacts, table::PodName};
use beelet_spec::{
    cri_config::{self, ContainerFacts, Features},
    env,
};
use beelet_state::events::{Object, Recorder};
use beelet_volumes::Volumes;

/// Why a container could not be started.
#[derive(Debug)]
pub struct StartError {
    /// The word that the pod's status shows.
    pub reason: &'static str,
    /// A sentence.
    pub message: String,
    /// The runtime wasn't there or gave no answer, so nothing is known against the container itself.
    pub unanswered: bool,
}

impl StartError {
    fn new(reason: &'static str, message: &dyn std::fmt::Display) -> Self {
        Self { reason, message: message.to_string(), unanswered: false }
    }

    fn of_runtime(reason: &'static str, error: &beelet_cri::Error) -> Self {
        Self { reason, message: error.to_string(), unanswered: error.is_unavailable() }
    }
}

impl From<PullError> for StartError {
    fn from(error: PullError) -> Self {
        Self { reason: error.reason, message: error.message, unanswered: error.unanswered }
    }
}

/// What every worker needs to bring pods to life.
#[derive(Debug)]
pub struct Launcher {
    /// The runtime.
    pub runtime: Runtime,
    /// Gets images.
    pub puller: Puller,
    /// The manifests: ConfigMaps, Secrets and RuntimeClasses are among them.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The cgroup tree.
    pub cgroups: Arc<Cgroups>,
    /// How cgroup values are computed.
    pub cgroup_config: values::CgroupConfig,
    /// The node.
    pub node: NodeFacts,
    /// The folder with a folder of volumes for each pod.
    pub pods_dir: PathBuf,
    /// The longest time a crashing container waits for its restart.
    pub max_restart_delay: Duration,
    /// Where is told what was done.
    pub events: Recorder,
    /// Who has which device.
    pub devices: Devices,
    /// CDI devices are named in an annotation too: the runtime is too old for the field.
    pub cdi_by_annotation: bool,
    /// Who may run here.
    pub admission: Arc<Admission>,
    /// Images that containers are about to be made from.
    pub leases: Leases,
}

impl Launcher {
    /// Makes the pod's cgroup and folders and runs its sandbox; the sandbox's identifier.
    pub(super) async fn create_sandbox(
        &self,
        pod: &core::Pod,
        attempt: u32,
        chores: &Chores,
    ) -> Result<String, String> {
        let decided = values::pod_cgroup(pod, &self.cgroup_config).map_err(|e| e.to_string())?;
        let config = cri_config::sandbox(pod, attempt, self.cgroups.cri_parent(&decided.path), &self.node)?;
        let cgroups = Arc::clone(&self.cgroups);
        let cgroups =
            chores.run(move || cgroups.ensure(&decided.path, &decided.files).map_err(|e| e.to_string()));
        let logs = PathBuf::from(&config.log_directory);
        let volumes = Volumes::of(pod, &self.pods_dir);
        let (objects, node, of_pod) = (self.objects(), self.node.clone(), pod.clone());
        let folders = chores.run(move || {
            make_folder(&logs, READABLE)?;
            volumes.set_up(&beelet_volumes::Sources { pod: &of_pod, objects: &objects, node: &node })
        });
        // Both to their end: nothing may still be made when what was made is taken away.
        let (cgroups, folders) = tokio::join!(cgroups, folders);
        cgroups.and(folders)?;
        let handler = self.objects().runtime_handler(pod);
        self.runtime.run_sandbox(config, &handler).await.map_err(|e| e.to_string())
    }

    /// Starts a container in `sandbox`; its identifier.
    pub(super) async fn start(
        &self,
        pod: &core::Pod,
        sandbox: &SandboxDetail,
        start: &Start,
        chores: &Chores,
    ) -> Result<String, StartError> {
        if let Some(id) = &start.created {
            self.start_created(pod, &start.name, id).await?;
            return Ok(id.clone());
        }
        let container = container_of(pod, &start.name)
            .ok_or_else(|| config_error(format!("the pod has no container {}", start.name)))?;
        // The attempt in the sandbox's configuration has no meaning for its containers.
        let path = values::pod_cgroup(pod, &self.cgroup_config).map_err(config_error)?.path;
        let sandbox_config =
            cri_config::sandbox(pod, 0, self.cgroups.cri_parent(&path), &self.node).map_err(config_error)?;
        // Until the container exists, nobody may remove its images.
        let (mut config, _leases) =
            self.container_config(pod, container, sandbox, start, &sandbox_config, chores).await?;
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let devices = self.devices.container_options(uid, &start.name).await.map_err(config_error)?;
        devices.apply(&mut config, self.cdi_by_annotation);
        let id = self
            .runtime
            .create_container(&sandbox.id, config, &sandbox_config)
            .await
            .map_err(|e| StartError::of_runtime("CreateContainerError", &e))?;
        self.events.normal(
            Object::container(pod, &start.name),
            "Created",
            format!("Created container: {}", start.name),
        );
        self.start_created(pod, &start.name, &id).await?;
        Ok(id)
    }

    /// Gets what the container needs (image, volumes, files), and says how it is to be made.
    async fn container_config(
        &self,
        pod: &core::Pod,
        container: &core::Container,
        sandbox: &SandboxDetail,
        start: &Start,
        sandbox_config: &cri::PodSandboxConfig,
        chores: &Chores,
    ) -> Result<(cri::ContainerConfig, Vec<Lease>), StartError> {
        let objects = self.objects();
        let pod_ips = self.pod_ips(pod, sandbox);
        let (image, lease) = self.image_of(pod, container, &objects, sandbox_config).await?;
        let (images, mut leases) = self.volume_images(pod, container, &objects, sandbox_config).await?;
        leases.push(lease);
        let sources = env::Sources { pod, pod_ips: &pod_ips, objects: &objects, node: &self.node };
        let environment = sources.environment(container).map_err(config_error)?;
        let features = self.features(pod, container, &objects).await?;
        let mount_facts = beelet_volumes::MountFacts {
            env: environment.clone(),
            images,
            recursive_read_only: features.recursive_read_only,
        };
        let mounts = self.prepare(pod, container, pod_ips, start.attempt, mount_facts, chores).await?;
        let facts = ContainerFacts {
            attempt: start.attempt,
            restart_delay: start.restart_delay,
            image_ref: image.id,
            image_user: image.user,
            features,
            mounts,
            resources: values::container_resources(pod, container, &self.cgroup_config)
                .map_err(config_error)?,
        };
        let config = cri_config::container(pod, container, environment, facts, &self.node);
        Ok((config.map_err(config_error)?, leases))
    }

    /// The objects that manifests describe now.
    fn objects(&self) -> Arc<Objects> {
        Arc::clone(&self.desired.borrow().objects)
    }

    async fn start_created(&self, pod: &core::Pod, name: &str, id: &str) -> Result<(), StartError> {
        let started = self.runtime.start_container(id).await;
        started.map_err(|e| StartError::of_runtime("RunContainerError", &e))?;
        self.events.normal(Object::container(pod, name), "Started", format!("Started container {name}"));
        Ok(())
    }

    pub(super) fn pod_ips(&self, pod: &core::Pod, sandbox: &SandboxDetail) -> Vec<String> {
        let on_host = pod.spec.as_ref().and_then(|s| s.host_network) == Some(true);
        if on_host { vec![self.node.host_ip.to_string()] } else { sandbox.ips.clone() }
    }

    /// An image by its pull policy, held until the container is made.
    async fn image(
        &self,
        image: &str,
        policy: Option<&str>,
        auths: Vec<cri::AuthConfig>,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<(Image, Lease), StartError> {
        let policy = policy.unwrap_or("IfNotPresent");
        Ok(self.puller.leased(&self.leases, image, policy, auths, sandbox).await?)
    }

    async fn image_of(
        &self,
        pod: &core::Pod,
        container: &core::Container,
        objects: &Objects,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<(Image, Lease), StartError> {
        let image = container.image.as_deref().unwrap_or_default();
        let auths = credentials(pod, image, objects)?;
        self.image(image, container.image_pull_policy.as_deref(), auths, sandbox).await
    }

    /// The images of the image volumes that a container mounts, by volume.
    async fn volume_images(
        &self,
        pod: &core::Pod,
        container: &core::Container,
        objects: &Objects,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<(BTreeMap<String, String>, Vec<Lease>), StartError> {
        let volumes = Volumes::of(pod, &self.pods_dir);
        let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|mount| mount.name == name);
        let (mut images, mut leases) = (BTreeMap::new(), Vec::new());
        for (name, source) in volumes.images().filter(|(name, _)| mounted(name)) {
            self.refuse_old_runtime(name).await?;
            let image = source.reference.as_deref().unwrap_or_default();
            let auths = credentials(pod, image, objects)?;
            let (image, lease) = self.image(image, source.pull_policy.as_deref(), auths, sandbox).await?;
            images.insert(name.to_owned(), image.id);
            leases.push(lease);
        }
        Ok((images, leases))
    }

    /// A runtime that doesn't know image volumes would mount something else, or nothing, without a word.
    async fn refuse_old_runtime(&self, volume: &str) -> Result<(), StartError> {
        let version = self.runtime.version().await;
        let version = version.map_err(|e| StartError::of_runtime("CreateContainerError", &e))?;
        if mounts_images(&version.runtime_name, &version.runtime_version) {
            return Ok(());
        }
        Err(config_error(format!(
            "volume {volume}: {} {} can't mount images; containerd 2.1 and CRI-O 1.31 can",
            version.runtime_name, version.runtime_version
        )))
    }

    /// What the runtime can do, asked only for a container that needs what not every runtime can.
    async fn features(
        &self,
        pod: &core::Pod,
        container: &core::Container,
        objects: &Objects,
    ) -> Result<Features, StartError> {
        let context = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
        let strict = context.and_then(|c| c.supplemental_groups_policy.as_deref()) == Some("Strict");
        let recursive = container.volume_mounts.iter().flatten().any(|mount| {
            mount.recursive_read_only.as_deref().is_some_and(|mode| mode == "Enabled" || mode == "IfPossible")
        });
        if !strict && !recursive {
            return Ok(Features::default());
        }
        let status = self.runtime.status(false).await;
        let status = status.map_err(|e| StartError::of_runtime("CreateContainerError", &e))?;
        let name = objects.runtime_handler(pod);
        let handler = status.runtime_handlers.iter().find(|handler| handler.name == name);
        let of_handler = handler.and_then(|handler| handler.features.as_ref());
        Ok(Features {
            supplemental_groups_policy: status.features.is_some_and(|f| f.supplemental_groups_policy),
            recursive_read_only: of_handler.is_some_and(|f| f.recursive_read_only_mounts),
        })
    }

    /// Makes the container's files and mounts on the machine; all its mounts.
    async fn prepare(
        &self,
        pod: &core::Pod,
        container: &core::Container,
        pod_ips: Vec<String>,
        attempt: u32,
        facts: beelet_volumes::MountFacts,
        chores: &Chores,
    ) -> Result<Vec<cri::Mount>, StartError> {
        let volumes = Volumes::of(pod, &self.pods_dir);
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let folder = self.pods_dir.join(&uid);
        let logs = beelet_model::pod::log_folder(&self.node.pod_logs_dir, &PodName::of(pod), &uid)
            .join(&container.name);
        let (pod, container, node) = (pod.clone(), container.clone(), self.node.clone());
        let prepared = chores.run(move || {
            make_folder(&logs, READABLE)?;
            beelet_logs::rotate::forget_older(&logs, attempt);
            beelet_logs::clear(&logs, attempt)?;
            let mut mounts = volumes.mounts(&container, &facts)?;
            let hosts = hosts::write(&folder, &pod, &pod_ips, &node)?;
            mounts.extend(hosts::mount(&hosts, &container));
            mounts.extend(termination::prepare(&folder, &container, attempt)?);
            Ok(mounts)
        });
        prepared.await.map_err(config_error)
    }

    /// Takes away the cgroup, the volumes and the devices of a pod whose containers and sandboxes are gone.
    pub(super) async fn release(&self, pod: &core::Pod, chores: &Chores) -> Result<(), String> {
        self.give_back(pod, chores, Volumes::tear_down).await?;
        self.devices.forget(pod.metadata.uid.as_deref().unwrap_or_default());
        Ok(())
    }

    /// Takes away the cgroup and the volumes of a pod that has ended, whose containers stay to be looked at.
    /// Its devices are free as soon as somebody else wants them.
    pub(super) async fn release_ended(&self, pod: &core::Pod, chores: &Chores) -> Result<(), String> {
        self.give_back(pod, chores, Volumes::give_back).await
    }

    async fn give_back(
        &self,
        pod: &core::Pod,
        chores: &Chores,
        of_volumes: fn(&Volumes) -> Result<(), String>,
    ) -> Result<(), String> {
        // What a cancelled step has begun makes things still.
        chores.done().await;
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let volumes = Volumes::of(pod, &self.pods_dir);
        let cgroups = Arc::clone(&self.cgroups);
        // An adopted pod whose manifest is gone has no spec: its cgroup is looked for by its UID.
        let classes = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];
        let paths = classes.map(|class| values::pod_path(Some(&uid), class, &self.cgroup_config));
        let work = chores.run(move || {
            for path in paths.iter().flatten() {
                // Not asked first whether it exists: a part of it may be gone already.
                cgroups.destroy(path).map_err(|e| e.to_string())?;
            }
            of_volumes(&volumes)
        });
        work.await
    }

    /// Takes away the logs of a pod that is gone.
    pub(super) async fn remove_logs(&self, pod: &core::Pod, chores: &Chores) -> Result<(), String> {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let logs = beelet_model::pod::log_folder(&self.node.pod_logs_dir, &PodName::of(pod), &uid);
        chores.run(move || remove_folder(&logs)).await
    }
}

#[allow(clippy::needless_pass_by_value)] // a function for map_err
fn config_error(error: impl std::fmt::Display) -> StartError {
    StartError::new("CreateContainerConfigError", &error)
}

/// A pod's blocking work, which runs off the async threads, and to its end also where nobody waits for it any
/// more. Clones are of the same pod.
#[derive(Clone, Debug)]
pub(super) struct Chores(TaskTracker);

impl Chores {
    pub(super) fn new() -> Self {
        let tracker = TaskTracker::new();
        // A closed one takes work all the same, and can be waited for.
        tracker.close();
        Self(tracker)
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let work = self.0.spawn_blocking(work);
        work.await.unwrap_or_else(|e| Err(format!("an internal task failed: {e}")))
    }

    /// Waits until all that was begun has ended.
    async fn done(&self) {
        self.0.wait().await;
    }
}

/// Who to be at the registry of an image: what the pod's secrets say. A secret that isn't there is passed over, as by
/// the kubelet: the registry may not ask.
fn credentials(pod: &core::Pod, image: &str, objects: &Objects) -> Result<Vec<cri::AuthConfig>, StartError> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let named = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let mut secrets = Vec::new();
    for reference in named {
        match objects.secret(namespace, &reference.name) {
            Some(secret) => secrets.push(secret),
            None => {
                tracing::warn!(pod = %PodName::of(pod), "{}", env::missing("Secret", namespace, &reference.name));
            }
        }
    }
    beelet_images::credentials::of_secrets(image, &secrets).map_err(|e| StartError::new("ErrImagePull", &e))
}

/// Whether a runtime is known to mount images (KEP-4639).
fn mounts_images(name: &str, version: &str) -> bool {
    let mut numbers =
        version.trim_start_matches('v').split(['.', '-', '+', '~']).map_while(|n| n.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match name {
        "containerd" => version >= (2, 1),
        "cri-o" => version >= (1, 31),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_that_mount_images_are_known_by_their_version() {
        let check = |name: &str, version: &str, expected: bool| {
            assert_eq!(mounts_images(name, version), expected, "{name} {version}");
        };
        check("containerd", "1.6.20~ds1", false);
        check("containerd", "v2.0.5", false);
        check("containerd", "v2.1.9", true);
        check("containerd", "2.2.0-rc.1", true);
        check("cri-o", "1.31.2", true);
        check("cri-o", "1.30.0", false);
        check("other", "9.9", false);
        check("containerd", "", false);
    }
}
