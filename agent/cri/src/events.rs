//! The runtime's own word of what happens to containers, where it gives any (containerd from 1.7 on).

use beelet_proto::cri;
use cri::runtime_service_client::RuntimeServiceClient;
use tonic::Streaming;

use super::error::Failure;
use super::{Error, MAX_MESSAGE, Operation, Runtime};

/// Events as they come. Dropped, the subscription ends.
#[derive(Debug)]
pub struct ContainerEvents {
    stream: Streaming<cri::ContainerEventResponse>,
    socket: String,
}

impl Runtime {
    /// Subscribes to container events. containerd has room for one subscriber only and gives each event to
    /// one of several: whoever shares a node with a kubelet must leave it to that.
    ///
    /// # Errors
    /// As for every call: [`Error`]; [`super::Kind::Unimplemented`] where the runtime has no such stream.
    /// Some runtimes (containerd 1.6) say so only when the first event is awaited.
    pub async fn container_events(&self) -> Result<ContainerEvents, Error> {
        let mut client = RuntimeServiceClient::new(self.runtime.channel())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let socket = self.runtime.path.display().to_string();
        // No deadline: the answer's head may come with the first event only.
        match client.get_container_events(cri::GetEventsRequest {}).await {
            Ok(response) => Ok(ContainerEvents { stream: response.into_inner(), socket }),
            Err(status) => Err(error(&Failure::from_status(status), &socket)),
        }
    }
}

impl ContainerEvents {
    /// The next event; None when the runtime has ended the stream. Safe to be dropped while it waits.
    ///
    /// # Errors
    /// As for every call: [`Error`].
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
    }
}
