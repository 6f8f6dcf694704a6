//! What probes tell of themselves, under the kubelet's names.

use std::sync::Arc;

use beelet_policy::probe::Outcome;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::worker::Key;
use crate::pods::table::PodName;

/// The labels of `prober_probe_total`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ProbeLabels {
    /// `Liveness`, `Readiness` or `Startup`.
    pub probe_type: &'static str,
    /// `successful`, `failed` or `unknown`.
    pub result: &'static str,
    /// The container's name.
    pub container: Arc<str>,
    /// The pod's name.
    pub pod: Arc<str>,
    /// The pod's namespace.
    pub namespace: Arc<str>,
    /// The pod's UID.
    pub pod_uid: Arc<str>,
}

/// The labels of `prober_probe_duration_seconds`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct DurationLabels {
    /// As in [`ProbeLabels`].
    pub probe_type: &'static str,
    /// As in [`ProbeLabels`].
    pub container: Arc<str>,
    /// As in [`ProbeLabels`].
    pub pod: Arc<str>,
    /// As in [`ProbeLabels`].
    pub namespace: Arc<str>,
}

/// Counters; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Looks, by probe and result.
    probes: Family<ProbeLabels, Counter>,
    /// How long they took.
    durations: Family<DurationLabels, Histogram, fn() -> Histogram>,
    /// Changes of a probe's state that a kernel edge caused.
    pub edges: Counter,
    /// Canary connections sent.
    pub canaries: Counter,
    /// Probes that the kernel can't answer though it was asked to.
    pub fallbacks: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            probes: Family::default(),
            durations: Family::new_with_constructor(histogram),
            edges: Counter::default(),
            canaries: Counter::default(),
            fallbacks: Gauge::default(),
        }
    }
}

/// Prometheus' default buckets, as the kubelet has them, and two for the kernel's answers.
fn histogram() -> Histogram {
    Histogram::new([0.000_01, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0])
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("prober_probe", "Probes run, by kind and result", self.probes.clone());
        registry.register("prober_probe_duration_seconds", "How long probes took", self.durations.clone());
        registry.register(
            "beelet_probe_kernel_edges",
            "Changes of a probe's state that a kernel event caused",
            self.edges.clone(),
        );
        registry.register(
            "beelet_probe_canaries",
            "Connections sent to see whether an application that is idle still accepts",
            self.canaries.clone(),
        );
        registry.register(
            "beelet_probe_fallbacks",
            "TCP probes that connect although the kernel was to answer them",
            self.fallbacks.clone(),
        );
    }
}

/// The counters of one probe, looked up once.
#[derive(Debug)]
pub(super) struct OfProbe {
    labels: ProbeLabels,
    duration: Histogram,
    counters: [Option<Counter>; 3],
}

/// The label and the place of an outcome.
const fn result(outcome: Outcome) -> (&'static str, usize) {
    match outcome {
        Outcome::Success => ("successful", 0),
        Outcome::Failure => ("failed", 1),
        Outcome::Error => ("unknown", 2),
    }
}

impl Metrics {
    pub(super) fn of_probe(&self, key: &Key, pod: &PodName) -> OfProbe {
        let labels = ProbeLabels {
            probe_type: key.kind.title(),
            result: result(Outcome::Success).0,
            container: Arc::clone(&key.container),
            pod: pod.name.as_str().into(),
            namespace: pod.namespace.as_str().into(),
            pod_uid: Arc::clone(&key.uid),
        };
        let duration = self.durations.get_or_create_owned(&labels.duration());
        OfProbe { labels, duration, counters: [None, None, None] }
    }

    /// Takes a probe's lines out of what is served.
    pub(super) fn forget(&self, of: &OfProbe) {
        for outcome in [Outcome::Success, Outcome::Failure, Outcome::Error] {
            self.probes.remove(&ProbeLabels { result: result(outcome).0, ..of.labels.clone() });
        }
        self.durations.remove(&of.labels.duration());
    }

    pub(super) fn count(&self, of: &mut OfProbe, outcome: Outcome, seconds: f64) {
        let (label, place) = result(outcome);
        let counter = of.counters[place].get_or_insert_with(|| {
            self.probes.get_or_create_owned(&ProbeLabels { result: label, ..of.labels.clone() })
        });
        counter.inc();
        of.duration.observe(seconds);
    }
}

impl ProbeLabels {
    fn duration(&self) -> DurationLabels {
        DurationLabels {
            probe_type: self.probe_type,
            container: Arc::clone(&self.container),
            pod: Arc::clone(&self.pod),
            namespace: Arc::clone(&self.namespace),
        }
    }
}

#[cfg(test)]
mod tests {
    use beelet_policy::probe::ProbeKind;
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn probes_are_counted_under_the_kubelets_names_and_go_with_their_pod() {
        let (metrics, mut registry) = (Metrics::default(), Registry::default());
        metrics.register(&mut registry);
        let key = Key { uid: "u1".into(), container: "web".into(), kind: ProbeKind::Readiness };
        let name = PodName { namespace: "shop".to_owned(), name: "web-n1".to_owned() };
        let mut of = metrics.of_probe(&key, &name);
        metrics.count(&mut of, Outcome::Success, 0.002);
        metrics.count(&mut of, Outcome::Failure, 0.002);
        metrics.count(&mut of, Outcome::Success, 0.002);
        let text = |registry: &Registry| {
            let mut text = String::new();
            encode(&mut text, registry).unwrap();
            text
        };
        let shown = text(&registry);
        let labels = r#"container="web",pod="web-n1",namespace="shop""#;
        let line = format!(
            r#"prober_probe_total{{probe_type="Readiness",result="successful",{labels},pod_uid="u1"}} 2"#
        );
        assert!(shown.contains(&line), "{shown}");
        let line = format!(r#"prober_probe_duration_seconds_count{{probe_type="Readiness",{labels}}} 3"#);
        assert!(shown.contains(&line), "{shown}");
        metrics.forget(&of);
        assert!(!text(&registry).contains("shop"));
    }
}
