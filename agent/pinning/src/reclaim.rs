//! Running containers whose pins are missing: the state file was lost, or the agent was killed between an
//! accepted resize and the write of the file. Each container is looked at once: later ones are pinned before
//! they start.

use std::{collections::BTreeSet, sync::Arc};

use beelet_base::blocking::blocking;
use beelet_model::{
    pod::running,
    table::{PodName, PodTable},
};
use beelet_policy::{
    pinning::{Needs, cpus::reclaim::reclaim},
    resources::cgroups::pod_cgroup,
};
use tracing::{debug, info};

use super::{Task, follow::cpus_of_cgroup};

/// A running container whose pod lacks CPUs that it requests.
#[derive(Debug)]
struct Unpinned {
    pod: PodName,
    needs: Arc<Needs>,
    container: String,
    id: String,
    /// The pod's cgroup.
    parent: String,
}

impl Task {
    /// Gives running containers the CPUs of their cgroups, if they are as many as the containers request, and
    /// free. `known` has the containers that were looked at.
    pub(super) async fn reclaim(&self, table: &PodTable, known: &mut BTreeSet<String>) {
        // Without managed CPUs no container lacks any.
        if self.desk.with(|book| book.pins.cpus.allocatable().is_empty()) {
            return;
        }
        let unpinned = self.unpinned(table, known);
        if unpinned.is_empty() {
            return;
        }
        let resized = self.desk.with(|book| {
            let before = book.pins.cpus.state().clone();
            for one in &unpinned {
                if let Err(error) = book.pins.resize(&one.needs, &one.needs) {
                    debug!(pod = %one.pod, %error, "a pod keeps fewer CPUs than it requests");
                }
            }
            *book.pins.cpus.state() != before
        });
        let cgroups = Arc::clone(&self.cgroups);
        let read = move || {
            let cpus = |one: &Unpinned| cpus_of_cgroup(&cgroups, &one.parent, &one.id);
            let found = unpinned.into_iter().filter_map(|one| cpus(&one).map(|cpus| (one, cpus)));
            found.collect::<Vec<_>>()
        };
        let mut changed = resized;
        for (Unpinned { pod, needs, container, .. }, cpus) in
            blocking("reading the CPUs of containers", read).await
        {
            if self.desk.with(|book| reclaim(&mut book.pins.cpus, &needs, &container, &cpus)) {
                info!(%pod, container, %cpus, "a running container keeps the CPUs of its cgroup: the state was lost");
                changed = true;
            }
        }
        if changed {
            self.desk.changed();
        }
    }

    fn unpinned(&self, table: &PodTable, known: &mut BTreeSet<String>) -> Vec<Unpinned> {
        let mut unpinned = Vec::new();
        for (name, entry) in table.pods.iter().filter(|(_, entry)| entry.ended().is_none()) {
            let new: Vec<_> = running(&entry.pod).filter(|(id, _)| !known.contains(*id)).collect();
            if new.is_empty() {
                continue;
            }
            known.extend(new.iter().map(|(id, _)| (*id).to_owned()));
            let Ok(needs) = Needs::read(&entry.pod, self.desk.gates) else { continue };
            let lacks =
                |book: &mut super::Book| book.pins.has_something_for(&needs) && !book.pins.holds(&needs);
            let cgroup = pod_cgroup(&entry.pod, &self.cgroup_config).ok();
            let Some(cgroup) = cgroup.filter(|_| self.desk.with(lacks)) else { continue };
            let needs = Arc::new(needs);
            unpinned.extend(new.into_iter().map(|(id, container)| Unpinned {
                pod: name.clone(),
                needs: Arc::clone(&needs),
                container: container.name.clone(),
                id: id.to_owned(),
                parent: cgroup.path.clone(),
            }));
        }
        unpinned
    }
}
