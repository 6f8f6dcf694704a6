//! Builds and connects the parts that protect the node from its pods: admission, garbage collection,
//! eviction.

use std::sync::Arc;

use beelet_policy::{
    eviction::{DiskLayout, EvictionSwap, Reclaim},
    resources::cgroups::SwapBehavior,
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use super::{conditions, facts, health::Health, opened::Node, services::Services, tasks::Tasks};
use beelet_admission::{Admission, RetryEvicted};
use beelet_api::grpc::{devices::NodeResources, garbage::Collectors};
use beelet_base::blocking::blocking;
use beelet_bpf::{
    Interest,
    quota::{self, Uncounted},
};
use beelet_cgroups::Cgroups;
use beelet_config::Config;
use beelet_eviction::{
    DiskUsages, DiskView, Eviction, Filesystems, Hints, LocalStorage, PodUsages, Reclaimed, Reclaimer,
    SwapDoor, edges, gauges,
};
use beelet_images::{
    Collector, ImageGc, ImageGcRequest, Leases,
    containers::{self, ContainerGc, ContainerGcRequest},
};
use beelet_model::{pressure::Conditions, request::Request};
use beelet_shutdown::Since;

/// Admission, garbage collection and eviction, not running yet.
pub(super) struct NodeProtection {
    pub(super) admission: Arc<Admission>,
    pub(super) leases: Leases,
    /// The node's pressures.
    pressures: watch::Receiver<Conditions>,
    /// Start of the machine's shutdown, if it is shutting down.
    pub(super) shutdown: watch::Receiver<Since>,
    retry_evicted: RetryEvicted,
    image_gc: Collector<ImageGc>,
    container_gc: Collector<ContainerGc>,
    eviction: Eviction,
    local_storage: LocalStorage,
    /// Disk usage for the node's pages.
    pub(super) disk: DiskView,
    /// Tasks that deliver hints to eviction.
    sources: [(&'static str, BoxFuture<'static, ()>); 3],
}

impl NodeProtection {
    /// Builds the parts for `node`; they send `requests` to the pods' manager.
    pub(super) async fn build(
        node: &Node,
        requests: &mpsc::Sender<Request>,
        shutdown: watch::Receiver<Since>,
    ) -> Self {
        let (conditions, pressures) = watch::channel(Conditions::new());
        let Services { config, doors, metrics, table, .. } = &node.services;
        let admission = Arc::new(Admission::new(beelet_admission::Parts {
            resources: facts::capacity(config, &node.machine),
            policy: config.beelet.preemption,
            conditions: pressures.clone(),
            shutdown: shutdown.clone(),
            requests: requests.clone(),
            metrics: metrics.admission.clone(),
        }));
        let retry_evicted = RetryEvicted {
            table: table.clone(),
            conditions: pressures.clone(),
            admission: Arc::clone(&admission),
            requests: requests.clone(),
            transition: config.eviction.pressure_transition,
        };
        let leases = Leases::default();
        let (image_gc, images) = image_gc(&node.services, &leases);
        let (container_gc, containers) = container_gc(&node.services);
        log_quotas(config).await;
        let disk = DiskUsages::default();
        let local_storage = local_storage(&node.services, &disk, requests);
        let reclaimer = reclaimer(images.clone(), containers.clone());
        let filesystems = Filesystems::new(facts::volumes_folder(config), doors.space.clone());
        let disk = DiskView { usages: disk, filesystems };
        let (eviction, sources) = eviction(node, disk.clone(), requests, reclaimer, conditions);
        let _ = node.late.collectors.set(Collectors { images, containers });
        Self {
            admission,
            leases,
            pressures,
            shutdown,
            retry_evicted,
            image_gc,
            container_gc,
            eviction,
            local_storage,
            disk,
            sources,
        }
    }

    /// Returns capacity and allocatable, without devices.
    pub(super) fn resources(&self, config: &Config) -> NodeResources {
        facts::node_resources(config, self.admission.resources())
    }

    /// Returns a function that returns the node's current conditions. Spawns a task that records their
    /// transition times and ends with eviction.
    pub(super) fn conditions(
        &self,
        health: &Health,
        tasks: &mut Tasks,
    ) -> Arc<dyn Fn() -> Vec<core::NodeCondition> + Send + Sync> {
        let (since, recording) = conditions::follow(self.pressures.clone());
        tasks.spawn("node conditions", recording);
        let (health, shutdown) = (health.clone(), self.shutdown.clone());
        Arc::new(move || conditions::list(&since.borrow(), &health, *shutdown.borrow()))
    }

    /// Starts the parts.
    pub(super) fn spawn(self, tasks: &mut Tasks) {
        tasks.spawn("image collection", self.image_gc.run(tasks.stop()));
        tasks.spawn("container collection", self.container_gc.run(tasks.stop()));
        tasks.spawn("retry of evicted pods", self.retry_evicted.run(tasks.stop()));
        tasks.spawn("eviction", self.eviction.run(tasks.stop()));
        tasks.spawn("local storage", self.local_storage.run(tasks.stop()));
        for (name, source) in self.sources {
            let stop = tasks.stop();
            // The kernel may lack a source of hints.
            tasks.spawn_optional(name, async move {
                let _ = stop.run_until_cancelled(source).await;
            });
        }
    }
}

fn image_gc(services: &Services, leases: &Leases) -> (Collector<ImageGc>, beelet_images::Handle) {
    ImageGc::new(beelet_images::Parts {
        runtime: services.runtime.clone(),
        leases: leases.clone(),
        state: Arc::clone(&services.state),
        table: services.table.clone(),
        policy: services.config.image_gc.policy,
        period: services.config.image_gc.is_on().then_some(beelet_images::gc::PERIOD),
        space: services.doors.space.clone(),
        events: services.node_events(),
        metrics: services.metrics.images.clone(),
    })
}

fn container_gc(services: &Services) -> (Collector<ContainerGc>, containers::Handle) {
    ContainerGc::new(containers::Parts {
        runtime: services.runtime.clone(),
        table: services.table.clone(),
        policy: services.config.beelet.container_gc,
        period: containers::PERIOD,
        pod_logs_dir: services.config.pod_logs_dir.clone(),
        events: services.node_events(),
        metrics: services.metrics.dead_containers.clone(),
    })
}

fn local_storage(services: &Services, usages: &DiskUsages, requests: &mpsc::Sender<Request>) -> LocalStorage {
    LocalStorage {
        table: services.table.clone(),
        runtime: services.runtime.clone(),
        pods_dir: services.config.beelet.pods_dir.clone(),
        pod_logs_dir: services.config.pod_logs_dir.clone(),
        period: services.config.volume_stats_period,
        enforce: services.config.local_storage_isolation,
        usages: usages.clone(),
        requests: requests.clone(),
        metrics: services.metrics.eviction.clone(),
    }
}

/// Builds eviction and its sources of hints.
fn eviction(
    node: &Node,
    disk: DiskView,
    requests: &mpsc::Sender<Request>,
    reclaimer: Reclaimer,
    conditions: watch::Sender<Conditions>,
) -> (Eviction, [(&'static str, BoxFuture<'static, ()>); 3]) {
    let services = &node.services;
    let (configured, cgroups) = (&services.config.eviction, Arc::clone(&node.cgroups));
    let metrics = &services.metrics.eviction;
    let DiskView { usages: disk, filesystems } = disk;
    let (layout_out, layout) = watch::channel(DiskLayout::default());
    let hints = Hints::default();
    let mut gauges = filesystems.gauges();
    let memory_signal = services.config.beelet.eviction_memory_signal;
    let of_the_machine = || gauges::of_the_machine(&cgroups, memory_signal);
    gauges.extend(services.doors.gauges.clone().unwrap_or_else(of_the_machine));
    let swap = services.config.beelet.eviction_swap;
    let eviction = Eviction::new(beelet_eviction::Parts {
        thresholds: configured.thresholds.clone(),
        transition: configured.pressure_transition,
        max_pod_grace: configured.max_pod_grace,
        gauges,
        layout,
        hints: hints.clone(),
        usage: PodUsages {
            cgroups: Arc::clone(&cgroups),
            config: node.cgroup_config.clone(),
            memory_signal,
            swap,
            disk,
        },
        table: services.table.clone(),
        requests: requests.clone(),
        reclaimer,
        swap: swap_door(&services.config, &cgroups),
        conditions,
        events: services.node_events(),
        metrics: metrics.clone(),
    });
    let edges = node.kernel.subscribe(Interest::OOM_KILLS | Interest::PRESSURE);
    let to_kernel = edges::listen_to_kernel(edges, hints.clone(), metrics.clone());
    let to_cgroups = edges::listen(cgroups, configured.thresholds.clone(), hints);
    let follow = filesystems.follow(services.runtime.clone(), layout_out);
    let sources: [(_, BoxFuture<'static, ()>); 3] = [
        ("eviction hints of the kernel", Box::pin(to_kernel)),
        ("eviction hints of cgroups", Box::pin(to_cgroups)),
        ("file systems", Box::pin(follow)),
    ];
    (eviction, sources)
}

/// Returns the door to swap if swap counts in eviction and pods may use it.
fn swap_door(config: &Config, cgroups: &Arc<Cgroups>) -> Option<SwapDoor> {
    let counts = config.beelet.eviction_swap == EvictionSwap::Counted;
    if !counts || config.swap_behavior != SwapBehavior::LimitedSwap {
        return None;
    }
    let door = SwapDoor::of_the_machine(cgroups);
    if door.is_none() {
        warn!(
            "evictionSwap: this kernel cannot move pods' memory to swap on request (that takes cgroup v2 and Linux 5.19); \
             swap counts only in the ranking"
        );
    }
    door
}

/// Returns the reclaimer, by which eviction runs the collectors before it evicts a pod.
fn reclaimer(images: beelet_images::Handle, containers: containers::Handle) -> Reclaimer {
    Arc::new(move |step| {
        let (images, containers) = (images.clone(), containers.clone());
        Box::pin(async move {
            match step {
                Reclaim::DeleteUnusedContainers => {
                    let request = ContainerGcRequest { terminated: true, dry_run: false };
                    let collected = containers.collect(request).await?;
                    // The runtime removes the writable layers later.
                    Ok(if collected.containers.is_empty() { Reclaimed::Now } else { Reclaimed::Later })
                }
                Reclaim::DeleteUnusedImages => {
                    let request = ImageGcRequest { all_unused: true, dry_run: false };
                    images.collect(request).await?;
                    Ok(Reclaimed::Now)
                }
            }
        })
    })
}

/// Logs the method of measuring volumes.
async fn log_quotas(config: &Config) {
    let dir = config.beelet.pods_dir.clone();
    match blocking("asking for project quotas", move || quota::counted(&dir)).await {
        Ok(()) => info!("measuring volumes by project quotas"),
        Err(Uncounted::Off(why)) => info!("measuring volumes by walking through their files: {why}"),
        Err(Uncounted::Refused(why)) => warn!("measuring volumes by walking through their files: {why}"),
    }
}
