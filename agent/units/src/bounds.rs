//! Bounds for numbers from pods, plugins, runtimes and servers, mainly lengths of time.
//!
//! The API server bounds few of a pod's seconds from above: `kubectl delete --grace-period` accepts any int64.
//! Sums with such a number overflow here, and in the runtime, which counts nanoseconds in an int64. So every
//! number of seconds from outside becomes a [`Duration`] through one of these functions only. Sums of a time
//! and a length use `After` in `base::clock`, as a second line of defence.

use std::time::Duration;

/// Longest grace period of a pod or a probe, in seconds: 366 days. A longer one is certainly a mistake, and
/// is shortened to this.
pub const LONGEST_GRACE_SECONDS: i64 = 366 * 24 * 3600;

/// [`LONGEST_GRACE_SECONDS`] as a duration.
pub const LONGEST_GRACE: Duration = Duration::from_secs(LONGEST_GRACE_SECONDS as u64);

/// Longest duration in the agent, 68 years: the API's own limit of `activeDeadlineSeconds`
/// (`ValidatePodSpec`, pkg/apis/core/validation). Any sum of a few of them fits into every type of time.
pub const FAR: Duration = Duration::from_secs(i32::MAX as u64);

/// Converts seconds into a grace period: zero if negative, at most [`LONGEST_GRACE`].
#[must_use]
pub fn grace(seconds: i64) -> Duration {
    self::seconds(seconds).min(LONGEST_GRACE)
}

/// Converts seconds into a duration: zero if negative, at most [`FAR`].
#[must_use]
pub fn seconds(seconds: i64) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(FAR)
}

/// Adds numbers from outside, saturating.
#[must_use]
pub fn total(parts: impl IntoIterator<Item = u64>) -> u64 {
    parts.into_iter().fold(0, u64::saturating_add)
}

/// Converts a time into whole seconds, rounded up, at most those of [`FAR`]: for programs that count
/// nanoseconds in an int64, as Go programs do.
#[must_use]
pub fn whole_seconds(time: Duration) -> i64 {
    let time = time.min(FAR);
    let seconds = time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0));
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn seconds_of_others_have_a_smallest_and_a_largest_value() {
        let check = |given: i64, as_grace: u64, as_seconds: u64| {
            assert_eq!((grace(given).as_secs(), seconds(given).as_secs()), (as_grace, as_seconds), "{given}");
        };
        let (grace, far) = (366 * 24 * 3600, 2_147_483_647);
        check(i64::MIN, 0, 0);
        check(-1, 0, 0);
        check(0, 0, 0);
        check(30, 30, 30);
        check(366 * 24 * 3600 + 1, grace, grace + 1);
        check(2_147_483_648, grace, far);
        check(1_000_000_000_000, grace, far);
        check(i64::MAX, grace, far);
    }

    #[test]
    fn whole_seconds_round_up_and_end() {
        let check = |time: Duration, expected: i64| assert_eq!(whole_seconds(time), expected, "{time:?}");
        check(Duration::ZERO, 0);
        check(Duration::from_nanos(1), 1);
        check(Duration::from_secs(7), 7);
        check(Duration::from_millis(7001), 8);
        check(Duration::MAX, i32::MAX.into());
    }

    #[test]
    fn a_sum_ends_at_the_largest_number() {
        assert_eq!(total([]), 0);
        assert_eq!(total([1, 2, 3]), 6);
        assert_eq!(total([u64::MAX, 1, u64::MAX]), u64::MAX);
    }

    proptest! {
        #[test]
        fn whatever_is_named_fits_into_int64_nanoseconds(given: i64, seconds in any::<u64>(), nanos in 0..1_000_000_000_u32) {
            let whole = whole_seconds(Duration::new(seconds.min(u64::MAX - 1), nanos));
            prop_assert!(whole.checked_mul(1_000_000_000).is_some());
            prop_assert!(i64::try_from(super::seconds(given).as_nanos()).is_ok());
            prop_assert!(i64::try_from((grace(given) + grace(given) / 2).as_nanos()).is_ok());
        }
    }
}
