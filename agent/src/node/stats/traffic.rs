//! Bytes of pods' sockets are counted while somebody reads them, and not else: each packet would pay for it.

use std::{sync::Arc, time::Duration};

use beelet_base::blocking::blocking;
use beelet_bpf::Traffic;
use tokio::{sync::Notify, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// How long they are counted after the last reading: whoever scrapes does so more often.
const LINGER: Duration = Duration::from_secs(300);

/// Attaches what counts at each first `demand`, and takes it off when there was none for [`LINGER`].
pub(super) async fn run(traffic: Traffic, demand: Arc<Notify>, shutdown: CancellationToken) {
    let work = async {
        loop {
            demand.notified().await;
            let attaching = traffic.clone();
            match blocking("attaching the counters of bytes", move || attaching.attach()).await {
                Ok(()) => debug!("somebody reads what pods' sockets carry: it is counted"),
                Err(error) => {
                    warn!(%error, "the bytes of containers' sockets can't be counted; their pods' interfaces are");
                }
            }
            while timeout(LINGER, demand.notified()).await.is_ok() {}
            traffic.detach();
            debug!("nobody reads what pods' sockets carry any more: it is counted no longer");
        }
    };
    // The kernel half takes them off when it is stopped.
    shutdown.run_until_cancelled(work).await;
}
