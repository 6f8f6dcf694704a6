//! Measures the cost of devices: the decision alone, for one resource and for two that must come from the
//! same NUMA node, and a whole admission without the plugin's own time. `cargo xtask bench devices` runs this
//! program, which prints one JSON object with the samples, in milliseconds.
//!
//! A thread of this program serves the plugin over the real sockets. The plugin's own time is the time of an
//! answer to a client that does nothing else, measured after each admission. The checkpoint is written as
//! usual, but to memory, so the time of a disk is not included.

#![allow(clippy::unwrap_used, clippy::panic)] // a bench: any fault ends it

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beelet_devices::{Circumstances, Devices, Metrics, Parts, Settings};
use beelet_policy::devices::{
    self as policy, ContainerKind, ContainerRequest, Device, Health, PluginOptions,
    admission::{Admission, Aligner, Next},
    topology::{TopologyPolicy, TopologyScope},
};
use beelet_policy::pinning::{
    NodeSet, Refusal,
    error::Reason,
    hints::ProviderHints,
    topology::{Node, TopologyManager, TopologySettings},
};
use beelet_proto::deviceplugin as api;
use beelet_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use beelet_proto::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use beelet_state::events::Recorder;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status};

const RESOURCE: &str = "example.com/gpu";
/// A second resource, with the same number of devices and nodes.
const SECOND: &str = "example.com/nic";
const DEVICES: usize = 1000;
const NODES: usize = 8;
const PODS: usize = 100;
/// Number of devices of each pod.
const PER_POD: usize = 5;

fn milliseconds(took: Duration) -> f64 {
    took.as_secs_f64() * 1e3
}

fn main() {
    let rounds: usize = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(20);
    let one = [TopologyPolicy::None, TopologyPolicy::BestEffort, TopologyPolicy::SingleNumaNode];
    println!(
        "{}",
        json!({
            "decision": decisions(rounds, &[RESOURCE], &one),
            "decision_of_two_restricted": decisions(rounds, &[RESOURCE, SECOND], &[TopologyPolicy::Restricted]),
            "decision_of_two_single_numa_node":
                decisions(rounds, &[RESOURCE, SECOND], &[TopologyPolicy::SingleNumaNode]),
            "admission": admissions(rounds, TopologyPolicy::None),
            "admission_single_numa_node": admissions(rounds, TopologyPolicy::SingleNumaNode),
        })
    );
}

/// Returns a ledger of 1,000 devices of each resource on 8 nodes; pods hold half of the devices.
fn ledger(resources: &[&str]) -> policy::Devices {
    let mut devices = policy::Devices::default();
    for resource in resources {
        devices.inventory.register(resource, PluginOptions::default());
        let device = |i: usize| Device {
            id: id(i),
            health: Health::Healthy,
            numa_nodes: vec![i64::try_from(i % NODES).unwrap()],
        };
        devices.inventory.list(resource, (0..DEVICES).map(device));
    }
    for pod in 0..PODS {
        decide(&mut devices, &format!("pod-{pod}"), resources, PER_POD, TopologyPolicy::None);
    }
    devices
}

/// Decides the admission of one pod, up to the plugin's answer.
fn decide(
    devices: &mut policy::Devices,
    uid: &str,
    resources: &[&str],
    count: usize,
    policy: TopologyPolicy,
) {
    let kind = ContainerKind::Lasting;
    let limits = resources.iter().map(|resource| (*resource, count)).collect();
    let wish = ContainerRequest { container: "main", kind, limits };
    let circumstances =
        policy::admission::Circumstances { policy, scope: TopologyScope::Container, ..Default::default() };
    let mut admission = Admission::new(uid, vec![wish], circumstances);
    loop {
        match admission.next(devices).unwrap() {
            Next::Free => {
                devices.holders.free_inactive(|_| true);
            }
            Next::Allocate { .. } => admission.allocated(devices, Vec::new()),
            Next::Done => return,
            Next::Ask { .. } => panic!("the plugin has no preferences"),
        }
    }
}

fn decisions(rounds: usize, resources: &[&str], policies: &[TopologyPolicy]) -> Vec<f64> {
    let ledger = ledger(resources);
    let mut samples = Vec::new();
    for _ in 0..rounds {
        for policy in policies {
            for count in [1, 2, 4, 8, 16] {
                let mut devices = ledger.clone();
                let begun = Instant::now();
                decide(&mut devices, "new", resources, count, *policy);
                samples.push(milliseconds(begun.elapsed()));
            }
        }
    }
    samples
}

/// A plugin that answers immediately.
struct Plugin;

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(
        &self,
        _request: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(api::DevicePluginOptions::default()))
    }

    type ListAndWatchStream = ReceiverStream<Result<api::ListAndWatchResponse, Status>>;

    async fn list_and_watch(
        &self,
        _request: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |i: usize| api::Device {
            id: id(i),
            health: "Healthy".to_owned(),
            topology: Some(api::TopologyInfo {
                nodes: vec![api::NumaNode { id: i64::try_from(i % NODES).unwrap() }],
            }),
        };
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            let devices = (0..DEVICES).map(device).collect();
            let _ = sender.send(Ok(api::ListAndWatchResponse { devices })).await;
            sender.closed().await;
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn get_preferred_allocation(
        &self,
        _request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("the plugin has no preferences"))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let ids = request.into_inner().container_requests.remove(0).devices_ids;
        let answer = api::ContainerAllocateResponse {
            envs: [("NVIDIA_VISIBLE_DEVICES".to_owned(), ids.join(","))].into(),
            ..Default::default()
        };
        Ok(Response::new(api::AllocateResponse { container_responses: vec![answer] }))
    }

    async fn pre_start_container(
        &self,
        _request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

/// Serves the plugin and registers it, on a separate thread.
fn serve(dir: PathBuf) {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = UnixListener::bind(dir.join("bench.sock")).unwrap();
            let server = tonic::transport::Server::builder().add_service(DevicePluginServer::new(Plugin));
            let served = tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
            register(&dir.join("kubelet.sock")).await;
            served.await.unwrap().unwrap();
        });
    });
}

