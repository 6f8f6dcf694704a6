//! Registration of drivers' plugins, found by the plugin registry, and supervision of their connections.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use beelet_base::work::Work;
use beelet_model::plugins::{PluginHandler, Presences, Registering, RegistrationRefusal};
use futures::future::{join, join_all};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Dra, Error, Metrics, Plugin, lock, policy};

/// Plugin kind of DRA drivers in the plugin registry.
pub const KIND: &str = "DRAPlugin";
/// Maximum number of plugins per driver: two while one is replaced, plus some that were not deregistered.
const MAX_PLUGINS: usize = 16;
/// Maximum number of absent drivers that are remembered.
const MAX_DRIVERS: usize = 256;
/// Interval of reconnects.
const RECONNECT: Duration = Duration::from_secs(1);

/// The drivers' plugins.
#[derive(Debug)]
pub(crate) struct Drivers {
    /// Registered plugins of each driver, the newest last: there are two while one is replaced.
    pub(crate) plugins: Mutex<BTreeMap<String, Vec<Plugin>>>,
    pub(crate) known: watch::Sender<Arc<Presences>>,
    /// Notified when a connection is made or lost.
    wake: Arc<Notify>,
    /// Number of the newest plugin.
    pub(crate) registered: watch::Sender<u64>,
    metrics: Metrics,
}

impl PluginHandler for Dra {
    fn register<'a>(&'a self, name: &'a str, versions: &'a [String], socket: &'a Path) -> Registering<'a> {
        Box::pin(
            async move { self.0.drivers.register(name, versions, socket).await.map_err(RegistrationRefusal) },
        )
    }

    /// Removes the driver's plugin with this socket. Others may remain.
    fn deregister(&self, name: &str, socket: &Path) {
        let mut plugins = lock(&self.0.drivers.plugins);
        let Some(all) = plugins.get_mut(name) else { return };
        let before = all.len();
        let leaving = all.iter().filter(|plugin| plugin.socket() == socket);
        leaving.for_each(|plugin| plugin.deregistered.cancel());
        all.retain(|plugin| plugin.socket() != socket);
        if all.len() < before {
            info!(driver = name, socket = %socket.display(), left = all.len(), "deregistered a plugin of a DRA driver");
        }
        if all.is_empty() {
            plugins.remove(name);
        }
        drop(plugins);
        self.0.drivers.publish();
    }
}

impl Dra {
    /// Supervises the connections until `stop`, to know which drivers are away, and to find a plugin that
    /// returns without registering.
    #[must_use]
    pub fn follow(self, stop: CancellationToken) -> Work {
        Box::pin(async move {
            stop.run_until_cancelled(join(self.0.drivers.watch(), self.watch_health())).await;
        })
    }
}

impl Drivers {
    pub(crate) fn new(metrics: Metrics) -> Self {
        let (plugins, known, wake) = (Mutex::default(), watch::Sender::default(), Arc::default());
        Self { plugins, known, wake, registered: watch::Sender::default(), metrics }
    }

    /// Returns the plugin of a driver: the newest connected one, otherwise the newest (`GetPlugin`).
    pub(crate) fn plugin(&self, driver: &str) -> Result<Plugin, Error> {
        let plugins = lock(&self.plugins);
        let all = plugins.get(driver).map(Vec::as_slice).unwrap_or_default();
        let connected = all.iter().rev().find(|plugin| plugin.is_connected());
        connected.or(all.last()).cloned().ok_or_else(|| Error::NotRegistered(driver.to_owned()))
    }

    /// Connects to a plugin, and registers it.
    pub(crate) async fn register(
        &self,
        name: &str,
        versions: &[String],
        socket: &Path,
    ) -> Result<(), String> {
        let service = policy::service(versions).map_err(|why| {
            let (endpoint, why) = (socket.display(), why.to_string());
            format!(
                "invalid supported gRPC versions of DRA driver plugin {name:.64} at endpoint {endpoint}: {why:.1024}"
            )
        })?;
        if !policy::is_driver_name(name) {
            return Err(format!("invalid DRA driver name {name:.64?}"));
        }
        // A plugin may register before its service listens, as under the kubelet: `watch` connects it then.
        let mut plugin = Plugin::new(name, socket, service, Arc::clone(&self.wake), self.metrics.clone());
        plugin.reconnect().await;
        let mut plugins = lock(&self.plugins);
        let all = plugins.entry(name.to_owned()).or_default();
        if all.iter().any(|known| known.socket() == socket) {
            let endpoint = socket.display();
            return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {name}"));
        }
        if all.len() >= MAX_PLUGINS {
            return Err(format!("DRA driver {name} has {MAX_PLUGINS} plugins already"));
        }
        plugin.number = *self.registered.borrow() + 1;
        let number = plugin.number;
        all.push(plugin);
        self.registered.send_replace(number);
        self.wake.notify_one();
        info!(driver = name, socket = %socket.display(), service, plugins = all.len(), "registered a plugin of a DRA driver");
        drop(plugins);
        self.publish();
        Ok(())
    }

    /// Reconnects plugins until the future is dropped.
    pub(crate) async fn watch(&self) {
        loop {
            self.publish();
            let broken: Vec<Plugin> = {
                let plugins = lock(&self.plugins);
                plugins.values().flatten().filter(|plugin| !plugin.is_connected()).cloned().collect()
            };
            if broken.is_empty() {
                self.wake.notified().await;
                continue;
            }
            tokio::time::sleep(RECONNECT).await;
            join_all(broken.iter().map(Plugin::reconnect)).await;
        }
    }

    /// Publishes which drivers are connected.
    fn publish(&self) {
        let plugins = lock(&self.plugins);
        let answers =
            |driver: &str| plugins.get(driver).is_some_and(|all| all.iter().any(Plugin::is_connected));
        self.known.send_if_modified(|known| {
            let mut now = Presences::clone(known);
            for driver in plugins.keys() {
                now.entry(driver.clone()).or_default();
            }
            for (driver, away) in &mut now {
                match (answers(driver), &away) {
                    (true, _) => *away = None,
                    (false, None) => {
                        warn!(driver, "DRA driver has no registered plugin");
                        *away = Some(Instant::now());
                    }
                    (false, Some(_)) => {}
                }
            }
            while now.len() > MAX_DRIVERS {
                let oldest = now.iter().filter_map(|(name, away)| Some((away.as_ref()?, name))).min();
                let Some(oldest) = oldest.map(|(_, name)| name.clone()) else { break };
                now.remove(&oldest);
            }
            let differs = now != **known;
            *known = Arc::new(now);
            differs
        });
    }
}
