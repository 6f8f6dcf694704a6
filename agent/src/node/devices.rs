//! Opens the devices, and serves what others ask of them.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
};
use tracing::warn;

use super::run::Node;
use beelet_devices::{Active, Devices, Parts, Settings, Tasks, remnants};
use beelet_model::{pod::managed, request::Request};
use beelet_proto::cri;

impl Node {
    /// The devices as an earlier agent or a kubelet left them, and what must run for them.
    pub(super) async fn open_devices(
        &self,
        active: watch::Receiver<Active>,
        requests: mpsc::Sender<Request>,
    ) -> Result<(Devices, Tasks)> {
        let (policy, scope) = self.config.topology;
        let kubelet_dir = self.config.beelet.kubelet_dir.clone();
        let settings = Settings {
            plugin_wait: self.config.beelet.device_plugin_wait,
            policy,
            scope,
            ..Settings::new(kubelet_dir)
        };
        // Asked in any case: whether the checkpoint is damaged is seen when it is read.
        let ours = cri::ContainerFilter { label_selector: managed(), ..Default::default() };
        let containers = self.runtime.list_containers(Some(ours)).await;
        let containers = containers.unwrap_or_else(|error| {
            warn!(%error, "the runtime's containers can't be listed: a lost device checkpoint could not be rebuilt");
            Vec::new()
        });
        let store = self.doors.checkpoint.clone().unwrap_or_else(|| Arc::new(settings.checkpoint()));
        let parts = Parts {
            store,
            settings,
            active,
            requests,
            metrics: self.metrics.devices.clone(),
            events: self.events.clone(),
            node_name: self.config.node_name.clone(),
        };
        let open = move || Devices::open(parts, || remnants(&containers));
        let (devices, tasks) = spawn_blocking(open).await.context("the devices could not be opened")?;
        let tasks = tasks.with_handler(beelet_csi::KIND, Arc::new(self.csi.clone()));
        // On a node of its own no pod has claims.
        if self.storage.is_some() {
            return Ok((devices, tasks.with_handler(beelet_dra::KIND, Arc::new(self.dra.clone()))));
        }
        Ok((devices, tasks))
    }
}
