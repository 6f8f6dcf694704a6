//! The sources of the numbers, read once per second, and ten times per second when a threshold is near or the
//! kernel has just hinted at pressure.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::eviction::{MemorySignal, NeededCache, Observation, Signal, Threshold};
use beelet_units::{moment::Moment, quantity::Quantity};
use tokio::{sync::Notify, time::Instant};
use tracing::{info, warn};

use super::{Error, Observations, edges::Hints, machine};
use beelet_base::blocking::blocking;
use beelet_cgroups::Cgroups;

/// Interval between two readings.
const SLOW: Duration = Duration::from_secs(1);
/// Interval between two readings when a threshold is near.
const FAST: Duration = Duration::from_millis(100);
/// Minimum time between two readings, for any number of hints.
const LEAST: Duration = Duration::from_millis(10);
/// Time for which a hint makes readings fast.
const HINTED: Duration = Duration::from_secs(10);
/// A threshold is near if the amount above it would be used up within this time at the present rate.
const FORESIGHT: Duration = Duration::from_secs(3);
/// A threshold is also near if less than this part (1/N) of the capacity is left above it.
const MARGIN: i64 = 20;

/// The numbers of one reading, without signals that could not be read.
pub type Readings = Result<BTreeMap<Signal, Observation>, Error>;

type Read = dyn Fn() -> Readings + Send + Sync;

/// A source of numbers. A reading may block, and hang: the gauge's signals then vanish, without delaying
/// others.
#[derive(Clone)]
pub struct Gauge {
    /// Name for log lines.
    pub name: &'static str,
    /// Readings, taken one after the other on one thread. A failed one does not affect the others.
    reads: Vec<Arc<Read>>,
    /// Maximum age of a reading.
    pub stale_after: Duration,
    /// True if the kernel's memory hints trigger a reading.
    pub of_memory: bool,
}

impl Gauge {
    /// Creates a gauge that the kernel's memory hints do not trigger.
    pub fn new(
        name: &'static str,
        stale_after: Duration,
        read: impl Fn() -> Readings + Send + Sync + 'static,
    ) -> Self {
        Self { name, reads: vec![Arc::new(read)], stale_after, of_memory: false }
    }

    /// Adds a reading whose numbers vanish together with the others' if any of them hangs. A second gauge
    /// would need another thread at each reading.
    #[must_use]
    pub fn and(mut self, read: impl Fn() -> Readings + Send + Sync + 'static) -> Self {
        self.reads.push(Arc::new(read));
        self
    }

    /// Marks the gauge as one of memory.
    #[must_use]
    pub fn of_memory(self) -> Self {
        Self { of_memory: true, ..self }
    }

