//! Start of a container: its images, files, mounts and devices, and the two calls of the runtime.

use std::sync::Arc;

use beelet_base::{
    blocking::BlockingTasks,
    folder::{READABLE, make_folder},
};
use beelet_model::objects::Objects;
use beelet_pinning::Pinning;
use beelet_policy::{
    pod::{Start, start_limit::Call},
    resources::{cgroups as values, critical},
    volumes::mounted,
};
use beelet_proto::cri;
use beelet_spec::{
    cri_config::{self, ContainerFacts, Features},
    env,
};
use beelet_state::events::Object;
use beelet_volumes::{MountFacts, VolumeManager};
use k8s_openapi::api::core::v1 as core;
use tokio_util::sync::CancellationToken;

use crate::{
    call_queue::{CallQueue, Urgency},
    container_images::{ContainerImages, ImagePulls, PodContainer},
    deps::{DeviceDeps, NodeDeps, PodDeps, Reports, RuntimeDeps},
    env_files,
    error::{Error, StartError},
    hosts,
    plan::PodPlan,
    pod_users::PodUsers,
    runtime_abilities,
    runtime_view::{Observation, SandboxDetail},
    sandbox::require_mounts,
    sandbox_files, termination,
};

/// Any error, of which only the message is used.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Starts containers.
#[derive(Debug)]
pub(crate) struct Containers {
    pub(crate) runtime: RuntimeDeps,
    pub(crate) node: NodeDeps,
    pub(crate) pods: PodDeps,
    pub(crate) images: ImagePulls,
    pub(crate) devices: DeviceDeps,
    pub(crate) pinning: Pinning,
    pub(crate) volumes: VolumeManager,
    pub(crate) users: PodUsers,
    pub(crate) calls: CallQueue,
    pub(crate) reports: Reports,
}

/// A container that is being created.
struct Creation<'a> {
    of: PodContainer<'a>,
    sandbox: &'a SandboxDetail,
    /// Attempt of the sandbox.
    sandbox_attempt: Option<u32>,
    /// The runtime's identifier of the container whose processes it shares.
    process_target: Option<String>,
    start: &'a Start,
    tasks: &'a BlockingTasks,
}

/// Returns the urgency of a container's start. Restarts precede first starts.
fn urgency_of(plan: &PodPlan, start: &Start) -> Urgency {
    Urgency::new(critical::priority(&plan.pod), start.attempt > 0)
}

impl Containers {
    /// Starts a container in `sandbox`, of the pod that was `seen` last. Returns the container's identifier.
    ///
    /// # Errors
    /// An image cannot be pulled, a volume or a device is missing, or the runtime refuses the container.
    pub(crate) async fn start(
        &self,
        plan: &Arc<PodPlan>,
        (sandbox, seen): (&SandboxDetail, &Observation),
        start: &Start,
        tasks: &BlockingTasks,
    ) -> Result<String, StartError> {
        if let Some(id) = &start.created {
            self.start_created(plan, start, id).await?;
            return Ok(id.clone());
        }
        let container = plan.container(&start.name)?;
        if plan.is_debugger(&start.name) {
            // Only the record assigns the container to the pod.
            self.pods.written.have_debugger(&plan.uid, &start.name).await;
        }
        let process_target = process_target(plan, &start.name, seen)?;
        let of = PodContainer { plan, container, objects: self.pods.objects() };
        let sandbox_attempt =
            seen.pod.sandboxes.iter().find(|one| one.id == sandbox.id).map(|one| one.attempt);
        let creation = Creation { of, sandbox, sandbox_attempt, process_target, start, tasks };
        // The images stay leased until the container exists.
        let images = self.images.pull(&creation.of).await?;
        let mut config = self.container_config(&creation, &images).await?;
        let mut of_sandbox = plan.sandbox()?.clone();
        let users = self.users.of_pod(plan, tasks).await?;
        users.apply_to_sandbox(&mut of_sandbox);
        users.apply_to_container(&mut config);
        let object = || Object::container(&plan.pod, &start.name);
        let create = Box::pin(self.runtime.cri.containers.create(&sandbox.id, config, &of_sandbox));
        let creating = self.calls.call(urgency_of(plan, start), Call::CreateContainer, create);
        let created =
            self.reports.events.while_waiting(object, "the runtime to create the container", creating).await;
        let id = created.map_err(StartError::Create)?;
        let message = format!("Created container: {}", start.name);
        self.reports.events.normal(Object::container(&plan.pod, &start.name), "Created", message);
        self.start_created(plan, start, &id).await?;
        Ok(id)
    }

    async fn start_created(&self, plan: &PodPlan, start: &Start, id: &str) -> Result<(), StartError> {
        let object = || Object::container(&plan.pod, &start.name);
        let run = Box::pin(self.runtime.cri.containers.start(id));
        let starting = self.calls.call(urgency_of(plan, start), Call::StartContainer, run);
        self.reports
            .events
            .while_waiting(object, "the runtime to start the container", starting)
            .await
            .map_err(StartError::Run)?;
        self.reports.events.normal(object(), "Started", format!("Started container {}", start.name));
        Ok(())
    }

