//! Conversions of millicores to shares, quotas and weights: the kubelet's, the runtimes', and the agent's
//! own.

/// The minimum of `cpu.shares` (a container without a request gets it).
const MIN_SHARES: i64 = 2;
/// The maximum of `cpu.shares` in the kernel.
const MAX_SHARES: i64 = 262_144;
/// The minimum quota in the kernel, in microseconds.
const MIN_QUOTA_US: i64 = 1000;

/// Converts millicores to `cpu.shares`: 1024 per core, at least 2, at most 262144 (`MilliCPUToShares`).
pub fn millis_to_shares(millis: i64) -> u64 {
    let shares = i128::from(millis) * 1024 / 1000;
    shares.clamp(i128::from(MIN_SHARES), i128::from(MAX_SHARES)).unsigned_abs() as u64 // within 2..=262144
}

/// Returns the maximum millicores that [`millis_to_shares`] converts to these shares: a cgroup's request,
/// estimated from its file. `None` at the end of the scale, where all larger amounts look the same.
pub fn shares_to_millis(shares: u64) -> Option<u64> {
    (shares < MAX_SHARES.unsigned_abs()).then(|| ((shares + 1) * 1000).div_ceil(1024) - 1)
}

/// Returns the maximum millicores that yield this `cpu.weight` by the linear formula of
/// [`shares_to_weight_linear`]. A weight is coarse (some 26 shares look the same), so the result exceeds the
/// request by up to 28, and is never below it.
pub fn weight_to_millis(weight: u64) -> Option<u64> {
    // The minimum shares of the next weight, less one.
    shares_to_millis((weight.max(1) * 262_142).div_ceil(9999) + 1)
}

/// Converts a limit in millicores to microseconds per period, at least 1 ms; 0 without a limit
/// (`MilliCPUToQuota`).
pub fn millis_to_quota(millis: i64, period_us: u64) -> i64 {
    if millis == 0 {
        return 0;
    }
    let quota = i128::from(millis) * i128::from(period_us) / 1000;
    i64::try_from(quota).unwrap_or(i64::MAX).max(MIN_QUOTA_US)
}

/// Converts shares to the kubelet's `cpu.weight` above the container: linear from (2, 1) to (262144, 10000)
/// (KEP-2254).
pub fn shares_to_weight_linear(shares: u64) -> u64 {
    1 + shares.clamp(2, 262_144).saturating_sub(2) * 9999 / 262_142
}

/// Converts shares to the runtimes' `cpu.weight` at the container: a curve through (2, 1), (1024, 100) and
/// (262144, 10000) (opencontainers/cgroups #20: ceil(10^((L² + 125 L) / 612 - 7/34)) with L = log2(shares)).
pub fn shares_to_weight_quadratic(shares: u64) -> u64 {
    match shares {
        0..=2 => 1,
        262_144.. => 10_000,
        _ => {
            let l = (shares as f64).log2(); // exact: shares < 2^18
            let exponent = (l * l + 125.0 * l) / 612.0 - 7.0 / 34.0;
            10_f64.powf(exponent).ceil() as u64 // within 2..=10000
        }
    }
}

/// Returns the agent's own `cpu.weight`, the same at every level: millicores / 10, rounded half up, at least
/// 1, at most 10000.
pub(crate) fn proportional_weight(millis: i64) -> u64 {
    (millis.max(0).unsigned_abs().saturating_add(5) / 10).clamp(1, 10_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_the_kubelet() {
        for (millis, shares) in [
            (0, 2),
            (1, 2),
            (2, 2),
            (100, 102),
            (1000, 1024),
            (3000, 3072),
            (1_000_000, 262_144),
            (i64::MAX, 262_144),
            (-5, 2),
        ] {
            assert_eq!(millis_to_shares(millis), shares, "{millis}");
        }
    }

    #[test]
    fn a_request_is_recovered_from_its_file_and_never_too_low() {
        for millis in 0..=255_000 {
            let shares = millis_to_shares(millis);
            let back = shares_to_millis(shares).unwrap();
            assert!(millis.unsigned_abs() <= back && back <= millis.unsigned_abs() + 2, "{millis}: {back}");
            let weight = shares_to_weight_linear(shares);
            let back = weight_to_millis(weight).unwrap();
            assert!(millis.unsigned_abs() <= back && back <= millis.unsigned_abs() + 28, "{millis}: {back}");
            let again = millis_to_shares(i64::try_from(back).unwrap());
            assert_eq!(shares_to_weight_linear(again), weight, "{millis}");
        }
        assert_eq!((shares_to_millis(102), shares_to_millis(256)), (Some(100), Some(250)));
        assert_eq!((shares_to_millis(262_144), weight_to_millis(10_000)), (None, None));
    }

    #[test]
    fn quotas_follow_the_kubelet() {
        for (millis, period, quota) in [
            (0, 100_000, 0),
            (1, 100_000, 1000),
            (100, 100_000, 10_000),
            (6100, 12_500, 76_250),
            (i64::MAX, 1_000_000, i64::MAX),
        ] {
            assert_eq!(millis_to_quota(millis, period), quota, "{millis} {period}");
        }
    }

    #[test]
    fn weights_agree_with_the_published_table() {
        // opencontainers/cgroups #20 and kubernetes/website #54835: millicores, linear, quadratic.
        for (millis, linear, quadratic) in [
            (10, 1, 4),
            (50, 2, 11),
            (100, 4, 17),
            (250, 10, 35),
            (500, 20, 59),
            (1000, 39, 100),
            (2000, 79, 174),
            (4000, 157, 303),
            (8000, 313, 532),
            (16_000, 625, 942),
            (64_000, 2500, 3023),
        ] {
            let shares = millis_to_shares(millis);
            assert_eq!(
                (shares_to_weight_linear(shares), shares_to_weight_quadratic(shares)),
                (linear, quadratic),
                "{millis}"
            );
        }
        assert_eq!((shares_to_weight_linear(2), shares_to_weight_linear(262_144)), (1, 10_000));
        assert_eq!((shares_to_weight_quadratic(2), shares_to_weight_quadratic(262_144)), (1, 10_000));
    }

    #[test]
    fn one_cpu_is_the_kernels_default_weight() {
        for (millis, weight) in [
            (0, 1),
            (4, 1),
            (5, 1),
            (14, 1),
            (15, 2),
            (1000, 100),
            (333, 33),
            (335, 34),
            (200_000, 10_000),
            (i64::MAX, 10_000),
        ] {
            assert_eq!(proportional_weight(millis), weight, "{millis}");
        }
    }
}
