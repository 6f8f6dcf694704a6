//! Records the last log line of a container that ended with an error, if its status has no message. Few
//! applications write a termination message, and the cause of a crash is the user's first question.

use std::{path::Path, sync::Arc};

use beelet_base::blocking::blocking;
use beelet_policy::pod::{Verdicts, why};
use beelet_proto::cri;
use beelet_state::events::{Object, Recorder};
use k8s_openapi::api::core::v1 as core;

/// Most bytes of the line.
const MAX: usize = 1024;

/// Records the last log lines of containers that have just ended, except those that the agent stopped.
pub(super) async fn record(
    events: &Recorder,
    pod: &core::Pod,
    ended: Vec<&Arc<cri::ContainerStatus>>,
    verdicts: &Verdicts,
) {
    for status in ended {
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
            let words = why::ended(status.exit_code, &line);
            events.warning(Object::container(pod, &name), why::ENDED, words);
        }
    }
}
