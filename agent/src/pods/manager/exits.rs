//! Containers that end: who must hear of it, and what their pods' status says.

use std::sync::Arc;

use beelet_policy::cgroups as values;
use beelet_proto::cri;
use tracing::warn;

use super::{Manager, OomUpdate};
use crate::{
    events::Object,
    pods::{
        launch::container_of,
        processes::{Process, Processes},
    },
};

impl Manager {
    /// See [`super::Request::Exited`]. What the worker has seen already changes nothing.
    pub(super) fn on_exited(&mut self, uid: &str, status: cri::ContainerStatus) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        let awaited = managed.seen.as_ref().is_some_and(|seen| seen.is_running(&status.id));
        if awaited {
            managed.control.send_modify(|c| drop(c.exited.insert(status.id.clone(), Arc::new(status))));
        }
    }

    /// See [`super::Request::OomKilled`].
    pub(super) fn on_oom_killed(&mut self, update: OomUpdate) {
        let Some(managed) = self.pods.get_mut(&update.uid) else { return };
        let of_id = |c: &&beelet_policy::pod::Container| c.id == update.id;
        let name = managed.seen.as_ref().and_then(|s| s.pod.containers.iter().find(of_id));
        let name = name.map(|container| container.name.clone()).unwrap_or_default();
        let limit = container_of(&managed.pod, &name)
            .and_then(|c| c.resources.as_ref()?.limits.as_ref()?.get("memory").map(|q| q.0.clone()));
        let sentence = update.facts.sentence(limit.as_deref());
        warn!(pod = %managed.name, container = name, "{sentence}");
        let object = Object::container(&managed.pod, &name);
        self.parts.launcher.events.warning(object, "OOMKilled", sentence);
        managed.oom.insert(update.id, update.facts);
        self.publish(&update.uid);
    }

    /// Tells who runs as which process, if that changed.
    pub(super) fn publish_processes(&self) {
        let config = &self.parts.launcher.cgroup_config;
        let known = self.parts.processes.borrow().clone();
        let mut now = Processes::new();
        for (uid, managed) in &self.pods {
            let Some(seen) = &managed.seen else { continue };
            for (id, pid) in &seen.pids {
                // What was known stays: its cgroup needn't be computed again.
                if let Some(same) = known.get(pid).filter(|process| process.id == *id) {
                    now.insert(*pid, same.clone());
                    continue;
                }
                let sandbox = seen.sandbox.as_ref().is_some_and(|sandbox| sandbox.id == *id);
                let of_pod = if sandbox { None } else { values::pod_cgroup(&managed.pod, config).ok() };
                let cgroup = of_pod.map(|pod| format!("{}/{id}", pod.path)).unwrap_or_default();
                now.insert(*pid, Process { uid: uid.clone(), id: id.clone(), sandbox, cgroup });
            }
        }
        if *known != now {
            self.parts.processes.send_replace(Arc::new(now));
        }
    }
}
