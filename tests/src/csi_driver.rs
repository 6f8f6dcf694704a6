//! Scripted storage plugin (CSI driver): registers like a driver's sidecar, bind-mounts folders as volumes,
//! records every call, and fails on demand. Runs on its own thread.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use anyhow::{Context as _, Result};
use beelet_proto::{
    csi::{
        self,
        node_server::{Node, NodeServer},
        node_service_capability::{Rpc, Type, rpc},
        volume_usage::Unit,
    },
    pluginregistration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    },
};
use beelet_serve::authority::AnyAuthority;
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use serde_json::{Value, json};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::oneshot,
};
use tokio_stream::{Stream, StreamExt as _, wrappers::UnixListenerStream};
use tonic::{Code, Request, Response, Status};

/// Properties of a driver.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the driver.
    pub name: String,
    /// The driver stages volumes.
    pub stages: bool,
    /// Topology of the node.
    pub topology: BTreeMap<String, String>,
    /// Maximum number of volumes on the node.
    pub max_volumes: i64,
    /// The driver reports usage and condition of volumes.
    pub measures: bool,
    /// The driver expands volumes on the node.
    pub expands: bool,
}

impl Settings {
    /// Returns a driver that stages, and reports only the node's name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            stages: true,
            topology: BTreeMap::new(),
            max_volumes: 0,
            measures: false,
            expands: false,
        }
    }
}

/// Running driver; a drop stops it and removes its sockets, but not its mounts.
#[derive(Debug)]
pub struct CsiDriver {
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    sockets: [PathBuf; 2],
}

#[derive(Debug)]
struct Shared {
    settings: Settings,
    socket: PathBuf,
    /// Folder of the volumes' contents.
    shelf: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<(String, Value)>,
    faults: BTreeMap<String, VecDeque<Fault>>,
    registered: Vec<RegistrationStatus>,
    /// Fault of all volumes.
    trouble: Option<String>,
}

#[derive(Clone, Debug)]
enum Fault {
    Refuse(Code, String),
    Hang,
}

