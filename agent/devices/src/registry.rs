//! Discovers plugins: sockets in `<kubelet dir>/plugins_registry` that serve
//! `pluginregistration.Registration`. A new socket is queried for its plugin; when it disappears, the plugin
//! is deregistered. Plugins of a kind without a handler are refused. Several sockets are queried
//! concurrently, so that a silent one delays no other.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::devices::registration;
use beelet_proto::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, registration_client::RegistrationClient,
};
use futures::StreamExt as _;
use inotify::{EventStream, Inotify, WatchMask};
use tokio::{
    task::{self, AbortHandle, JoinError, JoinSet},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};

use super::{Error, folder, ledger::Shared, plugin, register};
use beelet_base::blocking::blocking;
use beelet_model::plugins::PluginHandler;
use beelet_serve::client::dial;

/// Bytes of events read from the kernel at once.
const BUFFER: usize = 16 << 10;
/// Interval of scans without an event: events may be lost.
const RESCAN: Duration = Duration::from_secs(60);
/// Maximum number of concurrent queries. Waiting sockets follow, those with the fewest failures first.
const MAX_MEETINGS: usize = 16;
/// Minimum and maximum delay before a failed socket is retried.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(120));

/// Path and inode of a socket: another file at the same path is another plugin.
type Identity = (PathBuf, u64);

/// Connection to a socket in the registry.
type Client = RegistrationClient<tonic::transport::Channel>;

/// State of a socket.
#[derive(Debug)]
enum SocketState {
    /// The socket is being queried, after `tries` failures.
    Meeting { tries: u32, task: AbortHandle },
    /// Device plugin that serves this resource at this socket.
    Plugin { resource: String, socket: PathBuf },
    /// Plugin of another kind.
    Other { handler: Arc<dyn PluginHandler>, name: String, socket: PathBuf },
    /// The query failed and will be retried.
    Failed { tries: u32, retry_at: Instant },
    /// Plugin of a kind without a handler.
    Foreign,
}

/// Handlers of other kinds of plugins, by the kind in the plugin's registration info.
pub(super) type Handlers = BTreeMap<&'static str, Arc<dyn PluginHandler>>;

/// Watches until `shutdown`.
pub(super) async fn watch(shared: Arc<Shared>, handlers: Handlers, shutdown: CancellationToken) {
    let dir = shared.settings.registry_dir();
    let tracker = TaskTracker::new();
    let handlers = Arc::new(handlers);
    let host = Host { shared, handlers, tracker: tracker.clone(), shutdown: shutdown.clone() };
    let mut registry = Registry { host, known: BTreeMap::new(), meetings: JoinSet::new() };
    let mut events = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; BUFFER]));
    if let Err(error) = &events {
        warn!(%error, "cannot watch {}; scanning it every {} s", dir.display(), RESCAN.as_secs());
    }
    loop {
        let folder = dir.clone();
        let scanned = blocking("looking for device plugins", move || {
            // The folder must exist to be watched. If creating it fails, the scan below finds nothing.
            let _ = std::fs::create_dir_all(&folder);
            let (folders, sockets) = folder::scan(&folder);
            let identity = |path: PathBuf| std::fs::metadata(&path).ok().map(|m| (path, m.ino()));
            (folders, sockets.into_iter().filter_map(identity).collect::<Vec<Identity>>())
        });
        let (folders, sockets) = scanned.await;
        if let Ok(events) = &mut events {
            arm(events, &folders);
        }
        registry.update(sockets);
        let retry = registry.next_retry();
        tokio::select! {
            () = shutdown.cancelled() => break,
            () = changed(&mut events) => {}
            Some(met) = registry.meetings.join_next_with_id() => registry.met(met),
            () = tokio::time::sleep_until(retry.min(Instant::now() + RESCAN)) => {}
        }
    }
    drop(registry);
    tracker.close();
    tracker.wait().await;
}

/// Adds watches; adding an existing one has no effect.
fn arm(events: &mut EventStream<Vec<u8>>, folders: &[PathBuf]) {
    let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ONLYDIR;
    for folder in folders {
        if let Err(error) = events.watches().add(folder, mask) {
            debug!(%error, folder = %folder.display(), "cannot watch a folder of plugins");
        }
    }
}

async fn changed(events: &mut std::io::Result<EventStream<Vec<u8>>>) {
    if let Ok(events) = events
        && events.next().await.is_some()
    {
        return; // every event triggers a scan
    }
    std::future::pending::<()>().await;
}

/// Data shared by the queries.
#[derive(Clone)]
struct Host {
    shared: Arc<Shared>,
    handlers: Arc<Handlers>,
    tracker: TaskTracker,
    shutdown: CancellationToken,
}

struct Registry {
    host: Host,
    known: BTreeMap<Identity, SocketState>,
    meetings: JoinSet<Result<SocketState, Error>>,
}

