//! Containers that end: who must hear of it, and what their pods' status says.

use std::{sync::Arc, time::Duration};

use beelet_policy::resources::cgroups as values;
use beelet_proto::cri;
use tokio::time::Instant;
use tracing::warn;

use super::{Managed, Manager};
use crate::runtime_view::Observation;
use beelet_base::process::FirstProcess;
use beelet_model::request::OomUpdate;
use beelet_model::{
    pod::container_of,
    processes::{Process, Processes},
    status::OomFacts,
};
use beelet_state::events::{Object, Recorder};

/// The reason of the event, as others call it who read the kernel's log.
const OOM_KILLING: &str = "OOMKilling";
/// A container's kills are told so often at most: one that starts killed children again and again would flood
/// the log.
const OOM_PAUSE: Duration = Duration::from_secs(60);
/// Kills within this are of one want of memory: the first is the process that the kernel chose, and it takes
/// others along.
const OOM_AT_ONCE: Duration = Duration::from_secs(1);

/// What was told of a container's kills for want of memory.
#[derive(Debug)]
pub(super) struct OomTold {
    told: Instant,
    last: Instant,
    /// Kills since then.
    untold: u32,
}

impl Manager {
    /// See [`beelet_model::request::Request::Exited`]. What the worker has seen already changes nothing.
    pub(super) fn on_exited(&mut self, uid: &str, status: cri::ContainerStatus) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        let awaited = managed.seen.as_ref().is_some_and(|seen| seen.is_running(&status.id));
        if awaited {
            managed.control.send_modify(|c| drop(c.exited.insert(status.id.clone(), Arc::new(status))));
        }
    }

    /// See [`beelet_model::request::Request::OomKilled`].
    pub(super) fn on_oom_killed(&mut self, update: OomUpdate) {
        let uid = update.uid.clone();
        let Some(managed) = self.pods.get_mut(&uid) else { return };
        let first = update.facts.first;
        let told = managed.on_oom_killed(update, &self.parts.deps.reports.events);
        if told || first {
            self.publish(&uid);
        }
    }

    /// Tells who runs as which process, if that changed.
    pub(super) fn publish_processes(&self) {
        let config = &self.parts.deps.node.cgroup_config;
        let known = self.parts.processes.borrow().clone();
        let mut now = Processes::new();
        for (uid, managed) in &self.pods {
            let Some(seen) = &managed.seen else { continue };
            for (id, FirstProcess { pid, .. }) in &seen.processes {
                // What was known stays: its cgroup needn't be computed again.
                if let Some(same) = known.get(pid).filter(|process| process.id == *id) {
                    now.insert(*pid, Arc::clone(same));
                    continue;
                }
                let sandbox = seen.sandbox.as_ref().is_some_and(|sandbox| sandbox.id == *id);
                let of_pod = if sandbox { None } else { values::pod_cgroup(&managed.pod, config).ok() };
                let cgroup = of_pod.map(|pod| format!("{}/{id}", pod.path)).unwrap_or_default();
                let process = Process { uid: uid.clone(), id: id.clone(), sandbox, cgroup };
                now.insert(*pid, Arc::new(process));
            }
        }
        if *known != now {
            self.parts.processes.send_replace(Arc::new(now));
        }
    }
}

impl Managed {
    /// Remembers the process that was killed (of several at once the largest), and tells of it if it is time
    /// to.
    fn on_oom_killed(&mut self, update: OomUpdate, events: &Recorder) -> bool {
        let OomUpdate { id, facts, .. } = update;
        let now = Instant::now();
        let before = self.oom_told.get(&id);
        let at_once = before.is_some_and(|before| now.duration_since(before.last) < OOM_AT_ONCE);
        let tells = before.is_none_or(|before| now.duration_since(before.told) >= OOM_PAUSE);
        let untold = before.map_or(0, |before| before.untold);
        if tells {
            self.record_oom(&id, &facts, untold, events);
        }
        let told = OomTold {
            told: before.filter(|_| !tells).map_or(now, |before| before.told),
            last: now,
            untold: if tells { 0 } else { untold.saturating_add(1) },
        };
        self.oom_told.insert(id.clone(), told);
        let kept = match self.kept.oom.remove(&id).filter(|known| at_once && known.size() > facts.size()) {
            Some(known) => OomFacts { first: known.first || facts.first, ..known },
            None => facts,
        };
        self.kept.oom.insert(id, kept);
        tells
    }

    /// The event of one process, and of `others` before it.
    fn record_oom(&self, id: &str, facts: &OomFacts, others: u32, events: &Recorder) {
        let (container, limit) = self.container_with_limit(id);
        let mut sentence = facts.sentence(limit.as_deref());
        if others > 0 {
            sentence += &format!("; it killed {others} more in this container since that was last told");
        }
        warn!(pod = %self.name, container, "{sentence}");
        events.warning(Object::container(&self.pod, &container), OOM_KILLING, sentence);
    }

    /// The event for containers that were killed for want of memory by the runtime's word alone: the kernel's
    /// programs don't run everywhere.
    pub(super) fn record_unseen_oom(&self, seen: &Observation, events: &Recorder) {
        let Some(before) = &self.seen else { return };
        let killed = seen.containers.values().filter(|status| {
            status.reason == "OOMKilled"
                && before.is_running(&status.id)
                && !self.kept.oom.contains_key(&status.id)
        });
        for status in killed {
            let (container, limit) = self.container_with_limit(&status.id);
            let limit = limit.map(|limit| format!("; its memory limit is {limit}")).unwrap_or_default();
            let sentence =
                format!("the kernel killed the container for want of memory, the runtime says{limit}");
            warn!(pod = %self.name, container, "{sentence}");
            events.warning(Object::container(&self.pod, &container), OOM_KILLING, sentence);
        }
    }

    /// The name and the memory limit of a container of which the runtime's identifier is known.
    fn container_with_limit(&self, id: &str) -> (String, Option<String>) {
        let of_id = |c: &&beelet_policy::pod::Container| c.id == id;
        let name = self.seen.as_ref().and_then(|seen| seen.pod.containers.iter().find(of_id));
        let name = name.map(|container| container.name.clone()).unwrap_or_default();
        let limit = container_of(&self.pod, &name)
            .and_then(|c| c.resources.as_ref()?.limits.as_ref()?.get("memory").map(|q| q.0.clone()));
        (name, limit)
    }
}
