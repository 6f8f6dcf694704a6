//! What systemd wants to know of a service (sd_notify(3)). Without systemd all of this does nothing.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

/// Tells systemd that the agent is up, feeds the watchdog at half its period as the kubelet does, tells that the agent
/// ends once `ending` says so, and returns at `ended`.
///
/// The watchdog learns that the agent's threads get on with their work, and no more: to start the agent again because
/// the container runtime is down would help nobody.
pub async fn follow(ending: CancellationToken, ended: CancellationToken) {
    tell(NotifyState::Ready);
    let period = sd_notify::watchdog_enabled();
    let mut ticks = tokio::time::interval(period.map_or(Duration::from_secs(3600), |period| period / 2));
    let mut told = false;
    loop {
        tokio::select! {
            // In this order: where there is nothing to stop both come at once, and the first is to be told all the same.
            biased;
            () = ending.cancelled(), if !told => {
                told = true;
                tell(NotifyState::Stopping);
            }
            () = ended.cancelled() => return,
            _ = ticks.tick(), if period.is_some() => tell(NotifyState::Watchdog),
        }
    }
}

fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::debug!("systemd was not told: {error}");
    }
}