impl Registry {
    /// Deregisters plugins whose sockets disappeared, and starts queries of sockets that are new or due
    /// again.
    fn update(&mut self, sockets: Vec<Identity>) {
        let gone: Vec<Identity> =
            self.known.keys().filter(|known| !sockets.contains(known)).cloned().collect();
        for identity in gone {
            if let Some(known) = self.known.remove(&identity) {
                self.part(known);
            }
        }
        let due = sockets.into_iter().filter_map(|identity| match self.known.get(&identity) {
            None => Some((0, identity)),
            Some(SocketState::Failed { tries, retry_at }) if *retry_at <= Instant::now() => {
                Some((*tries, identity))
            }
            Some(_) => None,
        });
        let mut due: Vec<(u32, Identity)> = due.collect();
        due.sort();
        let room = MAX_MEETINGS.saturating_sub(self.meetings.len());
        for (tries, identity) in due.into_iter().take(room) {
            let (host, path) = (self.host.clone(), identity.0.clone());
            let task = self.meetings.spawn(async move { host.introduce(&path).await });
            self.known.insert(identity, SocketState::Meeting { tries, task });
        }
    }

    fn part(&self, known: SocketState) {
        match known {
            SocketState::Plugin { resource, socket } => {
                debug!(resource, "the device plugin's socket was removed from the registry");
                self.host.shared.deregister(&resource, &socket);
            }
            SocketState::Other { handler, name, socket } => handler.deregister(&name, &socket),
            SocketState::Meeting { task, .. } => task.abort(),
            SocketState::Failed { .. } | SocketState::Foreign => {}
        }
    }

    /// Processes the result of a query.
    fn met(&mut self, met: Result<(task::Id, Result<SocketState, Error>), JoinError>) {
        let (id, met) = match met {
            Ok(met) => met,
            Err(error) => (error.id(), Err(error.into())),
        };
        let of_id =
            |known: &SocketState| matches!(known, SocketState::Meeting { task, .. } if task.id() == id);
        let Some((identity, known)) = self.known.iter_mut().find(|(_, known)| of_id(known)) else {
            // The socket has been removed in the meantime.
            met.into_iter().for_each(|known| self.part(known));
            return;
        };
        let SocketState::Meeting { tries, .. } = *known else { return };
        *known = met.unwrap_or_else(|cause| {
            let pause = (RETRY.0 * 2_u32.saturating_pow(tries.min(16))).min(RETRY.1);
            warn!(socket = %identity.0.display(), retry_in_seconds = pause.as_secs_f32(), "cannot register a plugin: {cause}");
            SocketState::Failed { tries: tries.saturating_add(1), retry_at: Instant::now().after(pause) }
        });
    }

    /// Returns the time of the next retry. Sockets beyond the maximum number of queries follow when a query
    /// ends.
    fn next_retry(&self) -> Instant {
        let later = Instant::now() + RESCAN;
        if self.meetings.len() >= MAX_MEETINGS {
            return later;
        }
        let retries = self.known.values().filter_map(|known| match known {
            SocketState::Failed { retry_at, .. } => Some(*retry_at),
            _ => None,
        });
        retries.min().unwrap_or(later)
    }
}

impl Host {
    /// Queries a socket, registers its plugin and notifies the plugin of the result.
    async fn introduce(&self, path: &Path) -> Result<SocketState, Error> {
        let mut client = RegistrationClient::new(dial(path).await?);
        let asked = tokio::time::timeout(plugin::CONNECT_TIMEOUT, client.get_info(InfoRequest {})).await;
        let info = match asked {
            Ok(info) => info.map_err(|status| Error::Info(Box::new(status)))?.into_inner(),
            Err(_) => return Err(Error::Silent),
        };
        if let Some(handler) = self.handlers.get(&*info.r#type) {
            let registered = self.hand_over(path, info, Arc::clone(handler)).await;
            self.answer(client, &registered).await;
            return registered;
        }
        if info.r#type != "DevicePlugin" {
            let error = format!(
                "no handler registered for plugin type: {} at socket {}",
                info.r#type,
                path.display()
            );
            debug!("{error}");
            notify(&mut client, Some(error)).await;
            return Ok(SocketState::Foreign);
        }
        let registered = self.register(path, info).await;
        if registered.is_err() {
            self.shared.metrics.refused_registrations.inc();
        }
        self.answer(client, &registered).await;
        registered
    }

    /// Notifies a plugin of the result of its registration. A success is sent by another task: if the socket
    /// disappears before the notification is delivered, the query has already completed and its registration
    /// is undone; aborting the query would leave the registration behind.
    async fn answer(&self, mut client: Client, registered: &Result<SocketState, Error>) {
        let Err(cause) = registered else {
            let shutdown = self.shutdown.clone();
            self.tracker.spawn(async move {
                shutdown.run_until_cancelled(notify(&mut client, None)).await;
            });
            return;
        };
        notify(&mut client, Some(cause.to_string())).await;
    }

    async fn register(&self, path: &Path, info: PluginInfo) -> Result<SocketState, Error> {
        registration::check(&info.supported_versions, &info.name)?;
        let socket = self.service(path, &info).await?;
        register::connect(&self.shared, &info.name, &socket, None, (&self.tracker, &self.shutdown)).await?;
        Ok(SocketState::Plugin { resource: info.name, socket })
    }

    /// Passes a plugin of another kind to its handler.
    async fn hand_over(
        &self,
        path: &Path,
        info: PluginInfo,
        handler: Arc<dyn PluginHandler>,
    ) -> Result<SocketState, Error> {
        let socket = self.service(path, &info).await?;
        let registered = handler.register(&info.name, &info.supported_versions, &socket).await;
        registered.map_err(Error::Refused)?;
        Ok(SocketState::Other { handler, name: info.name, socket })
    }

    /// Returns the socket at which a plugin serves: the endpoint in its info, or the socket of its
    /// registration.
    async fn service(&self, path: &Path, info: &PluginInfo) -> Result<PathBuf, Error> {
        let service = if info.endpoint.is_empty() { path.to_owned() } else { PathBuf::from(&info.endpoint) };
        if !service.is_absolute() {
            return Err(Error::Relative(service));
        }
        let dir = self.shared.settings.kubelet_dir.clone();
        blocking("finding a plugin's socket", move || folder::within(&dir, &service)).await
    }
}

