//! The disturbances of a simulated machine: faults of calls, sick containers, a runtime that is away, kills.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beelet_tests::cri::Op;
use fastrand::Rng;
use tokio_util::sync::CancellationToken;

use crate::plan::{Fault, FaultKind};
use crate::seam;

/// The disturbances that are in force.
#[derive(Default)]
pub(crate) struct Disturbances(Mutex<State>);

#[derive(Default)]
struct State {
    /// Disturbances of calls, with their ends.
    faults: Vec<(Duration, Fault)>,
    /// Ends of the periods in which a container's probes fail, by pod and container.
    sick: BTreeMap<(String, String), Duration>,
    /// Number of changing calls until the agent's death, and true for a death after the effect.
    kill: Option<(u64, bool)>,
    /// Time for which a killed agent is away.
    away: Duration,
    runtime: Link,
    api_server: Link,
}

/// The agent's connections to a server that can be away.
#[derive(Default)]
struct Link {
    /// Time until which the server refuses connections.
    away_until: Duration,
    connections: CancellationToken,
}

impl Link {
    /// Breaks all connections; new ones are refused for these seconds.
    fn cut(&mut self, seconds: u64) {
        self.away_until = seam::elapsed() + Duration::from_secs(seconds);
        std::mem::take(&mut self.connections).cancel();
    }

    /// Returns a token that is cancelled when the connections break, or None while the server is away.
    fn open(&self) -> Option<CancellationToken> {
        (seam::elapsed() >= self.away_until).then(|| self.connections.clone())
    }
}

impl Disturbances {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the agent's connections and a planned death, after its death.
    pub(crate) fn forget_agent(&self) {
        let mut state = self.lock();
        state.kill = None;
        state.runtime.connections = CancellationToken::new();
        state.api_server.connections = CancellationToken::new();
    }

    /// Returns true if the agent dies at this changing call, and counts the call.
    pub(crate) fn dies(&self, after: bool) -> bool {
        let mut state = self.lock();
        match &mut state.kill {
            Some((0, after_effect)) if *after_effect == after => {
                state.kill = None;
                true
            }
            Some((left, after_effect)) if *after_effect == after => {
                *left -= 1;
                false
            }
            _ => false,
        }
    }

    /// Returns true if the probes of this container fail now.
    pub(crate) fn is_sick(&self, name: &(String, String)) -> bool {
        self.lock().sick.get(name).is_some_and(|until| seam::elapsed() < *until)
    }

    /// Disturbs calls from now on.
    pub(crate) fn disturb(&self, fault: Fault) {
        let until = seam::elapsed() + Duration::from_secs(fault.seconds);
        self.lock().faults.push((until, fault));
    }

    /// Makes the probes of a container fail.
    pub(crate) fn sicken(&self, uid: &str, name: &str, seconds: u64) {
        let until = seam::elapsed() + Duration::from_secs(seconds);
        self.lock().sick.insert((uid.to_owned(), name.to_owned()), until);
    }

    /// Breaks all connections to the runtime; new ones are refused for these seconds.
    pub(crate) fn restart_runtime(&self, seconds: u64) {
        self.lock().runtime.cut(seconds);
    }

    /// Breaks all connections to the API server; new ones are refused for these seconds.
    pub(crate) fn stop_api_server(&self, seconds: u64) {
        self.lock().api_server.cut(seconds);
    }

    /// Kills the agent at its n-th changing call from now, for this time.
    pub(crate) fn kill_at(&self, calls: u64, after_effect: bool, away: Duration) {
        let mut state = self.lock();
        (state.kill, state.away) = (Some((calls, after_effect)), away);
    }

    /// Returns the time for which a killed agent is away.
    pub(crate) fn away(&self) -> Duration {
        self.lock().away
    }

    /// Returns the token of a new connection to the runtime, which is cancelled when the connection breaks,
    /// or None while the runtime is away.
    pub(crate) fn runtime_link(&self) -> Option<CancellationToken> {
        self.lock().runtime.open()
    }

    /// Returns the token of a new connection to the API server, or None while the server is away.
    pub(crate) fn api_server_link(&self) -> Option<CancellationToken> {
        self.lock().api_server.open()
    }

    /// Returns the disturbance of a call, if any, with the rest of its time.
    pub(crate) fn fault(&self, op: Op, rng: &mut Rng) -> Option<(FaultKind, Duration)> {
        let now = seam::elapsed();
        let mut state = self.lock();
        state.faults.retain(|(until, _)| *until > now);
        let mut fitting = state.faults.iter().filter(|(_, fault)| fault.op.is_none_or(|other| other == op));
        fitting.find(|(_, fault)| rng.u64(0..100) < fault.percent).map(|(until, f)| (f.kind, *until - now))
    }
}
