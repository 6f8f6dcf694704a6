//! Brings one sandbox or one container to life: cgroup, folders, volumes, image, CRI calls. And takes
//! away what a pod leaves on disk and in cgroups when it is gone.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use beelet_base::spans::TARGET;
use beelet_policy::{
    pod::{Start, start_limit::Call},
    resources::{cgroups as values, critical},
    volumes::mounted,
};
use beelet_proto::cri;
use beelet_units::duration;
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, trace_span};

use crate::{
    env_files,
    error::{Error, StartError},
    hosts,
    metrics::Metrics,
    plan::{PodPlan, Site},
    records::WrittenRecords,
    runtime_view::{Observation, SandboxDetail},
    sandbox_files, termination,
    turns::{Turns, Urgency},
    user_namespaces::{self, UserNamespaces},
};
use beelet_admission::Admission;
use beelet_base::{
    blocking::BlockingTasks,
    folder::{READABLE, make_folder},
    walk::remove_folder,
};
use beelet_cgroups::Cgroups;
use beelet_cri::{Runtime, mounts::Mounts};
use beelet_devices::Devices;
use beelet_dra::Dra;
use beelet_images::{
    Lease, Leases,
    pull::{Image, Progress, Puller, Wanted},
};
use beelet_model::{
    desired::Desired,
    objects::Objects,
    pod::{NodeFacts, has_host_port},
    storage::Storage,
    table::PodTable,
};
use beelet_spec::{
    cri_config::{self, ContainerFacts, Features, UserNamespace},
    env,
};
use beelet_state::events::{Object, Recorder};
use beelet_volumes::{MountFacts, PodVolumes, VolumeManager};

/// What every worker needs to bring pods to life.
#[derive(Debug)]
pub struct Launcher {
    /// The runtime.
    pub runtime: Runtime,
    /// Gets images.
    pub puller: Arc<Puller>,
    /// What should run: ConfigMaps, Secrets and RuntimeClasses come with it.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The pods that are here.
    pub table: watch::Receiver<Arc<PodTable>>,
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
    /// Records events.
    pub events: Recorder,
    /// Hands out devices.
    pub devices: Devices,
    /// Drivers that claims to devices are prepared by.
    pub dra: Dra,
    /// CDI devices are named in an annotation too: the runtime is too old for the field.
    pub cdi_by_annotation: bool,
    /// Knows what claims are bound to; None on a node of its own.
    pub storage: Option<Arc<dyn Storage>>,
    /// Prepares volumes and takes them back.
    pub volumes: VolumeManager,
    /// Knows whether the runtime sees what is mounted for pods; None where nobody else could be the runtime.
    pub mounts: Option<Arc<Mounts>>,
    /// Gives pods with user namespaces of their own their ids.
    pub users: Arc<UserNamespaces>,
    /// Decides which pods may run here.
    pub admission: Arc<Admission>,
    /// Images that containers are about to be made from.
    pub leases: Leases,
    /// What of the pods the next agent would know.
    pub written: WrittenRecords,
    /// Says how many sandboxes and containers are made at once, and whose is next.
    pub turns: Turns,
    /// Counters.
    pub metrics: Metrics,
}

/// How urgent a container's start is: one that ran before is missed.
fn urgency_of(plan: &PodPlan, start: &Start) -> Urgency {
    Urgency::new(critical::priority(&plan.pod), start.attempt > 0)
}

/// Any part's error, of which only the sentence counts.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A container that is being started.
struct Starting<'a> {
    plan: &'a Arc<PodPlan>,
    container: &'a core::Container,
    sandbox: &'a SandboxDetail,
    /// Which of the pod's sandboxes it is.
    sandbox_attempt: Option<u32>,
    /// The runtime's identifier of the container whose processes it shares.
    process_target: Option<String>,
    start: &'a Start,
    /// What the pod may refer to.
    objects: Arc<Objects>,
    chores: &'a BlockingTasks,
}

/// The images of a container and of its image volumes, held until the container is made from them.
struct ContainerImages {
    image: Image,
    /// By volume.
    volumes: BTreeMap<String, String>,
    _leases: Vec<Lease>,
}