    /// Creates the container's files and mounts on the node. Returns the configuration of the container.
    async fn container_config(
        &self,
        creation: &Creation<'_>,
        images: &ContainerImages,
    ) -> Result<cri::ContainerConfig, StartError> {
        let Creation { of: PodContainer { plan, container, objects }, sandbox, start, .. } = creation;
        let (pod, pod_ips) = (&plan.pod, plan.ips(&sandbox.ips));
        let sources = env::Sources { pod, pod_ips: &pod_ips, objects, node: &self.node.facts };
        let environment = if env_files::are_asked_for(container) {
            let (container, plan) = ((*container).clone(), Arc::clone(plan));
            let with_files = creation.tasks.run(move || env_files::read(container, &plan.volumes)).await?;
            sources.environment(&with_files)
        } else {
            sources.environment(container)
        };
        let environment = environment.map_err(Error::of_spec)?;
        if container.lifecycle.as_ref().is_some_and(|lifecycle| lifecycle.stop_signal.is_some()) {
            let (field, signals) = ("lifecycle.stopSignal", &runtime_abilities::STOP_SIGNALS);
            runtime_abilities::require(&self.runtime.cri, field, signals).await?;
        }
        let features = self.features(pod, container, objects).await?;
        let mount_facts = MountFacts {
            env: environment.clone(),
            images: images.volumes.clone(),
            recursive_read_only: features.recursive_read_only,
        };
        let (mounts, block_devices) = self.prepare(creation, pod_ips, mount_facts).await?;
        let resources = values::container_resources(pod, container, &self.node.cgroup_config);
        let facts = ContainerFacts {
            attempt: start.attempt,
            restart_delay: start.restart_delay,
            round: start.round,
            image_ref: images.image.id.clone(),
            image_user: images.image.user.clone(),
            features,
            mounts,
            process_target: creation.process_target.clone(),
            resources: resources.map_err(Error::of_spec)?,
        };
        let config = cri_config::container(pod, container, environment, facts, &self.node.facts);
        let mut config = config.map_err(Error::of_spec)?;
        config.devices.extend(block_devices);
        let devices = self.devices.plugins.container_options(&plan.uid, &container.name).await;
        let mut devices = devices.map_err(Error::of_spec)?;
        let claimed =
            Box::pin(self.devices.claims.cdi_devices(self.devices.storage.as_deref(), pod, container));
        let claimed = claimed.await.map_err(Error::Unprepared)?;
        devices.add_cdi(claimed);
        devices.apply(&mut config, self.devices.cdi_by_annotation);
        let linux = config.linux.get_or_insert_default();
        self.pinning.apply(pod, &container.name, linux.resources.get_or_insert_default());
        Ok(config)
    }

    /// Returns the runtime's features. Queries the runtime only for a container that needs an optional
    /// feature.
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
        let status = self.runtime.cri.status(false).await.map_err(StartError::Create)?;
        let name = objects.runtime_handler(pod);
        let handler = status.runtime_handlers.iter().find(|handler| handler.name == name);
        let of_handler = handler.and_then(|handler| handler.features.as_ref());
        Ok(Features {
            supplemental_groups_policy: status.features.is_some_and(|f| f.supplemental_groups_policy),
            recursive_read_only: of_handler.is_some_and(|f| f.recursive_read_only_mounts),
        })
    }

    /// Creates the container's files and mounts on the node. Returns all its mounts and its block devices.
    async fn prepare(
        &self,
        creation: &Creation<'_>,
        pod_ips: Vec<String>,
        facts: MountFacts,
    ) -> Result<(Vec<cri::Mount>, Vec<cri::Device>), Error> {
        require_mounts(&self.runtime, mounted::first_part(creation.of.container)).await?;
        let (attempt, sandbox_attempt) = (creation.start.attempt, creation.sandbox_attempt);
        let object = || Object::container(&creation.of.plan.pod, &creation.start.name);
        let (plan, node) = (Arc::clone(creation.of.plan), self.node.facts.clone());
        let (container, objects) = (creation.of.container.clone(), Arc::clone(&creation.of.objects));
        let volumes = self.volumes.clone();
        let prepare = move |stop: &CancellationToken| -> Result<_, BoxError> {
            volumes.restore(&plan.pod, &plan.volumes, &objects)?;
            let logs = plan.logs.join(&container.name);
            make_folder(&logs, READABLE)?;
            beelet_logs::rotate::forget_older(&logs, attempt);
            beelet_logs::clear(&logs, attempt)?;
            let mut mounts = plan.volumes.mounts(&container, &facts, &|| stop.is_cancelled())?;
            let devices = plan.volumes.devices(&container)?;
            let hosts = hosts::write(&plan.folder, &plan.pod, &pod_ips, &node)?;
            mounts.extend(hosts::mount(&hosts, &container));
            let of_sandbox = |attempt| sandbox_files::mounts(&plan.folder, attempt, &container);
            mounts.extend(sandbox_attempt.map(of_sandbox).unwrap_or_default());
            mounts.extend(termination::prepare(&plan.folder, &container, attempt)?);
            Ok((mounts, devices))
        };
        let preparing = creation.tasks.run_until(move |stop| prepare(stop).map_err(Error::of_files));
        self.reports.events.while_waiting(object, "the container's volumes and logs", preparing).await
    }
}

/// Returns the identifier of the container whose PID namespace the container shares, if any.
fn process_target(plan: &PodPlan, container: &str, seen: &Observation) -> Result<Option<String>, Error> {
    let Some(target) = plan.process_target(container) else { return Ok(None) };
    let found = seen.newest(target).map(|instance| Some(instance.id.clone()));
    found.ok_or_else(|| {
        Error::Spec(format!("unable to find target container {target}: it was not started yet"))
    })
}
