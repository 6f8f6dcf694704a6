//! What systemd wants to know of a service (sd_notify(3)). Without systemd all of this does nothing.

use std::time::Duration;

use beelet_base::clock::After as _;
use sd_notify::NotifyState;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// While pods are being stopped systemd is asked so often for so much more time.
const EXTEND_PERIOD: Duration = Duration::from_secs(5);
const EXTENSION: Duration = Duration::from_secs(30);

/// Tells systemd that the agent is up, feeds the watchdog at half its period as the kubelet does, tells that
/// the agent ends once `ending` says so, and returns at `ended`.
///
/// What stops with the agent may take longer than the unit's `TimeoutStopSec`: for as long as `stopping_time`
/// says, asked once it ends, systemd is asked for more time.
///
/// The watchdog learns that the agent's threads get on with their work, and no more: to start the agent again
/// because the container runtime is down would help nobody.
pub async fn follow(
    ending: CancellationToken,
    ended: CancellationToken,
    stopping_time: impl Fn() -> Duration,
) {
    notify(&[NotifyState::Ready]);
    let period = sd_notify::watchdog_enabled();
    let mut ticks = tokio::time::interval(period.map_or(Duration::from_secs(3600), |period| period / 2));
    let mut extend = tokio::time::interval(EXTEND_PERIOD);
    let (mut told, mut patience) = (false, Instant::now());
    loop {
        tokio::select! {
            // In this order: where there is nothing to stop both come at once, and the first is to be told
            // all the same.
            biased;
            () = ending.cancelled(), if !told => {
                told = true;
                notify(&[NotifyState::Stopping]);
                patience = Instant::now().after(stopping_time());
                extend.reset_immediately();
            }
            () = ended.cancelled() => return,
            _ = extend.tick(), if told && Instant::now() < patience => {
                let usec = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
                notify(&[NotifyState::ExtendTimeoutUsec(usec)]);
            }
            _ = ticks.tick(), if period.is_some() => notify(&[NotifyState::Watchdog]),
        }
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("systemd was not told: {error}");
    }
}
