//! Tells what a container that has ended badly wrote last into its log, where its status doesn't. Few
//! applications write a termination message, and why one crashes is what is asked first.

use std::path::Path;

use beelet_base::blocking::blocking;
use beelet_policy::pod::{Container, ContainerState, Verdicts, why};
use beelet_proto::cri;
use beelet_state::events::Object;

use super::{Observation, Worker};

/// Most bytes of the line.
const MAX: usize = 1024;

impl Worker {
    /// Tells it of those that ended since the last look. Whom we stopped had nothing to do with it.
    pub(super) async fn tell_last_words(&mut self, verdicts: &Verdicts, seen: &Observation) {
        let is_running = |c: &&Container| matches!(c.state, ContainerState::Running { .. });
        let running = seen.pod.containers.iter().filter(is_running).map(|c| c.id.clone());
        let before = std::mem::replace(&mut self.alive, running.collect());
        for status in before.iter().filter_map(|id| seen.containers.get(id)) {
            let is_bad = status.state() == cri::ContainerState::ContainerExited
                && status.exit_code != 0
                && status.message.is_empty()
                && !verdicts.condemned.contains_key(&status.id);
            let Some(name) = status.metadata.as_ref().map(|m| m.name.clone()).filter(|_| is_bad) else {
                continue;
            };
            let path = status.log_path.clone();
            let end = blocking("reading the end of a container's log", move || {
                beelet_logs::end_of(Path::new(&path), 1, MAX)
            });
            if let Some(line) = end.await.filter(|line| !line.trim().is_empty()) {
                let told = why::ended(status.exit_code, &line);
                self.launcher.events.warning(Object::container(&self.plan.pod, &name), why::ENDED, told);
            }
        }
    }
}
