//! Common frame of `run` and `observe`: the servers, which start before the container runtime answers and end
//! last; the wait for the runtime; the service manager; and the first failure of a part.

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

/// The servers of an agent and its shutdown.
pub(super) struct Frame {
    /// The first failure of any part.
    pub(super) failures: Failures,
    /// The servers, which end after all other parts to show their last changes.
    pub(super) servers: Tasks,
    /// Cancelled when the servers must end.
    pub(super) serving: CancellationToken,
    shutdown: CancellationToken,
}

impl Frame {
    /// Creates a frame without running parts. Cancelling `shutdown` ends the agent.
    pub(super) fn new(shutdown: &CancellationToken) -> Self {
        let (failures, serving) = (Failures::default(), CancellationToken::new());
        let servers = Tasks::new(&serving, &failures);
        Self { failures, servers, serving, shutdown: shutdown.clone() }
    }

    /// Serves gRPC on `socket`, and HTTP on each address of a setting.
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

    /// Notifies the service manager of the agent's start, and of its stop with the time that it may take.
    pub(super) fn notify_service_manager(
        &mut self,
        stopping_time: impl Fn() -> Duration + Send + Sync + 'static,
    ) {
        let (ending, ended) = (self.shutdown.clone(), self.serving.clone());
        self.servers.spawn("service manager", systemd::follow(ending, ended, stopping_time));
    }

    /// Waits until the container runtime answers. Returns `None` if the agent is stopped first.
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

    /// Ends the servers after all other parts have ended.
    pub(super) async fn end(mut self) {
        self.serving.cancel();
        // The event log writes a last time.
        self.servers.ended().await;
    }
}
