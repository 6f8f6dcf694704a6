//! Notifications of a service to systemd (sd_notify(3)). Without systemd they have no effect.

use std::time::Duration;

use beelet_base::clock::After as _;
use sd_notify::NotifyState;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Interval of requests for more time while pods are being stopped.
const EXTEND_PERIOD: Duration = Duration::from_secs(5);
/// Additional time per request.
const EXTENSION: Duration = Duration::from_secs(30);

/// Notifies systemd that the agent is ready, feeds the watchdog at half its period as the kubelet does,
/// notifies systemd of the stop at `ending`, and returns at `ended`.
///
/// Stopping pods may take longer than the unit's `TimeoutStopSec`, so the agent requests more time for the
/// duration of `stopping_time`, which is evaluated at `ending`.
///
/// The watchdog covers only the progress of the agent's threads: restarting the agent would not help if the
/// container runtime is down.
pub async fn follow(
    ending: CancellationToken,
    ended: CancellationToken,
    stopping_time: impl Fn() -> Duration,
) {
    notify(&[NotifyState::Ready]);
    let period = sd_notify::watchdog_enabled();
    let mut ticks = tokio::time::interval(period.map_or(Duration::from_secs(3600), |period| period / 2));
    let mut extend = tokio::time::interval(EXTEND_PERIOD);
    let (mut is_stopping, mut patience) = (false, Instant::now());
    loop {
        tokio::select! {
            // In this order: without pods to stop, both tokens are cancelled at once, and systemd must still
            // get the first notification.
            biased;
            () = ending.cancelled(), if !is_stopping => {
                is_stopping = true;
                notify(&[NotifyState::Stopping]);
                patience = Instant::now().after(stopping_time());
                extend.reset_immediately();
            }
            () = ended.cancelled() => return,
            _ = extend.tick(), if is_stopping && Instant::now() < patience => {
                let usec = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
                notify(&[NotifyState::ExtendTimeoutUsec(usec)]);
            }
            _ = ticks.tick(), if period.is_some() => notify(&[NotifyState::Watchdog]),
        }
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("cannot notify systemd: {error}");
    }
}
