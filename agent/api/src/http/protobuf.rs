//! The registry as Prometheus' protobuf (`io.prometheus.client.MetricFamily`, delimited), for who asks for it: the only form
//! that has native histograms.
//!
//! It is made from the text, which is ours, so both forms always say the same; only the native histograms come from the
//! reading itself.

use std::collections::BTreeMap;

use axum::http::{HeaderMap, header};
use beelet_proto::prometheus::{
    Bucket, BucketSpan, Histogram, LabelPair, Metric, MetricFamily, MetricType, Value,
};
use prost::Message as _;

use beelet_stats::metrics::{RUNQUEUE, RUNQUEUE_NATIVE};
use beelet_stats::model::{KernelCounters, NodePressure, RUNQ_BUCKETS};

/// What it is called.
pub(super) const CONTENT_TYPE: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";
/// Shorter waits than 2 to this are in one bucket, in nanoseconds.
const ZERO_POWER: i32 = 10;

/// Whether `Accept` prefers protobuf to every text.
pub(super) fn is_wanted(headers: &HeaderMap) -> bool {
    let (mut protobuf, mut text) = (0.0_f64, 0.0_f64);
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    for range in accepted.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let parameters: BTreeMap<String, &str> = parts
            .filter_map(|part| part.split_once('='))
            .map(|(key, value)| (key.trim().to_ascii_lowercase(), value.trim().trim_matches('"')))
            .collect();
        let weight = parameters.get("q").map_or(1.0, |q| q.parse().unwrap_or(0.0));
        let is = |key: &str, wanted: &str| parameters.get(key).is_some_and(|value| *value == wanted);
        match kind.as_str() {
            "application/vnd.google.protobuf"
                if is("proto", "io.prometheus.client.MetricFamily") && is("encoding", "delimited") =>
            {
                protobuf = protobuf.max(weight);
            }
            "application/openmetrics-text" | "text/plain" | "text/*" => text = text.max(weight),
            _ => {}
        }
    }
    protobuf > 0.0 && protobuf >= text
}

/// The families of an OpenMetrics text, and the native histograms of what was read.
pub(super) fn body(text: &str, pressure: &NodePressure) -> Vec<u8> {
    let mut body = Vec::with_capacity(text.len());
    for family in families(text) {
        let native = (family.name() == RUNQUEUE.0).then(|| native(&family, pressure));
        for family in std::iter::once(family).chain(native).filter(|family| !family.metric.is_empty()) {
            // Memory is all that it needs.
            let _ = family.encode_length_delimited(&mut body);
        }
    }
    body
}

/// A line with a value.
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

/// A text's families in its order.
fn families(text: &str) -> Vec<MetricFamily> {
    let mut families: Vec<Family> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap_or((rest, ""));
            families.push(Family { name: name.to_owned(), help: help.to_owned(), ..Family::default() });
        } else if let (Some(rest), Some(family)) = (line.strip_prefix("# TYPE "), families.last_mut()) {
            rest.split(' ').next_back().unwrap_or_default().clone_into(&mut family.kind);
        } else if let (Some(sample), Some(family)) = (sample(line), families.last_mut()) {
            family.samples.push(sample);
        }
    }
    families.into_iter().map(Family::finish).collect()
}

#[derive(Default)]
struct Family {
    name: String,
    help: String,
    kind: String,
    samples: Vec<Sample>,
}

impl Family {
    fn finish(self) -> MetricFamily {
        let (kind, suffix) = match self.kind.as_str() {
            // Unlike OpenMetrics, this form has a counter's whole name.
            "counter" => (MetricType::Counter, "_total"),
            "gauge" => (MetricType::Gauge, ""),
            "histogram" => (MetricType::Histogram, ""),
            _ => (MetricType::Untyped, ""),
        };
        let metric = match kind {
            MetricType::Histogram => histograms(&self.name, self.samples),
            _ => self.samples.into_iter().map(|sample| single(kind, sample)).collect(),
        };
        MetricFamily {
            name: Some(format!("{}{suffix}", self.name)),
            help: Some(self.help),
            r#type: Some(kind.into()),
            metric,
        }
    }
}

fn single(kind: MetricType, sample: Sample) -> Metric {
    let value = Some(Value { value: Some(sample.value) });
    let metric = Metric { label: pairs(sample.labels), ..Metric::default() };
    match kind {
        MetricType::Counter => Metric { counter: value, ..metric },
        MetricType::Gauge => Metric { gauge: value, ..metric },
        _ => Metric { untyped: value, ..metric },
    }
}

fn pairs(labels: Vec<(String, String)>) -> Vec<LabelPair> {
    labels.into_iter().map(|(name, value)| LabelPair { name: Some(name), value: Some(value) }).collect()
}

/// Counts are whole, and as exact as the text.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn count(value: f64) -> u64 {
    value as u64
}

/// The samples of each set of labels in one.
fn histograms(name: &str, samples: Vec<Sample>) -> Vec<Metric> {
    let mut found: BTreeMap<Vec<(String, String)>, Histogram> = BTreeMap::new();
    for mut sample in samples {
        let bound = sample.labels.iter().position(|(label, _)| label == "le");
        let bound = bound.map(|at| sample.labels.remove(at).1);
        let histogram = found.entry(sample.labels).or_default();
        match (sample.name.strip_prefix(name), bound.as_deref()) {
            // Every value is below the last one: it says the same as the count.
            (Some("_bucket"), Some("+Inf") | None) => {}
            (Some("_bucket"), Some(bound)) => histogram.bucket.push(Bucket {
                cumulative_count: Some(count(sample.value)),
                upper_bound: bound.parse().ok(),
            }),
            (Some("_count"), _) => histogram.sample_count = Some(count(sample.value)),
            (Some("_sum"), _) => histogram.sample_sum = Some(sample.value),
            _ => {}
        }
    }
    let metric = |(labels, histogram)| Metric {
        label: pairs(labels),
        histogram: Some(histogram),
        ..Metric::default()
    };
    found.into_iter().map(metric).collect()
}

