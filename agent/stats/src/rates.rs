//! Computes rates from the counters of two readings, over windows. Pure; the same for counters of the kernel
//! programs and of files.

use std::time::Duration;

use super::model::{Counters, KernelCounters, NetRates, Rates, RunQueue, Share, Stalls, WAIT_BUCKETS};

/// Returns the rates from `then` to `now`, which are `over` apart. A counter that went backwards (because it
/// was replaced) began at 0.
pub(super) fn rates(then: &Counters, now: &Counters, over: Duration) -> Rates {
    let seconds = over.as_secs_f64();
    if seconds <= 0.0 {
        return Rates::default();
    }
    let per_second = |then: u64, now: u64| grown(then, now) as f64 / seconds;
    let time = |then: u64, now: u64| per_second(then, now) / 1e9;
    let periods = grown(then.periods, now.periods);
    let throttled = grown(then.throttled_periods, now.throttled_periods);
    let pair = |then: Option<[u64; 2]>, now: Option<[u64; 2]>, index: usize| {
        Some(per_second(then?[index], now?[index]))
    };
    let kernel = then.kernel.as_deref().zip(now.kernel.as_deref());
    Rates {
        over_ns: u64::try_from(over.as_nanos()).unwrap_or(u64::MAX),
        cpu: time(then.cpu_ns, now.cpu_ns),
        throttled: (now.periods > 0)
            .then(|| if periods == 0 { 0.0 } else { throttled as f64 / periods as f64 }),
        throttled_time: time(then.throttled_ns, now.throttled_ns),
        runq: kernel.map(|(then, now)| run_queue(then, now, seconds)),
        preempted: kernel.map(|(then, now)| {
            [
                per_second(then.preempted_by_same_pod, now.preempted_by_same_pod),
                per_second(then.preempted_by_other_pod, now.preempted_by_other_pod),
                per_second(then.preempted_by_system, now.preempted_by_system),
            ]
        }),
        cpu_stalled: share(then.cpu_stalls, now.cpu_stalls, over),
        memory_stalled: share(then.memory_stalls, now.memory_stalls, over),
        io_stalled: share(then.io_stalls, now.io_stalls, over),
        reclaim: kernel.map(|(then, now)| time(reclaim_ns(then), reclaim_ns(now))),
        major_faults: per_second(then.major_faults, now.major_faults),
        read_bytes: pair(then.io_bytes, now.io_bytes, 0),
        written_bytes: pair(then.io_bytes, now.io_bytes, 1),
        net: kernel.map(|(then, now)| NetRates {
            rx_bytes: per_second(then.rx_bytes, now.rx_bytes),
            tx_bytes: per_second(then.tx_bytes, now.tx_bytes),
            retransmits: per_second(then.retransmits, now.retransmits),
        }),
        established: kernel.map(|(then, now)| per_second(then.established, now.established)),
        rtt_us: kernel.and_then(|(then, now)| {
            let samples = grown(then.rtt_samples, now.rtt_samples);
            (samples > 0).then(|| grown(then.rtt_us, now.rtt_us) as f64 / samples as f64)
        }),
        oom_kills: grown(then.oom_kills, now.oom_kills),
    }
}

/// Returns the growth of a counter.
pub(super) fn grown(then: u64, now: u64) -> u64 {
    now.checked_sub(then).unwrap_or(now)
}

/// Returns the share of the time that was spent waiting. The kernel adds a wait at its end or at a read, so
/// the share may slightly exceed the whole time, and is capped.
pub(super) fn share(then: Option<Stalls>, now: Option<Stalls>, over: Duration) -> Option<Share> {
    let (then, now) = (then?, now?);
    let micros = over.as_secs_f64() * 1e6;
    let share = |then, now| if micros > 0.0 { (grown(then, now) as f64 / micros).min(1.0) } else { 0.0 };
    Some(Share { some: share(then.some_us, now.some_us), full: share(then.full_us, now.full_us) })
}

/// Returns the time that a container's tasks spent in reclaim, for its own limit or the node's, in
/// nanoseconds.
pub(super) fn reclaim_ns(of: &KernelCounters) -> u64 {
    of.memcg_reclaim_ns.wrapping_add(of.direct_reclaim_ns)
}

fn run_queue(then: &KernelCounters, now: &KernelCounters, seconds: f64) -> RunQueue {
    let waits: [u64; WAIT_BUCKETS] =
        std::array::from_fn(|bucket| grown(then.run_queue_waits[bucket], now.run_queue_waits[bucket]));
    RunQueue {
        p50_ns: percentile(&waits, 0.50),
        p99_ns: percentile(&waits, 0.99),
        waiting: grown(then.run_queue_wait_ns, now.run_queue_wait_ns) as f64 / 1e9 / seconds,
        waits: waits.iter().sum::<u64>() as f64 / seconds,
    }
}

/// Returns the lower (inclusive) and upper (exclusive) bound of a bucket in nanoseconds: 0 to 2^10, then from
/// 2^(9+k) to 2^(10+k), as the kernel programs count (`run_queue_waits` in ebpf/abi). The last bucket has no
/// upper bound.
pub(super) fn bucket_bounds(bucket: usize) -> (f64, f64) {
    let bound = |power: usize| 2f64.powi(i32::try_from(power).unwrap_or(i32::MAX));
    (if bucket == 0 { 0.0 } else { bound(bucket + 9) }, bound(bucket + 10))
}

