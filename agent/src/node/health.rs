//! The agent's health, as `/healthz`, the API and the node's conditions show it.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use jiff::Timestamp;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use beelet_api::grpc::Outlook;
use beelet_cri::mounts::Mounts;
use beelet_model::table::Complete;
use beelet_pleg::relist::{NOTICED_AFTER, Pulse, UNHEALTHY_AFTER};
use beelet_state::events::NodeEvents;

/// How often it is looked whether the node became ready or unready.
const LOOK: Duration = Duration::from_secs(5);
/// A runtime that has not answered for this long after the agent's start is told of.
const START: Duration = Duration::from_secs(10);

/// Knows whether the container runtime answers. Clones share it.
#[derive(Clone)]
pub(super) struct Health {
    endpoint: Arc<str>,
    /// The relist's, once the runtime has answered for the first time.
    pulse: Arc<OnceLock<Pulse>>,
    /// Once it is known that mounts reach the runtime.
    mounts: Arc<OnceLock<Arc<Mounts>>>,
    began: Instant,
    pub(super) complete: Complete,
}

impl Health {
    pub(super) fn new(endpoint: &str) -> Self {
        let (pulse, mounts, complete) = (Arc::default(), Arc::default(), Arc::default());
        Self { endpoint: endpoint.into(), pulse, mounts, began: Instant::now(), complete }
    }

    /// From now on the relist's pulse decides.
    pub(super) fn follow(&self, pulse: Pulse) {
        let _ = self.pulse.set(pulse);
    }

    /// From now on mounts that do not reach the runtime count, too.
    pub(super) fn follow_mounts(&self, mounts: Arc<Mounts>) {
        let _ = self.mounts.set(mounts);
    }

    /// Knows whether mounts reach the runtime, if that is looked at.
    pub(super) fn mounts(&self) -> Option<Arc<Mounts>> {
        self.mounts.get().cloned()
    }

    /// An error sentence if the agent is not well.
    pub(super) fn check(&self) -> Result<(), String> {
        self.check_within(UNHEALTHY_AFTER)
    }

    /// An error sentence once the runtime has been silent for this long.
    fn check_within(&self, patience: Duration) -> Result<(), String> {
        let endpoint = &self.endpoint;
        let Some(pulse) = self.pulse.get() else {
            return Err(format!("the container runtime at {endpoint} has not answered yet"));
        };
        let silent = pulse.silence();
        if silent < patience {
            let trouble = self.mounts.get().and_then(|mounts| mounts.state().trouble);
            return trouble.map_or(Ok(()), |trouble| Err(trouble.to_string()));
        }
        let since = Timestamp::now().saturating_sub(silent).map(|at| format!(" since {at:.0}"));
        Err(format!(
            "the container runtime at {endpoint} has not answered{} ({} s): is it running?",
            since.unwrap_or_default(),
            silent.as_secs()
        ))
    }

    /// What the API's clients learn beside the pods.
    pub(super) fn outlook(&self) -> Outlook {
        let health = self.clone();
        Outlook::new(Arc::clone(&self.complete), move || health.check_within(NOTICED_AFTER).err())
    }

    /// Records when the node becomes ready and unready, with the kubelet's reasons, until `shutdown`.
    pub(super) async fn tell(self, events: NodeEvents, shutdown: CancellationToken) {
        let mut ticks = interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_ready = None;
        while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            let now = self.check();
            // A runtime that starts with the machine is given its time.
            let is_early = was_ready.is_none() && self.began.elapsed() < START;
            if was_ready == Some(now.is_ok()) || (is_early && now.is_err()) {
                continue;
            }
            was_ready = Some(now.is_ok());
            match now {
                Ok(()) => events.normal("NodeReady", "The container runtime answers: the node is ready"),
                Err(error) => events.warning("NodeNotReady", &error),
            }
        }
    }

    /// For how long [`Health::check`] has given its present answer.
    pub(super) fn lasted(&self) -> Duration {
        let Some(pulse) = self.pulse.get() else { return self.began.elapsed() };
        match self.mounts.get().map(|mounts| mounts.state()) {
            Some(state) if pulse.silence() < UNHEALTHY_AFTER => match state.trouble {
                Some(_) => state.since.elapsed(),
                None => state.since.elapsed().min(pulse.lasted()),
            },
            _ => pulse.lasted(),
        }
    }
}