/// `name{label="value",…} 1.5`; None of anything else.
fn sample(line: &str) -> Option<Sample> {
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((label.trim_start_matches(',').to_owned(), value));
            rest = after;
        }
        rest = &rest[1..];
    }
    let value = rest.trim_start().split(' ').next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// Up to the quote, without the escapes; and what comes after it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

/// The native histograms of the same containers, with the same labels.
fn native(classic: &MetricFamily, pressure: &NodePressure) -> MetricFamily {
    let kernel = |metric: &Metric| {
        let label = |name: &str| metric.label.iter().find(|pair| pair.name() == name).map(LabelPair::value);
        let found = pressure.readings().find(|(pod, container, _)| {
            label("namespace") == Some(pod.name.namespace.as_str())
                && label("pod") == Some(pod.name.name.as_str())
                && label("container") == Some(container.name.as_str())
        });
        found.and_then(|(_, _, reading)| reading.counters.kernel.as_deref())
    };
    let metric = classic.metric.iter().filter_map(|metric| {
        let histogram = Some(native_histogram(kernel(metric)?));
        Some(Metric { label: metric.label.clone(), histogram, ..Metric::default() })
    });
    MetricFamily {
        name: Some(RUNQUEUE_NATIVE.0.to_owned()),
        help: Some(RUNQUEUE_NATIVE.1.to_owned()),
        r#type: Some(MetricType::Histogram.into()),
        metric: metric.collect(),
    }
}

/// The kernel's first bucket goes to 2^10 ns, the others each to twice as much: all of them as one span, without those at
/// the end that are empty.
fn native_histogram(kernel: &KernelCounters) -> Histogram {
    let [zero, counts @ ..] = &kernel.runq;
    let length = RUNQ_BUCKETS - 1 - counts.iter().rev().take_while(|count| **count == 0).count();
    let signed = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let mut before = 0;
    let deltas = counts[..length].iter().map(|count| {
        let count = signed(*count);
        count - std::mem::replace(&mut before, count)
    });
    let positive_delta: Vec<i64> = deltas.collect();
    let positive_span = BucketSpan { offset: Some(ZERO_POWER + 1), length: u32::try_from(length).ok() };
    Histogram {
        sample_count: Some(kernel.runq.iter().sum()),
        sample_sum: Some(kernel.runq_wait_ns as f64),
        schema: Some(0),
        zero_threshold: Some(f64::from(1 << ZERO_POWER)),
        zero_count: Some(*zero),
        // A native histogram without any bucket still needs a span to be one.
        positive_span: vec![positive_span],
        positive_delta,
        ..Histogram::default()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// All families of a body.
    pub(crate) fn decode(mut body: &[u8]) -> Vec<MetricFamily> {
        let mut families = Vec::new();
        while !body.is_empty() {
            families.push(MetricFamily::decode_length_delimited(&mut body).unwrap());
        }
        families
    }

    #[test]
    fn protobuf_is_for_who_prefers_it() {
        const PROTO: &str =
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
        for (accept, expected) in [
            (PROTO.to_owned(), true),
            (format!("{PROTO};q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"), true),
            (format!("application/openmetrics-text;version=1.0.0;q=0.6,{PROTO};q=0.5"), false),
            (format!("{PROTO};q=0"), false),
            ("application/vnd.google.protobuf;proto=other;encoding=delimited".to_owned(), false),
            ("*/*".to_owned(), false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, accept.parse().unwrap());
            assert_eq!(is_wanted(&headers), expected, "{accept}");
        }
        assert!(!is_wanted(&HeaderMap::new()));
    }

    #[test]
    fn a_text_becomes_families_with_everything_in_it() {
        let text = "# HELP x An x.\n# TYPE x counter\nx_total{a=\"b\\\"\\n,}\",c=\"d\"} 3\n\
                    # HELP g A g.\n# TYPE g gauge\ng 1.5\n\
                    # HELP h An h.\n# TYPE h histogram\nh_sum{a=\"1\"} 2.5\nh_count{a=\"1\"} 4\n\
                    h_bucket{le=\"0.5\",a=\"1\"} 3\nh_bucket{le=\"+Inf\",a=\"1\"} 4\n# EOF\n";
        let families = decode(&body(text, &NodePressure::nothing_yet()));
        let [x, g, h] = families.as_slice() else { panic!("{families:#?}") };
        assert_eq!((x.name(), x.help(), x.r#type()), ("x_total", "An x.", MetricType::Counter));
        let label = |metric: &Metric, at: usize| metric.label[at].value().to_owned();
        assert_eq!((label(&x.metric[0], 0).as_str(), label(&x.metric[0], 1).as_str()), ("b\"\n,}", "d"));
        assert_eq!(x.metric[0].counter.unwrap().value(), 3.0);
        assert_eq!((g.name(), g.metric[0].gauge.unwrap().value()), ("g", 1.5));
        let histogram = h.metric[0].histogram.as_ref().unwrap();
        assert_eq!((histogram.sample_count(), histogram.sample_sum()), (4, 2.5));
        assert_eq!(
            (
                histogram.bucket.len(),
                histogram.bucket[0].upper_bound(),
                histogram.bucket[0].cumulative_count()
            ),
            (1, 0.5, 3)
        );
        assert_eq!(h.metric[0].label.len(), 1);
    }
}
