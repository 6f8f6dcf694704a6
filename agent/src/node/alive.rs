//! Builds what keeps the node alive (admission, garbage collection, eviction) and connects it with the pods.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    thread,
};

use anyhow::Result;
use beelet_policy::{
    cgroups::CgroupConfig,
    eviction::{DiskLayout, Reclaim},
    quantity::Quantity,
    resources::{CPU, EPHEMERAL_STORAGE, MEMORY, PODS},
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1 as core;
use prometheus_client::registry::Registry;
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Health, conditions, facts, parts};
use beelet_admission::{Admission, Comeback, NodeResources};
use beelet_api::grpc::garbage::Collectors;
use beelet_base::filesystem;
use beelet_bpf::{
    Interest, Kernel,
    quota::{self, Uncounted},
};
use beelet_cgroups::Cgroups;
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_eviction::{DiskUsages, Eviction, Filesystems, Hints, LocalStorage, PodUsages, Reclaimer, edges};
use beelet_images::{
    ImageGc, Leases,
    containers::{self, ContainerGc},
};
use beelet_model::{pressure::Conditions, request::Request, table::PodTable};
use beelet_state::{
    State,
    events::{NodeEvents, Recorder},
};

/// What of them is there before the runtime answers: their counters, and where the collectors will be.
#[derive(Default)]
pub(super) struct Early {
    admission: beelet_admission::Metrics,
    images: beelet_images::Metrics,
    containers: containers::Metrics,
    eviction: beelet_eviction::Metrics,
    pub(super) collectors: Arc<OnceLock<Collectors>>,
}

impl Early {
    pub(super) fn register(&self, registry: &mut Registry) {
        self.admission.register(registry);
        self.images.register(registry);
        self.containers.register(registry);
        self.eviction.register(registry);
    }
}

/// What they need from the rest of the node.
pub(super) struct Parts<'a> {
    pub(super) config: &'a Config,
    pub(super) runtime: &'a Runtime,
    pub(super) cgroups: &'a Arc<Cgroups>,
    pub(super) cgroup_config: &'a CgroupConfig,
    pub(super) kernel: &'a Kernel,
    pub(super) state: &'a Arc<State>,
    pub(super) table: &'a watch::Receiver<Arc<PodTable>>,
    pub(super) requests: &'a mpsc::Sender<Request>,
    pub(super) events: &'a Recorder,
    pub(super) early: &'a Early,
}

/// All of them, not running yet.
pub(super) struct Alive {
    pub(super) admission: Arc<Admission>,
    pub(super) leases: Leases,
    /// What the node is short of.
    pressures: watch::Receiver<Conditions>,
    comeback: Comeback,
    image_gc: ImageGc,
    container_gc: ContainerGc,
    eviction: Eviction,
    local_storage: LocalStorage,
    /// What eviction listens to.
    sources: [(&'static str, BoxFuture<'static, ()>); 3],
}