    /// Reads repeatedly, and publishes the readings on the board. Gauges with the same `start` read at the
    /// same moments: the agent wakes up once per second for all of them.
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
                            error, "cannot read this gauge fully; the missing signals are unknown"
                        );
                    }
                    None => info!(gauge = self.name, "the gauge can be read again"),
                }
                trouble = problem;
            }
            let near = is_near(&thresholds, &seen, before.as_ref(), began);
            board.publish(&seen, began, self.stale_after);
            before = Some((began, seen));
            let pace = if near || hints.within(HINTED) { FAST } else { SLOW };
            let ended = Instant::now();
            tokio::select! {
                () = tokio::time::sleep_until(next_reading(start, ended, pace)) => {}
                // The channel stays open while this task holds its clone.
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

/// Returns the machine's own gauges: memory (its own, and the pods' common share) by this signal, and process
/// ids.
#[must_use]
pub fn of_the_machine(cgroups: &Arc<Cgroups>, signal: MemorySignal) -> Vec<Gauge> {
    let stale = Duration::from_secs(5);
    let memory = Gauge::new("memory and process ids", stale, machines_memory(Arc::clone(cgroups), signal));
    vec![
        memory
            .and(pods_memory(Arc::clone(cgroups), signal))
            .and(|| machine::pids().map(|seen| [(Signal::PidAvailable, seen)].into()))
            .of_memory(),
    ]
}

/// The cache in use so far, and the start of its clock. A gauge reads on one thread, so no reading waits for
/// the lock.
struct Cache {
    needed: Mutex<NeededCache>,
    began: Instant,
}

impl Cache {
    fn of(signal: MemorySignal) -> Option<Self> {
        let cache = || Self { needed: Mutex::default(), began: Instant::now() };
        (signal == MemorySignal::Reclaimable).then(cache)
    }

    fn with<T>(&self, read: impl FnOnce(&mut NeededCache, Moment) -> T) -> T {
        let mut needed = self.needed.lock().unwrap_or_else(PoisonError::into_inner);
        read(&mut needed, Moment::after_start(self.began.elapsed()))
    }
}

fn machines_memory(cgroups: Arc<Cgroups>, signal: MemorySignal) -> impl Fn() -> Readings + Send + Sync {
    let cache = Cache::of(signal);
    move || {
        let seen = match &cache {
            None => machine::memory(&cgroups),
            Some(cache) => cache.with(|needed, now| machine::reclaimable_memory(&cgroups, needed, now)),
        };
        seen.map(|seen| [(Signal::MemoryAvailable, seen)].into())
    }
}

fn pods_memory(cgroups: Arc<Cgroups>, signal: MemorySignal) -> impl Fn() -> Readings + Send + Sync {
    let cache = Cache::of(signal);
    move || {
        let seen = match &cache {
            None => machine::pods_memory(&cgroups, None),
            Some(cache) => cache.with(|needed, now| machine::pods_memory(&cgroups, Some((needed, now)))),
        };
        Ok(seen.map(|seen| (Signal::AllocatableMemoryAvailable, seen)).into_iter().collect())
    }
}

/// Returns the first moment at a multiple of `pace` after `start` that is at least [`LEAST`] after `now`.
fn next_reading(start: Instant, now: Instant, pace: Duration) -> Instant {
    let past = now.saturating_duration_since(start) + LEAST;
    let turns = past.as_nanos().div_ceil(pace.as_nanos().max(1));
    start.after(pace.saturating_mul(u32::try_from(turns).unwrap_or(u32::MAX)))
}

/// Returns the plausible numbers of several readings, and the first problem.
fn read_all(reads: &[Arc<Read>]) -> (Observations, Option<Error>) {
    let mut all = (Observations::new(), None);
    for (seen, problem) in reads.iter().map(|read| sound(read())) {
        all.0.extend(seen);
        all.1 = all.1.or(problem);
    }
    all
}

/// Returns the plausible numbers of a reading, and the problem with the others: a capacity must be positive,
/// and no more may be available than the capacity.
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
    pub(super) fn publish(&self, seen: &Observations, read_at: Instant, stale_after: Duration) {
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

    /// Returns the numbers that are not too old.
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

/// The board's numbers at one moment.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The numbers.
    pub(super) observations: Observations,
    /// Times of the readings.
    read_at: BTreeMap<Signal, Instant>,
}

impl Seen {
    /// Returns the signal's number, and the time of its reading.
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
    fn implausible_numbers_are_ignored() {
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
    fn a_failed_reading_does_not_affect_the_others() {
        let gauge = Gauge::new("both", SLOW, || Err(Error::NoMemory)).and(|| Ok(observe(10, 100)));
        let (seen, problem) = read_all(&gauge.reads);
        assert_eq!(seen, observe(10, 100));
        assert!(matches!(problem, Some(Error::NoMemory)), "{problem:?}");
    }

    #[test]
    fn the_kernels_hints_trigger_readings_of_the_machines_and_the_pods_memory() {
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
        let gauges =
            of_the_machine(&Arc::new(Cgroups::over_folders(layout, "/").unwrap()), MemorySignal::WorkingSet);
        let hinted = gauges.iter().filter(|gauge| gauge.of_memory);
        let seen: Observations = hinted.flat_map(|gauge| read_all(&gauge.reads).0).collect();
        assert!(seen.contains_key(&Signal::MemoryAvailable), "{seen:?}");
        let of_pods = seen[&Signal::AllocatableMemoryAvailable];
        assert_eq!((of_pods.available.value(), of_pods.capacity.value()), (4096 - 1000, 4096));
    }

    #[tokio::test(start_paused = true)]
    async fn readings_come_each_second_and_ten_times_faster_near_a_threshold_or_after_a_hint() {
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
        // A drop seen late counts as near by its rate, too; only the second reading shows that it has ended.
        available.store(150, Ordering::Relaxed);
        within(2 * SLOW).await;
        assert!(fast.contains(&within(10 * SLOW).await));
        available.store(9000, Ordering::Relaxed);
        within(2 * SLOW).await;
        assert!(slow.contains(&within(10 * SLOW).await));
        // Many simultaneous hints trigger one immediate reading.
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
    fn gauges_read_at_the_same_moments_for_any_duration_of_a_reading() {
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
