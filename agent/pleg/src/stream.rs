//! The runtime's event stream as a source of exits. Used only if the agent owns the node, because the stream
//! has a single subscriber.

use std::time::Duration;

use beelet_base::work::Work;
use beelet_proto::cri::ContainerEventType;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{ExitHint, Pace};
use beelet_cri::{ContainerEvents, Error, Kind, Runtime};

/// Pause before the next subscription; it doubles up to [`RETRY_MAX`].
const RETRY: Duration = Duration::from_secs(1);
/// Maximum pause.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Follows the stream until `shutdown`, or until the runtime reports that it has none.
pub fn follow(
    runtime: Runtime,
    hints: mpsc::Sender<ExitHint>,
    pace: Pace,
    shutdown: CancellationToken,
) -> Work {
    Box::pin(async move {
        let mut pause = RETRY;
        loop {
            let ended = tokio::select! {
                () = shutdown.cancelled() => return,
                ended = once(&runtime, &hints, &pace) => ended,
            };
            if pace.is_streaming() {
                pause = RETRY;
            }
            pace.set_streaming(false);
            match ended {
                Err(error) if error.kind == Kind::Unimplemented => {
                    info!(
                        "the container runtime streams no events; exits come from the kernel and the relist"
                    );
                    return;
                }
                Err(error) => warn!(%error, "the container runtime's event stream failed; using the relist"),
                Ok(()) => debug!("the container runtime ended its event stream"),
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(RETRY_MAX);
        }
    })
}

/// Runs a subscription to its end. The stream counts as working from its first event on: a runtime may accept
/// the subscription, but send the events to another subscriber.
async fn once(runtime: &Runtime, hints: &mpsc::Sender<ExitHint>, pace: &Pace) -> Result<(), Error> {
    let mut events: ContainerEvents = runtime.container_events().await?;
    while let Some(event) = events.next().await? {
        if !pace.is_streaming() {
            info!("the container runtime streams its events");
            pace.set_streaming(true);
            // The stream lacks earlier events.
            pace.nudge();
        }
        let stopped = event.container_event_type() == ContainerEventType::ContainerStoppedEvent;
        if stopped && hints.send(ExitHint::Stopped { id: event.container_id }).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}
