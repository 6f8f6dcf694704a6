//! Connections to the API server in a simulation ([`beelet_base::simulation`]).

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use beelet_base::simulation::{self, Stream};
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tower::Service;

/// Connects by the simulated network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connector;

impl Service<http::Uri> for Connector {
    type Response = TokioIo<Line>;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, server: http::Uri) -> Self::Future {
        let opened = simulation::connect(server.host().unwrap_or_default());
        std::future::ready(opened.map(|stream| TokioIo::new(Line(stream))))
    }
}

/// A connection to the simulated API server.
pub(crate) struct Line(Box<dyn Stream>);

impl Connection for Line {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
