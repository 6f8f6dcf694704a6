//! Counts bytes of pods' sockets only on demand, since counting costs time per packet.

use std::{sync::Arc, time::Duration};

use beelet_base::blocking::blocking;
use beelet_bpf::Traffic;
use tokio::{sync::Notify, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// Time for which counting continues after the last reading; scrapes are more frequent.
const LINGER: Duration = Duration::from_secs(300);

/// Attaches the counters at the first `demand`, and detaches them after [`LINGER`] without demand.
pub(super) async fn run(traffic: Traffic, demand: Arc<Notify>, shutdown: CancellationToken) {
    let work = async {
        loop {
            demand.notified().await;
            let attaching = traffic.clone();
            match blocking("attaching the counters of bytes", move || attaching.attach()).await {
                Ok(()) => debug!("traffic accounting enabled (a subscriber appeared)"),
                Err(error) => {
                    warn!(%error, "cannot count the bytes of containers' sockets; counting those of pods' interfaces only");
                }
            }
            while timeout(LINGER, demand.notified()).await.is_ok() {}
            traffic.detach();
            debug!("traffic accounting disabled (no subscriber left)");
        }
    };
    // The kernel half detaches the counters when it stops.
    shutdown.run_until_cancelled(work).await;
}
