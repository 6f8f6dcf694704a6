//! Reconciles workers with the desired pods: starts missing workers, terminates pods that are not desired.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};

use beelet_admission::Held;
use beelet_model::{
    desired::Desired,
    objects::Objects,
    origin::Origin,
    request::{Listed, RuntimePod},
    status::{has_ended, whole_second},
    table::PodName,
};
use beelet_spec::resize::{self, ResizeFacts};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1 as core,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use tokio::sync::watch;
use tracing::{info, warn};

use super::{
    Manager, adopted, assigned, debugging, deleting,
    deletion::Deletion,
    failing,
    keeping::runtime_pod,
    managed::{Managed, hash_of, manifest_of, manifest_restores},
    pods::Pods,
    resizing,
    resuming::{self, control_of, next_counts},
};
use crate::{
    records::PodRecord,
    runtime_view::Foreknown,
    worker::{Control, Terminate, Worker},
};

impl Manager {
    /// Reconciles workers with the desired pods: starts missing workers, terminates pods that are not
    /// desired.
    pub(super) fn reconcile(&mut self) {
        let desired = Arc::clone(&self.desired.borrow_and_update());
        self.pods.due.active = true;
        self.pods.publish_rejected(&desired);
        self.notify_of_objects(&desired);
        // A file that becomes valid later has other content than at the agent's start.
        let rejected = desired.rejected.iter().map(|rejected| &rejected.file);
        for file in desired.unreadable.iter().chain(rejected) {
            self.manifest_changes.remove(file);
        }
        // Before the first relist a running pod would appear to be stopped.
        let Some(in_runtime) = self.runtime.clone() else { return };
        let wanted = identified(&self.pods, &desired, &in_runtime, &self.manifest_changes);
        for uid in self.pods.by_uid.keys().cloned().collect::<Vec<_>>() {
            keep_or_terminate(&mut self.pods, &uid, wanted.get(&uid), &desired);
        }
        // Running pods reserve their resources before any new pod requests some.
        wanted.iter().for_each(|(uid, pod)| adopt(&self.pods, &self.present, uid, pod));
        for (uid, orphan) in in_runtime.iter() {
            // A record remains of a pod that the agent had adopted and now leaves alone.
            if self.left_alone.has(uid) {
                continue;
            }
            // A manifest may set the UID, and keep it when other fields change.
            let is_wanted = wanted.get(uid).is_some_and(|pod| {
                Origin::of(pod).is_api()
                    || orphan.hash.is_none()
                    || orphan.hash == hash_of(pod)
                    || adopted::shape_of(&self.pods, uid, orphan) == Some(resize::shape(pod))
            });
            // The sandbox of a kubelet's static pod does not name the manifest.
            let may_be_unread = orphan.adopted.is_some() && !desired.unreadable.is_empty();
            let may_remove = desired.may_remove_of(orphan.origin, uid, orphan.manifest.as_deref())
                && (orphan.origin.is_api() || !may_be_unread);
            // A termination that an earlier agent began continues, regardless of the desired pods.
            let is_leaving = self.pods.records.is_leaving(uid);
            if self.pods.by_uid.contains_key(uid) || !is_leaving && (is_wanted || !may_remove) {
                continue;
            }
            if is_leaving {
                info!(pod = %orphan.name, uid, "continuing the termination that an earlier agent began");
            } else {
                info!(pod = %orphan.name, uid, "terminating orphaned pod (not in any source)");
                self.pods.deps.reports.metrics.orphaned();
            }
            self.spawn(Arc::new(pod_of_orphan(uid, orphan)), true);
        }
        // After the orphans: their room must not be free for a moment before they hold it as terminating.
        self.pods.deps.admission.hold(&self.held(&wanted, &in_runtime, &desired));
        let mut manifests = if self.manifest_changes.is_empty() { Vec::new() } else { manifests_of(&wanted) };
        self.spawn_missing(wanted, &in_runtime);
        if !desired.folder_unread {
            // From now on the hash in the worker's pod shows whether the manifest is the same.
            manifests.retain(|(uid, _)| !self.pods.by_uid.contains_key(uid));
            self.manifest_changes.retain(|file, _| manifests.iter().any(|(_, waiting)| waiting == file));
        }
        deleting::publish_successors(&mut self.pods, &desired);
        // Resizes come after running pods have reserved their resources, and before new pods request some.
        self.pods.due.resizes = true;
    }

