//! Spans over OTLP, where the configuration has `tracing`: what took how long on a pod's way, and each call
//! to the container runtime, which may go on with its own spans below ours (docs/decisions/0025-spans.md).

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use beelet_base::spans::TARGET;
use beelet_config::Tracing;
use opentelemetry::{KeyValue, trace::TracerProvider};
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{Sampler, SdkTracerProvider, SpanData, SpanExporter},
};
use tokio::runtime::{Builder, Runtime};
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{Layer, filter::Targets, registry::LookupSpan};

/// How long a collector may take for a batch.
const PATIENCE: Duration = Duration::from_secs(10);
/// What is left at the end may take so long.
const FAREWELL: Duration = Duration::from_secs(2);

/// The endpoint as a URI.
fn address(endpoint: &str) -> String {
    if endpoint.starts_with("unix:") { endpoint.to_owned() } else { format!("http://{endpoint}") }
}

/// What sends spans. Dropped, it sends those that are left.
pub(crate) struct Exporter {
    provider: SdkTracerProvider,
    /// The connection is served here, and not among the agent's own threads.
    runtime: Option<Runtime>,
}

impl Exporter {
    /// Starts it. The connection is made when there is a first batch.
    ///
    /// # Errors
    /// There are no threads for it, or the endpoint is none.
    pub(crate) fn start(tracing: &Tracing, node: &str) -> anyhow::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("spans").enable_all().build()?;
        let entered = runtime.enter();
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(address(&tracing.endpoint))
            .with_timeout(PATIENCE)
            .build()?;
        let endpoint = tracing.endpoint.clone();
        let sampler = Sampler::TraceIdRatioBased(f64::from(tracing.per_million) / 1e6);
        // The kubelet's name of itself: dashboards look for it.
        let resource = Resource::builder()
            .with_service_name("kubelet")
            .with_attribute(KeyValue::new("host.name", node.to_owned()))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(Told { exporter, endpoint, failing: AtomicBool::new(false) })
            .with_sampler(Sampler::ParentBased(Box::new(sampler)))
            .with_resource(resource)
            .build();
        drop(entered);
        Ok(Self { provider, runtime: Some(runtime) })
    }

    /// What takes the spans, and nothing else, from the agent's code.
    pub(crate) fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let layer = tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("beelet"))
            .with_location(false)
            .with_threads(false)
            .with_target(false);
        layer.with_filter(Targets::new().with_target(TARGET, LevelFilter::TRACE))
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FAREWELL) {
            tracing::debug!("the last spans were not sent: {error}");
        }
        // Dropped, it would wait for as long as the endpoint's name is looked up.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Sends, and says in the log when that begins to fail, and when it works again.
#[derive(Debug)]
struct Told<E> {
    exporter: E,
    endpoint: String,
    failing: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for Told<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let sent = self.exporter.export(batch).await;
        let failed = self.failing.swap(sent.is_err(), Ordering::Relaxed);
        match &sent {
            Err(error) if !failed => {
                tracing::warn!(endpoint = self.endpoint, spans, %error, "spans can't be sent, and are lost");
            }
            Ok(()) if failed => tracing::info!(endpoint = self.endpoint, "spans are sent again"),
            _ => {}
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn shutdown(&self) -> OTelSdkResult {
        self.exporter.shutdown()
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
