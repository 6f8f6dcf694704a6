//! State of the fake runtime: sandboxes, containers, images, and the rules by which containerd changes them.
//! Sockets and faults are part of the server.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use beelet_proto::cri;
use cri::{ContainerState, PodSandboxState};
use sha2::{Digest, Sha256};
use tonic::Status;

/// Larger than any process id of Linux (PID_MAX_LIMIT).
const PID_MAX: u32 = 4 << 20;
/// Exit code of a process ended by SIGTERM.
const TERMINATED: i32 = 128 + 15;
/// Exit code of a process ended by SIGKILL.
const KILLED: i32 = 128 + 9;

/// Pod sandbox of the fake runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct Sandbox {
    /// 64 hexadecimal digits.
    pub id: String,
    /// Requested configuration.
    pub config: cri::PodSandboxConfig,
    /// State: ready or not.
    pub state: PodSandboxState,
    /// Nanoseconds since 1970.
    pub created_at: i64,
    /// Address; empty for a host network pod.
    pub ip: String,
    /// Details in a verbose status: [`crate::cri::FakeCri::set_sandbox_info`].
    pub info: serde_json::Value,
    /// Requested runtime handler.
    pub runtime_handler: String,
}

/// Container of the fake runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct Container {
    /// 64 hexadecimal digits.
    pub id: String,
    /// Id of the container's sandbox.
    pub sandbox_id: String,
    /// Requested configuration.
    pub config: cri::ContainerConfig,
    /// State: created, running, exited.
    pub state: ContainerState,
    /// Process id of the first process in a running container's verbose status. No process of this machine
    /// has this id.
    pub pid: u32,
    /// Nanoseconds since 1970.
    pub created_at: i64,
    /// Nanoseconds since 1970; 0 before the start.
    pub started_at: i64,
    /// Nanoseconds since 1970; 0 before the end.
    pub finished_at: i64,
    /// Exit code; 0 before the end.
    pub exit_code: i32,
    /// `Completed`, `Error`, `OOMKilled`; empty before the end.
    pub reason: String,
    /// Id of the image.
    pub image_ref: String,
    /// Path of the log: the sandbox's log folder and the container's log path.
    pub log_path: String,
    /// Resource limits, as last set.
    pub resources: Option<cri::LinuxContainerResources>,
}

impl Container {
    /// Creates a running container in a sandbox, with defaults for everything else.
    #[must_use]
    pub fn running(
        id: impl Into<String>,
        sandbox_id: impl Into<String>,
        config: cri::ContainerConfig,
    ) -> Self {
        Self {
            id: id.into(),
            sandbox_id: sandbox_id.into(),
            config,
            state: ContainerState::ContainerRunning,
            created_at: 1,
            started_at: 1,
            finished_at: 0,
            exit_code: 0,
            pid: 0,
            reason: String::new(),
            image_ref: String::new(),
            log_path: String::new(),
            resources: None,
        }
    }

    /// Returns the container's name in the pod.
    #[must_use]
    pub fn name(&self) -> &str {
        self.config.metadata.as_ref().map_or("", |metadata| &metadata.name)
    }

    /// Returns the container's attempt, from 0.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.config.metadata.as_ref().map_or(0, |metadata| metadata.attempt)
    }
}

impl Sandbox {
    /// Returns the name of the sandbox's pod.
    #[must_use]
    pub fn pod_name(&self) -> &str {
        self.config.metadata.as_ref().map_or("", |metadata| &metadata.name)
    }
}

/// State of the fake runtime.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// Sandboxes by id.
    pub sandboxes: BTreeMap<String, Sandbox>,
    /// Containers by id.
    pub containers: BTreeMap<String, Container>,
    /// Images on the node, by full name (`docker.io/library/busybox:1.36`).
    pub images: BTreeMap<String, cri::Image>,
    /// Names of containers whose process exits with 0 immediately after the start, like an init container.
    pub ends_at_once: BTreeSet<String>,
    /// If true, stopped containers exit with 0, like a server that handles SIGTERM.
    pub stops_well: bool,
    /// Exit codes of commands run in containers, by the command's first word; 0 for all others.
    pub exec_codes: BTreeMap<String, i32>,
    /// Address of the streaming server, as `http://host:port`; None for a runtime without streams.
    pub streaming: Option<String>,
    /// True if the runtime streams container events, like containerd 1.7 and later.
    pub streams_events: bool,
    /// Images in the registry, by full name, for pulls.
    pub registry: BTreeSet<String>,
    /// Reported runtime handlers; the default one has no name.
    pub runtime_handlers: Vec<cri::RuntimeHandler>,
    /// RuntimeReady and NetworkReady.
    pub conditions: (bool, bool),
    /// Reported name and version.
    pub runtime: (String, String),
    /// Answer to RuntimeConfig; None if the runtime lacks the call, like containerd 1.6.
    pub cgroup_driver: Option<cri::CgroupDriver>,
    /// Answer to ImageFsInfo.
    pub image_fs: cri::ImageFsInfoResponse,
    /// Seconds by which the runtime's clock is ahead of the machine's.
    pub clock_ahead: i64,
    made: u64,
}

