//! What every agent has around its parts, whether it runs pods or only observes: the servers, which are there
//! before the container runtime answers and end last; the wait for the runtime; the service manager; and the
//! first failure of a part.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::Result;
use beelet_proto::cri;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::{error, info};

use super::{
    systemd,
    tasks::{Failures, Tasks},
};
use beelet_api::http::{self, ApiState};
use beelet_cri::Runtime;

/// The servers of an agent, and what tells it to end.
pub(super) struct Frame {
    /// The first failure of any part.
    pub(super) failures: Failures,
    /// What ends after all other parts: their last acts can still be seen.
    pub(super) servers: Tasks,
    /// Cancelled when the servers are to end.
    pub(super) serving: CancellationToken,
    shutdown: CancellationToken,
}

impl Frame {
    /// Nothing runs yet. `shutdown` tells the agent to end.
    pub(super) fn new(shutdown: &CancellationToken) -> Self {
        let (failures, serving) = (Failures::default(), CancellationToken::new());
        let servers = Tasks::new(&serving, &failures);
        Self { failures, servers, serving, shutdown: shutdown.clone() }
    }

    /// Serves gRPC on `socket`, and HTTP on each address that a setting names.
    pub(super) async fn serve(
        &mut self,
        socket: &Path,
        services: Routes,
        http: impl IntoIterator<Item = (&'static str, SocketAddr, ApiState)>,
    ) -> Result<()> {
        let socket = beelet_serve::grpc::bind(socket).await?;
        let until = self.serving.clone();
        self.servers.spawn("gRPC server", async move {
            if let Err(error) = beelet_serve::grpc::serve(socket, services, until).await {
                error!("{error:#}");
            }
        });
        for (setting, address, state) in http {
            let listener = http::bind(address, setting).await?;
            self.servers.spawn("HTTP server", http::serve(listener, state, self.serving.clone()));
        }
        Ok(())
    }

    /// Serves the kubelet's API on a port.
    pub(super) async fn serve_kubelet_api(
        &mut self,
        parts: beelet_kubelet_api::Parts,
        port: u16,
    ) -> Result<()> {
        let server = beelet_kubelet_api::bind(parts, port).await?;
        self.servers.spawn("HTTPS server", server.serve(self.serving.clone()));
        Ok(())
    }

    /// Tells the service manager that the agent is up, and once it ends, for how long that may take.
    pub(super) fn notify_service_manager(
        &mut self,
        stopping_time: impl Fn() -> Duration + Send + Sync + 'static,
    ) {
        let (ending, ended) = (self.shutdown.clone(), self.serving.clone());
        self.servers.spawn("service manager", systemd::follow(ending, ended, stopping_time));
    }

    /// Waits until the container runtime answers. `None` if the agent is told to end before.
    pub(super) async fn wait_for(&self, runtime: &Runtime) -> Result<Option<cri::VersionResponse>> {
        let version = tokio::select! {
            version = runtime.wait_ready(&self.shutdown) => version,
            failed = self.failures.first() => return Err(failed),
        };
        if let Some(version) = &version {
            info!(
                name = version.runtime_name,
                version = version.runtime_version,
                "container runtime answers"
            );
        }
        Ok(version)
    }

    /// Ends the servers, after everything else has ended.
    pub(super) async fn end(mut self) {
        self.serving.cancel();
        // The event log writes once more.
        self.servers.ended().await;
    }
}
