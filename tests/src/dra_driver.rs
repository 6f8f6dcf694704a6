//! Scripted driver of Dynamic Resource Allocation: registers like the drivers' Go library (a socket in the
//! registry, another one for the node), prepares devices named after claims, records every call, and fails on
//! demand. Runs on its own thread.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use anyhow::{Context as _, Result};
use beelet_proto::{
    dra::{health, v1, v1beta1},
    pluginregistration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    },
};
use tokio::{
    net::UnixListener,
    sync::{oneshot, watch},
};
use tokio_stream::{
    StreamExt as _,
    wrappers::{UnixListenerStream, WatchStream},
};
use tonic::{Request, Response, Status, codegen::http};

/// Properties of a driver.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the driver.
    pub name: String,
    /// Distinguishes two instances of a driver, one of which replaces the other.
    pub instance: String,
    /// Services that the driver announces.
    pub services: Vec<String>,
    /// Hides the service's socket until [`DraDriver::show`].
    pub hidden: bool,
}

impl Settings {
    /// Returns a driver with both versions.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            instance: "a".to_owned(),
            services: vec!["v1.DRAPlugin".to_owned(), "v1beta1.DRAPlugin".to_owned()],
            hidden: false,
        }
    }
}

/// Abnormal answer of a driver.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Refuses the call.
    Refuse(String),
    /// Reports a failure for each claim.
    Fail(String),
    /// Returns no result for any claim.
    Skip,
    /// Returns a result for an unknown claim.
    Stranger,
    /// Returns this CDI device for each claim.
    Device(String),
    /// Never answers.
    Hang,
}

/// Running driver; a drop stops it and removes its sockets.
#[derive(Debug)]
pub struct DraDriver {
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    sockets: [PathBuf; 2],
}

#[derive(Debug)]
struct Shared {
    settings: Settings,
    socket: PathBuf,
    state: Mutex<State>,
    /// Reported health of the devices, or None before the first report.
    health: watch::Sender<Option<Vec<health::DeviceHealth>>>,
}

#[derive(Debug, Default)]
struct State {
    /// Called methods, with the claims' names.
    calls: Vec<(String, Vec<String>)>,
    faults: BTreeMap<String, VecDeque<Fault>>,
    registered: Vec<RegistrationStatus>,
}

