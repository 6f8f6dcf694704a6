//! Pauses between attempts to start one container.

use std::time::Duration;

/// The cause of a failed start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartFailure {
    /// The runtime could not be reached, or did not answer in time: not the container's fault.
    Runtime,
    /// The container's image cannot be pulled, or its process cannot be started.
    Image,
    /// An object that the container needs is missing, or the runtime does not create the container.
    Making,
}

/// First and maximum pause; pauses double.
const RUNTIME: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
const IMAGE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));
/// The kubelet's backOffPeriod: it tries again when it next syncs the pod.
const MAKING: Duration = Duration::from_secs(10);

/// Returns the pause before the next attempt. `before` is the pause before this attempt if that failed in the
/// same way, `chance` any number. Only pulls and starts have growing back-offs (`image_manager.go`,
/// `doBackOff`); after any other error the kubelet syncs the pod again within ten to fifteen seconds
/// (`pod_workers.go`, `completeWork`).
#[expect(clippy::arithmetic_side_effects, reason = "constants, and a number of eight bits")]
#[must_use]
pub fn start_pause(failure: StartFailure, before: Option<Duration>, chance: u8) -> Duration {
    let (least, most) = match failure {
        StartFailure::Runtime => RUNTIME,
        StartFailure::Image => IMAGE,
        StartFailure::Making => return MAKING + MAKING * u32::from(chance) / (2 * u32::from(u8::MAX)),
    };
    before.map_or(least, |before| before.saturating_mul(2).clamp(least, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pauses_after_pulls_and_runs_grow() {
        let seconds = |failure: StartFailure, chance: u8| {
            let mut pause = None;
            let mut next = || *pause.insert(start_pause(failure, pause, chance));
            [next(), next(), next(), next(), next(), next(), next()].map(|pause| pause.as_secs())
        };
        assert_eq!(seconds(StartFailure::Image, 255), [10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(seconds(StartFailure::Runtime, 255), [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(seconds(StartFailure::Making, 0), [10; 7]);
        assert_eq!(seconds(StartFailure::Making, 255), [15; 7]);
    }
}
