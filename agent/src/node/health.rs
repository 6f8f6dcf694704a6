//! The agent's health for `/healthz`, the API and the node's conditions.

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

/// Interval of checks of the node's readiness.
const CHECK_PERIOD: Duration = Duration::from_secs(5);
/// Time after the agent's start from which a silent runtime is reported.
const START: Duration = Duration::from_secs(10);

/// Health of the container runtime. Clones share it.
#[derive(Clone)]
pub(super) struct Health {
    endpoint: Arc<str>,
    /// The relist's pulse, set once the runtime has answered.
    pulse: Arc<OnceLock<Pulse>>,
    /// The check of mounts, set once mounts reach the runtime.
    mounts: Arc<OnceLock<Arc<Mounts>>>,
    began: Instant,
    pub(super) complete: Complete,
}

impl Health {
    pub(super) fn new(endpoint: &str) -> Self {
        let (pulse, mounts, complete) = (Arc::default(), Arc::default(), Arc::default());
        Self { endpoint: endpoint.into(), pulse, mounts, began: Instant::now(), complete }
    }

    /// Uses the relist's pulse from now on.
    pub(super) fn follow(&self, pulse: Pulse) {
        let _ = self.pulse.set(pulse);
    }

    /// Checks mounts, too, from now on.
    pub(super) fn follow_mounts(&self, mounts: Arc<Mounts>) {
        let _ = self.mounts.set(mounts);
    }

    /// Returns the check of mounts, if active.
    pub(super) fn mounts(&self) -> Option<Arc<Mounts>> {
        self.mounts.get().cloned()
    }

    /// Returns the time since the runtime's last answer, or since the start without an answer.
    pub(super) fn silence(&self) -> Duration {
        self.pulse.get().map_or_else(|| self.began.elapsed(), Pulse::silence)
    }

    /// Returns an error message if the agent is unhealthy.
    pub(super) fn check(&self) -> Result<(), String> {
        self.check_within(UNHEALTHY_AFTER)
    }

    /// Returns an error message if the agent is unhealthy, by a runtime silent for this long or by lost
    /// mounts.
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

    /// Returns the health for the API's clients.
    pub(super) fn outlook(&self) -> Outlook {
        let health = self.clone();
        Outlook::new(Arc::clone(&self.complete), move || health.check_within(NOTICED_AFTER).err())
    }

    /// Records changes of the node's readiness, with the kubelet's reasons, until `shutdown`.
    pub(super) async fn record_readiness(self, events: NodeEvents, shutdown: CancellationToken) {
        let mut ticks = interval(CHECK_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_ready = None;
        while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            let now = self.check();
            // A runtime that starts together with the machine needs time.
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

    /// Returns the time for which [`Health::check`] has returned its current answer.
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
