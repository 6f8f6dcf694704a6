//! Health of claims' devices, which drivers report on a stream (KEP-4680).

use std::{collections::BTreeSet, sync::Mutex, time::Duration};

use beelet_policy::dra::{
    DeviceKey,
    health::{Health, HealthBook, Report},
};
use beelet_proto::dra::health as wire;
use beelet_units::moment::Moment;
use futures::stream::{FuturesUnordered, StreamExt};
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};
use tonic::{Code, Status, Streaming};
use tracing::debug;

use crate::{Dra, Plugin, lock, plugin::WORDS};

/// Delay between the end of a stream and the next call: the kubelet's.
const RETRY: Duration = Duration::from_secs(5);
/// The same delay for a driver without the stream: a newer version may appear at its socket without a
/// registration.
const RETRY_UNSUPPORTED: Duration = Duration::from_secs(60);
/// Minimum time between two reports of a plugin: each may change the status of many pods.
const BETWEEN: Duration = Duration::from_secs(1);

/// Health of devices as reported by drivers.
#[derive(Debug)]
pub(crate) struct DeviceHealth {
    /// Locked before the ledger of claims, if both are.
    book: Mutex<HealthBook>,
    /// Pods whose devices changed health and that have not been returned yet.
    changed: Mutex<BTreeSet<String>>,
    changes: Notify,
    began: Instant,
}

impl Default for DeviceHealth {
    fn default() -> Self {
        let (book, changed) = (Mutex::default(), Mutex::default());
        Self { book, changed, changes: Notify::new(), began: Instant::now() }
    }
}

impl DeviceHealth {
    fn now(&self) -> Moment {
        Moment::after_start(self.began.elapsed())
    }
}

impl Dra {
    /// Waits for a change of device health; returns the UIDs of pods that hold an affected device by a claim.
    pub async fn health_changed(&self) -> BTreeSet<String> {
        loop {
            let pods = std::mem::take(&mut *lock(&self.0.health.changed));
            if !pods.is_empty() {
                return pods;
            }
            self.0.health.changes.notified().await;
        }
    }

    /// Adds the health of claimed devices to the statuses of containers that use claims, in addition to that
    /// of other devices.
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
            let health = lock(&self.0.health.book);
            let devices = health.statuses(&lock(&self.0.claims.ledger), pod, container, self.0.health.now());
            if !devices.is_empty() {
                of.allocated_resources_status.get_or_insert_default().extend(devices);
            }
        }
    }

    /// Keeps a stream per plugin, from its registration until it is deregistered.
    pub(crate) async fn watch_health(&self) {
        let mut registered = self.0.drivers.registered.subscribe();
        let mut streams = FuturesUnordered::new();
        let mut newest = 0;
        loop {
            registered.mark_unchanged();
            let known = newest;
            for plugin in
                lock(&self.0.drivers.plugins).values().flatten().filter(|plugin| plugin.number > known)
            {
                newest = newest.max(plugin.number);
                streams.push(self.watch_plugin(plugin.clone()));
            }
            tokio::select! {
                Ok(()) = registered.changed() => {}
                Some(()) = streams.next() => {}
            }
        }
    }

    async fn watch_plugin(&self, plugin: Plugin) {
        plugin.deregistered.run_until_cancelled(self.keep_stream(&plugin)).await;
        self.forget(&plugin);
    }

    /// Opens the plugin's stream again after each end.
    async fn keep_stream(&self, plugin: &Plugin) {
        loop {
            let end = match plugin.health().await {
                Ok(stream) => self.read(plugin, stream).await,
                Err(status) => status,
            };
            self.forget(plugin);
            let cause: String = end.message().chars().take(WORDS).collect();
            debug!(driver = plugin.driver(), cause, "a DRA driver does not report device health");
            sleep(if end.code() == Code::Unimplemented { RETRY_UNSUPPORTED } else { RETRY }).await;
        }
    }

    /// Processes a plugin's reports until its stream ends; returns the status of the end.
    async fn read(&self, plugin: &Plugin, mut stream: Streaming<wire::NodeWatchResourcesResponse>) -> Status {
        let driver = plugin.driver();
        loop {
            let expiry = lock(&self.0.health.book).next_expiry(driver, plugin.number);
            let expiry = expiry.map(|at| at.since(self.0.health.now()));
            tokio::select! {
                report = stream.message() => {
                    let devices = match report {
                        Ok(Some(report)) => report.devices,
                        Ok(None) => return Status::ok("the stream has ended"),
                        Err(status) => return status,
                    };
                    let reports = devices.into_iter().map(read_report).collect();
                    let changed = lock(&self.0.health.book).report(driver, plugin.number, reports, self.0.health.now());
                    self.publish(driver, &changed);
                    sleep(BETWEEN).await;
                }
                () = sleep(expiry.unwrap_or_default()), if expiry.is_some() => {
                    let expired = lock(&self.0.health.book).expire(driver, plugin.number, self.0.health.now());
                    self.publish(driver, &expired);
                }
            }
        }
    }

    fn forget(&self, plugin: &Plugin) {
        let forgotten = lock(&self.0.health.book).forget(plugin.driver(), plugin.number);
        self.publish(plugin.driver(), &forgotten);
    }

    /// Publishes the pods that hold one of these devices.
    fn publish(&self, driver: &str, changed: &BTreeSet<DeviceKey>) {
        if changed.is_empty() {
            return;
        }
        let pods = lock(&self.0.claims.ledger).pods_with(driver, changed);
        if !pods.is_empty() {
            lock(&self.0.health.changed).extend(pods);
            self.0.health.changes.notify_one();
        }
    }
}

fn read_report(device: wire::DeviceHealth) -> Report {
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
