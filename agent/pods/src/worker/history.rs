//! Facts about a pod's containers that the runtime does not report: finished hooks, containers that the
//! worker stopped, and containers whose definition is outdated.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use beelet_model::{labels::is_own, status::whole_second};
use beelet_policy::pod::{self, KillReason, Verdicts};
use beelet_proto::cri;
use beelet_spec::definition;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

use crate::{runtime_view::Observation, status::Waiting};

/// Facts about containers, by the runtime's identifier.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Containers whose postStart hook has finished.
    hooked: BTreeSet<String>,
    /// Containers whose postStart hook failed.
    failed_hooks: BTreeSet<String>,
    /// Containers that were running when the pod's definition of them changed.
    outdated: BTreeMap<String, KillReason>,
    /// Names of containers whose image or resources have changed since the last observation.
    renewed: BTreeSet<String>,
    /// Names of containers whose image has changed while this worker ran.
    other_image: BTreeSet<String>,
    /// The last instances before a change of image or resources. Their crashes do not delay the next
    /// instance.
    previous_instances: BTreeSet<String>,
    /// Containers that ran at the last observation, or were started since.
    alive: BTreeSet<String>,
    /// Times of the first stop request, by container.
    stopped: BTreeMap<String, Timestamp>,
}

impl History {
    /// Returns the history of a pod with these finished hooks.
    pub(super) fn new(hooked: BTreeSet<String>) -> Self {
        Self { hooked, ..Self::default() }
    }

    /// Returns the containers whose postStart hook has finished.
    pub(super) fn hooked(&self) -> &BTreeSet<String> {
        &self.hooked
    }

    /// Records the names of containers whose image has changed, and of those whose image or resources have.
    pub(super) fn renew(&mut self, of_image: Vec<String>, of_any: Vec<String>) {
        self.other_image.extend(of_image);
        self.renewed.extend(of_any);
    }

    /// Records that a container was started.
    pub(super) fn record_start(&mut self, id: &str) {
        self.alive.insert(id.to_owned());
    }

    /// Records the time of the first request to stop a container.
    pub(super) fn record_stop(&mut self, id: &str) {
        self.stopped.entry(id.to_owned()).or_insert_with(Timestamp::now);
    }

    /// Records the result of a postStart hook, or None if the container has no hook.
    pub(super) fn record_hook(&mut self, id: &str, succeeded: Option<bool>) {
        match succeeded {
            Some(true) => drop(self.hooked.insert(id.to_owned())),
            Some(false) => drop(self.failed_hooks.insert(id.to_owned())),
            None => {}
        }
    }

    /// Combines the verdicts of probes with those of the history: results of hooks, and containers without a
    /// startup probe, which count as started as soon as they run.
    pub(super) fn verdicts(&mut self, pod: &core::Pod, probes: &Verdicts, seen: &Observation) -> Verdicts {
        self.hooked.retain(|id| seen.containers.contains_key(id));
        self.stopped.retain(|id, _| seen.containers.contains_key(id));
        self.failed_hooks.retain(|id| seen.containers.contains_key(id));
        self.hooked.extend(started_by_kubelet(seen));
        let mut verdicts = Verdicts { hooked: self.hooked.clone(), ..probes.clone() };
        verdicts.condemned.retain(|id, reason| !reason.is_of_probe() || self.may_be_for(id, seen));
        let failed = self.failed_hooks.iter().map(|id| (id.clone(), KillReason::PostStartHook));
        verdicts.condemned.extend(failed);
        for container in regular(pod).filter(|c| c.startup_probe.is_none()) {
            verdicts.started.extend(seen.newest(&container.name).map(|c| c.id.clone()));
        }
        self.record_outdated(pod, seen);
        let before = std::mem::take(&mut self.renewed).into_iter();
        let newest = before.filter_map(|name| seen.newest(&name).map(|c| c.id.clone()));
        self.previous_instances.extend(newest);
        self.previous_instances.retain(|id| seen.containers.contains_key(id));
        verdicts.hurried.extend(replaced(pod, seen));
        verdicts.hurried.extend(self.previous_instances.iter().cloned());
        for (id, reason) in &self.outdated {
            verdicts.condemned.entry(id.clone()).or_insert(*reason);
        }
        verdicts
    }

