//! Follows one plugin's list of devices, for as long as the plugin is the one of its resource.
//!
//! The kubelet drops a plugin whose stream ends and waits for it to register again. So does this where the
//! plugin itself ended the stream; where the connection broke, its socket is tried again, so that a plugin
//! that was killed and comes back at the same place is followed whether it registers or not.

use std::{sync::Arc, time::Duration};

use beelet_policy::devices::{Device, ENDPOINT_GRACE};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    ledger::Shared,
    plugin::{self, MAX_DEVICES, Plugin},
};

/// The pauses between tries to follow a plugin again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Of the time that it takes to take in a list, this many times as much is left to others before the next.
const SHARE: u32 = 9;

/// Follows until another plugin takes its place, or it has been away for too long, or `shutdown`.
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
                "the device plugin is gone: its devices are unhealthy until it is back"
            );
        }
        let since = *gone_at.get_or_insert_with(Instant::now);
        if end.by_plugin {
            tokio::time::sleep_until(since + ENDPOINT_GRACE + RETRY.0).await;
        }
        if since.elapsed() > ENDPOINT_GRACE {
            warn!(
                resource,
                "the device plugin has been gone for too long: its resource is removed from the node"
            );
            shared.given_up(resource, generation);
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY.1);
    }
}

/// Why there are no more lists.
#[derive(Debug)]
struct End {
    why: String,
    /// The plugin itself says that there are none: it is not asked again before it registers anew.
    by_plugin: bool,
}

impl End {
    fn of(status: &tonic::Status) -> Self {
        // What broke the connection is behind the status; a plugin's own word has nothing behind it.
        Self { why: plugin::in_words(status), by_plugin: std::error::Error::source(status).is_none() }
    }
}

/// Takes in lists until the stream ends: how many came, and why there are no more.
async fn lists(shared: &Shared, resource: &str, plugin: &Plugin, generation: u64) -> (usize, End) {
    let mut stream = match plugin.list_and_watch().await {
        Ok(stream) => stream,
        Err(status) => return (0, End::of(&status)),
    };
    let mut count = 0;
    loop {
        let list = match stream.message().await {
            Ok(Some(list)) => list,
            Ok(None) => return (count, End { why: "it ended its list".to_owned(), by_plugin: true }),
            Err(status) => return (count, End::of(&status)),
        };
        if list.devices.len() > MAX_DEVICES {
            shared.metrics.refused_lists.inc();
            let why = format!("it lists {} devices, more than {MAX_DEVICES}", list.devices.len());
            return (count, End { why, by_plugin: false });
        }
        let begun = Instant::now();
        let devices: Vec<Device> = plugin::devices(list).collect();
        if count == 0 {
            info!(resource, devices = devices.len(), "the device plugin lists its devices");
        }
        if !shared.listed(resource, generation, devices) {
            return (count, End { why: "another took its place".to_owned(), by_plugin: false });
        }
        count += 1;
        // One that talks without end gets a share of the processor, no more.
        tokio::time::sleep(begun.elapsed() * SHARE).await;
    }
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;

    #[test]
    fn a_plugins_own_word_is_told_from_a_connection_that_broke() {
        assert!(End::of(&Status::internal("ListAndWatch failed")).by_plugin);
        assert!(End::of(&Status::unavailable("no devices any more")).by_plugin);
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(!End::of(&Status::from_error(Box::new(broken))).by_plugin);
    }
}