    /// Returns the running pods that are neither wanted nor removable: their source has not been listed, or
    /// shows no valid definition.
    fn held(
        &self,
        wanted: &BTreeMap<String, Arc<core::Pod>>,
        in_runtime: &BTreeMap<String, RuntimePod>,
        desired: &Desired,
    ) -> Vec<Held> {
        let held = |uid: &String| {
            let seen = in_runtime.get(uid)?;
            let is_managed = self.pods.by_uid.contains_key(uid) || wanted.contains_key(uid);
            if is_managed || desired.may_remove_of(seen.origin, uid, seen.manifest.as_deref()) {
                return None;
            }
            let record = self.pods.records.get(uid)?;
            let is_present = record.leaving.is_none() && record.ended().is_none();
            let is_listed = !desired.is_unread(seen.origin);
            Some(Held { pod: record.counted().filter(|_| is_present)?, is_listed })
        };
        self.present.iter().filter_map(held).collect()
    }

    /// Wakes the workers of pods that may wait for a changed object, and no others: in a cluster, a Service
    /// or token changes all the time, and each wake-up costs CPU time.
    fn notify_of_objects(&mut self, desired: &Desired) {
        if Objects::are_same(&self.objects, &desired.objects) {
            return;
        }
        let before = std::mem::replace(&mut self.objects, Arc::clone(&desired.objects));
        for managed in self.pods.by_uid.values() {
            if managed.record.failure.is_some() || managed.terminating() || managed.is_over() {
                continue;
            }
            let concerned = !before.are_same_for(&desired.objects, &managed.pod);
            managed.control.send_if_modified(|c| {
                c.objects += u64::from(concerned);
                concerned || managed.is_pending()
            });
        }
    }

    /// Starts workers for the wanted pods without one.
    fn spawn_missing(
        &mut self,
        mut wanted: BTreeMap<String, Arc<core::Pod>>,
        in_runtime: &BTreeMap<String, RuntimePod>,
    ) {
        wanted.retain(|uid, _| !self.pods.by_uid.contains_key(uid));
        if wanted.is_empty() {
            return;
        }
        let mut names: BTreeSet<PodName> =
            self.pods.by_uid.values().map(|managed| managed.name.clone()).collect();
        let left_alone = in_runtime.iter().filter(|(uid, _)| !self.pods.by_uid.contains_key(*uid));
        let left_alone: Vec<(&PodName, &String)> = left_alone.map(|(uid, seen)| (&seen.name, uid)).collect();
        let mut by_name: BTreeMap<&PodName, Vec<&String>> = BTreeMap::new();
        left_alone.into_iter().for_each(|(name, uid)| by_name.entry(name).or_default().push(uid));
        for (uid, pod) in wanted {
            let name = PodName::of(&pod);
            // An old pod of the same name must be removed first: both may use the same ports and files.
            if names.contains(&name) {
                continue;
            }
            // A static pod of the agent's own may run beside that of a kubelet.
            if !self.present.contains(&uid) && self.left_alone.blocks(&uid, &pod) {
                continue;
            }
            if by_name.get(&name).is_some_and(|uids| uids.iter().any(|other| **other != uid)) {
                warn!(
                    pod = %name,
                    uid,
                    "pod is blocked: a pod of the same name is running, whose manifest cannot be read"
                );
                continue;
            }
            info!(pod = %name, uid, "starting pod worker");
            if self.gone.contains_key(&uid) {
                self.pods.deps.reports.metrics.restarted(!Origin::of(&pod).is_api());
            }
            self.spawn(pod, false);
            names.insert(name);
        }
    }