impl Launcher {
    /// What follows from a pod's spec on this node.
    pub(crate) fn plan(&self, pod: Arc<core::Pod>) -> Arc<PodPlan> {
        let site = Site {
            node: &self.node,
            cgroup_config: &self.cgroup_config,
            cgroup_parent: &|path| self.cgroups.cri_parent(path),
            pods_dir: &self.pods_dir,
            volumes: &|pod| self.volumes.of_pod(pod),
        };
        Arc::new(PodPlan::new(pod, &site))
    }

    /// Makes the pod's cgroup and folders and runs its sandbox; the sandbox's identifier.
    pub(crate) async fn create_sandbox(
        &self,
        plan: &Arc<PodPlan>,
        attempt: u32,
        chores: &BlockingTasks,
    ) -> Result<String, Error> {
        let mut config = plan.sandbox_of_attempt(attempt)?;
        let handler = self.objects().runtime_handler(&plan.pod);
        if plan.own_users {
            self.refuse_without_user_namespaces(&handler).await?;
        }
        self.user_namespace(plan, chores).await?.apply_to_sandbox(&mut config);
        config.dns_config = Some(self.name_resolution(plan, chores).await?);
        self.require_mounts(mounted::first_mounted(&plan.pod)).await?;
        let pod = || Object::pod(&plan.pod);
        let prepared = Box::pin(self.volumes.prepare(&plan.pod)).await.map_err(Error::of_volumes)?;
        let (cgroups, decided) = (Arc::clone(&self.cgroups), plan.cgroup()?.clone());
        let cgroups = chores.run(move || Ok::<(), Error>(cgroups.ensure(&decided.path, &decided.files)?));
        let (of_pod, volumes, of_sandbox) = (Arc::clone(plan), self.volumes.clone(), config.clone());
        let folders = chores.run_until(move |stop| {
            make_folder(&of_pod.logs, READABLE).map_err(Error::of_files)?;
            sandbox_files::write(&of_pod.folder, &of_sandbox).map_err(Error::of_files)?;
            let made = volumes.set_up(&of_pod.pod, &of_pod.volumes, &prepared, &|| stop.is_cancelled());
            made.map_err(Error::of_volumes)
        });
        // Both to their end: nothing may still be made when what was made is taken away.
        let made = async { tokio::join!(cgroups, folders) };
        let (cgroups, folders) = self.events.while_waiting(pod, "its volumes and its cgroup", made).await;
        cgroups.and(folders)?;
        let preparing = Box::pin(self.dra.prepare(self.storage.as_deref(), &plan.pod));
        let prepared =
            self.events.while_waiting(pod, "its resource claims, which drivers prepare", preparing).await;
        prepared.map_err(Error::Unprepared)?;
        if has_host_port(&plan.pod)
            && let Some(why) = self.runtime.unmapped_host_ports().await
        {
            self.events.warning(pod(), "HostPortNotMapped", why);
        }
        let urgency = Urgency::new(critical::priority(&plan.pod), attempt > 0);
        let run = Box::pin(async {
            let began = Instant::now();
            let made = self.runtime.run_sandbox(config, &handler).await;
            self.metrics.launches.sandbox(&handler, began.elapsed(), made.is_err());
            made
        });
        let sandbox = self.turns.make(urgency, Call::RunSandbox, run);
        Ok(self
            .events
            .while_waiting(pod, "its sandbox and its network, which the runtime makes", sandbox)
            .await?)
    }

    /// Refuses to mount what the runtime would not see: the container would have an empty folder there.
    async fn require_mounts(&self, volume: Option<&str>) -> Result<(), Error> {
        let (Some(volume), Some(mounts)) = (volume, &self.mounts) else { return Ok(()) };
        let unseen = |why: Arc<str>| Error::UnseenMount { volume: volume.to_owned(), why: why.to_string() };
        mounts.check().await.map_or(Ok(()), |why| Err(unseen(why)))
    }