impl World {
    pub(super) fn new() -> Self {
        let runtime = ("fake".to_owned(), "1.0.0".to_owned());
        World { conditions: (true, true), runtime, ..World::default() }
    }

    /// Forgets sandboxes, containers and images, like a runtime after the loss of its state folder.
    pub(super) fn forget(&mut self) {
        self.sandboxes.clear();
        self.containers.clear();
        self.images.clear();
    }

    /// Returns the newest container of that name in a pod.
    #[must_use]
    pub fn container(&self, pod: &str, name: &str) -> Option<&Container> {
        let named = self.containers.values().filter(|c| c.name() == name);
        let of_pod = named.filter_map(|c| Some((self.sandboxes.get(&c.sandbox_id)?, c)));
        // Within one sandbox the attempt decides: the clock may have been set between two attempts.
        let newest = of_pod
            .filter(|(sandbox, _)| sandbox.pod_name() == pod)
            .max_by_key(|(sandbox, c)| (sandbox.created_at, c.attempt(), c.created_at));
        newest.map(|(_, container)| container)
    }

    /// Returns the newest sandbox of a pod.
    #[must_use]
    pub fn sandbox(&self, pod: &str) -> Option<&Sandbox> {
        self.sandboxes.values().filter(|s| s.pod_name() == pod).max_by_key(|s| s.created_at)
    }

    /// Adds an image to the node.
    pub(super) fn add_image(&mut self, name: &str) -> cri::Image {
        let full = full_name(name);
        let id = format!("sha256:{}", hex(&format!("image {full}")));
        let (repository, tag) = split_tag(&full);
        let image = cri::Image {
            id: id.clone(),
            repo_tags: tag.map(|_| full.clone()).into_iter().collect(),
            repo_digests: vec![format!("{repository}@sha256:{}", hex(&format!("digest {full}")))],
            size: 2_000_000,
            uid: Some(cri::Int64Value { value: 0 }),
            ..cri::Image::default()
        };
        self.images.insert(full, image.clone());
        image
    }

    /// Returns an image by name, digest or id.
    fn image(&self, asked: &str) -> Option<&cri::Image> {
        let full = full_name(asked);
        self.images.get(&full).or_else(|| {
            let mut all = self.images.values();
            all.find(|image| image.id == asked || image.repo_digests.contains(&full))
        })
    }

    /// Ends a running container.
    ///
    /// # Errors
    /// The container does not run.
    pub fn exit(&mut self, id: &str, code: i32, reason: Option<&str>) -> Result<(), String> {
        let now = self.now();
        let container =
            self.containers.get_mut(id).ok_or_else(|| format!("container {id} does not exist"))?;
        if container.state != ContainerState::ContainerRunning {
            return Err(format!("container {id} is in {:?}, not running", container.state));
        }
        container.state = ContainerState::ContainerExited;
        container.finished_at = now;
        container.exit_code = code;
        let usual = if code == 0 { "Completed" } else { "Error" };
        container.reason = reason.unwrap_or(usual).to_owned();
        Ok(())
    }

    /// Returns the time of the runtime's clock in nanoseconds since 1970.
    fn now(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
        now.saturating_add(self.clock_ahead.saturating_mul(1_000_000_000))
    }

    fn next_id(&mut self, what: &str) -> String {
        self.made += 1;
        hex(&format!("{what} {}", self.made))
    }

    fn known_container(&mut self, id: &str) -> Result<&mut Container, Status> {
        let not_found =
            || Status::not_found(format!("an error occurred when try to find container {id:?}: not found"));
        self.containers.get_mut(id).ok_or_else(not_found)
    }
}

