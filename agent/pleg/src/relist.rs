//! The relist: lists all our sandboxes and containers in the runtime once per period, and compares them with
//! the last list. Two calls for any number of pods. While nothing changes and other sources are trusted, the
//! period grows.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use beelet_base::clock::After as _;
use beelet_base::work::Work;
use beelet_proto::cri;
use beelet_units::bounds;
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Pace;
use beelet_cri::{Error, Runtime};
use beelet_model::{
    labels::{self, ANNOTATION_HASH},
    origin::Origin,
    pod::USUAL_GRACE_SECONDS,
    request::{Listed, Request, RuntimePod, RuntimePods},
    table::PodName,
};

/// Time between two relists, as in the kubelet.
pub const PERIOD: Duration = Duration::from_secs(1);
/// Maximum time between two relists: the period doubles up to it while nothing changes and other sources are
/// trusted.
pub(crate) const PERIOD_MAX: Duration = Duration::from_secs(5);
/// Minimum pause after a relist, regardless of the number of requests: a runtime with a thousand pods has
/// other work while many of them start.
const GAP: Duration = Duration::from_millis(100);
/// Minimum pause as a multiple of the relist's duration: relists take at most a fifth of the time.
const SHARE: u32 = 4;
/// Time without an answer after which the agent reports itself unhealthy and its node not ready, as in the
/// kubelet (`maxWaitForContainerRuntime`, pkg/kubelet/kubelet.go).
pub const UNHEALTHY_AFTER: Duration = Duration::from_secs(30);
/// Time without an answer after which readers of the pod table see the failure: twice the longest time
/// between two relists.
pub const NOTICED_AFTER: Duration = Duration::from_secs(10);

/// Time of the runtime's last answer; clones share it.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<Mutex<Beat>>);

#[derive(Clone, Copy, Debug)]
struct Beat {
    last: Instant,
    /// Start of the current series of answers without a too long pause.
    well_since: Instant,
}

impl Pulse {
    fn now() -> Self {
        let now = Instant::now();
        Self(Arc::new(Mutex::new(Beat { last: now, well_since: now })))
    }

    fn beat(&self) {
        let mut beat = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if now.duration_since(beat.last) >= UNHEALTHY_AFTER {
            beat.well_since = now;
        }
        beat.last = now;
    }

    fn get(&self) -> Beat {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time since the runtime's last answer.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.get().last.elapsed()
    }

    /// Returns the time for which the silence has been shorter than [`UNHEALTHY_AFTER`], or for which it has
    /// been longer.
    #[must_use]
    pub fn lasted(&self) -> Duration {
        let beat = self.get();
        match beat.last.elapsed().checked_sub(UNHEALTHY_AFTER) {
            None => beat.well_since.elapsed(),
            Some(lasted) => lasted,
        }
    }
}

/// Counters of the relist; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    duration: Histogram,
    interval: Histogram,
    last_seen: Gauge,
    errors: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let bounds = [0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
        Self {
            duration: Histogram::new(bounds),
            interval: Histogram::new(bounds),
            last_seen: Gauge::default(),
            errors: Counter::default(),
        }
    }
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_pleg_relist_duration_seconds",
            "Time to list all sandboxes and containers",
            self.duration.clone(),
        );
        registry.register(
            "kubelet_pleg_relist_interval_seconds",
            "Time between the beginnings of two lists of all sandboxes and containers",
            self.interval.clone(),
        );
        registry.register(
            "kubelet_pleg_last_seen_seconds",
            "When sandboxes and containers were last listed, in seconds since the epoch",
            self.last_seen.clone(),
        );
        registry.register("beelet_relist_errors", "Relists that failed", self.errors.clone());
    }

    fn seen(&self, at: SystemTime) {
        let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.last_seen.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }
}

/// Identifiers and states of sandboxes and containers, by the pod's UID, for comparison.
type Seen = BTreeMap<String, BTreeSet<(String, i32)>>;

/// Runs a relist once per [`PERIOD`].
#[derive(Debug)]
pub struct Relist {
    runtime: Runtime,
    requests: mpsc::Sender<Request>,
    metrics: Metrics,
    pulse: Pulse,
    pace: Pace,
    seen: Option<Seen>,
}

impl Relist {
    /// Returns a new relist, and the pulse that shows its health.
    pub fn new(
        runtime: Runtime,
        requests: mpsc::Sender<Request>,
        pace: Pace,
        metrics: Metrics,
    ) -> (Self, Pulse) {
        let pulse = Pulse::now();
        (Self { runtime, requests, metrics, pulse: pulse.clone(), pace, seen: None }, pulse)
    }