    /// The pod's name resolution, by the machine's own as of now.
    async fn name_resolution(
        &self,
        plan: &Arc<PodPlan>,
        chores: &BlockingTasks,
    ) -> Result<cri::DnsConfig, Error> {
        let (node, of_pod) = (self.node.clone(), Arc::clone(plan));
        let read = move || {
            node.host_dns.read().map_err(Error::of_files)?;
            Ok(cri_config::name_resolution(&of_pod.pod, &node))
        };
        chores.run(read).await
    }

    /// Starts a container in `sandbox`, of the pod that was `seen` last; its identifier.
    pub(crate) async fn start(
        &self,
        plan: &Arc<PodPlan>,
        (sandbox, seen): (&SandboxDetail, &Observation),
        start: &Start,
        chores: &BlockingTasks,
    ) -> Result<String, StartError> {
        if let Some(id) = &start.created {
            self.start_created(plan, start, id).await?;
            return Ok(id.clone());
        }
        let container = plan.container(&start.name)?;
        if plan.is_debugger(&start.name) {
            // Nothing but the record says that it belongs to the pod.
            self.written.have_debugger(&plan.uid, &start.name).await;
        }
        let process_target = process_target(plan, &start.name, seen)?;
        let objects = self.objects();
        let sandbox_attempt =
            seen.pod.sandboxes.iter().find(|one| one.id == sandbox.id).map(|one| one.attempt);
        let starting =
            Starting { plan, container, sandbox, sandbox_attempt, process_target, start, objects, chores };
        // Until the container exists, nobody may remove its images.
        let images = self.images(&starting).await?;
        let mut config = self.container_config(&starting, &images).await?;
        let mut of_sandbox = plan.sandbox()?.clone();
        let users = self.user_namespace(plan, chores).await?;
        users.apply_to_sandbox(&mut of_sandbox);
        users.apply_to_container(&mut config);
        let object = || Object::container(&plan.pod, &start.name);
        let create = Box::pin(self.runtime.create_container(&sandbox.id, config, &of_sandbox));
        let creating = self.turns.make(urgency_of(plan, start), Call::CreateContainer, create);
        let created =
            self.events.while_waiting(object, "the runtime to create the container", creating).await;
        let id = created.map_err(StartError::Create)?;
        let message = format!("Created container: {}", start.name);
        self.events.normal(Object::container(&plan.pod, &start.name), "Created", message);
        self.start_created(plan, start, &id).await?;
        Ok(id)
    }

    async fn start_created(&self, plan: &PodPlan, start: &Start, id: &str) -> Result<(), StartError> {
        let object = || Object::container(&plan.pod, &start.name);
        let run = Box::pin(self.runtime.start_container(id));
        let starting = self.turns.make(urgency_of(plan, start), Call::StartContainer, run);
        self.events
            .while_waiting(object, "the runtime to start the container", starting)
            .await
            .map_err(StartError::Run)?;
        self.events.normal(object(), "Started", format!("Started container {}", start.name));
        Ok(())
    }

    /// Makes what the container needs on the machine, and says how it is to be created.
    async fn container_config(
        &self,
        starting: &Starting<'_>,
        images: &ContainerImages,
    ) -> Result<cri::ContainerConfig, StartError> {
        let Starting { plan, container, sandbox, start, objects, .. } = starting;
        let (pod, pod_ips) = (&plan.pod, plan.ips(&sandbox.ips));
        let sources = env::Sources { pod, pod_ips: &pod_ips, objects, node: &self.node };
        let environment = if env_files::are_asked_for(container) {
            let (container, plan) = ((*container).clone(), Arc::clone(plan));
            let with_files = starting.chores.run(move || env_files::read(container, &plan.volumes)).await?;
            sources.environment(&with_files)
        } else {
            sources.environment(container)
        };
        let environment = environment.map_err(Error::of_spec)?;
        if container.lifecycle.as_ref().is_some_and(|lifecycle| lifecycle.stop_signal.is_some()) {
            self.refuse_old_runtime("lifecycle.stopSignal", &STOP_SIGNALS).await?;
        }
        let features = self.features(pod, container, objects).await?;
        let mount_facts = MountFacts {
            env: environment.clone(),
            images: images.volumes.clone(),
            recursive_read_only: features.recursive_read_only,
        };
        let (mounts, block_devices) = self.prepare(starting, pod_ips, mount_facts).await?;
        let resources = values::container_resources(pod, container, &self.cgroup_config);
        let facts = ContainerFacts {
            attempt: start.attempt,
            restart_delay: start.restart_delay,
            round: start.round,
            image_ref: images.image.id.clone(),
            image_user: images.image.user.clone(),
            features,
            mounts,
            process_target: starting.process_target.clone(),
            resources: resources.map_err(Error::of_spec)?,
        };
        let config = cri_config::container(pod, container, environment, facts, &self.node);
        let mut config = config.map_err(Error::of_spec)?;
        config.devices.extend(block_devices);
        let devices = self.devices.container_options(&plan.uid, &container.name).await;
        let mut devices = devices.map_err(Error::of_spec)?;
        let claimed = Box::pin(self.dra.cdi_devices(self.storage.as_deref(), pod, container));
        let claimed = claimed.await.map_err(Error::Unprepared)?;
        devices.add_cdi(claimed);
        devices.apply(&mut config, self.cdi_by_annotation);
        Ok(config)
    }

