//! Exports spans over OTLP if the configuration has `tracing`: the steps of a pod's start and stop, and each
//! call to the container runtime, which may add its own child spans (docs/decisions/0025-spans.md).

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

/// Timeout of the export of a batch.
const PATIENCE: Duration = Duration::from_secs(10);
/// Timeout of the last export when the agent stops.
const FAREWELL: Duration = Duration::from_secs(2);

/// Returns the endpoint as a URI.
fn address(endpoint: &str) -> String {
    if endpoint.starts_with("unix:") { endpoint.to_owned() } else { format!("http://{endpoint}") }
}

/// Exporter of spans. Dropping it sends the remaining spans.
pub(crate) struct Exporter {
    provider: SdkTracerProvider,
    /// Runtime of the connection, separate from the agent's own threads.
    runtime: Option<Runtime>,
}

impl Exporter {
    /// Starts the exporter. The first batch opens the connection.
    ///
    /// # Errors
    /// The system cannot create threads, or the endpoint is invalid.
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
        // The kubelet's service name, which dashboards use.
        let resource = Resource::builder()
            .with_service_name("kubelet")
            .with_attribute(KeyValue::new("host.name", node.to_owned()))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(Logged { exporter, endpoint, failing: AtomicBool::new(false) })
            .with_sampler(Sampler::ParentBased(Box::new(sampler)))
            .with_resource(resource)
            .build();
        drop(entered);
        Ok(Self { provider, runtime: Some(runtime) })
    }

    /// Returns the layer that collects the agent's spans, and no other events.
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
            tracing::debug!("cannot send the last spans: {error}");
        }
        // Dropping the runtime would wait for a pending lookup of the endpoint's name.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Exporter that logs the first failure and the recovery.
#[derive(Debug)]
struct Logged<E> {
    exporter: E,
    endpoint: String,
    failing: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for Logged<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let sent = self.exporter.export(batch).await;
        let failed = self.failing.swap(sent.is_err(), Ordering::Relaxed);
        match &sent {
            Err(error) if !failed => {
                tracing::warn!(endpoint = self.endpoint, spans, %error, "cannot send spans; dropping them");
            }
            Ok(()) if failed => tracing::info!(endpoint = self.endpoint, "sending spans again"),
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
