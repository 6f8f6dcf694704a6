//! Spans: what took how long on a pod's way. Code opens them by `tracing::trace_span!` with [`TARGET`]. Where
//! the configuration has no `tracing` each is one look at a flag.

use std::fmt::Display;

use opentelemetry::trace::TraceContextExt;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The target of all spans, which tells them from what the log says.
pub const TARGET: &str = "spans";

/// Says on a span that what it is about failed, and why. The span must have the two fields.
pub fn fail(span: &Span, why: &dyn Display) {
    if !span.is_disabled() {
        span.record("otel.status_code", "ERROR");
        span.record("otel.status_description", tracing::field::display(why));
    }
}

/// The span for who continues it elsewhere, as the value of a `traceparent` header (W3C Trace Context,
/// section 3.2). None where nobody collects spans.
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