    /// The user namespace of a pod; the ids of one of its own are the pod's from now on.
    async fn user_namespace(&self, plan: &PodPlan, chores: &BlockingTasks) -> Result<UserNamespace, Error> {
        if !plan.own_users {
            return Ok(UserNamespace::OfMachine);
        }
        let choose = || {
            let (users, uid) = (Arc::clone(&self.users), plan.uid.clone());
            chores.run(move || users.of(&uid))
        };
        let mut ids = choose().await;
        if let Err(user_namespaces::Error::Unknown { .. }) = &ids {
            self.learn_user_ids(chores).await?;
            ids = choose().await;
        }
        Ok(UserNamespace::Own(ids.map_err(Error::of_files)?))
    }

    /// Asks the runtime for the ids of pods whose records of them can't be read. What it doesn't tell stays
    /// unknown.
    async fn learn_user_ids(&self, chores: &BlockingTasks) -> Result<(), Error> {
        let users = Arc::clone(&self.users);
        let unknown = chores.run(move || users.unknown().map_err(Error::of_files)).await?;
        let mut all = self.runtime.list_sandboxes(None).await?;
        // In one that isn't ready nothing runs.
        all.retain(|sandbox| sandbox.state == i32::from(cri::PodSandboxState::SandboxReady));
        for uid in unknown {
            let of_pod =
                |sandbox: &&cri::PodSandbox| sandbox.metadata.as_ref().is_some_and(|of| of.uid == uid);
            let mut told = None;
            for sandbox in all.iter().filter(of_pod) {
                let status = self.runtime.sandbox_status(&sandbox.id, false).await?;
                let ids = user_namespaces::told(&status);
                told = told.or(ids.map_err(|why| Error::of_files(format!("the pod {uid}: {why}")))?);
            }
            let users = Arc::clone(&self.users);
            chores.run(move || users.learn(&uid, told).map_err(Error::of_files)).await?;
        }
        Ok(())
    }

    /// Refuses a pod with a user namespace of its own where the runtime would run it in the machine's without
    /// a word (`GetOrCreateUserNamespaceMappings`).
    async fn refuse_without_user_namespaces(&self, handler: &str) -> Result<(), Error> {
        let status = self.runtime.status(false).await?;
        let known = status.runtime_handlers.iter().find(|known| known.name == handler);
        if known.and_then(|known| known.features.as_ref()).is_some_and(|features| features.user_namespaces) {
            return Ok(());
        }
        let who = match handler {
            "" => "runtime".to_owned(),
            handler => format!("RuntimeClass handler {handler:?}"),
        };
        Err(Error::Spec(format!(
            "can't set `spec.hostUsers: false`, {who} does not support user namespaces (containerd 2.0 or CRI-O 1.25, with \
             runc 1.2 or crun 1.9, on Linux 6.3 do)"
        )))
    }

    /// Returns true if the API server has yet to answer for something that the pod refers to.
    pub(crate) fn waits_for_objects(&self, pod: &core::Pod) -> bool {
        self.desired.borrow().objects.is_unread(pod)
    }

