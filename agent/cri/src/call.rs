//! A single call to the runtime: its deadline, span, metrics and second attempt.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beelet_base::spans::{self, TARGET};
use beelet_units::bounds::FAR;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tracing::field::Empty;
use tracing::{Instrument, trace_span};

use super::MAX_MESSAGE;
use crate::channel::Socket;
use crate::door::Door;
use crate::error::{Error, Failure};
use crate::operation::Operation;
use beelet_proto::cri::image_service_client::ImageServiceClient;
use beelet_proto::cri::runtime_service_client::RuntimeServiceClient;

/// A call before it is sent: the fields that all calls share.
pub(crate) struct Call<'a> {
    pub(crate) door: &'a Door,
    pub(crate) operation: Operation,
    pub(crate) subject: String,
    /// None: the runtime decides when the call ends.
    pub(crate) deadline: Option<Duration>,
}

impl Door {
    /// Returns a call with the usual deadline.
    pub(super) fn call(&self, operation: Operation, subject: String) -> Call<'_> {
        Call { door: self, operation, subject, deadline: Some(self.request_timeout) }
    }
}

impl Call<'_> {
    pub(crate) async fn runtime<Q, A, F>(
        self,
        request: Q,
        send: impl Fn(RuntimeServiceClient<Channel>, Request<Q>) -> F,
    ) -> Result<A, Error>
    where
        Q: Clone,
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let socket = Arc::clone(&self.door.runtime);
        let client = RuntimeServiceClient::new(socket.channel())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        self.send(&socket, request, |request| send(client.clone(), request)).await
    }

    pub(crate) async fn images<Q, A, F>(
        self,
        request: Q,
        send: impl Fn(ImageServiceClient<Channel>, Request<Q>) -> F,
    ) -> Result<A, Error>
    where
        Q: Clone,
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let socket = Arc::clone(&self.door.images);
        let client = ImageServiceClient::new(socket.channel())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        self.send(&socket, request, |request| send(client.clone(), request)).await
    }

    async fn send<Q, A, F>(
        self,
        socket: &Socket,
        request: Q,
        send: impl Fn(Request<Q>) -> F,
    ) -> Result<A, Error>
    where
        Q: Clone,
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let started = Instant::now();
        // The kubelet's own client names and describes its spans like this (otelgrpc).
        let span = trace_span!(
            target: TARGET, "cri", otel.name = self.operation.rpc(), otel.kind = "client",
            rpc.system = "grpc", subject = self.subject.as_str(),
            otel.status_code = Empty, otel.status_description = Empty,
        );
        let parent = spans::trace_parent(&span);
        let asked = || send(self.request(request.clone(), parent.as_deref()));
        let mut result = within(self.deadline(), asked).instrument(span.clone()).await;
        let broke = result.as_ref().is_err_and(Failure::is_broken_connection);
        if broke && self.operation.is_read() {
            let again = || send(self.request(request, parent.as_deref()));
            result = within(self.deadline(), again).instrument(span.clone()).await;
        }
        if let Err(failure) = &result {
            spans::fail(&span, &failure.message(&socket.path.display().to_string()));
        }
        self.door.metrics.record(self.operation, started.elapsed(), result.is_err());
        result.map_err(|failure| Error {
            operation: self.operation,
            subject: self.subject,
            kind: failure.kind(),
            message: failure.message(&socket.path.display().to_string()),
            rpc: failure.rpc(),
        })
    }

    /// Returns the deadline, limited to the range of a gRPC header: tonic panics at more than eight digits of
    /// hours.
    fn deadline(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.min(FAR))
    }

    /// Returns the request with the deadline in its header, so the runtime ends its own work at the deadline
    /// too. The runtime's spans are children of `parent`.
    fn request<Q>(&self, message: Q, parent: Option<&str>) -> Request<Q> {
        let mut request = Request::new(message);
        if let Some(deadline) = self.deadline() {
            request.set_timeout(deadline);
        }
        if let Some(parent) = parent.and_then(|parent| AsciiMetadataValue::try_from(parent).ok()) {
            request.metadata_mut().insert("traceparent", parent);
        }
        request
    }
}

pub(crate) async fn within<A, F>(deadline: Option<Duration>, send: impl FnOnce() -> F) -> Result<A, Failure>
where
    F: Future<Output = Result<Response<A>, Status>>,
{
    let Some(deadline) = deadline else {
        return send().await.map(Response::into_inner).map_err(Failure::from_status);
    };
    // The channel's own timeout is not enough: it does not run while the channel is connecting.
    let started = tokio::time::Instant::now();
    match tokio::time::timeout(deadline, send()).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(_)) if started.elapsed() >= deadline => Err(Failure::Deadline(deadline)),
        Ok(Err(status)) => Err(Failure::from_status(status)),
        Err(_) => Err(Failure::Deadline(deadline)),
    }
}
