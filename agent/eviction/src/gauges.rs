//! Where the numbers come from, and how often: once per second, ten times per second when a threshold is near
//! or the kernel has just hinted at pressure.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::eviction::{Observation, Signal, Threshold};
use beelet_units::quantity::Quantity;
use tokio::{sync::Notify, time::Instant};
use tracing::{info, warn};

use super::{Error, Observations, edges::Hints, machine};
use beelet_base::blocking::blocking;
use beelet_cgroups::Cgroups;

/// Between two readings.
const SLOW: Duration = Duration::from_secs(1);
/// Between two readings when a threshold is near.
const FAST: Duration = Duration::from_millis(100);
/// Least time between two readings, however many hints there are.
const LEAST: Duration = Duration::from_millis(10);
/// How long a hint makes readings fast.
const HINTED: Duration = Duration::from_secs(10);
/// A threshold is near if what is left above it would be gone within this at the present rate.
const FORESIGHT: Duration = Duration::from_secs(3);
/// … or if less than this part of the capacity is left above it.
const MARGIN: i64 = 20;

/// The numbers of one reading. A signal that isn't there could not be read.
pub type Readings = Result<BTreeMap<Signal, Observation>, Error>;

type Read = dyn Fn() -> Readings + Send + Sync;

/// One source of numbers. It may block, and hang: then its signals vanish, and nobody waits.
#[derive(Clone)]
pub struct Gauge {
    /// For people.
    pub name: &'static str,
    /// Read one after the other on one thread. What one of them can't read, the others still do.
    reads: Vec<Arc<Read>>,
    /// A reading older than this says nothing any more.
    pub stale_after: Duration,
    /// The kernel's hints on memory make it read.
    pub of_memory: bool,
}

impl Gauge {
    /// A gauge that the kernel's hints on memory don't concern.
    pub fn new(
        name: &'static str,
        stale_after: Duration,
        read: impl Fn() -> Readings + Send + Sync + 'static,
    ) -> Self {
        Self { name, reads: vec![Arc::new(read)], stale_after, of_memory: false }
    }

    /// The gauge with one more reading: of numbers that vanish together if either hangs. A second gauge
    /// would take a thread more at each look.
    #[must_use]
    pub fn and(mut self, read: impl Fn() -> Readings + Send + Sync + 'static) -> Self {
        self.reads.push(Arc::new(read));
        self
    }

    /// The gauge as one of memory.
    #[must_use]
    pub fn of_memory(self) -> Self {
        Self { of_memory: true, ..self }
    }

    /// Reads on and on, and puts what it reads on the board. Gauges with the same `start` read in the same
    /// moments: the agent wakes once per second for all of them.
    pub(super) async fn run(
        self,
        board: LatestReadings,
        hints: Hints,
        thresholds: Vec<Threshold>,
        start: Instant,
    ) {
        let mut hinted = hints.subscribe();
        let mut before: Option<(Instant, Observations)> = None;
        let mut trouble: Option<String> = None;
        loop {
            hinted.mark_unchanged();
            let began = Instant::now();
            let reads = self.reads.clone();
            let (seen, problem) = blocking("reading a gauge", move || read_all(&reads)).await;
            let problem = problem.map(|error| error.to_string());
            if problem != trouble {
                match &problem {
                    Some(error) => {
                        warn!(
                            gauge = self.name,
                            error, "cannot read this gauge, or not all of it; what is missing is unknown"
                        );
                    }
                    None => info!(gauge = self.name, "the gauge can be read again"),
                }
                trouble = problem;
            }
            let near = is_near(&thresholds, &seen, before.as_ref(), began);
            board.put(&seen, began, self.stale_after);
            before = Some((began, seen));
            let pace = if near || hints.within(HINTED) { FAST } else { SLOW };
            let ended = Instant::now();
            tokio::select! {
                () = tokio::time::sleep_until(next_reading(start, ended, pace)) => {}
                // It lives as long as its clone here.
                _ = hinted.changed() => tokio::time::sleep_until(ended + LEAST).await,
            }
        }
    }
}

impl std::fmt::Debug for Gauge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gauge").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The machine's own gauges: memory (its own, and what pods may use together) and process ids.
#[must_use]
pub fn of_the_machine(cgroups: &Arc<Cgroups>) -> Vec<Gauge> {
    let (of_all, of_pods, stale) = (Arc::clone(cgroups), Arc::clone(cgroups), Duration::from_secs(5));
    vec![
        Gauge::new("memory and process ids", stale, move || {
            machine::memory(&of_all).map(|seen| [(Signal::MemoryAvailable, seen)].into())
        })
        .and(move || {
            let seen = machine::pods_memory(&of_pods);
            Ok(seen.map(|seen| (Signal::AllocatableMemoryAvailable, seen)).into_iter().collect())
        })
        .and(|| machine::pids().map(|seen| [(Signal::PidAvailable, seen)].into()))
        .of_memory(),
    ]
}

