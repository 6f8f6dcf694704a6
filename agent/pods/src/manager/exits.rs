//! Ended containers and OOM kills, with events for OOM kills.

use std::{sync::Arc, time::Duration};

use beelet_proto::cri;
use tokio::time::Instant;
use tracing::warn;

use super::{
    managed::{Managed, OomEvent},
    pods::Pods,
};
use crate::runtime_view::Observation;
use beelet_model::request::OomUpdate;
use beelet_model::{pod::container_of, status::OomFacts};
use beelet_state::events::{Object, Recorder};

/// Reason of the event, the same as in tools that read the kernel's log.
const OOM_KILLING: &str = "OOMKilling";
/// Shortest time between two events for OOM kills in a container: a container that keeps restarting killed
/// children would flood the log.
const OOM_PAUSE: Duration = Duration::from_secs(60);
/// Kills within this time have the same cause: the kernel chose the first process, and killed others with it.
const OOM_AT_ONCE: Duration = Duration::from_secs(1);

/// See [`beelet_model::request::Request::Exited`]. Ignores an end that the worker has already observed.
pub(super) fn on_exited(pods: &mut Pods, uid: &str, status: cri::ContainerStatus) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    let awaited = managed.seen.as_ref().is_some_and(|seen| seen.is_running(&status.id));
    if awaited {
        managed.control.send_modify(|c| drop(c.exited.insert(status.id.clone(), Arc::new(status))));
    }
}

/// See [`beelet_model::request::Request::OomKilled`].
pub(super) fn on_oom_killed(pods: &mut Pods, update: OomUpdate) {
    let uid = update.uid.clone();
    let Some(managed) = pods.by_uid.get_mut(&uid) else { return };
    let first = update.facts.first;
    let recorded = follow_oom_kill(managed, update, &pods.deps.reports.events);
    if recorded || first {
        pods.publish(&uid);
    }
}

/// Records the killed process (the largest of several at once). Returns true if the kill has an event. The
/// shortest time between two events is [`OOM_PAUSE`].
fn follow_oom_kill(managed: &mut Managed, update: OomUpdate, events: &Recorder) -> bool {
    let OomUpdate { id, facts, .. } = update;
    let now = Instant::now();
    let before = managed.oom_events.get(&id);
    let at_once = before.is_some_and(|before| now.duration_since(before.last) < OOM_AT_ONCE);
    let records = before.is_none_or(|before| now.duration_since(before.recorded) >= OOM_PAUSE);
    let unrecorded = before.map_or(0, |before| before.unrecorded);
    if records {
        record_oom(managed, &id, &facts, unrecorded, events);
    }
    let event = OomEvent {
        recorded: before.filter(|_| !records).map_or(now, |before| before.recorded),
        last: now,
        unrecorded: if records { 0 } else { unrecorded.saturating_add(1) },
    };
    managed.oom_events.insert(id.clone(), event);
    let kept = match managed.record.oom.remove(&id).filter(|known| at_once && known.size() > facts.size()) {
        Some(known) => OomFacts { first: known.first || facts.first, ..known },
        None => facts,
    };
    managed.record.oom.insert(id, kept);
    records
}

/// Records the event for a killed process, with the number of `others` killed since the last event.
fn record_oom(managed: &Managed, id: &str, facts: &OomFacts, others: u32, events: &Recorder) {
    let (container, limit) = container_with_limit(managed, id);
    let mut sentence = facts.sentence(limit.as_deref());
    if others > 0 {
        sentence += &format!("; {others} more kills in this container since the last event");
    }
    warn!(pod = %managed.name, container, "{sentence}");
    events.warning(Object::container(&managed.pod, &container), OOM_KILLING, sentence);
}

/// Records events for OOM kills that only the runtime reports, because BPF programs are not available on
/// every node.
pub(super) fn record_unseen_oom(managed: &Managed, seen: &Observation, events: &Recorder) {
    let Some(before) = &managed.seen else { return };
    let killed = seen.containers.values().filter(|status| {
        status.reason == "OOMKilled"
            && before.is_running(&status.id)
            && !managed.record.oom.contains_key(&status.id)
    });
    for status in killed {
        let (container, limit) = container_with_limit(managed, &status.id);
        let limit = limit.map(|limit| format!("; its memory limit is {limit}")).unwrap_or_default();
        let sentence = format!("the runtime reports that the container was OOM-killed{limit}");
        warn!(pod = %managed.name, container, "{sentence}");
        events.warning(Object::container(&managed.pod, &container), OOM_KILLING, sentence);
    }
}

/// Returns the name and the memory limit of the container with this runtime identifier.
fn container_with_limit(managed: &Managed, id: &str) -> (String, Option<String>) {
    let of_id = |c: &&beelet_policy::pod::Container| c.id == id;
    let name = managed.seen.as_ref().and_then(|seen| seen.pod.containers.iter().find(of_id));
    let name = name.map(|container| container.name.clone()).unwrap_or_default();
    let limit = container_of(&managed.pod, &name)
        .and_then(|c| c.resources.as_ref()?.limits.as_ref()?.get("memory").map(|q| q.0.clone()));
    (name, limit)
}
