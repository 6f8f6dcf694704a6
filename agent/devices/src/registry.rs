//! Discovers plugins: sockets in `<kubelet dir>/plugins_registry` that serve
//! `pluginregistration.Registration`. A new socket is queried for its plugin; when it disappears, the plugin
//! is deregistered. Plugins of a kind without a handler are refused. Several sockets are queried
//! concurrently, so that a silent one delays no other.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
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
use beelet_base::{blocking::blocking, own_file};
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

/// Path, device and inode of a socket: another file at the same path is another plugin.
type Identity = (PathBuf, u64, u64);

/// Socket in the registry.
#[derive(Debug)]
struct Socket {
    identity: Identity,
    /// Keeps the inode's number in use, so that the socket of a restarted plugin gets another one. `None` if
    /// the descriptor cannot be opened (EMFILE): the number may be used again then.
    file: Option<File>,
}

/// Connection to a socket in the registry.
type Client = RegistrationClient<tonic::transport::Channel>;

/// State of a socket.
#[derive(Debug)]
enum SocketState {
    /// The socket is being queried, after `tries` failures.
    Meeting { tries: u32, task: AbortHandle },
    /// The plugin is registered, and being notified of it, after `tries` failures.
    Notifying { tries: u32, task: AbortHandle, plugin: Registered },
    /// The plugin is registered and knows.
    Registered(Registered),
    /// The query failed and will be retried.
    Failed { tries: u32, retry_at: Instant },
    /// Plugin of a kind without a handler.
    Foreign,
}

/// Registered plugin.
#[derive(Clone, Debug)]
enum Registered {
    /// Device plugin that serves this resource at this socket.
    Device { resource: String, socket: PathBuf },
    /// Plugin of another kind.
    Other { handler: Arc<dyn PluginHandler>, name: String, socket: PathBuf },
}

/// Result of a query that did not fail.
enum Met {
    /// The plugin is registered, and waits for the notification of this client.
    Registered(Registered, Box<Client>),
    /// No handler has the plugin's kind.
    Foreign,
}

/// State of a known socket, and the descriptor that keeps its inode's number in use.
#[derive(Debug)]
struct Known {
    state: SocketState,
    _file: Option<File>,
}

/// Handlers of other kinds of plugins, by the kind in the plugin's registration info.
pub(super) type Handlers = BTreeMap<&'static str, Arc<dyn PluginHandler>>;

/// Watches until `shutdown`.
pub(super) async fn watch(shared: Arc<Shared>, handlers: Handlers, shutdown: CancellationToken) {
    let dir = shared.settings.registry_dir();
    let tracker = TaskTracker::new();
    let handlers = Arc::new(handlers);
    let host = Host { shared, handlers, tracker: tracker.clone(), shutdown: shutdown.clone() };
    let mut registry =
        Registry { host, known: BTreeMap::new(), meetings: JoinSet::new(), notifications: JoinSet::new() };
    let mut events = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; BUFFER]));
    if let Err(error) = &events {
        warn!(%error, "cannot watch {}; scanning it every {} s", dir.display(), RESCAN.as_secs());
    }
    loop {
        let folder = dir.clone();
        let scanned = blocking("looking for device plugins", move || {
            // The folder must exist to be watched. If creating it fails, the scan below finds nothing.
            let _ = fs::create_dir_all(&folder);
            let (folders, sockets) = folder::scan(&folder);
            (folders, sockets.into_iter().filter_map(|path| find(path).ok()).collect::<Vec<Socket>>())
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
            Some(notified) = registry.notifications.join_next_with_id() => registry.notified(notified),
            () = tokio::time::sleep_until(retry.min(Instant::now() + RESCAN)) => {}
        }
    }
    drop(registry);
    tracker.close();
    tracker.wait().await;
}