    /// Runs relists until `shutdown`, at once and then periodically. Logs a failure once, and also its end.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let mut failing = false;
            // A slow answer delays the next relist and does not cause a burst.
            let (mut last, mut period) = (Instant::now(), Duration::ZERO);
            let (mut began, mut gap) = (None::<Instant>, GAP);
            loop {
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = sleep_until(last.after(period)) => {}
                    () = self.pace.nudged() => sleep_until(last.after(gap.min(period))).await,
                }
                let asked = Instant::now();
                if let Some(before) = began.replace(asked) {
                    self.metrics.interval.observe(before.elapsed().as_secs_f64());
                }
                let listed = tokio::select! {
                    () = shutdown.cancelled() => return,
                    listed = self.list() => listed,
                };
                last = Instant::now();
                gap = GAP.max((last - asked) * SHARE);
                let quiet = matches!(&listed, Ok(news) if news.changed.is_empty()) && !failing;
                let longest = if quiet && self.pace.is_trusted() { PERIOD_MAX } else { PERIOD };
                period = (period * 2).clamp(PERIOD, longest);
                match listed {
                    Ok(news) => {
                        if failing {
                            info!("the container runtime answers again");
                        }
                        // After an outage every worker must check its pod: anything may have happened.
                        let news = RuntimePods { recovered: failing, ..news };
                        failing = false;
                        self.pulse.beat();
                        self.metrics.seen(SystemTime::now());
                        // Also sent without changes: a worker may wait for a change that came and went
                        // between two relists.
                        if self.requests.send(Request::Runtime(news)).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        self.metrics.errors.inc();
                        if !failing {
                            warn!(%error, "the container runtime does not answer; pods keep running, changes wait");
                        }
                        failing = true;
                    }
                }
            }
        })
    }

    /// Lists sandboxes and containers, and compares them with the last list.
    async fn list(&mut self) -> Result<RuntimePods, Error> {
        let began = Instant::now();
        let (sandboxes, containers) =
            tokio::try_join!(self.runtime.sandboxes.ours(), self.runtime.containers.ours())?;
        self.metrics.duration.observe(began.elapsed().as_secs_f64());
        let (pods, seen) = group(&sandboxes, &containers);
        let before = self.seen.take().unwrap_or_default();
        let changed = differences(&before, &seen);
        self.seen = Some(seen);
        let listed = by_pod(&changed, sandboxes, containers);
        Ok(RuntimePods { pods, changed, listed, asked_at: began, recovered: false })
    }
}

/// Groups sandboxes and containers by pod.
fn group(
    sandboxes: &[cri::PodSandbox],
    containers: &[cri::Container],
) -> (BTreeMap<String, RuntimePod>, Seen) {
    let mut pods = BTreeMap::new();
    let mut newest = BTreeMap::new();
    let mut seen = Seen::new();
    let uid = |labels: &std::collections::HashMap<String, String>| labels.get(labels::POD_UID).cloned();
    for sandbox in sandboxes {
        let pod = pod_of(&sandbox.labels, &sandbox.annotations);
        let Some(uid) = uid(&sandbox.labels).filter(|uid| pod.is_sound(uid)) else { continue };
        seen.entry(uid.clone()).or_default().insert((sandbox.id.clone(), sandbox.state));
        let adopted = (!labels::is_own(&sandbox.labels)).then_some(sandbox.created_at);
        // The newest of several sandboxes describes the pod.
        if newest.get(&uid).is_none_or(|newest| *newest <= sandbox.created_at) {
            newest.insert(uid.clone(), sandbox.created_at);
            pods.insert(uid, RuntimePod { adopted, ..pod });
        }
    }
    for container in containers {
        let pod = pod_of(&container.labels, &container.annotations);
        let Some(uid) = uid(&container.labels).filter(|uid| pod.is_sound(uid)) else { continue };
        seen.entry(uid.clone()).or_default().insert((container.id.clone(), container.state));
        // Only the containers of a kubelet have the grace period.
        let known = pods.get_mut(&uid).filter(|known: &&mut RuntimePod| known.adopted.is_some());
        known.into_iter().for_each(|known| known.grace = pod.grace);
        // A container without its sandbox still belongs to a pod that must be cleaned up.
        pods.entry(uid).or_insert(pod);
    }
    (pods, seen)
}

/// Returns the listed sandboxes and containers of each of `pods`, by their UIDs.
fn by_pod(
    pods: &BTreeSet<String>,
    sandboxes: Vec<cri::PodSandbox>,
    containers: Vec<cri::Container>,
) -> BTreeMap<String, Listed> {
    let mut listed: BTreeMap<String, Listed> =
        pods.iter().map(|uid| (uid.clone(), Listed::default())).collect();
    for sandbox in sandboxes {
        if let Some(of_pod) = sandbox.labels.get(labels::POD_UID).and_then(|uid| listed.get_mut(uid)) {
            of_pod.sandboxes.push(sandbox);
        }
    }
    for container in containers {
        if let Some(of_pod) = container.labels.get(labels::POD_UID).and_then(|uid| listed.get_mut(uid)) {
            of_pod.containers.push(container);
        }
    }
    listed
}