    /// Returns once the API server has answered for all that the pod refers to.
    pub(crate) async fn answered(&self, pod: &core::Pod) {
        let mut desired = self.desired.clone();
        if desired.wait_for(|desired| !desired.objects.is_unread(pod)).await.is_err() {
            // Nobody is there any more who could say so.
            std::future::pending::<()>().await;
        }
    }

    /// The objects that pods may refer to now.
    fn objects(&self) -> Arc<Objects> {
        Arc::clone(&self.desired.borrow().objects)
    }

    /// Gets the images that a container is made from: its own, and those of the image volumes that it mounts.
    async fn images(&self, starting: &Starting<'_>) -> Result<ContainerImages, StartError> {
        let Starting { plan, container, .. } = starting;
        let policy = container.image_pull_policy.as_deref();
        let (image, lease) = self.image(starting, container.image.as_deref(), policy).await?;
        let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|mount| mount.name == name);
        let (mut volumes, mut leases) = (BTreeMap::new(), vec![lease]);
        for (name, source) in plan.volumes.images().filter(|(name, _)| mounted(name)) {
            self.refuse_old_runtime(&format!("volume {name}"), &IMAGES).await?;
            let mut mounts = container.volume_mounts.iter().flatten().filter(|mount| mount.name == name);
            if mounts.any(|mount| mount.sub_path.is_some() || mount.sub_path_expr.is_some()) {
                self.refuse_old_runtime(&format!("volume {name}"), &PARTS_OF_IMAGES).await?;
            }
            let (reference, policy) = (source.reference.as_deref(), source.pull_policy.as_deref());
            let (image, lease) = self.image(starting, reference, policy).await?;
            volumes.insert(name.to_owned(), image.id);
            leases.push(lease);
        }
        Ok(ContainerImages { image, volumes, _leases: leases })
    }

    /// An image by its pull policy.
    async fn image(
        &self,
        starting: &Starting<'_>,
        reference: Option<&str>,
        policy: Option<&str>,
    ) -> Result<(Image, Lease), StartError> {
        let Starting { plan, container, objects, .. } = starting;
        let image = reference.unwrap_or_default();
        let began = Instant::now();
        let tell = |progress: Progress<'_>| {
            if let Progress::Pulled(took, _, size) = progress {
                self.metrics.starts.pulled(&plan.uid, began.elapsed());
                self.metrics.launches.pulled(took, size);
            }
            self.tell_of_image(Object::container(&plan.pod, &container.name), image, progress);
        };
        let account = plan.pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        let wanted = Wanted {
            image,
            policy: policy.unwrap_or("IfNotPresent"),
            sandbox: plan.sandbox()?,
            secrets: pull_secrets(plan, objects),
            service_account: account.unwrap_or_default(),
            tell: &tell,
        };
        let object = || Object::container(&plan.pod, &container.name);
        let span = trace_span!(target: TARGET, "image", otel.name = "ensureImageExists", image);
        let getting = Box::pin(self.puller.leased(&self.leases, &wanted)).instrument(span);
        Ok(self.events.while_waiting(object, &format!("image {image:?}"), getting).await?)
    }

    /// Tells how getting an image goes, in the kubelet's words where it has some.
    fn tell_of_image(&self, object: Object, image: &str, progress: Progress<'_>) {
        let rounded = |took: Duration| duration::format(Duration::from_millis(millis(took)));
        match progress {
            Progress::Here => {
                let message = format!(
                    "Container image {image:?} already present on machine and can be accessed by the pod"
                );
                self.events.normal(object, "Pulled", message);
            }
            Progress::Pulling => self.events.normal(object, "Pulling", format!("Pulling image {image:?}")),
            Progress::Pulled(took, whole, size) => {
                let (took, whole) = (rounded(took), rounded(whole));
                let message = format!(
                    "Successfully pulled image {image:?} in {took} ({whole} including waiting). Image size: {size} bytes."
                );
                self.events.normal(object, "Pulled", message);
            }
            Progress::Failed(why) => {
                self.events.warning(object, "Failed", format!("Failed to pull image {image:?}: {why}"));
            }
        }
    }

    /// A runtime that doesn't know a field of a container does something else, or nothing, without a word.
    async fn refuse_old_runtime(&self, of: &str, ability: &Ability) -> Result<(), StartError> {
        let version = self.runtime.version().await.map_err(StartError::Create)?;
        let (name, version) = (version.runtime_name, version.runtime_version);
        if ability.is_of(&name, &version) {
            return Ok(());
        }
        Err(Error::Spec(format!("{of}: {name} {version} can't {ability} can")).into())
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
        let status = self.runtime.status(false).await.map_err(StartError::Create)?;
        let name = objects.runtime_handler(pod);
        let handler = status.runtime_handlers.iter().find(|handler| handler.name == name);
        let of_handler = handler.and_then(|handler| handler.features.as_ref());
        Ok(Features {
            supplemental_groups_policy: status.features.is_some_and(|f| f.supplemental_groups_policy),
            recursive_read_only: of_handler.is_some_and(|f| f.recursive_read_only_mounts),
        })
    }

    /// Makes the container's files and mounts on the machine; all its mounts, and its block devices.
    async fn prepare(
        &self,
        starting: &Starting<'_>,
        pod_ips: Vec<String>,
        facts: MountFacts,
    ) -> Result<(Vec<cri::Mount>, Vec<cri::Device>), Error> {
        self.require_mounts(mounted::first_part(starting.container)).await?;
        let (attempt, sandbox_attempt) = (starting.start.attempt, starting.sandbox_attempt);
        let object = || Object::container(&starting.plan.pod, &starting.start.name);
        let (plan, node) = (Arc::clone(starting.plan), self.node.clone());
        let (container, objects) = (starting.container.clone(), Arc::clone(&starting.objects));
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
        let preparing = starting.chores.run_until(move |stop| prepare(stop).map_err(Error::of_files));
        self.events.while_waiting(object, "its volumes and its logs", preparing).await
    }

    /// Gives back the pod's claims, once nothing of it runs any more and before anybody is told so: who waits
    /// for that takes its devices for free (`SyncTerminatingPod`).
    pub(crate) async fn unprepare(&self, plan: &PodPlan) -> Result<(), Error> {
        let pod = || Object::pod(&plan.pod);
        let table = Arc::clone(&self.table.borrow());
        let giving_back = Box::pin(self.dra.unprepare(&plan.uid, &table));
        let given =
            self.events.while_waiting(pod, "drivers to take back its resource claims", giving_back).await;
        given.map_err(|error| {
            let message = format!("Failed to unprepare dynamic resources: {error}");
            self.events.warning(pod(), "FailedUnprepareDynamicResources", message);
            Error::StillPrepared(error)
        })
    }

    /// Takes away the cgroup, the volumes and the devices of a pod whose containers and sandboxes are gone.
    pub(crate) async fn release(&self, plan: &Arc<PodPlan>, chores: &BlockingTasks) -> Result<(), Error> {
        self.release_with(plan, chores, PodVolumes::tear_down).await?;
        self.devices.forget(&plan.uid);
        Ok(())
    }

    /// Takes away the cgroup and the volumes of a pod that has ended, whose containers stay to be looked at.
    /// Its devices are free as soon as another pod needs them.
    pub(crate) async fn release_ended(
        &self,
        plan: &Arc<PodPlan>,
        chores: &BlockingTasks,
    ) -> Result<(), Error> {
        self.release_with(plan, chores, PodVolumes::release).await?;
        let (users, uid) = (Arc::clone(&self.users), plan.uid.clone());
        chores.run(move || users.release(&uid).map_err(Error::of_files)).await
    }

    async fn release_with(
        &self,
        plan: &Arc<PodPlan>,
        chores: &BlockingTasks,
        of_volumes: fn(&PodVolumes) -> Result<(), beelet_volumes::Error>,
    ) -> Result<(), Error> {
        // What a cancelled step has begun makes things still, until it sees that nobody waits for it.
        chores.done().await;
        self.volumes.unpublish(&plan.uid).await.map_err(Error::of_files)?;
        let (plan, cgroups) = (Arc::clone(plan), Arc::clone(&self.cgroups));
        let work = chores.run(move || {
            for path in &plan.cgroups {
                // Not asked first whether it exists: a part of it may be gone already.
                cgroups.destroy(path)?;
            }
            of_volumes(&plan.volumes).map_err(Error::of_files)
        });
        work.await
    }

    /// Takes away the logs of a pod that is gone.
    pub(crate) async fn remove_logs(&self, plan: &Arc<PodPlan>, chores: &BlockingTasks) -> Result<(), Error> {
        let plan = Arc::clone(plan);
        chores.run(move || remove_folder(&plan.logs).map_err(Error::of_files)).await
    }
}

