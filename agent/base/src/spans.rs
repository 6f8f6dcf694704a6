//! Spans: the durations of the steps of a pod's life. Code opens them by `tracing::trace_span!` with
//! [`TARGET`]. Without `tracing` in the configuration each span costs one check of a flag.

use std::fmt::Display;

use opentelemetry::trace::TraceContextExt;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Target of all spans, which distinguishes them from log events.
pub const TARGET: &str = "spans";

/// Records a failure and its reason on a span. The span must have the two fields.
pub fn fail(span: &Span, why: &dyn Display) {
    if !span.is_disabled() {
        span.record("otel.status_code", "ERROR");
        span.record("otel.status_description", tracing::field::display(why));
    }
}

/// Returns the span as the value of a `traceparent` header (W3C Trace Context, section 3.2), for another
/// process that continues the trace. `None` if spans are not collected.
#[must_use]
pub fn trace_parent(span: &Span) -> Option<String> {
    if span.is_disabled() {
        return None;
    }
    let context = span.context();
    let span = context.span();
    let known = span.span_context();
    let (trace, id, flags) = (known.trace_id(), known.span_id(), known.trace_flags().to_u8());
    known.is_valid().then(|| format!("00-{trace}-{id}-{flags:02x}"))
}
