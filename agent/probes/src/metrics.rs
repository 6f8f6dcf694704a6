//! Metrics of the probes, under the kubelet's names.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use beelet_policy::probe::Outcome;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter, counter::Counter, gauge::Gauge},
    registry::Registry,
};

use super::ids::Key;
use beelet_model::table::PodName;

/// Buckets in seconds: Prometheus' defaults, which the kubelet uses, and two for the kernel's answers.
const BOUNDS: [f64; 13] = [0.000_01, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Counters of a probe. Each probe has its own, since a node makes thousands of equal checks per second: all
/// fields that a success by the kernel changes are in a single line of the CPU's caches.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Tally {
    /// Checks by [`result`].
    outcomes: [AtomicU64; 3],
    /// Total duration of the checks.
    nanoseconds: AtomicU64,
    /// Checks by duration: up to each of [`BOUNDS`], and longer.
    durations: [AtomicU64; BOUNDS.len() + 1],
    of: Labels,
}

/// The labels of a probe.
#[derive(Debug)]
struct Labels {
    /// `Liveness`, `Readiness` or `Startup`.
    probe_type: &'static str,
    container: Arc<str>,
    pod: String,
    namespace: String,
    pod_uid: Arc<str>,
}

impl Labels {
    /// Returns the labels of `prober_probe_duration_seconds`.
    fn of_durations(&self) -> [(&'static str, &str); 4] {
        [
            ("probe_type", self.probe_type),
            ("container", &self.container),
            ("pod", &self.pod),
            ("namespace", &self.namespace),
        ]
    }

    /// Returns the labels of `prober_probe_total`; `result` is `successful`, `failed` or `unknown`.
    fn of_looks(&self, result: &'static str) -> [(&'static str, &str); 6] {
        [
            ("probe_type", self.probe_type),
            ("result", result),
            ("container", &self.container),
            ("pod", &self.pod),
            ("namespace", &self.namespace),
            ("pod_uid", &self.pod_uid),
        ]
    }
}

/// Returns the label and the index of an outcome.
const fn result(outcome: Outcome) -> (&'static str, usize) {
    match outcome {
        Outcome::Success => ("successful", 0),
        Outcome::Failure => ("failed", 1),
        Outcome::Error => ("unknown", 2),
    }
}

impl Tally {
    /// Counts a finished check.
    pub(super) fn count(&self, outcome: Outcome, took: Duration) {
        self.outcomes[result(outcome).1].fetch_add(1, Relaxed);
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Relaxed);
        let seconds = took.as_secs_f64();
        let place = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.durations[place].fetch_add(1, Relaxed);
    }
}

/// The counters of all probes.
#[derive(Debug, Default)]
struct Tallies {
    all: Mutex<Vec<Arc<Tally>>>,
}

impl Tallies {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Tally>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for Tallies {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // A copy, so that adding and removing probes does not wait for a scrape.
        let all = self.lock().clone();
        let (name, help) = ("prober_probe", "Probes run, by kind and result.");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        // Each label set once: Prometheus refuses a whole scrape with duplicates.
        let mut durations: BTreeMap<_, (u64, [u64; BOUNDS.len() + 1])> = BTreeMap::new();
        for tally in &all {
            for outcome in [Outcome::Success, Outcome::Failure, Outcome::Error] {
                let (result, place) = result(outcome);
                let count = tally.outcomes[place].load(Relaxed);
                if count > 0 {
                    ConstCounter::new(count).encode(family.encode_family(&tally.of.of_looks(result))?)?;
                }
            }
            let (nanoseconds, counts) = durations.entry(tally.of.of_durations()).or_default();
            *nanoseconds += tally.nanoseconds.load(Relaxed);
            for (sum, count) in counts.iter_mut().zip(&tally.durations) {
                *sum += count.load(Relaxed);
            }
        }
        let (name, help) = ("prober_probe_duration_seconds", "How long probes took.");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, (nanoseconds, counts)) in &durations {
            let bounds = BOUNDS.into_iter().chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
            let seconds = Duration::from_nanos(*nanoseconds).as_secs_f64();
            let mut encoder = family.encode_family(labels)?;
            encoder.encode_histogram::<NoLabelSet>(seconds, counts.iter().sum(), &buckets, None)?;
        }
        Ok(())
    }
}

