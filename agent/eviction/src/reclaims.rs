//! Reclaims: the removal of unused objects before a pod is evicted.

use std::{collections::HashMap, sync::Arc, time::Duration};

use beelet_policy::eviction::{Assessment, DiskLayout, Reclaim, Signal, Threshold, is_relieved, reclaim};
use tokio::{sync::mpsc, time::Instant};
use tracing::warn;

use super::{Parts, Reclaimed, Reclaimer, gauges::Seen};

/// Maximum time of a reclaim before pods are evicted although it has not ended.
const RECLAIM_PATIENCE: Duration = Duration::from_secs(60);
/// Time after a reclaim during which another one cannot help, if the first was not enough: a signal that
/// stays low then leads to evictions.
const RECLAIMED: Duration = Duration::from_secs(30);

/// Time for the runtime to free the space of removed objects before a shortage leads to an eviction.
/// containerd waits fifty times the duration of its last collection; the kubelet decides again after this
/// time.
pub(super) const LATE: Duration = Duration::from_secs(10);

/// State of a reclaim.
#[derive(Debug, Clone, Copy)]
enum ReclaimState {
    Running {
        since: Instant,
    },
    /// Numbers read after `settled` include the effect.
    Done {
        at: Instant,
        settled: Instant,
    },
}

/// Steps of a reclaim: on a split disk each file system has its own.
type Steps = &'static [Reclaim];

/// Reclaims in progress or done.
pub(super) struct Reclaims {
    states: HashMap<Steps, ReclaimState>,
    reclaimer: Reclaimer,
    out: mpsc::Sender<(Steps, Reclaimed)>,
    done: mpsc::Receiver<(Steps, Reclaimed)>,
}

impl Reclaims {
    pub(super) fn new(reclaimer: Reclaimer) -> Self {
        let (out, done) = mpsc::channel(1);
        Self { states: HashMap::new(), reclaimer, out, done }
    }

    /// Waits until a reclaim ends.
    pub(super) async fn ended(&mut self) {
        // This value has a sender, so the channel stays open.
        if let Some((steps, reclaimed)) = self.done.recv().await {
            let at = Instant::now();
            let settled = if reclaimed == Reclaimed::Later { at + LATE } else { at };
            self.states.insert(steps, ReclaimState::Done { at, settled });
        }
    }

    /// Drops sufficient reclaims: the next shortage of the disk may be reclaimable, too.
    pub(super) fn forget_what_was_enough(
        &mut self,
        (layout, thresholds): (DiskLayout, &[Threshold]),
        assessment: &Assessment,
        seen: &Seen,
    ) {
        self.states.retain(|steps, state| {
            let ReclaimState::Done { at, .. } = *state else { return true };
            let read_since = |signal| seen.get(signal).map(|(_, read_at)| at < read_at);
            !is_relieved(steps, layout, thresholds, &assessment.met, read_since)
        });
    }

    /// Starts a reclaim if that can help; returns true if evictions must wait until it has ended.
    pub(super) fn must_wait(
        &mut self,
        (signal, layout): (Signal, DiskLayout),
        read_at: Instant,
        parts: &Parts,
    ) -> bool {
        let wanted = reclaim(signal, layout);
        if wanted.is_empty() {
            return false;
        }
        match self.states.get(wanted) {
            Some(ReclaimState::Running { since }) => return since.elapsed() < RECLAIM_PATIENCE,
            Some(ReclaimState::Done { at, settled }) if at.elapsed() < RECLAIMED => {
                // The effect of the reclaim must be measured first.
                return read_at <= *settled;
            }
            Some(ReclaimState::Done { .. }) | None => {}
        }
        self.states.insert(wanted, ReclaimState::Running { since: Instant::now() });
        parts.metrics.reclaimed();
        parts.events.warning("EvictionThresholdMet", &format!("Attempting to reclaim {}", signal.resource()));
        let (reclaimer, done) = (Arc::clone(&self.reclaimer), self.out.clone());
        tokio::spawn(async move {
            let mut reclaimed = Reclaimed::Now;
            for step in wanted {
                match reclaimer(*step).await {
                    Ok(Reclaimed::Now) => {}
                    Ok(Reclaimed::Later) => reclaimed = Reclaimed::Later,
                    Err(error) => {
                        let what = match step {
                            Reclaim::DeleteUnusedContainers => "unused containers",
                            Reclaim::DeleteUnusedImages => "unused images",
                        };
                        warn!(%error, "cannot remove {what}");
                    }
                }
            }
            // Sending fails only after eviction has ended.
            let _ = done.send((wanted, reclaimed)).await;
        });
        true
    }
}
