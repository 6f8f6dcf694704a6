//! Fake runtime on a socket: every call is recorded, passes the script, and is then answered by the world.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use beelet_proto::cri;
use cri::image_service_server::{ImageService, ImageServiceServer};
use cri::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use http_body_util::{BodyExt as _, Full};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::body::Body;
use tonic::{Request, Response, Status};

use super::Shared;
use super::calls::{Asked, Op, Wrapped};
use super::script::{Act, Fault};
use super::world::{World, lacking};

/// Largest message, in bytes, as in containerd.
const MAX_MESSAGE: usize = 16 << 20;

/// Command to a running server.
pub(super) enum Signal {
    /// Break every connection, and continue to listen.
    Sever,
    /// Break every connection, and stop listening.
    Stop,
}

/// Serves until stopped, on its own thread with its own async runtime: dropping that runtime ends every
/// connection at once, like a killed process.
pub(super) fn serve(
    listener: &UnixListener,
    shared: &Arc<Shared>,
    mut signals: mpsc::UnboundedReceiver<Signal>,
) {
    loop {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        let signal = runtime.block_on(async {
            let Ok(listener) = listener.try_clone().and_then(tokio::net::UnixListener::from_std) else {
                return None;
            };
            let service = Service { shared: Arc::clone(shared) };
            let calls = RuntimeServiceServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE);
            let images = ImageServiceServer::new(service).max_decoding_message_size(MAX_MESSAGE);
            let server = tonic::transport::Server::builder()
                .layer(tower::util::MapResponseLayer::new(rewritten))
                .add_service(calls.max_encoding_message_size(MAX_MESSAGE))
                .add_service(images.max_encoding_message_size(MAX_MESSAGE))
                .serve_with_incoming(UnixListenerStream::new(listener));
            tokio::select! {
                signal = signals.recv() => signal,
                _ = server => None,
            }
        });
        drop(runtime);
        match signal {
            Some(Signal::Sever) => {}
            Some(Signal::Stop) | None => return,
        }
    }
}

/// Serves one connection in memory until its end.
pub(super) async fn serve_connection(shared: Arc<Shared>, connection: tokio::io::DuplexStream) {
    let service = Service { shared };
    let calls = RuntimeServiceServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE);
    let images = ImageServiceServer::new(service).max_decoding_message_size(MAX_MESSAGE);
    let incoming = futures::stream::iter([Ok::<_, std::io::Error>(connection)]);
    let server = tonic::transport::Server::builder()
        .add_service(calls.max_encoding_message_size(MAX_MESSAGE))
        .add_service(images.max_encoding_message_size(MAX_MESSAGE));
    // The end of a connection is not a failure of the runtime.
    let _ = server.serve_with_incoming(incoming).await;
}

/// Replacement of an answer's body.
#[derive(Clone)]
struct Rewritten(Vec<u8>);

/// Replaces tonic's body by the test's body, if any.
fn rewritten(mut response: http::Response<Body>) -> http::Response<Body> {
    let Some(Rewritten(bytes)) = response.extensions_mut().remove() else { return response };
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let body =
        Full::new(prost::bytes::Bytes::from(bytes)).with_trailers(std::future::ready(Some(Ok(trailers))));
    response.map(|_| Body::new(body))
}

#[derive(Clone)]
struct Service {
    shared: Arc<Shared>,
}

