//! Connections to ports of pods through the runtime's streaming server.

use beelet_cri::{Runtime, forward};
use beelet_proto::beelet as proto;
use beelet_proto::beelet::port_input::Input;
use beelet_proto::cri;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::{QUEUE, Service, not_found};

/// Messages to the client.
type Outputs = mpsc::Sender<Result<proto::PortOutput, Status>>;

impl Service {
    /// Connects a client with a port of a pod.
    pub(super) async fn forward_port(
        &self,
        mut inputs: Streaming<proto::PortInput>,
    ) -> Result<ReceiverStream<Result<proto::PortOutput, Status>>, Status> {
        let first = inputs.message().await?.and_then(|input| input.input);
        let Some(Input::Start(start)) = first else {
            return Err(Status::invalid_argument("the first piece must name the pod and the port"));
        };
        let Ok(port @ 1..) = u16::try_from(start.port) else {
            return Err(Status::invalid_argument(format!("invalid port {}: use 1 to 65535", start.port)));
        };
        let uid = {
            let table = self.pods.borrow();
            let (_, entry) = table.find(&start.namespace, &start.pod).map_err(not_found)?;
            entry.pod.metadata.uid.clone().unwrap_or_default()
        };
        let sandbox = sandbox(&self.runtime, &uid).await?;
        let sandbox = sandbox.ok_or_else(|| {
            Status::failed_precondition(format!(
                "pod {} is not running: see `beelet describe pod {0}`",
                start.pod
            ))
        })?;
        let url = self.runtime.streams.port_forward(&sandbox, vec![i32::from(port)]).await;
        let url = url.map_err(|error| Status::unavailable(error.to_string()))?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(connect(url, port, inputs, sender, self.shutdown.clone()));
        Ok(ReceiverStream::new(receiver))
    }
}

/// Returns the newest ready sandbox of a pod.
async fn sandbox(runtime: &Runtime, uid: &str) -> Result<Option<String>, Status> {
    let sandboxes = runtime.sandboxes.of_pod(uid).await;
    let sandboxes = sandboxes.map_err(|error| Status::unavailable(error.to_string()))?;
    let ready = cri::PodSandboxState::SandboxReady as i32;
    let newest = sandboxes.into_iter().filter(|one| one.state == ready).max_by_key(|one| one.created_at);
    Ok(newest.map(|sandbox| sandbox.id))
}

/// Copies data both ways until one side closes.
async fn connect(
    url: String,
    port: u16,
    mut inputs: Streaming<proto::PortInput>,
    sender: Outputs,
    shutdown: CancellationToken,
) {
    let (to_port, input) = mpsc::channel(QUEUE);
    let (output, mut from_port) = mpsc::channel(QUEUE);
    let reading = async move {
        while let Ok(Some(message)) = inputs.message().await {
            let Some(Input::Data(bytes)) = message.input else { continue };
            if to_port.send(bytes).await.is_err() {
                return;
            }
        }
    };
    let sending = async {
        while let Some(data) = from_port.recv().await {
            if sender.send(Ok(proto::PortOutput { data })).await.is_err() {
                return;
            }
        }
    };
    let copying = async {
        let forwarded = async { tokio::join!(forward::forward(&url, port, input, output), sending).0 };
        // The client may close its side first and still read.
        let never = async {
            reading.await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = forwarded => ended,
            () = never => Ok(()),
        }
    };
    let failed = tokio::select! {
        ended = copying => ended.err().map(|error| error.to_string()),
        () = sender.closed() => None,
        () = shutdown.cancelled() => Some("the agent is shutting down".to_owned()),
    };
    if let Some(error) = failed {
        // The client may have disconnected.
        let _ = sender.try_send(Err(Status::unavailable(error)));
    }
}