/// The first of the moments that lie `pace` apart from `start` on, and at least [`LEAST`] after `now`.
fn next_reading(start: Instant, now: Instant, pace: Duration) -> Instant {
    let past = now.saturating_duration_since(start) + LEAST;
    let turns = past.as_nanos().div_ceil(pace.as_nanos().max(1));
    start.after(pace.saturating_mul(u32::try_from(turns).unwrap_or(u32::MAX)))
}

/// All that can be believed of several readings, and the first reason why that is not all.
fn read_all(reads: &[Arc<Read>]) -> (Observations, Option<Error>) {
    let mut all = (Observations::new(), None);
    for (seen, problem) in reads.iter().map(|read| sound(read())) {
        all.0.extend(seen);
        all.1 = all.1.or(problem);
    }
    all
}

/// The part of a reading that can be believed, and why not all of it: nothing has no capacity, and no more is
/// available than there is.
fn sound(readings: Readings) -> (Observations, Option<Error>) {
    let mut problem = None;
    let mut seen = match readings {
        Ok(seen) => seen,
        Err(error) => return (Observations::new(), Some(error)),
    };
    seen.retain(|signal, observation| {
        let sound = observation.capacity > Quantity::ZERO;
        if !sound {
            problem = Some(Error::NoCapacity { signal: *signal, capacity: observation.capacity });
        }
        observation.available = observation.available.max(Quantity::ZERO).min(observation.capacity);
        sound
    });
    (seen, problem)
}

/// Returns true if a threshold may be crossed before the next slow reading.
fn is_near(
    thresholds: &[Threshold],
    seen: &Observations,
    before: Option<&(Instant, Observations)>,
    now: Instant,
) -> bool {
    thresholds.iter().any(|threshold| {
        let Some(observation) = seen.get(&threshold.signal) else { return false };
        let limit = threshold.value.of(observation.capacity);
        let left = observation.available.saturating_sub(limit).value();
        if left < observation.capacity.value() / MARGIN {
            return true;
        }
        let earlier = before.and_then(|(at, seen)| Some((*at, seen.get(&threshold.signal)?)));
        earlier.is_some_and(|(at, earlier)| {
            let fell = i128::from(earlier.available.saturating_sub(observation.available).value());
            let (since, ahead) = (now.duration_since(at).as_millis().max(1), FORESIGHT.as_millis());
            let (since, ahead) = (i128::try_from(since).unwrap_or(1), i128::try_from(ahead).unwrap_or(0));
            fell > 0 && fell * ahead / since >= i128::from(left)
        })
    })
}

/// The newest number of each signal. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct LatestReadings {
    shared: Arc<(Mutex<BTreeMap<Signal, Entry>>, Notify)>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    observation: Observation,
    read_at: Instant,
    stale_after: Duration,
}

impl LatestReadings {
    pub(super) fn put(&self, seen: &Observations, read_at: Instant, stale_after: Duration) {
        {
            let mut entries = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
            for (signal, observation) in seen {
                entries.insert(*signal, Entry { observation: *observation, read_at, stale_after });
            }
        }
        self.shared.1.notify_one();
    }

    /// Waits for a new number.
    pub(super) async fn changed(&self) {
        self.shared.1.notified().await;
    }

    /// The numbers that still say something.
    pub(super) fn current(&self) -> Seen {
        let entries = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = Seen::default();
        for (signal, entry) in entries.iter() {
            if entry.read_at.elapsed() < entry.stale_after {
                seen.observations.insert(*signal, entry.observation);
                seen.read_at.insert(*signal, entry.read_at);
            }
        }
        seen
    }
}

/// What the board showed at one moment.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The numbers.
    pub(super) observations: Observations,
    /// When each of them was read.
    read_at: BTreeMap<Signal, Instant>,
}