/// Finds the socket at this path. Blocks.
fn find(path: PathBuf) -> io::Result<Socket> {
    let file = own_file::find(&path).map(File::from).ok();
    let metadata = match &file {
        Some(file) => file.metadata()?,
        None => fs::symlink_metadata(&path)?,
    };
    Ok(Socket { identity: (path, metadata.dev(), metadata.ino()), file })
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

async fn changed(events: &mut io::Result<EventStream<Vec<u8>>>) {
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
    known: BTreeMap<Identity, Known>,
    meetings: JoinSet<Result<Met, Error>>,
    notifications: JoinSet<Result<(), Error>>,
}

impl Registry {
    /// Deregisters plugins whose sockets disappeared, and starts queries of sockets that are new or due
    /// again.
    fn update(&mut self, sockets: Vec<Socket>) {
        let gone: Vec<Identity> = self
            .known
            .keys()
            .filter(|known| !sockets.iter().any(|socket| socket.identity == **known))
            .cloned()
            .collect();
        for identity in gone {
            if let Some(known) = self.known.remove(&identity) {
                self.part(known.state);
            }
        }
        let now = Instant::now();
        let due = sockets.into_iter().filter_map(|socket| {
            match self.known.get(&socket.identity).map(|known| &known.state) {
                None => Some((0, socket)),
                Some(SocketState::Failed { tries, retry_at }) if *retry_at <= now => Some((*tries, socket)),
                Some(_) => None,
            }
        });
        let mut due: Vec<(u32, Socket)> = due.collect();
        due.sort_by(|(tries, socket), (other_tries, other)| {
            (tries, &socket.identity).cmp(&(other_tries, &other.identity))
        });
        let room = MAX_MEETINGS.saturating_sub(self.meetings.len());
        for (tries, Socket { identity, file }) in due.into_iter().take(room) {
            let (host, path) = (self.host.clone(), identity.0.clone());
            let task = self.meetings.spawn(async move { host.introduce(&path).await });
            self.known.insert(identity, Known { state: SocketState::Meeting { tries, task }, _file: file });
        }
    }

    fn part(&self, state: SocketState) {
        match state {
            SocketState::Notifying { task, plugin, .. } => {
                task.abort();
                self.deregister(&plugin);
            }
            SocketState::Registered(plugin) => self.deregister(&plugin),
            SocketState::Meeting { task, .. } => task.abort(),
            SocketState::Failed { .. } | SocketState::Foreign => {}
        }
    }

    fn deregister(&self, plugin: &Registered) {
        match plugin {
            Registered::Device { resource, socket } => {
                debug!(resource, "deregistering a device plugin of the registry");
                self.host.shared.deregister(resource, socket);
            }
            Registered::Other { handler, name, socket } => handler.deregister(name, socket),
        }
    }

    /// Processes the result of a query: a registered plugin is notified.
    fn met(&mut self, met: Result<(task::Id, Result<Met, Error>), JoinError>) {
        let (id, met) = match met {
            Ok(met) => met,
            Err(error) => (error.id(), Err(error.into())),
        };
        let of_task = |state: &SocketState| match state {
            SocketState::Meeting { tries, task } if task.id() == id => Some(*tries),
            _ => None,
        };
        let known = self.known.iter_mut().find_map(|(identity, known)| {
            of_task(&known.state).map(|tries| (&identity.0, &mut known.state, tries))
        });
        let Some((socket, state, tries)) = known else {
            // The socket has been removed in the meantime.
            if let Ok(Met::Registered(plugin, _)) = met {
                self.deregister(&plugin);
            }
            return;
        };
        *state = match met {
            Ok(Met::Registered(plugin, mut client)) => {
                let task = self.notifications.spawn(async move { notify(&mut client, None).await });
                SocketState::Notifying { tries, task, plugin }
            }
            Ok(Met::Foreign) => SocketState::Foreign,
            Err(cause) => failed(socket, tries, &cause),
        };
    }

    /// Processes the result of a notification. A plugin without it may wait for it forever: it is
    /// deregistered and registered again, as by the kubelet (GenerateRegisterPluginFunc).
    fn notified(&mut self, notified: Result<(task::Id, Result<(), Error>), JoinError>) {
        let (id, notified) = match notified {
            Ok(notified) => notified,
            Err(error) => (error.id(), Err(error.into())),
        };
        let of_task = |state: &SocketState| match state {
            SocketState::Notifying { tries, task, plugin } if task.id() == id => {
                Some((*tries, plugin.clone()))
            }
            _ => None,
        };
        let known = self.known.iter_mut().find_map(|(identity, known)| {
            of_task(&known.state).map(|of_task| (&identity.0, &mut known.state, of_task))
        });
        let Some((socket, state, (tries, plugin))) = known else { return };
        match notified {
            Ok(()) => *state = SocketState::Registered(plugin),
            Err(cause) => {
                *state = failed(socket, tries, &cause);
                self.deregister(&plugin);
            }
        }
    }

    /// Returns the time of the next retry. Sockets beyond the maximum number of queries follow when a query
    /// ends.
    fn next_retry(&self) -> Instant {
        let later = Instant::now() + RESCAN;
        if self.meetings.len() >= MAX_MEETINGS {
            return later;
        }
        let retries = self.known.values().filter_map(|known| match &known.state {
            SocketState::Failed { retry_at, .. } => Some(*retry_at),
            _ => None,
        });
        retries.min().unwrap_or(later)
    }
}

/// Logs a failure, and returns the state of its socket after `tries` earlier failures.
fn failed(socket: &Path, tries: u32, cause: &Error) -> SocketState {
    let pause = (RETRY.0 * 2_u32.saturating_pow(tries.min(16))).min(RETRY.1);
    warn!(socket = %socket.display(), retry_in_seconds = pause.as_secs_f32(), "cannot register a plugin: {cause}");
    SocketState::Failed { tries: tries.saturating_add(1), retry_at: Instant::now().after(pause) }
}

impl Host {
    /// Queries a socket and registers its plugin. Notifies the plugin of a failure; the caller notifies it of
    /// success, since a plugin whose socket disappears must be deregistered meanwhile.
    async fn introduce(&self, path: &Path) -> Result<Met, Error> {
        let mut client = RegistrationClient::new(dial(path).await?);
        let asked = tokio::time::timeout(plugin::CONNECT_TIMEOUT, client.get_info(InfoRequest {})).await;
        let info = match asked {
            Ok(info) => info.map_err(|status| Error::Info(Box::new(status)))?.into_inner(),
            Err(_) => return Err(Error::Silent),
        };
        let registered = if let Some(handler) = self.handlers.get(&*info.r#type) {
            self.hand_over(path, info, Arc::clone(handler)).await
        } else if info.r#type == "DevicePlugin" {
            let registered = self.register(path, info).await;
            if registered.is_err() {
                self.shared.metrics.refused_registrations.inc();
            }
            registered
        } else {
            let (kind, socket) = (info.r#type, path.display());
            let error = format!("no handler registered for plugin type: {kind} at socket {socket}");
            debug!("{error}");
            refuse(&mut client, error).await;
            return Ok(Met::Foreign);
        };
        match registered {
            Ok(plugin) => Ok(Met::Registered(plugin, Box::new(client))),
            Err(cause) => {
                refuse(&mut client, cause.to_string()).await;
                Err(cause)
            }
        }
    }

    async fn register(&self, path: &Path, info: PluginInfo) -> Result<Registered, Error> {
        registration::check(&info.supported_versions, &info.name)?;
        let socket = self.service(path, &info).await?;
        register::connect(&self.shared, &info.name, &socket, None, (&self.tracker, &self.shutdown)).await?;
        Ok(Registered::Device { resource: info.name, socket })
    }

    /// Passes a plugin of another kind to its handler.
    async fn hand_over(
        &self,
        path: &Path,
        info: PluginInfo,
        handler: Arc<dyn PluginHandler>,
    ) -> Result<Registered, Error> {
        let socket = self.service(path, &info).await?;
        handler.register(&info.name, &info.supported_versions, &socket).await?;
        Ok(Registered::Other { handler, name: info.name, socket })
    }

    /// Returns the socket at which a plugin serves: the endpoint in its info, or the socket of its
    /// registration.
    async fn service(&self, path: &Path, info: &PluginInfo) -> Result<PathBuf, Error> {
        let service = if info.endpoint.is_empty() { path.to_owned() } else { PathBuf::from(&info.endpoint) };
        if !service.is_absolute() {
            return Err(Error::Relative(service));
        }
        let dir = self.shared.settings.kubelet_dir.clone();
        blocking("finding a plugin's socket", move || folder::service_within(&dir, &service)).await
    }
}

/// Notifies a plugin of the result of its registration: success, or this error.
async fn notify(client: &mut Client, error: Option<String>) -> Result<(), Error> {
    let status = RegistrationStatus { plugin_registered: error.is_none(), error: error.unwrap_or_default() };
    let notified = client.notify_registration_status(status);
    match tokio::time::timeout(plugin::CONNECT_TIMEOUT, notified).await {
        Ok(notified) => notified.map(drop).map_err(|status| Error::Notification(Box::new(status))),
        Err(_) => Err(Error::Silent),
    }
}

/// Notifies a plugin that its registration failed. Does not retry: the next query repeats it.
async fn refuse(client: &mut Client, error: String) {
    if let Err(error) = notify(client, Some(error)).await {
        debug!(%error, "cannot notify a plugin of its failed registration");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

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

    /// Plugin that answers its first `failures` notifications with an error; with `u32::MAX`, no notification
    /// gets an answer.
    #[derive(Clone, Debug, Default)]
    struct Driver {
        failures: u32,
        notifications: Arc<AtomicU32>,
    }

    #[tonic::async_trait]
    impl Registration for Driver {
        async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
            let (r#type, name) = ("DRAPlugin".to_owned(), "gpu.example.com".to_owned());
            Ok(Response::new(PluginInfo { r#type, name, ..Default::default() }))
        }

        async fn notify_registration_status(
            &self,
            _: Request<RegistrationStatus>,
        ) -> Result<Response<RegistrationStatusResponse>, Status> {
            if self.failures == u32::MAX {
                std::future::pending::<()>().await;
            }
            let earlier = self.notifications.fetch_add(1, Ordering::Relaxed);
            if earlier < self.failures {
                return Err(Status::internal("simulated failure"));
            }
            Ok(Response::new(RegistrationStatusResponse {}))
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

    /// A watched registry.
    struct Fixture {
        _dir: tempfile::TempDir,
        socket: PathBuf,
        counts: channel::Receiver<(u32, u32)>,
        servers: JoinSet<anyhow::Result<()>>,
        shutdown: CancellationToken,
        watching: task::JoinHandle<()>,
    }

    impl Fixture {
        async fn with(driver: Driver) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let settings = Settings::new(dir.path().to_owned());
            let registry = settings.registry_dir();
            fs::create_dir_all(&registry).unwrap();
            let counting = Arc::new(Counting::default());
            let counts = counting.0.subscribe();
            let handlers: Handlers = [("DRAPlugin", counting as Arc<dyn PluginHandler>)].into();
            let shared = Arc::new(Shared::new(Devices::default(), settings, Metrics::default()));
            let shutdown = CancellationToken::new();
            let watching = tokio::spawn(watch(shared, handlers, shutdown.clone()));
            let socket = registry.join("gpu.sock");
            let mut fixture = Self { _dir: dir, socket, counts, servers: JoinSet::new(), shutdown, watching };
            fixture.serve(driver).await;
            fixture
        }

        async fn serve(&mut self, driver: Driver) {
            let listener = grpc::bind(&self.socket).await.unwrap();
            let routes = Routes::new(RegistrationServer::new(driver));
            self.servers.spawn(grpc::serve_others(listener, routes, CancellationToken::new()));
        }

        /// Waits for these numbers of registrations and deregistrations.
        async fn wait_for(&mut self, expected: (u32, u32)) {
            let reached = self.counts.wait_for(|counts| *counts == expected);
            tokio::time::timeout(Duration::from_secs(60), reached).await.unwrap().unwrap();
        }

        async fn end(self) {
            self.shutdown.cancel();
            self.watching.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_plugin_that_vanishes_before_its_notification_is_deregistered() {
        let mut fixture = Fixture::with(Driver { failures: u32::MAX, ..Driver::default() }).await;
        fixture.wait_for((1, 0)).await;
        fs::remove_file(&fixture.socket).unwrap();
        fixture.wait_for((1, 1)).await;
        fixture.end().await;
    }

    #[tokio::test]
    async fn a_plugin_that_is_back_at_once_is_registered_again() {
        let mut fixture = Fixture::with(Driver::default()).await;
        for restarts in 1..=8 {
            fixture.wait_for((restarts, restarts - 1)).await;
            // Most file systems give the new socket the old one's inode number, if nothing keeps that in use.
            fs::remove_file(&fixture.socket).unwrap();
            fixture.serve(Driver::default()).await;
        }
        fixture.wait_for((9, 8)).await;
        fixture.end().await;
    }

    #[tokio::test]
    async fn a_plugin_that_fails_its_notification_is_registered_again() {
        let driver = Driver { failures: 1, ..Driver::default() };
        let mut fixture = Fixture::with(driver.clone()).await;
        fixture.wait_for((2, 1)).await;
        fixture.end().await;
        assert!(driver.notifications.load(Ordering::Relaxed) >= 1);
    }
}
