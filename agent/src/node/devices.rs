//! Opens the devices and creates the tasks that serve them to other programs.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use tokio::sync::{mpsc, watch};
use tracing::warn;

use super::services::Services;
use beelet_base::blocking::spawn_blocking;
use beelet_devices::{Active, Devices, Parts, Settings, Tasks, remnants};
use beelet_model::request::Request;

/// Opens the devices as an earlier agent or a kubelet left them. Returns them with the tasks that serve them.
pub(super) async fn open(
    services: &Services,
    active: watch::Receiver<Active>,
    requests: mpsc::Sender<Request>,
) -> Result<(Devices, Tasks)> {
    let config = &services.config;
    let settings = Settings {
        plugin_wait: config.beelet.device_plugin_wait,
        ..Settings::new(config.beelet.kubelet_dir.clone())
    };
    // Always list them: a damaged checkpoint shows only when it is read.
    let containers = services.runtime.containers.ours().await;
    let containers = containers.unwrap_or_else(|error| {
        warn!(%error, "cannot list the runtime's containers; a lost device checkpoint cannot be rebuilt");
        Vec::new()
    });
    let store = services.doors.checkpoint.clone().unwrap_or_else(|| Arc::new(settings.checkpoint()));
    let parts = Parts {
        store,
        settings,
        active,
        requests,
        metrics: services.metrics.devices.clone(),
        events: services.events.clone(),
        node_name: config.node_name.clone(),
    };
    let open = move || Devices::open(parts, || remnants(&containers));
    let (devices, tasks) = spawn_blocking(open).await.context("cannot open the devices")?;
    let tasks = tasks.with_handler(beelet_csi::KIND, Arc::new(services.csi.clone()));
    // Pods of a standalone node have no claims.
    if services.storage.is_some() {
        return Ok((devices, tasks.with_handler(beelet_dra::KIND, Arc::new(services.dra.clone()))));
    }
    Ok((devices, tasks))
}