impl Seen {
    /// The signal's number, and when it was read.
    pub(super) fn get(&self, signal: Signal) -> Option<(&Observation, Instant)> {
        Some((self.observations.get(&signal)?, *self.read_at.get(&signal)?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

    use beelet_policy::eviction::ThresholdValue;

    use super::*;
    use beelet_cgroups::{Hierarchy, Layout, Version};

    fn observe(available: i64, capacity: i64) -> Observations {
        let units = Quantity::from_units;
        [(Signal::MemoryAvailable, Observation { available: units(available), capacity: units(capacity) })]
            .into()
    }

    #[test]
    fn lies_are_not_believed() {
        let check = |available, capacity, expect: Option<i64>| {
            let (seen, problem) = sound(Ok(observe(available, capacity)));
            let got = seen.get(&Signal::MemoryAvailable).map(|seen| seen.available.value());
            assert_eq!((got, problem.is_some()), (expect, expect.is_none()), "{available} of {capacity}");
        };
        check(10, 100, Some(10));
        check(200, 100, Some(100));
        check(-5, 100, Some(0));
        check(10, 0, None);
        check(10, -1, None);
    }

    fn below(text: &str) -> Threshold {
        let value = ThresholdValue::threshold(text).unwrap().unwrap();
        Threshold { signal: Signal::MemoryAvailable, value, grace: Duration::ZERO, min_reclaim: None }
    }

    #[test]
    fn what_one_reading_lacks_another_still_has() {
        let gauge = Gauge::new("both", SLOW, || Err(Error::NoMemory)).and(|| Ok(observe(10, 100)));
        let (seen, problem) = read_all(&gauge.reads);
        assert_eq!(seen, observe(10, 100));
        assert!(matches!(problem, Some(Error::NoMemory)), "{problem:?}");
    }

    #[test]
    fn the_kernels_hints_make_the_machines_memory_and_the_pods_be_read() {
        let mount = tempfile::tempdir().unwrap();
        let pods = mount.path().join("kubepods");
        std::fs::create_dir(&pods).unwrap();
        for (file, text) in [
            ("memory.limit_in_bytes", "4096"),
            ("memory.usage_in_bytes", "1024"),
            ("memory.stat", "total_inactive_file 24"),
        ] {
            std::fs::write(pods.join(file), text).unwrap();
        }
        let controllers = ["cpu".to_owned(), "memory".to_owned()].into();
        let hierarchies = vec![Hierarchy { mount: mount.path().into(), is_v2: false, controllers }];
        let layout = Layout { version: Version::V1, hierarchies };
        let gauges = of_the_machine(&Arc::new(Cgroups::over_folders(layout, "/").unwrap()));
        let hinted = gauges.iter().filter(|gauge| gauge.of_memory);
        let seen: Observations = hinted.flat_map(|gauge| read_all(&gauge.reads).0).collect();
        assert!(seen.contains_key(&Signal::MemoryAvailable), "{seen:?}");
        let of_pods = seen[&Signal::AllocatableMemoryAvailable];
        assert_eq!((of_pods.available.value(), of_pods.capacity.value()), (4096 - 1000, 4096));
    }

    #[tokio::test(start_paused = true)]
    async fn readings_are_a_second_apart_and_a_tenth_of_it_near_a_threshold_or_after_a_hint() {
        let (available, reads) = (Arc::new(AtomicI64::new(9000)), Arc::new(AtomicUsize::new(0)));
        let (shown, counted) = (Arc::clone(&available), Arc::clone(&reads));
        let gauge = Gauge::new("test", SLOW, move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(observe(shown.load(Ordering::Relaxed), 10_000))
        });
        let hints = Hints::default();
        let running = tokio::spawn(gauge.run(
            LatestReadings::default(),
            hints.clone(),
            vec![below("100")],
            Instant::now(),
        ));
        let within = async |time: Duration| {
            let before = reads.load(Ordering::Relaxed);
            tokio::time::sleep(time).await;
            reads.load(Ordering::Relaxed) - before
        };
        let (slow, fast) = (9_usize..=11, 90_usize..=101);
        within(SLOW / 2).await;
        assert!(slow.contains(&within(10 * SLOW).await));
        // A fall seen late is near by its rate too; only the second reading shows that it has ended.
        available.store(150, Ordering::Relaxed);
        within(2 * SLOW).await;
        assert!(fast.contains(&within(10 * SLOW).await));
        available.store(9000, Ordering::Relaxed);
        within(2 * SLOW).await;
        assert!(slow.contains(&within(10 * SLOW).await));
        // Of many hints at once one reading comes, at once.
        for _ in 0..100 {
            hints.notify();
        }
        assert_eq!(within(SLOW / 20).await, 1);
        assert!(fast.contains(&within(HINTED - SLOW / 10).await));
        within(SLOW).await;
        assert!(slow.contains(&within(10 * SLOW).await));
        running.abort();
    }

    #[test]
    fn gauges_read_in_the_same_moments_however_long_each_reading_takes() {
        let start = Instant::now();
        let ms = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(next_reading(start, start, SLOW), ms(1000));
        assert_eq!(next_reading(start, ms(3), SLOW), ms(1000));
        assert_eq!(next_reading(start, ms(990), SLOW), ms(1000));
        assert_eq!(next_reading(start, ms(991), SLOW), ms(2000));
        assert_eq!(next_reading(start, ms(4200), FAST), ms(4300));
    }

    #[test]
    fn a_threshold_is_near_by_distance_or_by_rate() {
        let threshold = below("100");
        let now = Instant::now();
        let check = |available: i64, earlier: Option<i64>, expect: bool| {
            let before = earlier.map(|earlier| (now, observe(earlier, 10_000)));
            let later = now + Duration::from_secs(1);
            let near = is_near(
                std::slice::from_ref(&threshold),
                &observe(available, 10_000),
                before.as_ref(),
                later,
            );
            assert_eq!(near, expect, "{earlier:?} -> {available}");
        };
        check(5000, None, false);
        check(50, None, true);
        check(500, None, true);
        check(700, None, false);
        check(5000, Some(5100), false);
        check(5000, Some(7000), true);
        check(5000, Some(4000), false);
    }
}
