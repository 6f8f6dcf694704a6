//! A node whose container runtime has answered: its services, and the resources that depend on the runtime.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use beelet_base::blocking::spawn_blocking;
use beelet_policy::resources::{
    cgroups::{CgroupConfig, CgroupValues},
    user_namespaces::IdPool,
};
use beelet_proto::cri;
use beelet_units::cgroup_driver::CgroupDriver;
use tracing::warn;

use super::{
    facts::{self, Machine},
    kernel, kernel_settings, preflight,
    services::{Late, Services},
    subordinate_ids,
};
use beelet_bpf::{Kernel, KernelOptions};
use beelet_cgroups::Cgroups;
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_images::{
    access::Access,
    credentials::Keys,
    providers::Providers,
    pull::{self, Puller},
};
use beelet_pods::qos_tree;
use beelet_state::events::NodeEvents;

/// Number of attempts to read the runtime's configuration before the last one.
const CONFIG_TRIES: usize = 30;
/// Pause between two attempts.
const CONFIG_RETRY: Duration = Duration::from_secs(1);

/// The opened resources of a node.
pub(super) struct Node {
    pub(super) services: Services,
    pub(super) late: Late,
    pub(super) version: cri::VersionResponse,
    pub(super) machine: Machine,
    /// The cgroup tree with the runtime's driver.
    pub(super) cgroups: Arc<Cgroups>,
    pub(super) cgroup_config: CgroupConfig,
    pub(super) user_ids: IdPool,
    pub(super) puller: Arc<Puller>,
    pub(super) reserved: Vec<CgroupValues>,
    pub(super) kernel: Kernel,
}

impl Node {
    /// Opens the node over `cgroups`, for the runtime that answered with `version`.
    ///
    /// # Errors
    /// The machine or the runtime does not fit the configuration; the message has the remedy.
    pub(super) async fn open(
        services: Services,
        late: Late,
        mut cgroups: Arc<Cgroups>,
        version: cri::VersionResponse,
    ) -> Result<Self> {
        let config = Arc::clone(&services.config);
        let reported = runtimes_cgroup_driver(&services.runtime).await?;
        if let Some(driver) = effective_driver(config.cgroup_driver, reported) {
            cgroups = Arc::new(Cgroups::clone(&cgroups).with_driver(driver)?);
            cgroups.paths.require_root()?;
        }
        let machine = match &services.doors.machine {
            Some(machine) => machine.clone(),
            None => Machine::inspect(&config).await?,
        };
        facts::check_reservations(&config, &machine)?;
        preflight::swap(&config, machine.swap_bytes)?;
        kernel_settings::check(config.protect_kernel_defaults)?;
        let mut cgroup_config = facts::cgroup_config(&config, &machine, &cgroups);
        let (held, journal) = (Arc::clone(&cgroups), Arc::clone(&services.state));
        spawn_blocking(move || beelet_tuner::recover(&held, &journal))
            .await
            .context("the tuner's journal")?;
        enforce_allocatable(&services.node_events(), &cgroups, &cgroup_config).await?;
        cgroup_config.swap = facts::swap(&config, &machine, &cgroups);
        let (per_pod, pods) = (config.user_ids_per_pod, config.pod_limit(machine.cpus));
        let ids = spawn_blocking(move || subordinate_ids::pool(per_pod, pods)).await;
        let user_ids = ids.context("the ids of user namespaces")??;
        let reserved = facts::reserved_cgroups(&config, &cgroups, &cgroup_config)?;
        let kernel = kernel::start(kernel_options(&config, &cgroups)).await?;
        let puller = Arc::new(puller(&services).await?);
        Ok(Self {
            services,
            late,
            version,
            machine,
            cgroups,
            cgroup_config,
            user_ids,
            puller,
            reserved,
            kernel,
        })
    }
}

/// Limits all pods together to the node's allocatable resources, and records an event of the result
/// (`enforceNodeAllocatableCgroups`).
async fn enforce_allocatable(
    events: &NodeEvents,
    cgroups: &Arc<Cgroups>,
    config: &CgroupConfig,
) -> Result<()> {
    let written = qos_tree::write(cgroups, qos_tree::values(&[], config)?).await;
    match &written {
        Ok(()) => events.normal("NodeAllocatableEnforced", "Updated Node Allocatable limit across pods"),
        Err(error) => {
            let message = format!("Failed to update Node Allocatable Limits \"/kubepods\": {error}");
            events.warning("FailedNodeAllocatableEnforcement", &message);
        }
    }
    Ok(written?)
}

/// Creates the puller of images with the node's registry credentials.
async fn puller(services: &Services) -> Result<Puller> {
    let config = &services.config;
    let (providers, accounts) = (config.credential_providers.clone(), services.accounts.clone());
    let metrics = services.metrics.images.clone();
    let opened = spawn_blocking(move || Providers::open(providers.as_ref(), accounts, metrics)).await;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let keys = Keys {
        providers: opened.context("the credential providers")??,
        files: Keys::files_of(&config.beelet.kubelet_dir, home.as_deref()),
    };
    let limits = pull::Limits {
        parallel: config.parallel_image_pulls,
        per_second: config.registry_pull_qps.into(),
        burst: config.registry_burst,
    };
    let pulls = services.metrics.images.pulls.clone();
    let access = Access::new(&config.beelet.kubelet_dir, config.image_verification.clone(), pulls);
    Ok(Puller::new(services.runtime.clone(), limits, keys, Arc::new(access)))
}

/// Returns the runtime's driver, if reported, otherwise the configured one. As under the kubelet
/// (`KubeletCgroupDriverFromCRI`), the runtime's report wins: kubeadm writes `cgroupDriver: systemd` for
/// every node.
fn effective_driver(
    configured: Option<CgroupDriver>,
    reported: Option<CgroupDriver>,
) -> Option<CgroupDriver> {
    if let (Some(configured), Some(reported)) = (configured, reported)
        && configured != reported
    {
        warn!(
            "the container runtime's cgroup driver, {reported}, replaces `cgroupDriver: {configured}` of the \
             configuration: remove the field"
        );
    }
    reported.or(configured)
}

/// Reads the runtime's cgroup driver, with retries: a runtime that has just started may not know it yet.
async fn runtimes_cgroup_driver(runtime: &Runtime) -> Result<Option<CgroupDriver>> {
    for _ in 0..CONFIG_TRIES {
        match runtime.runtime_config().await {
            Ok(driver) => return Ok(driver),
            Err(error) => warn!("{error}; retrying in {} s", CONFIG_RETRY.as_secs()),
        }
        tokio::time::sleep(CONFIG_RETRY).await;
    }
    Ok(runtime.runtime_config().await?)
}

fn kernel_options(config: &Config, cgroups: &Cgroups) -> KernelOptions {
    KernelOptions {
        bpffs: config.beelet.bpffs.clone(),
        pin_name: config.beelet.pin_name.clone(),
        cgroup: cgroups.paths.cgroup2_path("/kubepods").unwrap_or_default(),
        mode: config.beelet.bpf,
        object: config.beelet.bpf_log.clone(),
        pressure_edges: config.beelet.pressure_edges,
        pods: usize::try_from(config.max_pods).unwrap_or(usize::MAX),
        ..KernelOptions::default()
    }
}