/// Implementation of the calls, each with containerd's behavior.
#[allow(clippy::needless_pass_by_value)] // all calls have one shape: a whole request in, a whole response out
impl World {
    pub(super) fn version(&mut self, _: cri::VersionRequest) -> Result<cri::VersionResponse, Status> {
        Ok(cri::VersionResponse {
            version: "0.1.0".to_owned(),
            runtime_name: self.runtime.0.clone(),
            runtime_version: self.runtime.1.clone(),
            runtime_api_version: "v1".to_owned(),
        })
    }

    pub(super) fn status(&mut self, request: cri::StatusRequest) -> Result<cri::StatusResponse, Status> {
        let condition = |r#type: &str, status| cri::RuntimeCondition {
            r#type: r#type.to_owned(),
            status,
            ..cri::RuntimeCondition::default()
        };
        let (runtime, network) = self.conditions;
        let conditions = vec![condition("RuntimeReady", runtime), condition("NetworkReady", network)];
        let config = ("config".to_owned(), "{}".to_owned());
        Ok(cri::StatusResponse {
            status: Some(cri::RuntimeStatus { conditions }),
            info: if request.verbose { HashMap::from([config]) } else { HashMap::new() },
            runtime_handlers: self.runtime_handlers.clone(),
            ..cri::StatusResponse::default()
        })
    }

    pub(super) fn runtime_config(
        &mut self,
        _: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, Status> {
        let driver =
            self.cgroup_driver.ok_or_else(|| Status::unimplemented("unknown method RuntimeConfig"))?;
        let linux = cri::LinuxRuntimeConfiguration { cgroup_driver: driver.into() };
        Ok(cri::RuntimeConfigResponse { linux: Some(linux) })
    }

    pub(super) fn update_runtime_config(
        &mut self,
        _: cri::UpdateRuntimeConfigRequest,
    ) -> Result<cri::UpdateRuntimeConfigResponse, Status> {
        Ok(cri::UpdateRuntimeConfigResponse {})
    }

    pub(super) fn run_pod_sandbox(
        &mut self,
        request: cri::RunPodSandboxRequest,
    ) -> Result<cri::RunPodSandboxResponse, Status> {
        let config = request.config.ok_or_else(|| Status::invalid_argument("sandbox config is missing"))?;
        let name = config
            .metadata
            .clone()
            .ok_or_else(|| Status::invalid_argument("sandbox config must include metadata"))?;
        if let Some(other) = self.sandboxes.values().find(|s| s.config.metadata.as_ref() == Some(&name)) {
            let reserved = format!("{}_{}_{}_{}", name.name, name.namespace, name.uid, name.attempt);
            let message = format!(
                "failed to reserve sandbox name {reserved:?}: name {reserved:?} is reserved for {:?}",
                other.id
            );
            return Err(Status::unknown(message));
        }
        let id = self.next_id("sandbox");
        let host_network =
            config.linux.as_ref().and_then(|linux| linux.security_context.as_ref()).is_some_and(|c| {
                c.namespace_options.as_ref().is_some_and(|n| n.network() == cri::NamespaceMode::Node)
            });
        let n = self.made;
        let ip = if host_network { String::new() } else { format!("10.88.{}.{}", n / 250, n % 250 + 2) };
        let sandbox = Sandbox {
            id: id.clone(),
            config,
            state: PodSandboxState::SandboxReady,
            created_at: self.now(),
            ip,
            info: serde_json::json!({ "pid": 0 }),
            runtime_handler: request.runtime_handler,
        };
        self.sandboxes.insert(id.clone(), sandbox);
        Ok(cri::RunPodSandboxResponse { pod_sandbox_id: id })
    }

    /// Stops a sandbox. Idempotent, as required by CRI.
    pub(super) fn stop_pod_sandbox(
        &mut self,
        request: cri::StopPodSandboxRequest,
    ) -> Result<cri::StopPodSandboxResponse, Status> {
        let running = |c: &&Container| {
            c.sandbox_id == request.pod_sandbox_id && c.state == ContainerState::ContainerRunning
        };
        let ids: Vec<String> = self.containers.values().filter(running).map(|c| c.id.clone()).collect();
        for id in ids {
            // Cannot fail: the containers are running.
            let _ = self.exit(&id, KILLED, None);
        }
        if let Some(sandbox) = self.sandboxes.get_mut(&request.pod_sandbox_id) {
            sandbox.state = PodSandboxState::SandboxNotready;
        }
        Ok(cri::StopPodSandboxResponse {})
    }

    /// Removes a sandbox, after stopping it if needed. Idempotent.
    pub(super) fn remove_pod_sandbox(
        &mut self,
        request: cri::RemovePodSandboxRequest,
    ) -> Result<cri::RemovePodSandboxResponse, Status> {
        self.containers.retain(|_, c| c.sandbox_id != request.pod_sandbox_id);
        self.sandboxes.remove(&request.pod_sandbox_id);
        Ok(cri::RemovePodSandboxResponse {})
    }

    pub(super) fn pod_sandbox_status(
        &mut self,
        request: cri::PodSandboxStatusRequest,
    ) -> Result<cri::PodSandboxStatusResponse, Status> {
        let id = &request.pod_sandbox_id;
        let not_found =
            || Status::not_found(format!("an error occurred when try to find sandbox {id:?}: not found"));
        let sandbox = self.sandboxes.get(id).ok_or_else(not_found)?;
        let options = sandbox.config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = options.and_then(|context| context.namespace_options.clone());
        let status = cri::PodSandboxStatus {
            id: sandbox.id.clone(),
            metadata: sandbox.config.metadata.clone(),
            state: sandbox.state.into(),
            created_at: sandbox.created_at,
            network: Some(cri::PodSandboxNetworkStatus { ip: sandbox.ip.clone(), ..Default::default() }),
            linux: Some(cri::LinuxPodSandboxStatus { namespaces: Some(cri::Namespace { options }) }),
            labels: sandbox.config.labels.clone(),
            annotations: sandbox.config.annotations.clone(),
            runtime_handler: sandbox.runtime_handler.clone(),
        };
        let info = ("info".to_owned(), sandbox.info.to_string());
        Ok(cri::PodSandboxStatusResponse {
            status: Some(status),
            info: if request.verbose { HashMap::from([info]) } else { HashMap::new() },
            ..cri::PodSandboxStatusResponse::default()
        })
    }

    pub(super) fn list_pod_sandbox(
        &mut self,
        request: cri::ListPodSandboxRequest,
    ) -> Result<cri::ListPodSandboxResponse, Status> {
        let filter = request.filter.unwrap_or_default();
        let chosen = self.sandboxes.values().filter(|s| {
            matches_id(&s.id, &filter.id)
                && filter.state.is_none_or(|state| state.state() == s.state)
                && matches_labels(&s.config.labels, &filter.label_selector)
        });
        let items = chosen.map(|s| cri::PodSandbox {
            id: s.id.clone(),
            metadata: s.config.metadata.clone(),
            state: s.state.into(),
            created_at: s.created_at,
            labels: s.config.labels.clone(),
            annotations: s.config.annotations.clone(),
            runtime_handler: s.runtime_handler.clone(),
        });
        Ok(cri::ListPodSandboxResponse { items: items.collect() })
    }

    pub(super) fn create_container(
        &mut self,
        request: cri::CreateContainerRequest,
    ) -> Result<cri::CreateContainerResponse, Status> {
        let config = request.config.ok_or_else(|| Status::invalid_argument("container config is missing"))?;
        let name = config
            .metadata
            .clone()
            .ok_or_else(|| Status::invalid_argument("container config must include metadata"))?;
        let sandbox = self.sandboxes.get(&request.pod_sandbox_id).ok_or_else(|| {
            Status::not_found(format!("failed to find sandbox id {:?}: not found", request.pod_sandbox_id))
        })?;
        if sandbox.state != PodSandboxState::SandboxReady {
            return Err(Status::unknown(format!("sandbox container {:?} is not running", sandbox.id)));
        }
        let mut siblings = self.containers.values().filter(|c| c.sandbox_id == sandbox.id);
        if let Some(other) = siblings.find(|c| c.config.metadata.as_ref() == Some(&name)) {
            let message = format!(
                "failed to reserve container name {:?}: it is reserved for {:?}",
                name.name, other.id
            );
            return Err(Status::unknown(message));
        }
        let image = config.image.as_ref().map_or("", |image| &image.image);
        let image_ref = match self.image(image) {
            Some(found) => found.id.clone(),
            None => {
                return Err(Status::not_found(format!(
                    "failed to get image from containerd {image:?}: not found"
                )));
            }
        };
        let log_path = Path::new(&sandbox.config.log_directory).join(&config.log_path).display().to_string();
        let resources = config.linux.as_ref().and_then(|linux| linux.resources.clone());
        let id = self.next_id("container");
        let container = Container {
            id: id.clone(),
            sandbox_id: request.pod_sandbox_id,
            config,
            state: ContainerState::ContainerCreated,
            pid: PID_MAX + u32::try_from(self.made).unwrap_or(0),
            created_at: self.now(),
            started_at: 0,
            finished_at: 0,
            exit_code: 0,
            reason: String::new(),
            image_ref,
            log_path,
            resources,
        };
        self.containers.insert(id.clone(), container);
        Ok(cri::CreateContainerResponse { container_id: id })
    }

    pub(super) fn start_container(
        &mut self,
        request: cri::StartContainerRequest,
    ) -> Result<cri::StartContainerResponse, Status> {
        let now = self.now();
        let container = self.known_container(&request.container_id)?;
        if container.state != ContainerState::ContainerCreated {
            let message =
                format!("container {:?} is in {} state", container.id, container.state.as_str_name());
            return Err(Status::unknown(message));
        }
        container.state = ContainerState::ContainerRunning;
        container.started_at = now;
        let (id, name) = (container.id.clone(), container.name().to_owned());
        if self.ends_at_once.contains(&name) {
            // Cannot fail: the container is running.
            let _ = self.exit(&id, 0, None);
        }
        Ok(cri::StartContainerResponse {})
    }

    /// Stops a container. Idempotent; a running container ends immediately, by SIGTERM if it has any grace
    /// period.
    pub(super) fn stop_container(
        &mut self,
        request: cri::StopContainerRequest,
    ) -> Result<cri::StopContainerResponse, Status> {
        let code = match request.timeout {
            0 => KILLED,
            _ if self.stops_well => 0,
            _ => TERMINATED,
        };
        // A container that does not exist or does not run is not an error.
        let _ = self.exit(&request.container_id, code, None);
        Ok(cri::StopContainerResponse {})
    }

    /// Removes a container. Idempotent.
    pub(super) fn remove_container(
        &mut self,
        request: cri::RemoveContainerRequest,
    ) -> Result<cri::RemoveContainerResponse, Status> {
        self.containers.remove(&request.container_id);
        Ok(cri::RemoveContainerResponse {})
    }

    pub(super) fn list_containers(
        &mut self,
        request: cri::ListContainersRequest,
    ) -> Result<cri::ListContainersResponse, Status> {
        let filter = request.filter.unwrap_or_default();
        let chosen = self.containers.values().filter(|c| {
            matches_id(&c.id, &filter.id)
                && matches_id(&c.sandbox_id, &filter.pod_sandbox_id)
                && filter.state.is_none_or(|state| state.state() == c.state)
                && matches_labels(&c.config.labels, &filter.label_selector)
        });
        let containers = chosen.map(|c| cri::Container {
            id: c.id.clone(),
            pod_sandbox_id: c.sandbox_id.clone(),
            metadata: c.config.metadata.clone(),
            image: c.config.image.clone(),
            image_ref: c.image_ref.clone(),
            state: c.state.into(),
            created_at: c.created_at,
            labels: c.config.labels.clone(),
            annotations: c.config.annotations.clone(),
            image_id: c.image_ref.clone(),
        });
        Ok(cri::ListContainersResponse { containers: containers.collect() })
    }

    pub(super) fn container_status(
        &mut self,
        request: cri::ContainerStatusRequest,
    ) -> Result<cri::ContainerStatusResponse, Status> {
        let c = self.known_container(&request.container_id)?;
        let status = cri::ContainerStatus {
            id: c.id.clone(),
            metadata: c.config.metadata.clone(),
            state: c.state.into(),
            created_at: c.created_at,
            started_at: c.started_at,
            finished_at: c.finished_at,
            exit_code: c.exit_code,
            image: c.config.image.clone(),
            image_ref: c.image_ref.clone(),
            image_id: c.image_ref.clone(),
            reason: c.reason.clone(),
            labels: c.config.labels.clone(),
            annotations: c.config.annotations.clone(),
            mounts: c.config.mounts.clone(),
            log_path: c.log_path.clone(),
            stop_signal: c.config.stop_signal,
            resources: c.resources.clone().map(|linux| cri::ContainerResources {
                linux: Some(linux),
                ..cri::ContainerResources::default()
            }),
            ..cri::ContainerStatus::default()
        };
        let pid = if c.state == ContainerState::ContainerRunning { c.pid } else { 0 };
        let info =
            ("info".to_owned(), serde_json::json!({ "sandboxID": c.sandbox_id, "pid": pid }).to_string());
        Ok(cri::ContainerStatusResponse {
            status: Some(status),
            info: if request.verbose { HashMap::from([info]) } else { HashMap::new() },
        })
    }

    /// Lists writable layers, all empty.
    pub(super) fn list_container_stats(
        &mut self,
        request: cri::ListContainerStatsRequest,
    ) -> Result<cri::ListContainerStatsResponse, Status> {
        let filter = request.filter.unwrap_or_default();
        let chosen = self.containers.values().filter(|c| {
            matches_id(&c.id, &filter.id)
                && matches_id(&c.sandbox_id, &filter.pod_sandbox_id)
                && matches_labels(&c.config.labels, &filter.label_selector)
        });
        let stats = chosen.map(|c| cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: c.id.clone(),
                metadata: c.config.metadata.clone(),
                labels: c.config.labels.clone(),
                annotations: c.config.annotations.clone(),
            }),
            writable_layer: Some(cri::FilesystemUsage::default()),
            ..cri::ContainerStats::default()
        });
        Ok(cri::ListContainerStatsResponse { stats: stats.collect() })
    }

    pub(super) fn exec_sync(
        &mut self,
        request: cri::ExecSyncRequest,
    ) -> Result<cri::ExecSyncResponse, Status> {
        let container = self.known_container(&request.container_id)?;
        if container.state != ContainerState::ContainerRunning {
            let state = container.state.as_str_name();
            return Err(Status::unknown(format!("container is in {state} state")));
        }
        let code = request.cmd.first().and_then(|word| self.exec_codes.get(word)).copied().unwrap_or(0);
        let stderr = if code == 0 { Vec::new() } else { b"it went wrong\n".to_vec() };
        Ok(cri::ExecSyncResponse { exit_code: code, stderr, ..cri::ExecSyncResponse::default() })
    }

    fn stream(&self, path: &str) -> Result<String, Status> {
        let none = || Status::unimplemented("unknown method");
        Ok(format!("{}/{path}", self.streaming.as_ref().ok_or_else(none)?))
    }

    pub(super) fn exec(&mut self, request: cri::ExecRequest) -> Result<cri::ExecResponse, Status> {
        self.known_container(&request.container_id)?;
        Ok(cri::ExecResponse { url: self.stream("exec/token")? })
    }

    pub(super) fn attach(&mut self, request: cri::AttachRequest) -> Result<cri::AttachResponse, Status> {
        self.known_container(&request.container_id)?;
        Ok(cri::AttachResponse { url: self.stream("attach/token")? })
    }

    pub(super) fn port_forward(
        &mut self,
        _: cri::PortForwardRequest,
    ) -> Result<cri::PortForwardResponse, Status> {
        Ok(cri::PortForwardResponse { url: self.stream("portforward/token")? })
    }

    /// Checks that container events are supported; the server sends them.
    pub(super) fn get_container_events(&mut self, _: cri::GetEventsRequest) -> Result<(), Status> {
        if self.streams_events { Ok(()) } else { Err(Status::unimplemented("unknown method")) }
    }

    /// Returns all containers with their states, for events.
    pub(super) fn states(&self) -> BTreeMap<String, ContainerState> {
        self.containers.iter().map(|(id, container)| (id.clone(), container.state)).collect()
    }

    pub(super) fn update_container_resources(
        &mut self,
        request: cri::UpdateContainerResourcesRequest,
    ) -> Result<cri::UpdateContainerResourcesResponse, Status> {
        let container = self.known_container(&request.container_id)?;
        let before = std::mem::replace(&mut container.resources, request.linux);
        // A container keeps its CPUs if the request names none.
        if let Some((new, before)) = container.resources.as_mut().zip(before)
            && new.cpuset_cpus.is_empty()
        {
            new.cpuset_cpus = before.cpuset_cpus;
        }
        Ok(cri::UpdateContainerResourcesResponse {})
    }

    /// Reopens the log, and recreates it, empty, if it was renamed.
    pub(super) fn reopen_container_log(
        &mut self,
        request: cri::ReopenContainerLogRequest,
    ) -> Result<cri::ReopenContainerLogResponse, Status> {
        let container = self.known_container(&request.container_id)?;
        if container.state != ContainerState::ContainerRunning {
            return Err(Status::unknown("container is not running"));
        }
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(&container.log_path);
        opened.map_err(|error| Status::unknown(format!("failed to open {}: {error}", container.log_path)))?;
        Ok(cri::ReopenContainerLogResponse {})
    }

    pub(super) fn list_images(
        &mut self,
        request: cri::ListImagesRequest,
    ) -> Result<cri::ListImagesResponse, Status> {
        let wanted =
            request.filter.and_then(|filter| filter.image).map(|image| image.image).unwrap_or_default();
        let images = match wanted.as_str() {
            "" => self.images.values().cloned().collect(),
            name => self.image(name).cloned().into_iter().collect(),
        };
        Ok(cri::ListImagesResponse { images })
    }

    pub(super) fn image_status(
        &mut self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let image = self.image(&named(request.image)?).cloned();
        Ok(cri::ImageStatusResponse { image, ..cri::ImageStatusResponse::default() })
    }

    pub(super) fn pull_image(
        &mut self,
        request: cri::PullImageRequest,
    ) -> Result<cri::PullImageResponse, Status> {
        let full = full_name(&named(request.image)?);
        if !self.registry.contains(&full) {
            let message = format!(
                "failed to pull and unpack image {full:?}: failed to resolve reference {full:?}: {full}: not found"
            );
            return Err(Status::not_found(message));
        }
        Ok(cri::PullImageResponse { image_ref: self.add_image(&full).id })
    }

    /// Removes an image. Idempotent.
    pub(super) fn remove_image(
        &mut self,
        request: cri::RemoveImageRequest,
    ) -> Result<cri::RemoveImageResponse, Status> {
        if let Some(id) = self.image(&named(request.image)?).map(|image| image.id.clone()) {
            self.images.retain(|_, image| image.id != id);
        }
        Ok(cri::RemoveImageResponse {})
    }

    pub(super) fn image_fs_info(
        &mut self,
        _: cri::ImageFsInfoRequest,
    ) -> Result<cri::ImageFsInfoResponse, Status> {
        Ok(self.image_fs.clone())
    }
}

