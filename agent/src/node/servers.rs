//! Servers of a node that runs pods: they start before the container runtime answers, and end last.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Result;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::{
    frame::Frame,
    services::{Late, Services},
    sources,
};
use beelet_api::{
    grpc,
    http::{self, ApiState},
    signals::Mode,
};
use beelet_cgroups::Cgroups;
use beelet_kubelet_api::{Verbosity, auth::Reviewers};

/// The machine's own logs.
const SYSTEM_LOGS: &str = "/var/log";

/// Starts all servers in `frame`. The pages include the metrics of `cgroups`.
///
/// # Errors
/// A socket or a port is in use, or a certificate is unusable.
pub(super) async fn start(
    frame: &mut Frame,
    services: &Services,
    late: &Late,
    cgroups: &Cgroups,
    (reviewers, verbosity): (Reviewers, Option<Verbosity>),
) -> Result<()> {
    let config = &services.config;
    let (pages, plain) = pages(services, cgroups);
    frame.serve(&config.socket(), grpc_services(services, late, &frame.serving), plain).await?;
    if let Some(port) = beelet_kubelet_api::port(&config.server, reviewers.access.is_some()) {
        let parts = beelet_kubelet_api::Parts {
            config: config.server.clone(),
            node_name: config.node_name.clone(),
            certificates: config.cert_dir(),
            reviewers,
            pages: http::router(pages),
            verbosity,
            metrics: services.metrics.kubelet_api.clone(),
            configz: config.effective_kubelet(),
            table: services.table.clone(),
            runtime: services.runtime.clone(),
            logs: config.pod_logs_dir.clone(),
            system_logs: SYSTEM_LOGS.into(),
            checkpoints: config.beelet.kubelet_dir.join("checkpoints"),
            shutdown: frame.serving.clone(),
        };
        frame.serve_kubelet_api(parts, port).await?;
    }
    Ok(())
}

/// Returns all services of the gRPC socket.
fn grpc_services(services: &Services, late: &Late, serving: &CancellationToken) -> Routes {
    let Services { table, runtime, config, .. } = services;
    let logs = config.pod_logs_dir.clone();
    let folder = grpc::manifests::Folder {
        path: config.static_pod_path.clone(),
        node_name: config.node_name.clone(),
        rules: sources::manifest_rules(services),
        runtime: runtime.clone(),
    };
    let running = || Arc::clone(&late.running);
    let (table, stop) = (|| table.clone(), || serving.clone());
    Routes::new(grpc::node_service(table(), services.health.outlook(), stop()))
        .add_service(grpc::events::service(&services.events, &config.node_name, stop()))
        .add_service(grpc::containers::service(table(), runtime.clone(), logs, running(), stop()))
        .add_service(grpc::images::service(table(), runtime.clone()))
        .add_service(grpc::devices::service(Arc::clone(&late.devices), table()))
        .add_service(grpc::manifests::service(folder, running()))
        .add_service(grpc::garbage::service(Arc::clone(&late.collectors)))
        .add_service(grpc::tuner::service(late.tuner.subscribe(), services.stats.pinned.subscribe()))
        .add_service(grpc::probes::service(services.probes.clone()))
        .add_service(services.stats.service(Mode::Run, serving))
}

/// Returns all pages for authorized clients, and the servers without encryption, each with the setting of its
/// port.
fn pages(services: &Services, cgroups: &Cgroups) -> (ApiState, Vec<(&'static str, SocketAddr, ApiState)>) {
    let Services { config, stats, .. } = services;
    let mut registry = services.metrics.registry(&services.runtime, cgroups);
    stats.register(&mut registry, config.beelet.metrics_pod_uid);
    let health = services.health.clone();
    let all = ApiState {
        pods: services.table.clone(),
        registry: Arc::new(registry),
        pressure: stats.pressure.clone(),
        specs: true,
        summary: true,
        health: Arc::new(move || health.check().err()),
        slis: http::slis::Slis::default(),
    };
    let local = ApiState { specs: config.beelet.unauthenticated_pods, ..all.clone() };
    let healthz = SocketAddr::new(config.healthz_address, config.healthz_port);
    // As on the kubelet's port, every client sees the pods, too.
    let read_only = SocketAddr::new(config.server.address, config.server.read_only_port);
    let mut plain = vec![("healthzPort", healthz, local)];
    if config.server.enabled {
        plain.push(("readOnlyPort", read_only, all.clone()));
    }
    plain.retain(|(_, address, _)| address.port() != 0);
    (all, plain)
}
