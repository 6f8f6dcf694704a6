//! Brings one sandbox or one container to life: cgroup, folders, volumes, image, CRI calls. And takes
//! away what a pod leaves on disk and in cgroups when it is gone.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_policy::{cgroups as values, pod::Start, qos::QosClass};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use tokio::task::spawn_blocking;

use super::{
    cri_config::{self, ContainerFacts, NodeFacts},
    observe::SandboxDetail,
    table::PodName,
    volumes,
};
use crate::{
    admission::Admission,
    cgroups::Cgroups,
    devices::Devices,
    events::{Object, Recorder},
    images::{Lease, Leases},
    runtime::{self, Runtime},
};

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

    fn of_runtime(reason: &'static str, error: &runtime::Error) -> Self {
        Self { reason, message: error.to_string(), unanswered: error.is_unavailable() }
    }
}

/// What every worker needs to bring pods to life.
#[derive(Debug)]
pub struct Launcher {
    /// The runtime.
    pub runtime: Runtime,
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
    pub async fn create_sandbox(&self, pod: &core::Pod, attempt: u32) -> Result<String, String> {
        let decided = values::pod_cgroup(pod, &self.cgroup_config).map_err(|e| e.to_string())?;
        let cgroups = Arc::clone(&self.cgroups);
        let path = decided.path.clone();
        run_blocking(move || cgroups.ensure(&decided.path, &decided.files).map_err(|e| e.to_string()))
            .await?;
        let config = cri_config::sandbox(pod, attempt, self.cgroups.cri_parent(&path), &self.node);
        let logs = PathBuf::from(&config.log_directory);
        let volumes_of_pod = volumes::Volumes::of(pod, &self.pods_dir);
        run_blocking(move || {
            make_folder(&logs)?;
            volumes_of_pod.set_up()
        })
        .await?;
        let handler = pod.spec.as_ref().and_then(|s| s.runtime_class_name.clone()).unwrap_or_default();
        self.runtime.run_sandbox(config, &handler).await.map_err(|e| e.to_string())
    }

    /// Starts a container in `sandbox`; its identifier.
    pub async fn start(
        &self,
        pod: &core::Pod,
        sandbox: &SandboxDetail,
        start: &Start,
    ) -> Result<String, StartError> {
        if let Some(id) = &start.created {
            self.start_created(pod, &start.name, id).await?;
            return Ok(id.clone());
        }
        let container = container_of(pod, &start.name)
            .ok_or_else(|| config_error(format!("the pod has no container {}", start.name)))?;
        // The attempt in the sandbox's configuration has no meaning for its containers.
        let path = values::pod_cgroup(pod, &self.cgroup_config).map_err(config_error)?.path;
        let sandbox_config = cri_config::sandbox(pod, 0, self.cgroups.cri_parent(&path), &self.node);
        // Until the container exists, nobody may remove its image.
        let (image_ref, _lease) = self.leased_image(container, &sandbox_config).await?;
        let facts = ContainerFacts {
            attempt: start.attempt,
            restart_delay: start.restart_delay,
            image_ref,
            pod_ips: self.pod_ips(pod, sandbox),
            mounts: self.mounts(pod, container).await?,
            resources: values::container_resources(pod, container, &self.cgroup_config)
                .map_err(config_error)?,
        };
        let mut config = cri_config::container(pod, container, facts, &self.node).map_err(config_error)?;
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let devices = self.devices.container_options(uid, &start.name).await.map_err(config_error)?;
        devices.apply(&mut config, self.cdi_by_annotation);
        let log = Path::new(&sandbox_config.log_directory).join(&config.log_path);
        run_blocking(move || log.parent().map_or(Ok(()), make_folder))
            .await
            .map_err(|e| StartError::new("CreateContainerError", &e))?;
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

    /// The image by its pull policy, as the runtime identifies it, held until the container is made.
    async fn leased_image(
        &self,
        container: &core::Container,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<(String, Lease), StartError> {
        let mut lease = self.leases.acquire(container.image.as_deref().unwrap_or_default()).await;
        let mut image = self.image(container, sandbox).await?;
        // An image that was removed just now, under another of its names, is looked for once more; this time it is held.
        if !lease.extend(&image).await {
            image = self.image(container, sandbox).await?;
            let _ = lease.extend(&image).await;
        }
        Ok((image, lease))
    }

    /// The image by its pull policy, as the runtime identifies it.
    async fn image(
        &self,
        container: &core::Container,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<String, StartError> {
        let image = container.image.as_deref().unwrap_or_default();
        let policy = container.image_pull_policy.as_deref().unwrap_or("IfNotPresent");
        if policy != "Always" {
            let present = self
                .runtime
                .image_status(image)
                .await
                .map_err(|e| StartError::of_runtime("ImageInspectError", &e))?;
            if let Some(present) = present {
                return Ok(present.id);
            }
            if policy == "Never" {
                let message =
                    format!("image {image} is not on this node, and its pull policy is Never: import it");
                return Err(StartError::new("ErrImageNeverPull", &message));
            }
        }
        let pulled = self.runtime.pull_image(image, sandbox).await;
        pulled.map_err(|e| StartError::of_runtime("ErrImagePull", &e))
    }

    async fn mounts(
        &self,
        pod: &core::Pod,
        container: &core::Container,
    ) -> Result<Vec<cri::Mount>, StartError> {
        let volumes = volumes::Volumes::of(pod, &self.pods_dir);
        let container = container.clone();
        run_blocking(move || volumes.mounts(&container)).await.map_err(config_error)
    }

    /// Takes away the cgroup and the volumes of a pod whose containers and sandboxes are gone.
    pub async fn release(&self, pod: &core::Pod) -> Result<(), String> {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let volumes = volumes::Volumes::of(pod, &self.pods_dir);
        let cgroups = Arc::clone(&self.cgroups);
        // An adopted pod whose manifest is gone has no spec: its cgroup is looked for by its UID.
        let classes = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];
        let paths = classes.map(|class| values::pod_path(Some(&uid), class, &self.cgroup_config));
        run_blocking(move || {
            for path in paths.iter().flatten() {
                // Not asked first whether it exists: a part of it may be gone already.
                cgroups.destroy(path).map_err(|e| e.to_string())?;
            }
            volumes.tear_down()
        })
        .await?;
        self.devices.forget(pod.metadata.uid.as_deref().unwrap_or_default());
        Ok(())
    }

    /// Takes away the logs of a pod that is gone.
    pub async fn remove_logs(&self, pod: &core::Pod) -> Result<(), String> {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let logs = cri_config::log_folder(&self.node.pod_logs_dir, &PodName::of(pod), &uid);
        run_blocking(move || remove_folder(&logs)).await
    }
}

/// The container or init container of this name.
pub(super) fn container_of<'a>(pod: &'a core::Pod, name: &str) -> Option<&'a core::Container> {
    let spec = pod.spec.as_ref()?;
    spec.init_containers.iter().flatten().chain(&spec.containers).find(|c| c.name == name)
}

#[allow(clippy::needless_pass_by_value)] // a function for map_err
fn config_error(error: impl std::fmt::Display) -> StartError {
    StartError::new("CreateContainerConfigError", &error)
}

/// Runs blocking work off the async threads.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    spawn_blocking(work).await.unwrap_or_else(|e| Err(format!("an internal task failed: {e}")))
}

pub(super) fn make_folder(path: &Path) -> Result<(), String> {
    std::fs::create_dir_all(path).map_err(|e| format!("cannot create the folder {}: {e}", path.display()))
}

pub(super) fn remove_folder(path: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove the folder {}: {e}", path.display()))
        }
        _ => Ok(()),
    }
}
