//! Exec probes through the helper `beelet-exec` instead of the runtime, where the helper can reproduce the
//! container (docs/decisions/0029-exec.md). Must never run a command in both ways for one check, unless the
//! helper has refused to start it.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_cri::Runtime;
use beelet_exec::{Described, Entrance, Helper, Reply};
use beelet_proto::cri::ContainerState;
use prometheus_client::metrics::gauge::Gauge;
use tracing::{info, warn};

use super::{answer::Answer, exec};

/// The way into a container.
#[derive(Clone, Debug)]
enum Way {
    /// The helper enters it.
    Direct(Entrance),
    /// The runtime runs its commands, for this reason.
    Runtime(String),
}

/// Runs commands through the helper. Clones share the knowledge about containers.
#[derive(Clone, Debug)]
pub(super) struct Direct {
    runtime: Runtime,
    helper: Helper,
    ways: Arc<Mutex<BTreeMap<String, Way>>>,
    /// Reason why the helper can't be reached, since its last failure.
    away: Arc<Mutex<Option<String>>>,
    /// Number of containers whose commands the runtime runs although the helper should.
    fallbacks: Gauge,
}

impl Direct {
    /// Returns a client of the helper at `socket`.
    pub(super) fn new(runtime: Runtime, socket: PathBuf, fallbacks: Gauge) -> Self {
        let helper = Helper::new(socket);
        Self { runtime, helper, ways: Arc::default(), away: Arc::default(), fallbacks }
    }

    /// Returns the reason why the runtime runs the commands of a container.
    pub(super) fn reason(&self, container_id: &str) -> Option<String> {
        match self.ways().get(container_id) {
            Some(Way::Runtime(why)) => Some(why.clone()),
            _ => self.away.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// Forgets a container that has ended.
    pub(super) fn forget(&self, container_id: &str) {
        self.ways().remove(container_id);
        self.count();
    }

    /// Runs a command. `None` if the runtime must run it.
    pub(super) async fn run(
        &self,
        container_id: &str,
        command: &[String],
        within: Duration,
    ) -> Option<Answer> {
        let known = self.ways().get(container_id).cloned();
        let way = match known {
            Some(way) => way,
            None => match self.learn(container_id).await {
                Ok(way) => way,
                Err(error) => return Some(Answer::error(error)),
            },
        };
        let Way::Direct(entrance) = way else { return None };
        let reply = match self.helper.run(container_id, &entrance, command, within).await {
            Ok(reply) => reply,
            Err(error) => {
                let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
                if away.replace(error.to_string()).is_none() {
                    warn!(%error, "the runtime runs the commands of exec probes");
                }
                return None;
            }
        };
        *self.away.lock().unwrap_or_else(PoisonError::into_inner) = None;
        match reply {
            Reply::Ended { code, stdout, stderr } => Some(exec::judge(code, &[stdout, stderr].concat())),
            Reply::TimedOut => Some(exec::timed_out(command, within)),
            Reply::NotStarted(why) => Some(Answer::error(why)),
            Reply::Gone => {
                self.forget(container_id);
                Some(Answer::error("the container does not run any more"))
            }
            Reply::UseRuntime(why) => {
                self.learned(container_id, Way::Runtime(why));
                None
            }
        }
    }

    /// Finds the way into a container.
    async fn learn(&self, container_id: &str) -> Result<Way, String> {
        let found = self.runtime.containers.status(container_id, true).await.map_err(|e| e.to_string())?;
        let running = ContainerState::ContainerRunning;
        if found.status.as_ref().is_none_or(|status| status.state() != running) {
            return Err("the container does not run".to_owned());
        }
        let info = found.info.get("info").map(String::as_str).unwrap_or_default();
        let way = match Described::read(info) {
            Ok(described) => match Entrance::of(described) {
                Some(entrance) => Way::Direct(entrance),
                None => return Err("the container does not run any more".to_owned()),
            },
            Err(error) => Way::Runtime(error.to_string()),
        };
        self.learned(container_id, way.clone());
        Ok(way)
    }

    fn learned(&self, container_id: &str, way: Way) {
        if let Way::Runtime(why) = &way {
            info!(container_id, why, "the runtime runs the container's exec probes");
        }
        self.ways().insert(container_id.to_owned(), way);
        self.count();
    }

    fn count(&self) {
        let count = self.ways().values().filter(|way| matches!(way, Way::Runtime(_))).count();
        self.fallbacks.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    fn ways(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Way>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