/// Returns a quantile of a histogram with [`bucket_bounds`]. Values are assumed to be spread evenly within a
/// bucket, as in Prometheus's `histogram_quantile`: the true value is between half and twice the
/// result, except in the first and the last bucket. `None` for an empty histogram.
pub(super) fn percentile(counts: &[u64], quantile: f64) -> Option<f64> {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return None;
    }
    let rank = (quantile.clamp(0.0, 1.0) * total as f64).max(f64::MIN_POSITIVE);
    let mut below = 0.0;
    for (bucket, &count) in counts.iter().enumerate() {
        let upto = below + count as f64;
        if count > 0 && upto >= rank {
            let (low, high) = bucket_bounds(bucket);
            return Some(low + (high - low) * (rank - below) / count as f64);
        }
        below = upto;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn both_halves_mean_the_same_by_a_bucket() {
        for bucket in 0..WAIT_BUCKETS {
            assert_eq!(bucket_bounds(bucket).0, beelet_bpf::wait_bucket_floor_ns(bucket) as f64, "{bucket}");
        }
    }

    #[test]
    fn reclaim_is_for_the_own_limit_and_for_the_nodes_memory() {
        let of = |memcg_reclaim_ns, direct_reclaim_ns| {
            let kernel = KernelCounters { memcg_reclaim_ns, direct_reclaim_ns, ..KernelCounters::default() };
            Counters { kernel: Some(Box::new(kernel)), ..Counters::default() }
        };
        let rates = rates(&of(1, 2), &of(200_000_001, 300_000_002), SECOND);
        assert_eq!(rates.reclaim, Some(0.5));
    }

    #[test]
    fn rates_are_what_grew_per_second() {
        let then = Counters { cpu_ns: 1_000, periods: 10, throttled_periods: 5, ..Counters::default() };
        let now = Counters {
            cpu_ns: 3_000_001_000,
            periods: 30,
            throttled_periods: 10,
            throttled_ns: 500_000_000,
            io_bytes: Some([10, 20]),
            cpu_stalls: Some(Stalls { some_us: 1_000_000, ..Stalls::default() }),
            oom_kills: 2,
            ..Counters::default()
        };
        let rates = rates(&then, &now, 2 * SECOND);
        assert!((rates.cpu - 1.5).abs() < 1e-9 && rates.over_ns == 2_000_000_000);
        assert_eq!((rates.throttled, rates.throttled_time, rates.oom_kills), (Some(0.25), 0.25, 2));
        // Only one of the two readings has them.
        assert_eq!((rates.read_bytes, rates.cpu_stalled, rates.runq), (None, None, None));
    }

    #[test]
    fn a_counter_that_went_backwards_began_at_zero() {
        assert_eq!((grown(10, 15), grown(10, 4), grown(7, 7)), (5, 4, 0));
    }

    #[test]
    fn without_a_quota_there_is_nothing_to_be_throttled() {
        let none = Counters::default();
        assert_eq!(rates(&none, &none, SECOND).throttled, None);
        let idle = Counters { periods: 7, ..none };
        assert_eq!(rates(&idle, &idle, SECOND).throttled, Some(0.0));
        assert_eq!(rates(&idle, &idle, Duration::ZERO), Rates::default());
    }

    #[test]
    fn stalls_are_a_share_of_the_time_and_never_more_than_all_of_it() {
        let at = |some_us, full_us| Some(Stalls { some_us, full_us, ..Stalls::default() });
        assert_eq!(share(at(0, 0), at(250_000, 100_000), SECOND), Some(Share { some: 0.25, full: 0.1 }));
        assert_eq!(share(at(0, 0), at(1_000_400, 0), SECOND), Some(Share { some: 1.0, full: 0.0 }));
        assert_eq!(share(None, at(1, 1), SECOND), None);
    }

    #[test]
    fn percentiles_lie_in_the_bucket_that_has_their_rank() {
        #[track_caller]
        fn check(counts: &[u64], quantile: f64, expected: f64) {
            let got = percentile(counts, quantile).unwrap();
            assert!((got - expected).abs() < 1e-6, "{got}, not {expected}");
        }
        check(&[0, 0, 0, 100], 0.5, 6144.0); // halfway through 4096 to 8192
        check(&[0, 0, 0, 100], 1.0, 8192.0);
        check(&[4], 0.5, 512.0);
        check(&[0, 99, 0, 0, 0, 1], 0.99, 2048.0);
        check(&[0, 98, 0, 0, 0, 2], 0.99, 24_576.0);
        assert_eq!(percentile(&[0; WAIT_BUCKETS], 0.99), None);
    }

    proptest::proptest! {
        #[test]
        fn a_percentile_is_never_further_off_than_a_factor_of_two(
            mut values in proptest::collection::vec(1024u64..1 << 33, 1..200),
            quantile in 0.01f64..1.0,
        ) {
            let mut counts = [0; WAIT_BUCKETS];
            for value in &values {
                counts[value.ilog2() as usize - 9] += 1;
            }
            values.sort_unstable();
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let rank = (quantile * values.len() as f64).ceil() as usize;
            let exact = values[rank.clamp(1, values.len()) - 1] as f64;
            let got = percentile(&counts, quantile).unwrap();
            proptest::prop_assert!(got <= exact * 2.0 && got >= exact / 2.0, "{} for {}", got, exact);
        }
    }
}
