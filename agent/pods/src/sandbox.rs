//! Creation of a pod's sandbox, after its requirements: user namespace, name resolution, volumes, cgroup and
//! resource claims.

use std::sync::Arc;

use beelet_base::{
    blocking::BlockingTasks,
    folder::{READABLE, make_folder},
};
use beelet_model::pod::has_host_port;
use beelet_policy::{pod::start_limit::Call, resources::critical, volumes::mounted};
use beelet_proto::cri;
use beelet_spec::cri_config;
use beelet_state::events::Object;
use beelet_volumes::{Prepared, VolumeManager};
use tokio::time::Instant;

use crate::{
    call_queue::{CallQueue, Urgency},
    deps::{NodeDeps, PodDeps, Reports, RuntimeDeps},
    error::Error,
    plan::PodPlan,
    pod_users::PodUsers,
    resource_claims::ResourceClaims,
    sandbox_files,
};

/// Creates sandboxes.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    pub(crate) runtime: RuntimeDeps,
    pub(crate) node: NodeDeps,
    pub(crate) pods: PodDeps,
    pub(crate) volumes: VolumeManager,
    pub(crate) users: PodUsers,
    pub(crate) claims: ResourceClaims,
    pub(crate) calls: CallQueue,
    pub(crate) reports: Reports,
}

impl Sandboxes {
    /// Sets up the requirements of the pod's sandbox, and runs the sandbox. Returns the sandbox's identifier.
    ///
    /// # Errors
    /// A step fails. The error names the step.
    pub(crate) async fn create(
        &self,
        plan: &Arc<PodPlan>,
        attempt: u32,
        tasks: &BlockingTasks,
    ) -> Result<String, Error> {
        let mut config = plan.sandbox_of_attempt(attempt)?;
        let handler = self.pods.objects().runtime_handler(&plan.pod);
        if plan.own_users {
            self.users.require_support(&handler).await?;
        }
        self.users.of_pod(plan, tasks).await?.apply_to_sandbox(&mut config);
        config.dns_config = Some(self.name_resolution(plan, tasks).await?);
        require_mounts(&self.runtime, mounted::first_mounted(&plan.pod)).await?;
        let prepared = Box::pin(self.volumes.prepare(&plan.pod)).await.map_err(Error::of_volumes)?;
        self.make_cgroup_and_folders(plan, &config, prepared, tasks).await?;
        self.claims.prepare(plan).await?;
        self.warn_of_host_ports(plan).await;
        self.run(plan, config, attempt, &handler).await
    }

    /// Reads the node's resolver configuration, and returns the pod's.
    async fn name_resolution(
        &self,
        plan: &Arc<PodPlan>,
        tasks: &BlockingTasks,
    ) -> Result<cri::DnsConfig, Error> {
        let (node, of_pod) = (self.node.facts.clone(), Arc::clone(plan));
        let read = move || {
            node.host_dns.read().map_err(Error::of_files)?;
            Ok(cri_config::name_resolution(&of_pod.pod, &node))
        };
        tasks.run(read).await
    }

    /// Creates the cgroup and, concurrently, the folders and the volumes. Waits for both even if one fails: a
    /// teardown must not run concurrently with the setup.
    async fn make_cgroup_and_folders(
        &self,
        plan: &Arc<PodPlan>,
        config: &cri::PodSandboxConfig,
        prepared: Prepared,
        tasks: &BlockingTasks,
    ) -> Result<(), Error> {
        let (cgroups, decided) = (Arc::clone(&self.node.cgroups), plan.cgroup()?.clone());
        let cgroups = tasks.run(move || Ok::<(), Error>(cgroups.ensure(&decided.path, &decided.files)?));
        let (of_pod, volumes, config) = (Arc::clone(plan), self.volumes.clone(), config.clone());
        let folders = tasks.run_until(move |stop| {
            make_folder(&of_pod.logs, READABLE).map_err(Error::of_files)?;
            sandbox_files::write(&of_pod.folder, &config).map_err(Error::of_files)?;
            let made = volumes.set_up(&of_pod.pod, &of_pod.volumes, &prepared, &|| stop.is_cancelled());
            made.map_err(Error::of_volumes)
        });
        let made = async { tokio::join!(cgroups, folders) };
        let object = || Object::pod(&plan.pod);
        let made = self.reports.events.while_waiting(object, "the pod's volumes and cgroup", made);
        let (cgroups, folders) = made.await;
        cgroups.and(folders)
    }

    /// Warns of host ports that the runtime does not map.
    async fn warn_of_host_ports(&self, plan: &PodPlan) {
        if has_host_port(&plan.pod)
            && let Some(why) = self.runtime.cri.unmapped_host_ports().await
        {
            self.reports.events.warning(Object::pod(&plan.pod), "HostPortNotMapped", why);
        }
    }

    /// Runs the sandbox, with its network, once the call has a permit.
    async fn run(
        &self,
        plan: &PodPlan,
        config: cri::PodSandboxConfig,
        attempt: u32,
        handler: &str,
    ) -> Result<String, Error> {
        let urgency = Urgency::new(critical::priority(&plan.pod), attempt > 0);
        let run = Box::pin(async {
            let began = Instant::now();
            let made = self.runtime.cri.sandboxes.run(config, handler).await;
            self.reports.metrics.started.sandbox(handler, began.elapsed(), made.is_err());
            made
        });
        let sandbox = self.calls.call(urgency, Call::RunSandbox, run);
        let (object, subject) =
            (|| Object::pod(&plan.pod), "the runtime to create the pod's sandbox and network");
        Ok(self.reports.events.while_waiting(object, subject, sandbox).await?)
    }
}

/// Returns an error if the runtime would not see the mount of a volume: the container would have an empty
/// folder instead.
pub(crate) async fn require_mounts(runtime: &RuntimeDeps, volume: Option<&str>) -> Result<(), Error> {
    let (Some(volume), Some(mounts)) = (volume, &runtime.mounts) else { return Ok(()) };
    let unseen = |why: Arc<str>| Error::UnseenMount { volume: volume.to_owned(), why: why.to_string() };
    mounts.check().await.map_or(Ok(()), |why| Err(unseen(why)))
}