/// The pod's secrets for registries. One that isn't there is passed over, as by the kubelet: the registry may
/// not ask.
fn pull_secrets<'o>(plan: &PodPlan, objects: &'o Objects) -> Vec<&'o core::Secret> {
    let named = plan.pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let found = named.filter_map(|reference| {
        let secret = objects.secret(&plan.name.namespace, &reference.name);
        if secret.is_none() {
            tracing::warn!(pod = %plan.name, "{}", env::missing(&plan.pod, "Secret", &reference.name));
        }
        secret
    });
    found.collect()
}

fn millis(took: Duration) -> u64 {
    u64::try_from(took.as_millis()).unwrap_or(u64::MAX)
}

/// The instance whose processes a container shares, if it asks for any.
fn process_target(plan: &PodPlan, container: &str, seen: &Observation) -> Result<Option<String>, Error> {
    let Some(target) = plan.process_target(container) else { return Ok(None) };
    let found = seen.newest(target).map(|instance| Some(instance.id.clone()));
    found.ok_or_else(|| {
        Error::Spec(format!("unable to find target container {target}: it was not started yet"))
    })
}

/// What runtimes learned late, and don't tell of: since when they know it.
struct Ability {
    /// What they can then.
    what: &'static str,
    containerd: (u32, u32),
    crio: (u32, u32),
}