impl DraDriver {
    /// Starts a driver for the agent whose kubelet folder is `kubelet_dir`.
    ///
    /// # Errors
    /// The sockets cannot be created.
    pub fn start(kubelet_dir: &Path, settings: Settings) -> Result<Self> {
        let own = kubelet_dir.join("plugins").join(&settings.name);
        fs::create_dir_all(&own)?;
        fs::create_dir_all(kubelet_dir.join("plugins_registry"))?;
        let socket = own.join(format!("dra.{}.sock", settings.instance));
        let registry = format!("{}-{}-reg.sock", settings.name, settings.instance);
        let registry = kubelet_dir.join("plugins_registry").join(registry);
        let shared = Arc::new(Shared {
            settings,
            socket: socket.clone(),
            state: Mutex::default(),
            health: watch::Sender::default(),
        });
        let (stop, stopped) = oneshot::channel();
        let (ready, started) = std::sync::mpsc::channel();
        let (serving, paths) = (Arc::clone(&shared), [socket.clone(), registry.clone()]);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                let bind = |path: &Path| {
                    let _ = fs::remove_file(path);
                    UnixListener::bind(path)
                };
                let [own, registry] = &paths;
                let Ok(socket) = bind(own) else { return };
                if serving.settings.hidden && fs::rename(own, hidden(own)).is_err() {
                    return;
                }
                let Ok(registry) = bind(registry) else { return };
                let _ = ready.send(());
                let node = tonic::transport::Server::builder()
                    .layer(tower::util::MapRequestLayer::new(by_our_name))
                    .add_service(health::dra_resource_health_server::DraResourceHealthServer::new(Service(
                        Arc::clone(&serving),
                    )))
                    .add_service(v1::dra_plugin_server::DraPluginServer::new(Service(Arc::clone(&serving))))
                    .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(Service(Arc::clone(
                        &serving,
                    ))))
                    .serve_with_incoming(UnixListenerStream::new(socket));
                let registration = tonic::transport::Server::builder()
                    .add_service(RegistrationServer::new(Service(serving)))
                    .serve_with_incoming(UnixListenerStream::new(registry));
                tokio::select! {
                    _ = stopped => {}
                    _ = node => {}
                    _ = registration => {}
                }
            });
        });
        started.recv().context("cannot create the driver's sockets")?;
        Ok(Self { shared, stop: Some(stop), thread: Some(thread), sockets: [socket, registry] })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    /// Returns the claims' names of every call of this method, in order; e.g. `v1.NodePrepareResources`.
    #[must_use]
    pub fn calls(&self, method: &str) -> Vec<Vec<String>> {
        let calls = &self.state().calls;
        calls.iter().filter(|(name, _)| name == method).map(|(_, claims)| claims.clone()).collect()
    }

    /// Makes the next call of a method fail.
    pub fn spoil(&self, method: &str, fault: Fault) {
        self.state().faults.entry(method.to_owned()).or_default().push_back(fault);
    }

    /// Reports the health of a claim's device, and of no other.
    pub fn say(&self, claim: &str, health: health::HealthStatus, message: &str) {
        let device = health::DeviceIdentifier { pool_name: POOL.to_owned(), device_name: device_of(claim) };
        let report = health::DeviceHealth {
            device: Some(device),
            health: health.into(),
            message: message.to_owned(),
            health_check_timeout_seconds: 3600,
            ..Default::default()
        };
        self.shared.health.send_replace(Some(vec![report]));
    }

    /// Shows the hidden socket of the service.
    ///
    /// # Errors
    /// The socket cannot be renamed.
    pub fn show(&self) -> Result<()> {
        let [socket, _] = &self.sockets;
        fs::rename(hidden(socket), socket).context("cannot rename the driver's socket")
    }

    /// Returns the last notification about the driver's registration.
    #[must_use]
    pub fn registration(&self) -> Option<(bool, String)> {
        self.state().registered.last().map(|status| (status.plugin_registered, status.error.clone()))
    }

    /// Stops the driver like a kill: its sockets stay.
    pub fn kill(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the path of a hidden socket.
fn hidden(socket: &Path) -> PathBuf {
    socket.with_extension("hidden")
}

impl Drop for DraDriver {
    fn drop(&mut self) {
        self.kill();
        for socket in &self.sockets {
            let _ = fs::remove_file(socket);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone)]
struct Service(Arc<Shared>);

/// Results by claim: an error or a device.
type Results = HashMap<String, Result<v1::Device, String>>;

impl Service {
    /// Records a call; returns its results.
    async fn asked(&self, method: &str, claims: Vec<(String, String)>) -> Result<Results, Status> {
        let fault = {
            let mut state = self.0.state();
            state.calls.push((method.to_owned(), claims.iter().map(|(_, name)| name.clone()).collect()));
            state.faults.get_mut(method).and_then(VecDeque::pop_front)
        };
        let device = |name: &str, cdi: String| v1::Device {
            request_names: Vec::new(),
            pool_name: POOL.to_owned(),
            device_name: device_of(name),
            cdi_device_ids: vec![cdi],
            share_id: None,
        };
        let results = claims.into_iter().map(|(uid, name)| {
            let of = match &fault {
                Some(Fault::Fail(why)) => Err(why.clone()),
                Some(Fault::Device(cdi)) => Ok(device(&name, cdi.clone())),
                _ => Ok(device(&name, format!("example.com/gpu={name}"))),
            };
            (uid, of)
        });
        let mut results: Results = results.collect();
        match fault {
            Some(Fault::Refuse(why)) => return Err(Status::internal(why)),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Skip) => results.clear(),
            Some(Fault::Stranger) => drop(results.insert("stranger".to_owned(), Err(String::new()))),
            _ => {}
        }
        Ok(results)
    }
}

const POOL: &str = "pool";

fn device_of(claim: &str) -> String {
    format!("device-of-{claim}")
}

/// The package name on the wire collides with another service; here the service has a unique name.
fn by_our_name<B>(mut request: http::Request<B>) -> http::Request<B> {
    let path = request.uri().path();
    if let Some(method) = path.strip_prefix("/v1alpha1.DRAResourceHealth/") {
        let ours = format!("/k8s.io.kubelet.pkg.apis.dra_health.v1alpha1.DRAResourceHealth/{method}");
        if let Ok(uri) = ours.parse() {
            *request.uri_mut() = uri;
        }
    }
    request
}

#[tonic::async_trait]
impl health::dra_resource_health_server::DraResourceHealth for Service {
    type NodeWatchResourcesStream = std::pin::Pin<
        Box<dyn tokio_stream::Stream<Item = Result<health::NodeWatchResourcesResponse, Status>> + Send>,
    >;

    async fn node_watch_resources(
        &self,
        _: Request<health::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let reports = WatchStream::new(self.0.health.subscribe());
        let reports =
            reports.filter_map(|devices| Some(Ok(health::NodeWatchResourcesResponse { devices: devices? })));
        Ok(Response::new(Box::pin(reports)))
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: self.0.settings.name.clone(),
            endpoint: self.0.socket.display().to_string(),
            supported_versions: self.0.settings.services.clone(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.0.state().registered.push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Implements one version of the service; `$convert` converts a device.
macro_rules! serve {
    ($version:ident, $name:literal, |$device:ident| $convert:expr) => {
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for Service {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<$version::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(|claim| (claim.uid, claim.name));
                let results = self.asked(concat!($name, ".NodePrepareResources"), claims.collect()).await?;
                let claims = results.into_iter().map(|(uid, of)| {
                    let of = match of {
                        Ok($device) => $version::NodePrepareResourceResponse {
                            devices: vec![$convert],
                            error: String::new(),
                        },
                        Err(error) => $version::NodePrepareResourceResponse { devices: Vec::new(), error },
                    };
                    (uid, of)
                });
                Ok(Response::new($version::NodePrepareResourcesResponse { claims: claims.collect() }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$version::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(|claim| (claim.uid, claim.name));
                let results = self.asked(concat!($name, ".NodeUnprepareResources"), claims.collect()).await?;
                let claims = results.into_iter().map(|(uid, of)| {
                    let error = of.err().unwrap_or_default();
                    (uid, $version::NodeUnprepareResourceResponse { error })
                });
                Ok(Response::new($version::NodeUnprepareResourcesResponse { claims: claims.collect() }))
            }
        }
    };
}

serve!(v1, "v1", |device| device);
serve!(v1beta1, "v1beta1", |device| v1beta1::Device {
    request_names: device.request_names,
    pool_name: device.pool_name,
    device_name: device.device_name,
    cdi_device_ids: device.cdi_device_ids,
});