fn pod_of(
    all_labels: &std::collections::HashMap<String, String>,
    annotations: &std::collections::HashMap<String, String>,
) -> RuntimePod {
    let label = |key: &str| all_labels.get(key).cloned().unwrap_or_default();
    let grace = annotations.get(labels::GRACE_PERIOD).and_then(|s| s.parse().ok());
    RuntimePod {
        name: PodName { namespace: label(labels::POD_NAMESPACE), name: label(labels::POD_NAME) },
        grace: bounds::grace(grace.unwrap_or(USUAL_GRACE_SECONDS)),
        manifest: annotations.get(labels::MANIFEST).map(PathBuf::from),
        hash: annotations.get(ANNOTATION_HASH).cloned(),
        shape: annotations.get(labels::SHAPE).cloned(),
        origin: Origin::of_annotation(annotations.get(labels::ANNOTATION_SOURCE).map(String::as_str)),
        manifest_hash: annotations.get(labels::MANIFEST_HASH).cloned(),
        adopted: None,
    }
}

/// Returns the new, removed and changed pods.
fn differences(before: &Seen, now: &Seen) -> BTreeSet<String> {
    let changed = now.iter().filter(|(uid, seen)| before.get(*uid) != Some(seen)).map(|(uid, _)| uid);
    let gone = before.keys().filter(|uid| !now.contains_key(*uid));
    changed.chain(gone).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_pulse_measures_the_time_of_health_and_of_failure() {
        let pulse = Pulse::now();
        let check = |well: bool, seconds: u64| {
            let is_well = pulse.silence() < UNHEALTHY_AFTER;
            assert_eq!((is_well, pulse.lasted().as_secs()), (well, seconds));
        };
        let wait = async |seconds| tokio::time::advance(Duration::from_secs(seconds)).await;
        wait(20).await;
        pulse.beat();
        check(true, 20);
        wait(29).await;
        check(true, 49);
        wait(11).await;
        check(false, 10);
        pulse.beat();
        check(true, 0);
        wait(5).await;
        pulse.beat();
        check(true, 5);
    }

    fn seen(text: &str) -> Seen {
        let mut seen = Seen::new();
        for word in text.split_whitespace() {
            let (uid, rest) = word.split_once('/').unwrap();
            let (id, state) = rest.split_once('=').unwrap();
            seen.entry(uid.to_owned()).or_default().insert((id.to_owned(), state.parse().unwrap()));
        }
        seen
    }

    fn check(before: &str, now: &str, expect: &[&str]) {
        let changed = differences(&seen(before), &seen(now));
        assert_eq!(changed.iter().map(String::as_str).collect::<Vec<_>>(), expect, "{before} -> {now}");
    }

    #[test]
    fn a_sandbox_has_its_pods_grace_period_within_bounds() {
        for (said, expected) in [
            ("7", 7),
            ("-1", 0),
            ("1000000000000", 366 * 24 * 3600),
            ("9223372036854775807", 366 * 24 * 3600),
            ("18446744073709551615", 30),
            ("", 30),
        ] {
            let annotations = [(labels::GRACE_PERIOD.to_owned(), said.to_owned())].into();
            let grace = pod_of(&std::collections::HashMap::new(), &annotations).grace;
            assert_eq!(grace, Duration::from_secs(expected), "{said:?}");
        }
    }

    #[test]
    fn sandboxes_and_containers_without_a_valid_pod_are_ignored() {
        let labels = |uid: &str, name: &str| {
            let all = [(labels::POD_UID, uid), (labels::POD_NAME, name), (labels::POD_NAMESPACE, "default")];
            all.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
        };
        let cases = [("u", "web"), ("", "web"), ("../x", "web"), ("..", "web"), ("v", "a/../b"), ("w", "")];
        let sandboxes =
            cases.map(|(uid, name)| cri::PodSandbox { labels: labels(uid, name), ..Default::default() });
        let containers =
            cases.map(|(uid, name)| cri::Container { labels: labels(uid, name), ..Default::default() });
        for (sandboxes, containers) in [(&sandboxes[..], &[][..]), (&[], &containers)] {
            let (pods, seen) = group(sandboxes, containers);
            assert_eq!(pods.keys().collect::<Vec<_>>(), ["u"]);
            assert_eq!(seen.keys().collect::<Vec<_>>(), ["u"]);
        }
    }

    #[test]
    fn a_pod_changes_when_anything_in_it_comes_goes_or_changes_state() {
        check("", "", &[]);
        check("a/s=0", "a/s=0", &[]);
        check("", "a/s=0", &["a"]);
        check("a/s=0", "", &["a"]);
        check("a/s=0 a/c=1 b/s=0", "a/s=0 a/c=2 b/s=0", &["a"]);
        check("a/s=0 a/c=1", "a/s=0 a/c=1 a/d=0 b/s=0", &["a", "b"]);
    }
}
