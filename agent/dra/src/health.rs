//! How the devices of claims are, as their drivers say it on a stream (KEP-4680).

use std::{path::Path, time::Duration};

use beelet_policy::{
    dra::health::{Health, Report},
    moment::Moment,
};
use beelet_proto::dra::health as wire;
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::watch, time::sleep};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Status, Streaming};
use tracing::debug;

use crate::{Dra, Plugin, lock, plugin::WORDS};

/// How long after the end of a stream it is asked for again: the kubelet's.
const AGAIN: Duration = Duration::from_secs(5);
/// The same of a driver that has no such stream. Another one may listen there without registering anew.
const NEVER_SAYS: Duration = Duration::from_secs(300);
/// The least time between two reports of a plugin: one that writes without end waits.
const BETWEEN: Duration = Duration::from_millis(100);

impl Dra {
    /// Counts the changes of devices' health.
    #[must_use]
    pub fn health(&self) -> watch::Receiver<u64> {
        self.0.health_changes.subscribe()
    }

    /// Puts the health of the pod's devices into its status, beside that of other devices.
    pub fn annotate(&self, pod: &core::Pod, status: &mut core::PodStatus) {
        let Some(spec) = &pod.spec else { return };
        let uses_claims = |container: &core::Container| {
            container.resources.as_ref().is_some_and(|resources| resources.claims.is_some())
        };
        let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        for container in containers.filter(|container| uses_claims(container)) {
            let inits = status.init_container_statuses.iter_mut().flatten();
            let mut all = inits.chain(status.container_statuses.iter_mut().flatten());
            let Some(of) = all.find(|of| of.name == container.name) else { continue };
            let health = lock(&self.0.health);
            let told = health.statuses(&lock(&self.0.ledger), pod, container, self.now());
            if !told.is_empty() {
                of.allocated_resources_status.get_or_insert_default().extend(told);
            }
        }
    }

    fn now(&self) -> Moment {
        Moment::after_start(self.0.began.elapsed())
    }

    /// Listens to what a plugin says until it is deregistered.
    pub(crate) fn listen(&self, driver: &str, plugin: Plugin) {
        let place = (driver.to_owned(), plugin.socket().to_owned());
        let listening = tokio::spawn(self.clone().keep_listening(plugin));
        lock(&self.0.listening).insert(place, AbortOnDropHandle::new(listening));
    }

    /// The plugin of a driver that listens there is deregistered.
    pub(crate) fn listen_no_more(&self, driver: &str, socket: &Path) {
        lock(&self.0.listening).remove(&(driver.to_owned(), socket.to_owned()));
        self.silent(driver, socket);
    }

    /// Asks a plugin for its stream again and again.
    async fn keep_listening(self, plugin: Plugin) {
        loop {
            let status = match plugin.watch_health().await {
                Ok(said) => self.hear(&plugin, said).await,
                Err(status) => status,
            };
            self.silent(plugin.driver(), plugin.socket());
            let cause: String = status.message().chars().take(WORDS).collect();
            debug!(driver = plugin.driver(), cause, "a DRA driver does not say how its devices are");
            sleep(if status.code() == Code::Unimplemented { NEVER_SAYS } else { AGAIN }).await;
        }
    }

    /// The plugin that listens there says no more. What it said is forgotten, unless another one of its
    /// driver, which may take its place, is here.
    fn silent(&self, driver: &str, socket: &Path) {
        let plugins = lock(&self.0.plugins);
        let is_other = |plugin: &Plugin| plugin.socket() != socket && plugin.is_connected();
        if !plugins.get(driver).is_some_and(|all| all.iter().any(is_other)) {
            self.note_health(lock(&self.0.health).forget(driver));
        }
    }

    fn note_health(&self, changed: bool) {
        if changed {
            self.0.health_changes.send_modify(|changes| *changes += 1);
        }
    }

    /// Takes in what a plugin says until it says no more, and why that is.
    async fn hear(&self, plugin: &Plugin, mut said: Streaming<wire::NodeWatchResourcesResponse>) -> Status {
        let driver = plugin.driver();
        loop {
            let expiry = lock(&self.0.health).next_expiry(driver).map(|at| at.since(self.now()));
            tokio::select! {
                message = said.message() => {
                    let said = match message {
                        Ok(Some(said)) => said,
                        Ok(None) => return Status::ok("the stream has ended"),
                        Err(status) => return status,
                    };
                    let reports = said.devices.into_iter().map(report).collect();
                    self.note_health(lock(&self.0.health).report(driver, reports, self.now()));
                    sleep(BETWEEN).await;
                }
                () = sleep(expiry.unwrap_or_default()), if expiry.is_some() => {
                    self.note_health(lock(&self.0.health).expire(driver, self.now()));
                }
            }
        }
    }
}

fn report(device: wire::DeviceHealth) -> Report {
    let health = match device.health() {
        wire::HealthStatus::Unknown => Health::Unknown,
        wire::HealthStatus::Healthy => Health::Healthy,
        wire::HealthStatus::Unhealthy => Health::Unhealthy,
    };
    let identifier = device.device.unwrap_or_default();
    Report {
        pool: identifier.pool_name,
        device: identifier.device_name,
        health,
        lease: device.health_check_timeout_seconds,
        message: device.message,
    }
}