impl Alive {
    pub(super) async fn build(parts: Parts<'_>) -> Result<Self> {
        let (cgroups, kernel) = (Arc::clone(parts.cgroups), parts.kernel);
        let cgroup_config = parts.cgroup_config.clone();
        let Parts { config, runtime, state, table, requests, events, early, .. } = parts;
        let events = NodeEvents::new(events.clone(), &config.node_name);
        let (conditions, watched) = watch::channel(Conditions::new());
        let admission = Arc::new(Admission::new(beelet_admission::Parts {
            resources: resources(config).await?,
            policy: config.beelet.preemption.into(),
            conditions: watched.clone(),
            requests: requests.clone(),
            metrics: early.admission.clone(),
        }));
        let leases = Leases::default();
        let (image_gc, images) = ImageGc::new(beelet_images::Parts {
            runtime: runtime.clone(),
            leases: leases.clone(),
            state: Arc::clone(state),
            table: table.clone(),
            policy: config.image_gc.policy,
            period: config.image_gc.is_on().then_some(beelet_images::gc::PERIOD),
            space: beelet_images::Space::by_statvfs(),
            events: events.clone(),
            metrics: early.images.clone(),
        });
        let (container_gc, containers) = ContainerGc::new(containers::Parts {
            runtime: runtime.clone(),
            table: table.clone(),
            policy: config.beelet.container_gc,
            period: containers::PERIOD,
            pod_logs_dir: config.pod_logs_dir.clone(),
            events: events.clone(),
            metrics: early.containers.clone(),
        });
        let comeback = Comeback {
            table: table.clone(),
            conditions: watched.clone(),
            admission: Arc::clone(&admission),
            requests: requests.clone(),
            transition: config.eviction.pressure_transition,
        };
        tell_of_quotas(config).await;
        let disk = DiskUsages::default();
        let local_storage = LocalStorage {
            table: table.clone(),
            runtime: runtime.clone(),
            pods_dir: config.beelet.pods_dir.clone(),
            pod_logs_dir: config.pod_logs_dir.clone(),
            period: config.volume_stats_period,
            enforce: config.local_storage_isolation,
            usages: disk.clone(),
            requests: requests.clone(),
            metrics: early.eviction.clone(),
        };
        let space = beelet_images::Space::by_statvfs();
        let filesystems = Filesystems::new(config.beelet.state_dir.clone(), space);
        let (layout_out, layout) = watch::channel(DiskLayout::default());
        let hints = Hints::default();
        let mut gauges = filesystems.gauges();
        gauges.extend(beelet_eviction::gauges::of_the_machine(&cgroups));
        let eviction = Eviction::new(beelet_eviction::Parts {
            thresholds: config.eviction.thresholds.clone(),
            transition: config.eviction.pressure_transition,
            max_pod_grace: config.eviction.max_pod_grace,
            gauges,
            layout,
            hints: hints.clone(),
            usage: PodUsages { cgroups: Arc::clone(&cgroups), config: cgroup_config, disk },
            table: table.clone(),
            requests: requests.clone(),
            reclaimer: reclaimer(images.clone(), containers.clone()),
            conditions,
            events,
            metrics: early.eviction.clone(),
        });
        let edges = kernel.subscribe(Interest::OOM_KILLS | Interest::PRESSURE);
        let to_kernel = edges::listen_to_kernel(edges, hints.clone(), early.eviction.clone());
        let to_cgroups = edges::listen(cgroups, config.eviction.thresholds.clone(), hints);
        let sources: [(_, BoxFuture<'static, ()>); 3] = [
            ("eviction hints of the kernel", Box::pin(to_kernel)),
            ("eviction hints of cgroups", Box::pin(to_cgroups)),
            ("file systems", Box::pin(filesystems.follow(runtime.clone(), layout_out))),
        ];
        let _ = early.collectors.set(Collectors { images, containers });
        Ok(Self {
            admission,
            leases,
            pressures: watched,
            comeback,
            image_gc,
            container_gc,
            eviction,
            local_storage,
            sources,
        })
    }

    /// Says how the node is, whenever asked. What comes and goes is noted by one of `tasks`, which ends with eviction.
    pub(super) fn conditions(
        &self,
        health: &Health,
        tasks: &mut parts::Parts,
    ) -> Box<dyn Fn() -> Vec<core::NodeCondition> + Send + Sync> {
        let (since, noting) = conditions::follow(self.pressures.clone());
        tasks.spawn("node conditions", noting);
        let health = health.clone();
        Box::new(move || conditions::list(&since.borrow(), &health))
    }

    /// Runs them until `working` ends.
    pub(super) fn spawn(self, tasks: &mut parts::Parts, working: &CancellationToken) {
        tasks.spawn("image collection", self.image_gc.run(working.clone()));
        tasks.spawn("container collection", self.container_gc.run(working.clone()));
        tasks.spawn("comeback", self.comeback.run(working.clone()));
        tasks.spawn("eviction", self.eviction.run(working.clone()));
        tasks.spawn("local storage", self.local_storage.run(working.clone()));
        for (name, source) in self.sources {
            let working = working.clone();
            // A kernel may have none of what one of them listens to.
            tasks.spawn_optional(name, async move {
                let _ = working.run_until_cancelled(source).await;
            });
        }
    }
}

/// What eviction asks of the collectors before it ends a pod.
fn reclaimer(images: beelet_images::Handle, containers: containers::Handle) -> Reclaimer {
    Arc::new(move |step| {
        let (images, containers) = (images.clone(), containers.clone());
        Box::pin(async move {
            match step {
                Reclaim::DeleteUnusedContainers => {
                    let wish = containers::Wish { terminated: true, dry_run: false };
                    containers.collect(wish).await.map(drop)
                }
                Reclaim::DeleteUnusedImages => {
                    let wish = beelet_images::Wish { all_unused: true, dry_run: false };
                    images.collect(wish).await.map(drop)
                }
            }
        })
    })
}

/// Says how the sizes of volumes are found.
async fn tell_of_quotas(config: &Config) {
    let dir = config.beelet.pods_dir.clone();
    match spawn_blocking(move || quota::counted(&dir)).await {
        Ok(Ok(())) => info!("the kernel counts what volumes take, by project"),
        Ok(Err(Uncounted::Off(why))) => info!("volumes are measured by walking through them: {why}"),
        Ok(Err(Uncounted::Refused(why))) => warn!("volumes are measured by walking through them: {why}"),
        Err(failed) => warn!(%failed, "whether the kernel counts what volumes take can't be said"),
    }
}

/// What the node has for pods.
async fn resources(config: &Config) -> Result<NodeResources> {
    let cpus = thread::available_parallelism()?.get();
    let mut capacity: BTreeMap<String, Quantity> = beelet_admission::hugepages();
    let whole = |n: u64| Quantity::from_units(i64::try_from(n).unwrap_or(i64::MAX));
    capacity.insert(CPU.to_owned(), whole(cpus as u64));
    capacity.insert(MEMORY.to_owned(), whole(facts::memory()?));
    capacity.insert(PODS.to_owned(), whole(config.pod_limit(cpus).into()));
    let dir = config.beelet.state_dir.clone();
    match spawn_blocking(move || filesystem::statvfs(&dir)).await? {
        Ok(disk) => {
            capacity.insert(EPHEMERAL_STORAGE.to_owned(), whole(disk.bytes.capacity_bytes));
        }
        Err(error) => warn!(error, "pods that request ephemeral-storage find none here"),
    }
    let mut reserved = BTreeMap::new();
    for name in config.system_reserved.keys().chain(config.kube_reserved.keys()) {
        reserved.insert(name.clone(), config.reserved(name));
    }
    Ok(NodeResources::new(capacity, &reserved, &config.eviction.thresholds))
}