    fn spawn(&mut self, pod: Arc<core::Pod>, terminate: bool) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let (record, retry) = failing::remembered(&self.pods.records, &uid, Origin::of(&pod));
        let is_new_here = record.is_none();
        let mut kept = record.unwrap_or_else(|| PodRecord::new(runtime_pod(&pod)));
        kept.abandoned &= terminate;
        let is_static = !Origin::of(&pod).is_api();
        kept.leaving = (terminate && is_static).then(|| kept.leaving.unwrap_or_default());
        let in_runtime = self.runtime.as_ref().and_then(|runtime| runtime.get(&uid));
        if is_new_here
            && in_runtime.is_some_and(|seen| seen.adopted.is_some())
            && let Some(status) = self.desired.borrow().earlier_statuses.get(&uid)
        {
            resuming::adopt_status(&mut kept, &pod, status);
        }
        let left = self.left.remove(&uid);
        let counts = left.unwrap_or_else(|| Arc::new(next_counts(kept.status.as_deref())));
        let wanted = debugging::with_debuggers(pod, &kept.debuggers);
        let assigned = Origin::of(&wanted).is_api().then(|| Arc::clone(&wanted));
        let pod = resizing::as_accepted(&wanted, kept.accepted.as_ref());
        if kept.status.is_none() {
            // A pod with a final phase in the API server never runs again, even without a local record.
            kept.status = pod.status.clone().filter(|status| has_ended(Some(status))).map(Arc::new);
        }
        let mut deletion = assigned.as_deref().and_then(Deletion::of);
        if let (Some(deletion), Some(failure)) = (&mut deletion, &kept.failure) {
            (deletion.stopped, deletion.cleared) = (failure.has_stopped(), failure.cleared);
        }
        let counted = kept.counted().filter(|_| self.present.contains(&uid));
        admit_leaving(&self.pods, counted.as_ref().unwrap_or(&pod), &pod, deletion.as_ref(), terminate);
        let control = Control {
            terminate: terminate.then(|| Terminate { grace: kept.leaving.and_then(|leaving| leaving.grace) }),
            ..control_of(&kept, deletion.as_ref(), counts, beelet_model::pod::grace_period(&pod))
        };
        let (control, signal) = watch::channel(control);
        // The list of a pod that the runtime did not have is empty: only this worker creates the pod.
        let is_new = self.runtime.as_ref().is_some_and(|runtime| !runtime.contains_key(&uid));
        let listed = self.listed.remove(&uid).or_else(|| is_new.then(Listed::default));
        let network = resuming::network_of(&kept, &pod);
        let known = Foreknown { listed, processes: kept.processes.clone(), network };
        let (services, reports) = (Arc::clone(&self.services), self.reports_out.clone());
        let worker = Worker::supervised(services, Arc::clone(&pod), signal, reports, known);
        let managed = Managed {
            name: PodName::of(&pod),
            pod,
            control,
            task: tokio::spawn(worker),
            seen: None,
            waiting: BTreeMap::new(),
            record: kept,
            record_of: None,
            oom_events: BTreeMap::new(),
            lifetime: None,
            retry,
            deletion,
            assigned,
            resize: ResizeFacts::default(),
            enacting: None,
            wanted: None,
            manifest_restores: manifest_restores(&self.desired.borrow(), &uid),
            asked_grace: None,
            successor: None,
        };
        let is_known = managed.record.status.is_some();
        let may_run = self.runtime.as_ref().is_some_and(|runtime| runtime.contains_key(&uid));
        if !is_known && !may_run && !terminate {
            self.pods.deps.reports.metrics.startup.begin(&managed.name, &uid);
        }
        self.pods.by_uid.insert(uid.clone(), managed);
        resizing::ask_for_amounts(&mut self.pods, &uid, &wanted);
        self.pods.record_share(&uid);
        self.pods.due.active = true;
        // A pod that may run, but has no record, must not appear as Pending before its first observation.
        if is_known || !may_run {
            self.pods.publish(&uid);
        }
    }
}

/// Returns the UIDs and the manifests of static pods.
fn manifests_of(wanted: &BTreeMap<String, Arc<core::Pod>>) -> Vec<(String, PathBuf)> {
    wanted.iter().filter_map(|(uid, pod)| Some((uid.clone(), manifest_of(pod)?))).collect()
}

/// Returns the desired pods by UID. A desired pod that differs from a present pod only in probes, and in
/// amounts that can be resized in place, gets the UID of the present pod. So does the pod of an unchanged
/// manifest that a kubelet has started.
fn identified(
    pods: &Pods,
    desired: &Desired,
    in_runtime: &BTreeMap<String, RuntimePod>,
    manifest_changes: &BTreeMap<PathBuf, i64>,
) -> BTreeMap<String, Arc<core::Pod>> {
    let identify = |pod: &Arc<core::Pod>| {
        let uid = pod.metadata.uid.clone()?;
        let is_known = pods.by_uid.contains_key(&uid) || in_runtime.contains_key(&uid);
        if Origin::of(pod).is_api() || is_known && !adopted::is_adopted(pods, in_runtime, &uid) {
            return Some((uid, Arc::clone(pod)));
        }
        if let Some((known, adopted)) = adopted::of_manifest(pods, in_runtime, manifest_changes, pod) {
            return Some((known, Arc::new(adopted)));
        }
        if is_known {
            return Some((uid, Arc::clone(pod)));
        }
        let (name, shape) = (PodName::of(pod), resize::shape(pod));
        let mut managed = pods.by_uid.iter().filter(|(_, m)| m.name == name && m.may_resize());
        let running = managed.find(|(_, m)| resize::shape(&m.pod) == shape).map(|(uid, _)| uid);
        let mut seen = in_runtime.iter().filter(|(uid, _)| !pods.by_uid.contains_key(*uid));
        let known = running.or_else(|| {
            seen.find(|(uid, seen)| {
                seen.name == name && adopted::shape_of(pods, uid, seen).as_ref() == Some(&shape)
            })
            .map(|(uid, _)| uid)
        });
        let Some(known) = known else { return Some((uid, Arc::clone(pod))) };
        let mut resized = (**pod).clone();
        resized.metadata.uid = Some(known.clone());
        Some((known.clone(), Arc::new(resized)))
    };
    desired.pods.values().filter_map(identify).collect()
}

