//! The container events of the runtime, from runtimes that send them (containerd since 1.7).

use beelet_proto::cri;
use cri::runtime_service_client::RuntimeServiceClient;
use tonic::Streaming;

use super::error::Failure;
use super::{Error, MAX_MESSAGE, Operation, Runtime};

/// A subscription to container events. Dropping it ends the subscription.
#[derive(Debug)]
pub struct ContainerEvents {
    stream: Streaming<cri::ContainerEventResponse>,
    socket: String,
}

impl Runtime {
    /// Subscribes to container events. containerd supports one subscriber only and sends each event to just
    /// one of several subscribers: an agent that shares a node with a kubelet must leave the events to the
    /// kubelet.
    ///
    /// # Errors
    /// The call fails with an [`Error`], of [`super::Kind::Unimplemented`] if the runtime lacks the stream.
    /// Some runtimes (containerd 1.6) return that error only when the first event is awaited.
    pub async fn container_events(&self) -> Result<ContainerEvents, Error> {
        let mut client = RuntimeServiceClient::new(self.door.runtime.channel())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let socket = self.door.runtime.path.display().to_string();
        // The call has no deadline: the head of the answer may come only with the first event.
        match client.get_container_events(cri::GetEventsRequest {}).await {
            Ok(response) => Ok(ContainerEvents { stream: response.into_inner(), socket }),
            Err(status) => Err(error(&Failure::from_status(status), &socket)),
        }
    }
}

impl ContainerEvents {
    /// Returns the next event; None when the runtime has ended the stream. The future may be dropped while it
    /// waits.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn next(&mut self) -> Result<Option<cri::ContainerEventResponse>, Error> {
        self.stream.message().await.map_err(|status| error(&Failure::from_status(status), &self.socket))
    }
}

fn error(failure: &Failure, socket: &str) -> Error {
    Error {
        operation: Operation::ContainerEvents,
        subject: String::new(),
        kind: failure.kind(),
        message: failure.message(socket),
        rpc: failure.rpc(),
    }
}