/// Counters; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    tallies: Arc<Tallies>,
    /// Changes of a probe's state that a kernel edge caused.
    pub edges: Counter,
    /// Canary connections sent.
    pub canaries: Counter,
    /// Probes that the kernel can't answer although it should.
    pub fallbacks: Gauge,
    /// Containers whose commands the runtime runs although the helper should.
    pub exec_fallbacks: Gauge,
    /// Checks of a stalled listener that count as successes.
    pub tolerated: Counter,
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(Arc::clone(&self.tallies)));
        registry.register(
            "beelet_probe_kernel_edges",
            "Changes of a probe's state that a kernel event caused",
            self.edges.clone(),
        );
        registry.register(
            "beelet_probe_canaries",
            "Connections sent to check whether an idle application still accepts",
            self.canaries.clone(),
        );
        registry.register(
            "beelet_probe_fallbacks",
            "TCP probes that connect because the kernel cannot answer them",
            self.fallbacks.clone(),
        );
        registry.register(
            "beelet_exec_probe_fallbacks",
            "Containers whose exec probes the runtime runs because the helper cannot",
            self.exec_fallbacks.clone(),
        );
        registry.register(
            "beelet_probe_tolerated_failures",
            "Times that liveness and startup probes succeeded although a stricter rule (stalled=fail) would have failed them",
            self.tolerated.clone(),
        );
    }

    /// Makes the counters of a new probe.
    pub(super) fn of_probe(&self, key: &Key, pod: &PodName) -> Arc<Tally> {
        let of = Labels {
            probe_type: key.kind.title(),
            container: Arc::clone(&key.container),
            pod: pod.name.clone(),
            namespace: pod.namespace.clone(),
            pod_uid: Arc::clone(&key.uid),
        };
        let tally = Arc::new(Tally {
            outcomes: Default::default(),
            nanoseconds: AtomicU64::new(0),
            durations: Default::default(),
            of,
        });
        self.tallies.lock().push(Arc::clone(&tally));
        tally
    }

    /// Removes a probe's counters.
    pub(super) fn forget(&self, tally: &Arc<Tally>) {
        self.tallies.lock().retain(|other| !Arc::ptr_eq(other, tally));
    }
}

#[cfg(test)]
mod tests {
    use beelet_policy::probe::ProbeKind;
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn probes_are_counted_under_the_kubelets_names_and_removed_with_their_pod() {
        let (metrics, mut registry) = (Metrics::default(), Registry::default());
        metrics.register(&mut registry);
        let key = Key { uid: "u1".into(), container: "web".into(), kind: ProbeKind::Readiness };
        let name = PodName { namespace: "shop".to_owned(), name: "web-n1".to_owned() };
        let (of, took) = (metrics.of_probe(&key, &name), Duration::from_millis(2));
        // A changed static pod has another UID and the same name.
        let next = metrics.of_probe(&Key { uid: "u2".into(), ..key }, &name);
        for outcome in [Outcome::Success, Outcome::Failure, Outcome::Success] {
            of.count(outcome, took);
        }
        next.count(Outcome::Success, Duration::from_secs(20));
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
        let labels = format!(r#"probe_type="Readiness",{labels}"#);
        for line in [
            format!("duration_seconds_count{{{labels}}} 4"),
            format!("duration_seconds_sum{{{labels}}} 20.006"),
            format!(r#"duration_seconds_bucket{{le="0.001",{labels}}} 0"#),
            format!(r#"duration_seconds_bucket{{le="0.005",{labels}}} 3"#),
            format!(r#"duration_seconds_bucket{{le="10.0",{labels}}} 3"#),
            format!(r#"duration_seconds_bucket{{le="+Inf",{labels}}} 4"#),
        ] {
            assert!(shown.contains(&format!("prober_probe_{line}")), "{line}: {shown}");
        }
        metrics.forget(&of);
        assert!(text(&registry).contains("u2") && !text(&registry).contains("u1"));
        metrics.forget(&next);
        assert!(!text(&registry).contains("shop"));
    }
}
