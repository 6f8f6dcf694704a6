//! Client of a registered plugin of a driver: every call has a deadline and every response a size limit.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use beelet_proto::dra::{health, v1 as wire};
use beelet_serve::client::{Link, dial_linked, lazy};
use prost::Message;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Request, Status, Streaming, client::Grpc, codegen::http::uri::PathAndQuery, transport::Channel,
};
use tonic_prost::ProstCodec;

use crate::{Error, Metrics, lock};

/// Deadline of a driver call: the kubelet's.
const TIMEOUT: Duration = Duration::from_secs(45);
/// Maximum size of a response in bytes: a base, and an addition per requested claim. The longest names of a
/// claim's devices (`check_devices`) fit with room to spare; a decoded response takes many times its size.
const MAX_ANSWER: usize = 256 << 10;
const MAX_ANSWER_OF_CLAIM: usize = 64 << 10;
/// Maximum number of characters of a driver's message that are passed on.
pub(crate) const WORDS: usize = 1024;

/// Maximum size of a device health report, in bytes.
const MAX_REPORT: usize = 256 << 10;

pub(crate) const PREPARE: &str = "NodePrepareResources";
pub(crate) const UNPREPARE: &str = "NodeUnprepareResources";

/// Registered plugin. Clones share the connection.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    /// Number of the registration, in ascending order.
    pub(crate) number: u64,
    /// Cancelled when the plugin is deregistered.
    pub(crate) deregistered: CancellationToken,
    driver: String,
    socket: PathBuf,
    /// `v1.DRAPlugin`
    service: &'static str,
    link: Link,
    channel: Arc<Mutex<Channel>>,
    metrics: Metrics,
}

impl Plugin {
    /// Returns a plugin without a connection, which the first call or [`Self::reconnect`] opens; `wake` is
    /// notified when the connection changes.
    pub(crate) fn new(
        driver: &str,
        socket: &Path,
        service: &'static str,
        wake: Arc<Notify>,
        metrics: Metrics,
    ) -> Self {
        let link = Link::waking(wake);
        let channel = Arc::new(Mutex::new(lazy(socket, &link)));
        let (driver, socket) = (driver.to_owned(), socket.to_owned());
        let deregistered = CancellationToken::new();
        Self { number: 0, deregistered, driver, socket, service, link, channel, metrics }
    }

    /// Returns the driver's name.
    pub(crate) fn driver(&self) -> &str {
        &self.driver
    }

    /// Returns the plugin's socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns true while the plugin is connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// Reconnects if the socket accepts a connection.
    pub(crate) async fn reconnect(&self) {
        if let Ok(channel) = dial_linked(&self.socket, &self.link).await {
            *lock(&self.channel) = channel;
        }
    }

    pub(crate) async fn prepare(
        &self,
        claims: Vec<wire::Claim>,
    ) -> Result<wire::NodePrepareResourcesResponse, Error> {
        let largest = largest_answer(claims.len());
        self.call(PREPARE, wire::NodePrepareResourcesRequest { claims }, largest).await
    }

    pub(crate) async fn unprepare(
        &self,
        claims: Vec<wire::Claim>,
    ) -> Result<wire::NodeUnprepareResourcesResponse, Error> {
        let largest = largest_answer(claims.len());
        self.call(UNPREPARE, wire::NodeUnprepareResourcesRequest { claims }, largest).await
    }

    /// Opens the plugin's stream of device health reports; returns when the first one arrives.
    ///
    /// # Errors
    /// The plugin has no health stream or cannot be called.
    pub(crate) async fn health(&self) -> Result<Streaming<health::NodeWatchResourcesResponse>, Status> {
        let path = PathAndQuery::from_static("/v1alpha1.DRAResourceHealth/NodeWatchResources");
        let mut client = self.client(MAX_REPORT).await?;
        let asked = Request::new(health::NodeWatchResourcesRequest {});
        // No deadline: a driver need not answer before its first report.
        let begun = client.server_streaming(asked, path, ProstCodec::default()).await?;
        Ok(begun.into_inner())
    }

    async fn call<Q, A>(&self, method: &'static str, asked: Q, largest: usize) -> Result<A, Error>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        // v1beta1 has the same messages except one missing field, so only the path differs.
        let path = format!("/k8s.io.kubelet.pkg.apis.dra.{}/{method}", self.service);
        let began = Instant::now();
        let answer = tokio::time::timeout(TIMEOUT, self.ask(&path, asked, largest)).await;
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("the driver did not answer")));
        let code = in_go(answer.as_ref().err().map_or(Code::Ok, Status::code));
        self.metrics.called(&self.driver, &path, &code, began.elapsed());
        answer.map_err(|status| Error::Call {
            method,
            code,
            message: status.message().chars().take(WORDS).collect(),
        })
    }

    async fn ask<Q, A>(&self, path: &str, asked: Q, largest: usize) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = PathAndQuery::try_from(path).map_err(|error| Status::internal(error.to_string()))?;
        let mut client = self.client(largest).await?;
        let answer = client.unary(Request::new(asked), path, ProstCodec::default()).await?;
        Ok(answer.into_inner())
    }

    /// Returns a client with this message size limit, in bytes.
    async fn client(&self, largest: usize) -> Result<Grpc<Channel>, Status> {
        let channel = lock(&self.channel).clone();
        let mut client = Grpc::new(channel).max_decoding_message_size(largest);
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(client)
    }
}

/// Returns the maximum size of a response about `claims` claims, in bytes.
fn largest_answer(claims: usize) -> usize {
    MAX_ANSWER_OF_CLAIM.saturating_mul(claims).saturating_add(MAX_ANSWER)
}

/// Returns the name of a status code in Go.
fn in_go(code: Code) -> String {
    match code {
        Code::Ok => "OK".to_owned(),
        Code::Cancelled => "Canceled".to_owned(),
        other => format!("{other:?}"),
    }
}
