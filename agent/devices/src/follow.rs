//! Follows the device list of one plugin while the plugin serves its resource.
//!
//! The kubelet drops a plugin whose stream ends and waits for its registration. This module does so only if
//! the plugin itself ended the stream. After a broken connection it reconnects to the socket, so that a
//! killed plugin that restarts at the same path is followed even without a registration.

use std::{sync::Arc, time::Duration};

use beelet_policy::devices::{Device, ENDPOINT_GRACE};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    ledger::Shared,
    plugin::{self, MAX_DEVICES, Plugin},
};

/// Minimum and maximum delay between reconnects.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Idle time after each list, as a multiple of the time spent on it.
const SHARE: u32 = 9;

/// Follows until another plugin replaces this one, it has been away for too long, or `shutdown`.
pub(super) async fn follow(
    shared: Arc<Shared>,
    resource: String,
    plugin: Plugin,
    (generation, superseded): (u64, CancellationToken),
    shutdown: CancellationToken,
) {
    tokio::select! {
        () = superseded.cancelled() => {}
        () = shutdown.cancelled() => {}
        () = follow_on(&shared, &resource, &plugin, generation) => {}
    }
}

async fn follow_on(shared: &Shared, resource: &str, plugin: &Plugin, generation: u64) {
    let mut pause = RETRY.0;
    let mut gone_at: Option<Instant> = None;
    loop {
        let (lists, end) = lists(shared, resource, plugin, generation).await;
        if lists > 0 {
            (pause, gone_at) = (RETRY.0, None);
        }
        if !shared.stopped(resource, generation) {
            return;
        }
        if gone_at.is_none() {
            warn!(
                resource,
                error = end.why,
                "lost the device plugin; its devices are unhealthy until it returns"
            );
        }
        let since = *gone_at.get_or_insert_with(Instant::now);
        if end.by_plugin {
            tokio::time::sleep_until(since + ENDPOINT_GRACE + RETRY.0).await;
        }
        if since.elapsed() > ENDPOINT_GRACE {
            warn!(resource, "the device plugin did not return in time; removing its resource from the node");
            shared.given_up(resource, generation);
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY.1);
    }
}

/// End of a device list stream.
#[derive(Debug)]
struct End {
    why: String,
    /// The plugin itself ended the stream: no reconnect before its next registration.
    by_plugin: bool,
}

impl End {
    fn of(status: &tonic::Status) -> Self {
        // tonic's source is the broken connection; a plugin's own error has none.
        Self { why: plugin::in_words(status), by_plugin: std::error::Error::source(status).is_none() }
    }
}

/// Processes lists until the stream ends; returns their number and the reason of the end.
async fn lists(shared: &Shared, resource: &str, plugin: &Plugin, generation: u64) -> (usize, End) {
    let mut stream = match plugin.list_and_watch().await {
        Ok(stream) => stream,
        Err(status) => return (0, End::of(&status)),
    };
    let mut count = 0;
    loop {
        let list = match stream.message().await {
            Ok(Some(list)) => list,
            Ok(None) => return (count, End { why: "the plugin ended its list".to_owned(), by_plugin: true }),
            Err(status) => return (count, End::of(&status)),
        };
        if list.devices.len() > MAX_DEVICES {
            shared.metrics.refused_lists.inc();
            let why = format!("the plugin lists {} devices, more than {MAX_DEVICES}", list.devices.len());
            return (count, End { why, by_plugin: false });
        }
        let begun = Instant::now();
        let devices: Vec<Device> = plugin::devices(list).collect();
        if count == 0 {
            info!(resource, devices = devices.len(), "the device plugin lists its devices");
        }
        if !shared.listed(resource, generation, devices) {
            return (count, End { why: "another plugin has replaced it".to_owned(), by_plugin: false });
        }
        count += 1;
        // Limits the share of a processor that a plugin's continuous updates can use.
        tokio::time::sleep(begun.elapsed() * SHARE).await;
    }
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;

    #[test]
    fn a_plugins_own_end_is_distinguished_from_a_broken_connection() {
        assert!(End::of(&Status::internal("ListAndWatch failed")).by_plugin);
        assert!(End::of(&Status::unavailable("no devices any more")).by_plugin);
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(!End::of(&Status::from_error(Box::new(broken))).by_plugin);
    }
}