impl Service {
    /// Records a call, applies the script, and lets the world answer.
    async fn answer<const OP: u8, Q: Clone, A: Message>(
        &self,
        request: Request<Q>,
        work: fn(&mut World, Q) -> Result<A, Status>,
    ) -> Result<Response<A>, Status>
    where
        Asked: From<Wrapped<OP, Q>>,
    {
        let header =
            |name| request.metadata().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let (timeout, parent) = (header("grpc-timeout"), header("traceparent"));
        let message = request.into_inner();
        let asked = Asked::from(Wrapped::<OP, Q>(message.clone()));
        if let Some(director) = &self.shared.director {
            director.before(&asked).await?;
            let result = self.shared.work(|world| {
                director.prepare(world, &asked);
                let result = work(world, message);
                director.follow(world, &asked);
                result
            });
            director.after(&asked).await?;
            return result.map(Response::new);
        }
        let (arrival, delay, act) = self.shared.arrive(asked, timeout, parent);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let mut instead = None;
        let result = match act {
            Act::Proceed => self.shared.work(|world| work(world, message)),
            Act::Fault(Fault::Fail(status)) => Err(status),
            Act::LoseReply => {
                // The caller must not learn the result.
                let _ = self.shared.work(|world| work(world, message));
                Err(Status::unavailable("the reply was lost"))
            }
            Act::Fault(Fault::Sever) => {
                let _ = self.shared.work(|world| work(world, message));
                self.shared.sever();
                std::future::pending().await
            }
            Act::Hold(gate) => {
                gate.wait().await;
                self.shared.work(|world| work(world, message))
            }
            Act::HoldReply(gate) => {
                let result = self.shared.work(|world| work(world, message));
                gate.wait().await;
                result
            }
            Act::Fault(Fault::Rewrite(rewrite)) => {
                let result = self.shared.work(|world| work(world, message));
                instead = result.as_ref().ok().map(|answer| Rewritten(rewrite(answer.encode_to_vec())));
                result
            }
        };
        arrival.finish(&result);
        result.map(|answer| {
            let mut response = Response::new(answer);
            if let Some(instead) = instead {
                response.extensions_mut().insert(instead);
            }
            response
        })
    }
}

/// Sends an event of every container change, until the subscriber disconnects.
async fn send_events(
    shared: Arc<Shared>,
    mut before: BTreeMap<String, cri::ContainerState>,
    sender: mpsc::Sender<Result<cri::ContainerEventResponse, Status>>,
) {
    let mut changes = shared.changes.subscribe();
    loop {
        let now = shared.lock().world.states();
        let events = now.iter().filter(|(id, state)| before.get(*id) != Some(state)).map(|(id, state)| {
            let kind = match state {
                cri::ContainerState::ContainerCreated => cri::ContainerEventType::ContainerCreatedEvent,
                cri::ContainerState::ContainerRunning => cri::ContainerEventType::ContainerStartedEvent,
                _ => cri::ContainerEventType::ContainerStoppedEvent,
            };
            (id.clone(), kind)
        });
        let gone = before.keys().filter(|id| !now.contains_key(*id));
        let gone = gone.map(|id| (id.clone(), cri::ContainerEventType::ContainerDeletedEvent));
        for (id, kind) in events.chain(gone).collect::<Vec<_>>() {
            let event = cri::ContainerEventResponse {
                container_id: id,
                container_event_type: kind.into(),
                ..cri::ContainerEventResponse::default()
            };
            if sender.send(Ok(event)).await.is_err() {
                return;
            }
        }
        before = now;
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = sender.closed() => return,
        }
    }
}

/// Defines a service of CRI: one line per call, `method: Call(request) -> response = answering function`.
macro_rules! service {
    ($service:ident {
        $($method:ident: $op:ident($request:ident) -> $response:ident = $work:expr;)*
    } $($rest:tt)*) => {
        #[tonic::async_trait]
        impl $service for Service {
            $(async fn $method(
                &self,
                request: Request<cri::$request>,
            ) -> Result<Response<cri::$response>, Status> {
                self.answer::<{ Op::$op as u8 }, _, _>(request, $work).await
            })*
            $($rest)*
        }
    };
}