impl CsiDriver {
    /// Starts a driver for the agent whose kubelet folder is `kubelet_dir`; the contents of its volumes are
    /// folders below `shelf`.
    ///
    /// # Errors
    /// The sockets cannot be created.
    pub fn start(kubelet_dir: &Path, shelf: &Path, settings: Settings) -> Result<Self> {
        let own = kubelet_dir.join("plugins").join(&settings.name);
        fs::create_dir_all(&own)?;
        fs::create_dir_all(kubelet_dir.join("plugins_registry"))?;
        let socket = own.join("csi.sock");
        let registry = kubelet_dir.join("plugins_registry").join(format!("{}-reg.sock", settings.name));
        let shared = Arc::new(Shared {
            settings,
            socket: socket.clone(),
            shelf: shelf.to_owned(),
            state: Mutex::default(),
        });
        let (stop, stopped) = oneshot::channel();
        let (ready, started) = std::sync::mpsc::channel();
        let (serving, paths) = (Arc::clone(&shared), [socket.clone(), registry.clone()]);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                let [socket, registry] = paths.map(|path| {
                    let _ = fs::remove_file(&path);
                    UnixListener::bind(&path)
                });
                let (Ok(socket), Ok(registry)) = (socket, registry) else { return };
                let _ = ready.send(());
                let node = tonic::transport::Server::builder()
                    .add_service(NodeServer::new(Service(Arc::clone(&serving))))
                    .serve_with_incoming(connections(socket));
                let registration = tonic::transport::Server::builder()
                    .add_service(RegistrationServer::new(Service(serving)))
                    .serve_with_incoming(connections(registry));
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

    /// Returns the calls of this method, in order, as JSON.
    #[must_use]
    pub fn calls(&self, method: &str) -> Vec<Value> {
        let calls = &self.state().calls;
        calls.iter().filter(|(name, _)| name == method).map(|(_, asked)| asked.clone()).collect()
    }

    /// Returns the methods that were called, in order, except queries.
    #[must_use]
    pub fn order(&self) -> Vec<String> {
        let calls = &self.state().calls;
        calls.iter().map(|(name, _)| name.clone()).filter(|name| !name.contains("Get")).collect()
    }

    /// Refuses the next call of a method.
    pub fn refuse(&self, method: &str, code: Code, message: &str) {
        let fault = Fault::Refuse(code, message.to_owned());
        self.state().faults.entry(method.to_owned()).or_default().push_back(fault);
    }

    /// Makes the next call of a method hang.
    pub fn hang(&self, method: &str) {
        self.state().faults.entry(method.to_owned()).or_default().push_back(Fault::Hang);
    }

    /// Reports this fault for all volumes from now on.
    pub fn trouble(&self, message: &str) {
        self.state().trouble = Some(message.to_owned());
    }

    /// Returns the last notification about the driver's registration.
    #[must_use]
    pub fn registration(&self) -> Option<(bool, String)> {
        self.state().registered.last().map(|status| (status.plugin_registered, status.error.clone()))
    }
}

impl Drop for CsiDriver {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for socket in &self.sockets {
            let _ = fs::remove_file(socket);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the folder of a volume's contents.
    fn contents(&self, volume: &str) -> PathBuf {
        self.shelf.join(volume)
    }
}

#[derive(Clone)]
struct Service(Arc<Shared>);

impl Service {
    /// Records a call, and fails if scripted.
    async fn asked(&self, method: &str, asked: Value) -> Result<(), Status> {
        let fault = {
            let mut state = self.0.state();
            state.calls.push((method.to_owned(), asked));
            state.faults.get_mut(method).and_then(VecDeque::pop_front)
        };
        match fault {
            None => Ok(()),
            Some(Fault::Refuse(code, message)) => Err(Status::new(code, message)),
            Some(Fault::Hang) => std::future::pending().await,
        }
    }
}

/// Returns the connections of a socket. Kubelets send its path as `:authority`.
fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<AnyAuthority<UnixStream, ()>>> {
    UnixListenerStream::new(listener).map(|accepted| accepted.map(|stream| AnyAuthority::new(stream, ())))
}

fn failed(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

fn is_mounted(path: &Path) -> bool {
    let mounts = crate::guards::mounts().unwrap_or_default();
    mounts.iter().any(|mount| mount.path == path)
}

/// Removes a mount and its folder, if they exist.
fn remove_mount(path: &Path) -> Result<(), Status> {
    if is_mounted(path) {
        unmount(path, UnmountFlags::empty()).map_err(failed)?;
    }
    let removed = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
    removed.or_else(|error| if path.exists() { Err(failed(error)) } else { Ok(()) })
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: self.0.settings.name.clone(),
            endpoint: self.0.socket.display().to_string(),
            supported_versions: vec!["1.0.0".to_owned()],
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

#[tonic::async_trait]
impl Node for Service {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        let asked = request.into_inner();
        let fields = json!({
            "volume": asked.volume_id, "path": asked.staging_target_path, "secrets": asked.secrets,
            "publishContext": asked.publish_context, "context": asked.volume_context,
        });
        self.asked("NodeStageVolume", fields).await?;
        let contents = self.0.contents(&asked.volume_id);
        fs::create_dir_all(&contents).map_err(failed)?;
        let path = Path::new(&asked.staging_target_path);
        if !is_mounted(path) {
            mount_bind(contents, path).map_err(failed)?;
        }
        Ok(Response::new(csi::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        let asked = request.into_inner();
        let fields = json!({"volume": asked.volume_id, "path": asked.staging_target_path});
        self.asked("NodeUnstageVolume", fields).await?;
        let path = Path::new(&asked.staging_target_path);
        if is_mounted(path) {
            unmount(path, UnmountFlags::empty()).map_err(failed)?;
        }
        Ok(Response::new(csi::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        let asked = request.into_inner();
        let fields = json!({
            "volume": asked.volume_id, "staged": asked.staging_target_path, "path": asked.target_path,
            "readOnly": asked.readonly, "secrets": asked.secrets, "context": asked.volume_context,
            "publishContext": asked.publish_context,
            "mode": asked.volume_capability.as_ref().and_then(|one| one.access_mode).map(|mode| mode.mode),
        });
        let access = asked.volume_capability.and_then(|capability| capability.access_type);
        let is_block = matches!(access, Some(csi::volume_capability::AccessType::Block(_)));
        self.asked("NodePublishVolume", fields).await?;
        let contents = if asked.staging_target_path.is_empty() {
            let contents = self.0.contents(&asked.volume_id);
            fs::create_dir_all(&contents).map_err(failed)?;
            contents
        } else {
            asked.staging_target_path.into()
        };
        let path = Path::new(&asked.target_path);
        if is_block {
            if !is_mounted(path) {
                fs::write(path, "").map_err(failed)?;
                mount_bind("/dev/null", path).map_err(failed)?;
            }
            return Ok(Response::new(csi::NodePublishVolumeResponse {}));
        }
        fs::create_dir_all(path).map_err(failed)?;
        if !is_mounted(path) {
            mount_bind(contents, path).map_err(failed)?;
        }
        Ok(Response::new(csi::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        let asked = request.into_inner();
        let fields = json!({"volume": asked.volume_id, "path": asked.target_path});
        self.asked("NodeUnpublishVolume", fields).await?;
        remove_mount(Path::new(&asked.target_path))?;
        Ok(Response::new(csi::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        let asked = request.into_inner();
        let fields = json!({"volume": asked.volume_id, "path": asked.volume_path});
        self.asked("NodeGetVolumeStats", fields).await?;
        let usage = |unit: Unit, total, available, used| csi::VolumeUsage {
            unit: unit.into(),
            total,
            available,
            used,
        };
        let trouble = self.0.state().trouble.clone();
        Ok(Response::new(csi::NodeGetVolumeStatsResponse {
            usage: vec![usage(Unit::Bytes, 1000, 600, 400), usage(Unit::Inodes, 50, 30, 20)],
            volume_condition: Some(csi::VolumeCondition {
                abnormal: trouble.is_some(),
                message: trouble.unwrap_or_default(),
            }),
        }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        let asked = request.into_inner();
        let wanted = asked.capacity_range.map(|range| range.required_bytes).unwrap_or_default();
        let fields = json!({
            "volume": asked.volume_id, "path": asked.volume_path, "staged": asked.staging_target_path,
            "bytes": wanted, "secrets": asked.secrets,
        });
        self.asked("NodeExpandVolume", fields).await?;
        Ok(Response::new(csi::NodeExpandVolumeResponse { capacity_bytes: wanted }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        self.asked("NodeGetCapabilities", Value::Null).await?;
        let of = |kind: rpc::Type| csi::NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let settings = &self.0.settings;
        let all = [
            (settings.stages, rpc::Type::StageUnstageVolume),
            (settings.measures, rpc::Type::GetVolumeStats),
            (settings.measures, rpc::Type::VolumeCondition),
            (settings.expands, rpc::Type::ExpandVolume),
        ];
        let capabilities = all.into_iter().filter(|(has, _)| *has).map(|(_, kind)| of(kind)).collect();
        Ok(Response::new(csi::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        self.asked("NodeGetInfo", Value::Null).await?;
        let segments = self.0.settings.topology.clone().into_iter().collect();
        Ok(Response::new(csi::NodeGetInfoResponse {
            node_id: format!("id-of-{}", self.0.settings.name),
            max_volumes_per_node: self.0.settings.max_volumes,
            accessible_topology: Some(csi::Topology { segments }),
        }))
    }
}