/// Terminates a pod that is no longer wanted or needs replacement; updates or resizes other pods.
fn keep_or_terminate(pods: &mut Pods, uid: &str, wanted: Option<&Arc<core::Pod>>, desired: &Desired) {
    if let Some(pod) = wanted.filter(|pod| Origin::of(pod).is_api()) {
        assigned::follow_assigned(pods, uid, pod);
        return;
    }
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    if wanted.is_some() && manifest_restores(desired, uid) > managed.manifest_restores {
        info!(pod = %managed.name, uid, "manifest was deleted and restored, replacing pod");
        deleting::terminate(pods, uid);
        return;
    }
    let same = |pod: &&Arc<core::Pod>| {
        hash_of(pod) == hash_of(&managed.pod)
            || managed.may_resize() && resize::shape(pod) == resize::shape(&managed.pod)
    };
    match wanted.filter(same).map(|pod| debugging::with_debuggers(Arc::clone(pod), &managed.record.debuggers))
    {
        // With the same manifest, values from other sources (the priority) may still have changed.
        Some(pod) if !managed.terminating() && managed.pod != pod => {
            if hash_of(&pod) == hash_of(&managed.pod) {
                resizing::want_nothing(managed);
                managed.pod = pod;
            } else if resize::same_amounts(&pod, &managed.pod) {
                // Only the probes have changed.
                resizing::update(managed, &pod, &pods.deps.reports.metrics.resizes);
            } else {
                resizing::update_probes(managed, &pod);
                resizing::want(managed, pod, &pods.deps.reports.metrics.resizes);
            }
            pods.publish(uid);
        }
        Some(_) if resizing::want_nothing(managed) => pods.publish(uid),
        Some(_) => {}
        None if desired.may_remove_of(managed.origin(), uid, manifest_of(&managed.pod).as_deref()) => {
            deleting::terminate(pods, uid);
        }
        None => {}
    }
}

/// Admits a pod that an earlier agent admitted, without checking the node's current state.
fn adopt(pods: &Pods, present: &BTreeSet<String>, uid: &str, pod: &Arc<core::Pod>) {
    if !present.contains(uid) || pods.by_uid.contains_key(uid) {
        return;
    }
    let record = pods.records.get(uid);
    // The worker of a pod that is being terminated takes the room itself.
    let has_none =
        |record: &PodRecord| record.leaving.is_some() || record.failure.is_some() && record.ended().is_some();
    if record.as_ref().is_some_and(has_none) {
        return;
    }
    let accepted = record.as_ref().and_then(|record| record.accepted.as_ref());
    pods.deps.admission.adopt(&resizing::as_accepted(pod, accepted));
    if let Some(failure) = record.and_then(|record| record.failure) {
        let grace = failure.grace.unwrap_or_else(|| beelet_model::pod::grace_period(pod));
        pods.deps.admission.leaving(uid, grace);
    }
}

/// Notifies admission of a pod that is already terminating when its worker starts. `counted` has the pod's
/// amounts, which the spec of an orphan lacks.
fn admit_leaving(
    pods: &Pods,
    counted: &Arc<core::Pod>,
    pod: &core::Pod,
    deletion: Option<&Deletion>,
    terminate: bool,
) {
    let admission = &pods.deps.admission;
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    if let Some(deletion) = deletion {
        admission.leaving(uid, deletion.grace);
    }
    if terminate {
        admission.adopt(counted);
        admission.leaving(uid, beelet_model::pod::grace_period(pod));
    }
}

/// Returns a pod with the fields that the termination of an orphan needs.
fn pod_of_orphan(uid: &str, orphan: &RuntimePod) -> core::Pod {
    core::Pod {
        metadata: ObjectMeta {
            name: Some(orphan.name.name.clone()),
            namespace: Some(orphan.name.namespace.clone()),
            uid: Some(uid.to_owned()),
            deletion_timestamp: Some(Time(whole_second(Timestamp::now()))),
            ..Default::default()
        },
        spec: Some(core::PodSpec {
            termination_grace_period_seconds: i64::try_from(orphan.grace.as_secs()).ok(),
            ..Default::default()
        }),
        status: None,
    }
}