/// KEP-4639.
const IMAGES: Ability = Ability { what: "mount images", containerd: (2, 1), crio: (1, 31) };
/// KEP-4639, its second part.
const PARTS_OF_IMAGES: Ability =
    Ability { what: "mount a part of an image", containerd: (2, 2), crio: (1, 33) };
/// KEP-4960.
const STOP_SIGNALS: Ability =
    Ability { what: "be told which signal ends a container", containerd: (2, 3), crio: (1, 34) };

impl Ability {
    /// Returns true if this runtime has it.
    fn is_of(&self, name: &str, version: &str) -> bool {
        let mut numbers =
            version.trim_start_matches('v').split(['.', '-', '+', '~']).map_while(|n| n.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        match name {
            "containerd" => version >= self.containerd,
            "cri-o" => version >= self.crio,
            _ => false,
        }
    }
}

impl std::fmt::Display for Ability {
    /// `mount images; containerd 2.1 and CRI-O 1.31`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, containerd, crio } = self;
        write!(f, "{what}; containerd {}.{} and CRI-O {}.{}", containerd.0, containerd.1, crio.0, crio.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runtimes_can_is_known_by_their_version() {
        let check = |name: &str, version: &str, expected: [bool; 3]| {
            let found = [IMAGES, PARTS_OF_IMAGES, STOP_SIGNALS].map(|ability| ability.is_of(name, version));
            assert_eq!(found, expected, "{name} {version}");
        };
        check("containerd", "1.6.20~ds1", [false; 3]);
        check("containerd", "v2.0.5", [false; 3]);
        check("containerd", "v2.1.9", [true, false, false]);
        check("containerd", "2.2.0-rc.1", [true, true, false]);
        check("containerd", "v2.3.0", [true; 3]);
        check("cri-o", "1.31.2", [true, false, false]);
        check("cri-o", "1.30.0", [false; 3]);
        check("cri-o", "1.34.0", [true; 3]);
        check("other", "9.9", [false; 3]);
        check("containerd", "", [false; 3]);
        assert_eq!(IMAGES.to_string(), "mount images; containerd 2.1 and CRI-O 1.31");
    }
}