async fn register(socket: &Path) {
    let channel = beelet_tests::containerd::connect(socket).await.unwrap();
    let request = api::RegisterRequest {
        version: "v1beta1".to_owned(),
        endpoint: "bench.sock".to_owned(),
        resource_name: RESOURCE.to_owned(),
        options: None,
    };
    api::registration_client::RegistrationClient::new(channel).register(request).await.unwrap();
}

/// Returns the request that a pod's admission sends to the plugin.
fn wish() -> api::AllocateRequest {
    let devices_ids = (0..PER_POD).map(id).collect();
    api::AllocateRequest { container_requests: vec![api::ContainerAllocateRequest { devices_ids }] }
}

fn id(number: usize) -> String {
    format!("GPU-9b341c59-f96b-ba85-c137-{number:012}")
}

fn pod(number: usize) -> Arc<Pod> {
    let pod = json!({
        "metadata": { "name": format!("pod-{number}"), "namespace": "default", "uid": format!("uid-{number}") },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": { RESOURCE: PER_POD.to_string() } } }] },
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

/// Aligns devices only with each other.
#[derive(Debug)]
struct Alone(TopologyManager);

impl Aligner for Alone {
    fn nodes(&self) -> NodeSet {
        self.0.nodes()
    }

    fn is_per_pod(&self) -> bool {
        false
    }

    fn align(&mut self, _: &str, devices: &ProviderHints) -> Result<Option<NodeSet>, Refusal> {
        let merged = self.0.merge(std::slice::from_ref(devices));
        match merged.admitted {
            true => Ok(merged.hint.nodes),
            false => Err(Refusal::new(Reason::TopologyAffinity, "no node has them")),
        }
    }
}

fn topology(policy: TopologyPolicy) -> TopologyManager {
    let policy = match policy {
        TopologyPolicy::SingleNumaNode => "single-numa-node",
        _ => "none",
    };
    let nodes = (0..u32::try_from(NODES).unwrap()).map(|id| Node { id, distances: None });
    let settings = TopologySettings { policy: policy.to_owned(), ..TopologySettings::default() };
    TopologyManager::new(&settings, &nodes.collect::<Vec<_>>()).unwrap()
}

/// Admits 100 pods one after the other in each round. Returns the average time of an admission per round,
/// without the plugin's own time and without a disk.
fn admissions(rounds: usize, policy: TopologyPolicy) -> Vec<f64> {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    // The same runtime as the agent's.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let folder = dir.path().to_owned();
    // A task, like each pod's worker.
    let admitting = runtime.spawn(async move {
        let settings = Settings::new(folder.clone());
        let plugins = folder.join("device-plugins");
        let registration = settings.registration_socket();
        let (requests, _ignored) = mpsc::channel(64);
        let parts = Parts {
            store: Arc::new(settings.checkpoint()),
            settings,
            active: watch::channel(None).1,
            requests,
            metrics: Metrics::default(),
            events: Recorder::default(),
            node_name: "bench".to_owned(),
        };
        let (devices, tasks) = Devices::open(parts, Vec::new);
        let (mut running, shutdown) =
            (tokio::task::JoinSet::new(), tokio_util::sync::CancellationToken::new());
        for (_, part) in tasks.named(&shutdown) {
            running.spawn(part);
        }
        while !registration.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        serve(plugins.clone());
        let mut node = devices.node();
        node.wait_for(|node| node.capacity.get(RESOURCE) == Some(&DEVICES)).await.unwrap();
        let pods: Vec<Arc<Pod>> = (0..PODS).map(pod).collect();
        let channel = beelet_tests::containerd::connect(&plugins.join("bench.sock")).await.unwrap();
        let mut bare = DevicePluginClient::new(channel);
        let mut samples = Vec::new();
        for _ in 0..rounds {
            let (mut whole, mut own) = (Duration::ZERO, Duration::ZERO);
            for pod in &pods {
                let begun = Instant::now();
                let aligner: Box<dyn Aligner> = Box::new(Alone(topology(policy)));
                devices.admit(pod, Circumstances::default(), Some(aligner)).await.unwrap();
                let admitted = Instant::now();
                bare.allocate(wish()).await.unwrap();
                whole += admitted - begun;
                own += admitted.elapsed();
            }
            let pods_of_a_round = f64::from(u32::try_from(PODS).unwrap());
            samples.push((milliseconds(whole) - milliseconds(own)) / pods_of_a_round);
            for pod in &pods {
                devices.forget(pod.metadata.uid.as_deref().unwrap());
            }
        }
        shutdown.cancel();
        samples
    });
    runtime.block_on(admitting).unwrap()
}
