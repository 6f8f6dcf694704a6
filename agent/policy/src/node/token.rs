//! Renewal of service account tokens: well before a token expires, and at most a day after its issue
//! (kubelet: `pkg/kubelet/token/token_manager.go`, `requiresRefresh`).

use std::time::Duration;

/// Maximum age of a token in use, regardless of its validity.
const OLDEST: Duration = Duration::from_secs(24 * 60 * 60);
/// Percentage of a token's lifetime after which it is renewed.
const USED_PERCENT: u32 = 80;

/// Returns the age at which a token that lives for `lifetime` is renewed. `chance`, 0 to 255, spreads the
/// tokens of a node over the last tenth of that time, so that tokens issued together are not renewed
/// together.
#[must_use]
pub fn renew_after(lifetime: Duration, chance: u8) -> Duration {
    let latest = (lifetime / 100 * USED_PERCENT).min(OLDEST);
    latest - latest / 10 * u32::from(chance) / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_renewed_in_time() {
        let check = |lifetime: u64, chance, expected: u64| {
            let after = renew_after(Duration::from_secs(lifetime), chance);
            assert_eq!(after, Duration::from_secs(expected), "{lifetime} s");
        };
        check(3600, 0, 2880);
        check(3600, 255, 2592);
        check(600, 0, 480);
        check(0, 0, 0);
        // A lifetime of a year still means a renewal per day.
        check(365 * 86_400, 0, 86_400);
    }
}