/// Answers a call that containerd 1.6 (or this fake) does not implement.
pub(super) fn lacking<Q, A>(_: &mut World, _: Q) -> Result<A, Status> {
    Err(Status::unimplemented("unknown method"))
}

fn named(image: Option<cri::ImageSpec>) -> Result<String, Status> {
    let name = image.map(|image| image.image).unwrap_or_default();
    if name.is_empty() { Err(Status::invalid_argument("image name is missing")) } else { Ok(name) }
}

/// Matches an id with its prefix, like containerd; an empty prefix matches every id.
fn matches_id(id: &str, wanted: &str) -> bool {
    id.starts_with(wanted)
}

fn matches_labels(labels: &HashMap<String, String>, selector: &HashMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Returns the name in the registry: `busybox` is `docker.io/library/busybox:latest`.
pub(super) fn full_name(name: &str) -> String {
    let first = name.split('/').next().unwrap_or_default();
    let has_host = name.contains('/') && (first.contains(['.', ':']) || first == "localhost");
    let hosted = match (has_host, name.contains('/')) {
        (true, _) => name.to_owned(),
        (false, true) => format!("docker.io/{name}"),
        (false, false) => format!("docker.io/library/{name}"),
    };
    let untagged = split_tag(&hosted).1.is_none() && !hosted.contains('@');
    if untagged { format!("{hosted}:latest") } else { hosted }
}

/// Splits a full name into repository and tag.
fn split_tag(full: &str) -> (&str, Option<&str>) {
    let name = full.split('@').next().unwrap_or(full);
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, Some(tag)),
        _ => (name, None),
    }
}

fn hex(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_names_are_completed_as_docker_does() {
        let check = |name: &str, expected: &str| assert_eq!(full_name(name), expected);
        check("busybox", "docker.io/library/busybox:latest");
        check("busybox:1.36", "docker.io/library/busybox:1.36");
        check("me/app", "docker.io/me/app:latest");
        check("localhost/app", "localhost/app:latest");
        check("localhost:5000/app", "localhost:5000/app:latest");
        check("registry.k8s.io/pause:3.9", "registry.k8s.io/pause:3.9");
        check("app@sha256:00", "docker.io/library/app@sha256:00");
    }
}