    /// Records the running containers whose definition in the pod has changed. An ended container may have
    /// ended before the change, so only running containers count. An init container other than a sidecar
    /// keeps its definition until its end, except for its amounts (`computeInitContainerActions`).
    fn record_outdated(&mut self, pod: &core::Pod, seen: &Observation) {
        self.outdated.retain(|id, _| seen.containers.contains_key(id) && !seen.is_running(id));
        let inits = pod.spec.iter().flat_map(|s| s.init_containers.iter().flatten());
        let inits = inits.map(|init| (init, pod::is_sidecar(init)));
        let mains = pod.spec.iter().flat_map(|s| &s.containers).map(|main| (main, true));
        for (container, is_lasting) in inits.chain(mains) {
            let made = seen.newest(&container.name).and_then(|c| seen.containers.get(&c.id));
            let Some(made) = made.filter(|made| seen.is_running(&made.id)) else { continue };
            // Another agent's digest may say nothing; then only a change that this worker sees counts.
            let is_changed = definition::is_redefined(container, made)
                || self.other_image.contains(&container.name) && definition::is_unjudged(container, made);
            if is_lasting && is_changed {
                self.outdated.insert(made.id.clone(), KillReason::Redefined);
            } else if definition::is_resized(container, made) {
                self.outdated.insert(made.id.clone(), KillReason::Resized);
            }
        }
    }

    /// Returns true if a container runs, or ended after a stop request: the reason for the request may be the
    /// reason for the end. A container that ended without a request counts by its exit code, regardless of
    /// probe results.
    pub(super) fn may_be_for(&self, id: &str, seen: &Observation) -> bool {
        let container = seen.pod.containers.iter().find(|c| c.id == id);
        match container.map(|c| &c.state) {
            Some(pod::ContainerState::Exited { finished_at, .. }) => {
                // A runtime may report the time in whole seconds, or not at all.
                let is_known = *finished_at != Timestamp::UNIX_EPOCH;
                let is_exact = finished_at.subsec_nanosecond() != 0;
                let since = |at: &Timestamp| if is_exact { *at } else { whole_second(*at) };
                self.stopped.get(id).is_some_and(|at| !is_known || since(at) <= *finished_at)
            }
            _ => true,
        }
    }

    /// Returns the containers that ended because the worker stopped them.
    pub(super) fn stopped(&self, seen: &Observation) -> BTreeSet<String> {
        self.stopped.keys().filter(|id| self.may_be_for(id, seen)).cloned().collect()
    }

    /// Returns the waiting states of containers that ended because of a changed definition. Each waits for
    /// its next instance, and the pod has not ended.
    pub(super) fn waiting<'a>(
        &'a self,
        seen: &'a Observation,
    ) -> impl Iterator<Item = (String, Waiting)> + 'a {
        let ended = seen.pod.containers.iter().filter(|c| {
            let newest = seen.newest(&c.name).is_some_and(|newest| newest.id == c.id);
            newest && self.outdated.contains_key(&c.id) && !seen.is_running(&c.id)
        });
        let waiting = || Waiting { reason: "ContainerCreating".to_owned(), message: String::new() };
        ended.map(move |c| (c.name.clone(), waiting()))
    }

    /// Returns the containers that ended since the last observation, and records the running containers.
    pub(super) fn ended_since_last<'a>(
        &mut self,
        seen: &'a Observation,
    ) -> Vec<&'a Arc<cri::ContainerStatus>> {
        let is_running = |c: &&pod::Container| matches!(c.state, pod::ContainerState::Running { .. });
        let running = seen.pod.containers.iter().filter(is_running).map(|c| c.id.clone());
        let before = std::mem::replace(&mut self.alive, running.collect());
        before.iter().filter_map(|id| seen.containers.get(id)).collect()
    }
}

/// Returns the running containers that a kubelet started. A kubelet runs the postStart hook before it looks
/// at the pod again, and never runs the hook of a running container a second time.
fn started_by_kubelet(seen: &Observation) -> impl Iterator<Item = String> {
    let of_kubelet = seen.containers.iter().filter(|(id, made)| !is_own(&made.labels) && seen.is_running(id));
    of_kubelet.map(|(id, _)| id.clone())
}

/// Returns the init and main containers of a pod.
fn regular(pod: &core::Pod) -> impl Iterator<Item = &core::Container> {
    pod.spec.iter().flat_map(|s| s.init_containers.iter().flatten().chain(&s.containers))
}

/// Returns the ended containers whose next instance has another definition. Their crashes do not delay the
/// next instance (the kubelet's back-off is by the container's hash).
fn replaced(pod: &core::Pod, seen: &Observation) -> Vec<String> {
    let ended = regular(pod).filter_map(|container| {
        let made = seen.newest(&container.name).and_then(|c| seen.containers.get(&c.id))?;
        let replaced = !seen.is_running(&made.id) && definition::is_redefined(container, made);
        replaced.then(|| made.id.clone())
    });
    ended.collect()
}
