//! Follows one plugin's list of devices, for as long as the plugin is the one of its resource.
//!
//! The kubelet drops a plugin whose stream ends and waits for it to register again; here its socket is also
//! tried again, so that a plugin that was killed and comes back at the same place is followed whether it
//! registers or not.

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
        let (lists, why) = lists(shared, resource, plugin, generation).await;
        if lists > 0 {
            (pause, gone_at) = (RETRY.0, None);
        }
        if !shared.stopped(resource, generation) {
            return;
        }
        if gone_at.is_none() {
            warn!(
                resource,
                error = why,
                "the device plugin is gone: its devices are unhealthy until it is back"
            );
        }
        let since = *gone_at.get_or_insert_with(Instant::now);
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

/// Takes in lists until the stream ends: how many came, and why there are no more.
async fn lists(shared: &Shared, resource: &str, plugin: &Plugin, generation: u64) -> (usize, String) {
    let mut stream = match plugin.list_and_watch().await {
        Ok(stream) => stream,
        Err(status) => return (0, plugin::told(&status)),
    };
    let mut count = 0;
    loop {
        let list = match stream.message().await {
            Ok(Some(list)) => list,
            Ok(None) => return (count, "it ended its list".to_owned()),
            Err(status) => return (count, plugin::told(&status)),
        };
        if list.devices.len() > MAX_DEVICES {
            shared.metrics.refused_lists.inc();
            return (count, format!("it lists {} devices, more than {MAX_DEVICES}", list.devices.len()));
        }
        let begun = Instant::now();
        let devices: Vec<Device> = plugin::devices(list).collect();
        if count == 0 {
            info!(resource, devices = devices.len(), "the device plugin lists its devices");
        }
        if !shared.listed(resource, generation, devices) {
            return (count, "another took its place".to_owned());
        }
        count += 1;
        // One that talks without end gets a share of the processor, no more.
        tokio::time::sleep(begun.elapsed() * SHARE).await;
    }
}
