//! The calls that prepare streams: commands, attachments and ports.

use std::sync::Arc;

use beelet_proto::cri;

use super::door::Door;
use super::subject::{container, sandbox};
use super::{Error, Operation};

/// The streams of the runtime: each call returns an address, for [`super::stream`] or [`super::forward`].
#[derive(Clone, Debug)]
pub struct Streams(pub(super) Arc<Door>);

impl Streams {
    /// Prepares a command in a container; returns the address of its streams, which works once.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn exec(&self, request: cri::ExecRequest) -> Result<String, Error> {
        let subject = container(&request.container_id);
        let response = self
            .0
            .call(Operation::Exec, subject)
            .runtime(request, |mut client, request| async move { client.exec(request).await })
            .await?;
        Ok(response.url)
    }

    /// Prepares to attach to a container's first process; returns the address of its streams,
    /// which works once.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn attach(&self, request: cri::AttachRequest) -> Result<String, Error> {
        let subject = container(&request.container_id);
        let response = self
            .0
            .call(Operation::Attach, subject)
            .runtime(request, |mut client, request| async move { client.attach(request).await })
            .await?;
        Ok(response.url)
    }

    /// Prepares to forward ports of a sandbox; returns the address of their streams, which works once.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn port_forward(&self, id: &str, ports: Vec<i32>) -> Result<String, Error> {
        let request = cri::PortForwardRequest { pod_sandbox_id: id.to_owned(), port: ports };
        let response = self
            .0
            .call(Operation::PortForward, sandbox(id))
            .runtime(request, |mut client, request| async move { client.port_forward(request).await })
            .await?;
        Ok(response.url)
    }
}