/// Notifies a plugin of the result of its registration. Does not retry.
async fn notify(client: &mut Client, error: Option<String>) {
    let status = RegistrationStatus { plugin_registered: error.is_none(), error: error.unwrap_or_default() };
    let notified =
        tokio::time::timeout(plugin::CONNECT_TIMEOUT, client.notify_registration_status(status)).await;
    if !matches!(notified, Ok(Ok(_))) {
        debug!("cannot notify a plugin of the result of its registration");
    }
}

#[cfg(test)]
mod tests {
    use beelet_model::plugins::Registering;
    use beelet_proto::pluginregistration::{
        RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    };
    use beelet_serve::grpc;
    use tokio::sync::watch as channel;
    use tonic::{Request, Response, Status, service::Routes};

    use super::*;
    use crate::{Metrics, Settings};
    use beelet_policy::devices::Devices;

    /// Plugin that never answers the notification.
    #[derive(Debug)]
    struct Deaf;

    #[tonic::async_trait]
    impl Registration for Deaf {
        async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
            let (r#type, name) = ("DRAPlugin".to_owned(), "gpu.example.com".to_owned());
            Ok(Response::new(PluginInfo { r#type, name, ..Default::default() }))
        }

        async fn notify_registration_status(
            &self,
            _: Request<RegistrationStatus>,
        ) -> Result<Response<RegistrationStatusResponse>, Status> {
            std::future::pending().await
        }
    }

    /// Counts registrations and deregistrations.
    #[derive(Debug, Default)]
    struct Counting(channel::Sender<(u32, u32)>);

    impl PluginHandler for Counting {
        fn register<'a>(&'a self, _: &'a str, _: &'a [String], _: &'a Path) -> Registering<'a> {
            self.0.send_modify(|(came, _)| *came += 1);
            Box::pin(std::future::ready(Ok(())))
        }

        fn deregister(&self, _: &str, _: &Path) {
            self.0.send_modify(|(_, went)| *went += 1);
        }
    }

    #[tokio::test]
    async fn a_plugin_that_vanishes_before_its_notification_is_deregistered() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path().to_owned());
        let registry = settings.registry_dir();
        std::fs::create_dir_all(&registry).unwrap();
        let socket = registry.join("gpu.sock");
        let listener = grpc::bind(&socket).await.unwrap();
        let (shutdown, mut running) = (CancellationToken::new(), JoinSet::new());
        let routes = Routes::new(RegistrationServer::new(Deaf));
        running.spawn(grpc::serve_others(listener, routes, CancellationToken::new()));
        let counting = Arc::new(Counting::default());
        let mut counts = counting.0.subscribe();
        let handlers: Handlers = [("DRAPlugin", Arc::clone(&counting) as Arc<dyn PluginHandler>)].into();
        let shared = Arc::new(Shared::new(Devices::default(), settings, Metrics::default()));
        let watching = tokio::spawn(watch(shared, handlers, shutdown.clone()));
        let patience = Duration::from_secs(60);
        let mut come_to = async |expected: (u32, u32)| {
            let reached = counts.wait_for(|counts| *counts == expected);
            tokio::time::timeout(patience, reached).await.unwrap().unwrap();
        };
        come_to((1, 0)).await;
        std::fs::remove_file(&socket).unwrap();
        come_to((1, 1)).await;
        shutdown.cancel();
        watching.await.unwrap();
    }
}
