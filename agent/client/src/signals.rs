//! Client of the agent's signals, for `beelet top` and the tests.

use std::path::Path;

use beelet_proto::beelet::signals_client::SignalsClient;
use beelet_proto::beelet::{SignalEdge, SignalSnapshot, SignalSnapshotRequest, SignalWatchRequest};
use tonic::Streaming;
use tonic::transport::Channel;

use crate::{ClientError, MAX_MESSAGE, connect};

/// A connection to a running agent's signals.
#[derive(Debug, Clone)]
pub struct Client {
    signals: SignalsClient<Channel>,
}

impl Client {
    /// Connects to the agent's socket at `path`.
    ///
    /// # Errors
    /// No process listens there, or this user may not connect.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let signals = SignalsClient::new(connect(path).await?).max_decoding_message_size(MAX_MESSAGE);
        Ok(Self { signals })
    }

    /// Returns the current state of the node.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn snapshot(&mut self, namespace: &str) -> Result<SignalSnapshot, ClientError> {
        let request = SignalSnapshotRequest { namespace: namespace.to_owned() };
        Ok(self.signals.snapshot(request).await?.into_inner())
    }

    /// Streams the state of the node, once per tick.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn snapshots(&mut self, namespace: &str) -> Result<Streaming<SignalSnapshot>, ClientError> {
        let request = SignalSnapshotRequest { namespace: namespace.to_owned() };
        Ok(self.signals.watch_snapshots(request).await?.into_inner())
    }

    /// Streams edges as they occur.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn edges(&mut self, request: SignalWatchRequest) -> Result<Streaming<SignalEdge>, ClientError> {
        Ok(self.signals.watch(request).await?.into_inner())
    }
}