service! { RuntimeService {
    version: Version(VersionRequest) -> VersionResponse = World::version;
    status: Status(StatusRequest) -> StatusResponse = World::status;
    runtime_config: RuntimeConfig(RuntimeConfigRequest) -> RuntimeConfigResponse = World::runtime_config;
    update_runtime_config: UpdateRuntimeConfig(UpdateRuntimeConfigRequest) -> UpdateRuntimeConfigResponse = World::update_runtime_config;
    run_pod_sandbox: RunPodSandbox(RunPodSandboxRequest) -> RunPodSandboxResponse = World::run_pod_sandbox;
    stop_pod_sandbox: StopPodSandbox(StopPodSandboxRequest) -> StopPodSandboxResponse = World::stop_pod_sandbox;
    remove_pod_sandbox: RemovePodSandbox(RemovePodSandboxRequest) -> RemovePodSandboxResponse = World::remove_pod_sandbox;
    pod_sandbox_status: PodSandboxStatus(PodSandboxStatusRequest) -> PodSandboxStatusResponse = World::pod_sandbox_status;
    list_pod_sandbox: ListPodSandbox(ListPodSandboxRequest) -> ListPodSandboxResponse = World::list_pod_sandbox;
    create_container: CreateContainer(CreateContainerRequest) -> CreateContainerResponse = World::create_container;
    start_container: StartContainer(StartContainerRequest) -> StartContainerResponse = World::start_container;
    stop_container: StopContainer(StopContainerRequest) -> StopContainerResponse = World::stop_container;
    remove_container: RemoveContainer(RemoveContainerRequest) -> RemoveContainerResponse = World::remove_container;
    list_containers: ListContainers(ListContainersRequest) -> ListContainersResponse = World::list_containers;
    container_status: ContainerStatus(ContainerStatusRequest) -> ContainerStatusResponse = World::container_status;
    update_container_resources: UpdateContainerResources(UpdateContainerResourcesRequest) -> UpdateContainerResourcesResponse = World::update_container_resources;
    reopen_container_log: ReopenContainerLog(ReopenContainerLogRequest) -> ReopenContainerLogResponse = World::reopen_container_log;
    exec_sync: ExecSync(ExecSyncRequest) -> ExecSyncResponse = World::exec_sync;
    exec: Exec(ExecRequest) -> ExecResponse = World::exec;
    attach: Attach(AttachRequest) -> AttachResponse = World::attach;
    port_forward: PortForward(PortForwardRequest) -> PortForwardResponse = World::port_forward;
    container_stats: ContainerStats(ContainerStatsRequest) -> ContainerStatsResponse = lacking;
    list_container_stats: ListContainerStats(ListContainerStatsRequest) -> ListContainerStatsResponse = World::list_container_stats;
    pod_sandbox_stats: PodSandboxStats(PodSandboxStatsRequest) -> PodSandboxStatsResponse = lacking;
    list_pod_sandbox_stats: ListPodSandboxStats(ListPodSandboxStatsRequest) -> ListPodSandboxStatsResponse = lacking;
    checkpoint_container: CheckpointContainer(CheckpointContainerRequest) -> CheckpointContainerResponse = lacking;
    list_metric_descriptors: ListMetricDescriptors(ListMetricDescriptorsRequest) -> ListMetricDescriptorsResponse = lacking;
    list_pod_sandbox_metrics: ListPodSandboxMetrics(ListPodSandboxMetricsRequest) -> ListPodSandboxMetricsResponse = lacking;
}
    type GetContainerEventsStream = ReceiverStream<Result<cri::ContainerEventResponse, Status>>;

    async fn get_container_events(
        &self,
        request: Request<cri::GetEventsRequest>,
    ) -> Result<Response<Self::GetContainerEventsStream>, Status> {
        let before = self.shared.lock().world.states();
        let answered = self
            .answer::<{ Op::GetContainerEvents as u8 }, _, _>(request, World::get_container_events)
            .await?;
        let (sender, receiver) = mpsc::channel(64);
        tokio::spawn(send_events(Arc::clone(&self.shared), before, sender));
        Ok(answered.map(|()| ReceiverStream::new(receiver)))
    }
}

service! { ImageService {
    list_images: ListImages(ListImagesRequest) -> ListImagesResponse = World::list_images;
    image_status: ImageStatus(ImageStatusRequest) -> ImageStatusResponse = World::image_status;
    pull_image: PullImage(PullImageRequest) -> PullImageResponse = World::pull_image;
    remove_image: RemoveImage(RemoveImageRequest) -> RemoveImageResponse = World::remove_image;
    image_fs_info: ImageFsInfo(ImageFsInfoRequest) -> ImageFsInfoResponse = World::image_fs_info;
} }
