//! Statuses of containers, including containers that the runtime has lost or forgotten.

use std::{collections::BTreeMap, sync::Arc};

use beelet_model::{
    origin::Origin,
    pod::container_of,
    status::{runtime_id, timestamp, whole_second},
};
use beelet_policy::{
    pod,
    resources::{CPU, PodDemand, ResourceList},
};
use beelet_proto::cri;
use beelet_spec::{resize, signals};
use beelet_units::quantity::Quantity;
use k8s_openapi::{
    api::core::v1 as core,
    apimachinery::pkg::{api::resource::Quantity as ApiQuantity, apis::meta::v1::Time},
};

use super::{Inputs, Role, Waiting};

/// Waiting reason of a container in a restart of all containers; the kubelet's.
const RESTARTING_ALL: &str = "RestartingAllContainers";
/// Message for an init container that the runtime has forgotten; the kubelet's.
pub(super) const FORGOTTEN: &str = "Unable to get init container status from container runtime and pod has been initialized, treat it as \
                         exited normally";

/// Returns the status of one container. `may_run` is false for init containers, and for other containers
/// until the pod is initialized.
pub(super) fn container(
    inputs: &Inputs<'_>,
    spec: &core::Container,
    role: Role,
    may_run: bool,
) -> core::ContainerStatus {
    let newest = inputs.seen.newest(&spec.name);
    if newest.is_none()
        && inputs.failure.is_some()
        && let Some(last) = last_known(inputs, &spec.name)
    {
        return last;
    }
    if newest.is_none()
        && matches!(role, Role::Init)
        && inputs.begun(inputs.pod.spec.iter().flat_map(|pod| &pod.containers))
    {
        return forgotten(inputs, spec);
    }
    if newest.is_none()
        && let Some(lost) = lost(inputs, spec, role, may_run)
    {
        return lost;
    }
    let runtime = newest.and_then(|c| inputs.seen.containers.get(&c.id)).map(Arc::as_ref);
    let started = newest.is_some_and(|c| inputs.started(spec, c));
    let ready = newest.is_some_and(|c| match role {
        // An init container is ready once it has succeeded.
        Role::Init => {
            matches!(c.state, pod::ContainerState::Exited { exit_code: 0, .. }) && !inputs.is_past(c)
        }
        Role::Running => inputs.ready(spec, c),
        Role::Ephemeral => false,
    });
    let (state, last_state) = states(inputs, spec, newest, may_run);
    let image = runtime.and_then(|r| r.image.as_ref()).map(|i| {
        if i.user_specified_image.is_empty() { i.image.clone() } else { i.user_specified_image.clone() }
    });
    core::ContainerStatus {
        name: spec.name.clone(),
        container_id: newest.map(|c| inputs.container_id(&c.id)),
        image: image.or_else(|| spec.image.clone()).unwrap_or_default(),
        image_id: runtime.map(|r| r.image_ref.clone()).unwrap_or_default(),
        ready,
        started: (!matches!(role, Role::Ephemeral)).then_some(started),
        restart_count: newest.map_or(0, |c| i32::try_from(c.attempt).unwrap_or(i32::MAX)),
        // A container that the runtime has created has resources, if only empty ones.
        resources: newest
            .and_then(|c| in_force(inputs, c))
            .or_else(|| resize::amounts(spec))
            .or_else(|| newest.map(|_| core::ResourceRequirements::default())),
        allocated_resources: resize::amounts(spec).and_then(|amounts| amounts.requests),
        stop_signal: runtime.and_then(|status| signals::name(status.stop_signal())),
        user: runtime.and_then(|status| status.user.as_ref()?.linux.as_ref()).map(user),
        volume_mounts: volume_mounts(spec, runtime),
        state: Some(state),
        last_state,
        ..Default::default()
    }
}

/// Returns the resource amounts in the previous status of the same running container. These amounts are in
/// force until the container's cgroup changes, regardless of the manifest.
fn in_force(inputs: &Inputs<'_>, container: &pod::Container) -> Option<core::ResourceRequirements> {
    if !matches!(container.state, pod::ContainerState::Running { .. }) {
        return None;
    }
    let (previous, id) = (inputs.previous?, inputs.container_id(&container.id));
    let all = previous.init_container_statuses.iter().chain(&previous.container_statuses).flatten();
    let same = |status: &&core::ContainerStatus| {
        let ran = status.state.as_ref().is_some_and(|state| state.running.is_some());
        ran && status.container_id.as_ref() == Some(&id)
    };
    all.into_iter().find(same)?.resources.clone()
}

/// Returns the last known status of a container that the runtime has lost. A container that was running has
/// ended for an unknown reason, with the kubelet's reason for such an end.
fn last_known(inputs: &Inputs<'_>, name: &str) -> Option<core::ContainerStatus> {
    let previous = inputs.previous?;
    let usual = previous.init_container_statuses.iter().chain(&previous.container_statuses);
    let all = usual.chain(&previous.ephemeral_container_statuses).flatten();
    let mut last = all.into_iter().find(|status| status.name == name)?.clone();
    end_unknown(inputs, &mut last);
    (last.ready, last.started) = (false, last.started.and(Some(false)));
    Some(last)
}

/// Marks a lost container as ended, if its status is running.
pub(super) fn end_unknown(inputs: &Inputs<'_>, last: &mut core::ContainerStatus) {
    let Some(running) = last.state.as_mut().and_then(|state| state.running.take()) else { return };
    last.state = Some(core::ContainerState {
        terminated: Some(core::ContainerStateTerminated {
            container_id: last.container_id.clone(),
            exit_code: 137,
            finished_at: Some(Time(whole_second(inputs.now))),
            started_at: running.started_at,
            reason: Some("ContainerStatusUnknown".to_owned()),
            message: Some("The container could not be located when the pod was terminated".to_owned()),
            signal: None,
        }),
        ..Default::default()
    });
}

/// Returns the status of a container that ran and that the runtime has lost. The container has ended for an
/// unknown reason, and its next instance counts as a restart (convertToAPIContainerStatuses).
fn lost(
    inputs: &Inputs<'_>,
    spec: &core::Container,
    role: Role,
    may_run: bool,
) -> Option<core::ContainerStatus> {
    let code = *inputs.last_codes.get(&spec.name)?;
    if matches!(role, Role::Init) && code == 0 {
        return None; // the init container runs again in the next sandbox, or counts as forgotten
    }
    let mut status = last_known(inputs, &spec.name)?;
    if ran(inputs, &spec.name) && inputs.pod.metadata.deletion_timestamp.is_none() {
        status.restart_count = status.restart_count.saturating_add(1);
    }
    if inputs.restarts(spec, role, code) {
        if status.state.as_ref().is_some_and(|state| state.terminated.is_some()) {
            status.last_state = status.state.take();
        }
        let fallback = if may_run { "ContainerCreating" } else { "PodInitializing" };
        let default = Waiting { reason: fallback.to_owned(), message: String::new() };
        status.state = Some(waiting_state(inputs.waiting.get(&spec.name).unwrap_or(&default)));
    }
    status.container_id = None;
    Some(status)
}

/// Returns true if a container is running in the previous status.
fn ran(inputs: &Inputs<'_>, name: &str) -> bool {
    let status = inputs.previous.into_iter();
    let all = status.flat_map(|s| s.init_container_statuses.iter().chain(&s.container_statuses).flatten());
    let mut of_name = all.filter(|status| status.name == name);
    of_name.any(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
}

/// Returns the status of an init container that the runtime has forgotten after the pod was initialized. The
/// kubelet does not keep the status of a static pod, so the exit code there is always 0
/// (convertToAPIContainerStatuses).
fn forgotten(inputs: &Inputs<'_>, spec: &core::Container) -> core::ContainerStatus {
    let last = last_known(inputs, &spec.name);
    let last = last.filter(|last| last.state.as_ref().is_some_and(|state| state.terminated.is_some()));
    let is_kept = last.is_some() && Origin::of(inputs.pod).is_api();
    let mut status = last.unwrap_or_else(|| core::ContainerStatus {
        name: spec.name.clone(),
        image: spec.image.clone().unwrap_or_default(),
        ..Default::default()
    });
    (status.ready, status.started) = (true, Some(false));
    if !is_kept {
        let state = status.state.get_or_insert_default();
        state.waiting = None;
        let terminated = state.terminated.get_or_insert_default();
        terminated.exit_code = 0;
        terminated.reason = Some("Completed".to_owned());
        terminated.message = Some(FORGOTTEN.to_owned());
    }
    status
}

/// Returns the state of a container, and its last terminated state, if any.
fn states(
    inputs: &Inputs<'_>,
    spec: &core::Container,
    newest: Option<&pod::Container>,
    may_run: bool,
) -> (core::ContainerState, Option<core::ContainerState>) {
    let ended =
        newest.and_then(|c| inputs.seen.containers.get(&c.id)).map(|status| terminated(inputs, spec, status));
    let before = newest.and_then(|c| {
        let dead = inputs.seen.pod.containers.iter().filter(|d| d.name == spec.name && d.id != c.id);
        let last = dead.max_by_key(|d| d.attempt)?;
        inputs.seen.containers.get(&last.id).map(|status| terminated(inputs, spec, status))
    });
    let waiting = inputs.waiting.get(&spec.name);
    match newest.map(|c| &c.state) {
        Some(pod::ContainerState::Running { started_at }) => {
            let running = core::ContainerStateRunning { started_at: Some(Time(whole_second(*started_at))) };
            (core::ContainerState { running: Some(running), ..Default::default() }, before)
        }
        // An ended container that waits for its restart is waiting, and its end is the last state.
        Some(pod::ContainerState::Exited { .. }) => match waiting {
            Some(waiting) => (waiting_state(waiting), ended),
            None if newest.is_some_and(|c| inputs.is_past(c)) => {
                let message = "restarting all containers of the pod".to_owned();
                (waiting_state(&Waiting { reason: RESTARTING_ALL.to_owned(), message }), ended)
            }
            None => (ended.unwrap_or_default(), before),
        },
        _ => {
            let fallback = if may_run { "ContainerCreating" } else { "PodInitializing" };
            let default = Waiting { reason: fallback.to_owned(), message: String::new() };
            (waiting_state(waiting.unwrap_or(&default)), before)
        }
    }
}

fn terminated(
    inputs: &Inputs<'_>,
    spec: &core::Container,
    status: &cri::ContainerStatus,
) -> core::ContainerState {
    // 137: SIGKILL, the signal of the OOM killer.
    let oom = inputs.oom.get(&status.id).filter(|facts| facts.first || status.exit_code == 137);
    let limit = spec.resources.as_ref().and_then(|r| Some(r.limits.as_ref()?.get("memory")?.0.as_str()));
    let message = match oom {
        Some(facts) if status.message.is_empty() => facts.sentence(limit),
        _ => status.message.clone(),
    };
    let reason = if oom.is_some() {
        "OOMKilled".to_owned()
    } else if status.reason.is_empty() {
        if status.exit_code == 0 { "Completed" } else { "Error" }.to_owned()
    } else {
        status.reason.clone()
    };
    let time = |ns| timestamp(ns).map(|t| Time(whole_second(t)));
    core::ContainerState {
        terminated: Some(core::ContainerStateTerminated {
            container_id: Some(inputs.container_id(&status.id)),
            exit_code: status.exit_code,
            finished_at: time(status.finished_at),
            started_at: time(status.started_at),
            reason: Some(reason),
            message: (!message.is_empty()).then_some(message),
            signal: None,
        }),
        ..Default::default()
    }
}

/// Applies the results of probes to the status of a running container. Returns true if its readiness has
/// changed.
pub(super) fn update_readiness(inputs: &Inputs<'_>, status: &mut core::ContainerStatus) -> bool {
    let Some(spec) = container_of(inputs.pod, &status.name) else { return false };
    let facts = runtime_id(status).and_then(|id| inputs.probes.get(id));
    let runs = status.state.as_ref().is_some_and(|state| state.running.is_some());
    let Some(facts) = facts.filter(|_| runs) else { return false };
    if facts.started == Some(true) {
        status.started = Some(true);
    }
    let has_probe = spec.readiness_probe.is_some();
    let ready = status.started == Some(true) && (!has_probe || facts.ready == Some(true));
    std::mem::replace(&mut status.ready, ready) != ready
}

/// Returns the pod-level resource amounts in the previous status of a running pod. These amounts are in force
/// until the pod's cgroup changes.
pub(super) fn pod_in_force(inputs: &Inputs<'_>, phase: &str) -> Option<core::ResourceRequirements> {
    // Amounts of the pod itself are enacted as one; those of its containers, one by one.
    resize::pod_amounts(inputs.pod)?;
    let ran = |status: &&core::PodStatus| status.phase.as_deref() == Some("Running");
    inputs.previous.filter(ran).filter(|_| phase == "Running")?.resources.clone()
}

/// Returns the amounts of the pod as a whole: of its spec and, for the others, the sums over its containers
/// (the kubelet's getEffectiveAllocatedResources).
pub(crate) fn pod_amounts(pod: &core::Pod) -> Option<core::ResourceRequirements> {
    let demand = PodDemand::read(pod).ok()?;
    let own = resize::pod_amounts(pod).unwrap_or_default();
    let texts = |sums: &ResourceList<'_>, own: Option<&BTreeMap<String, ApiQuantity>>| {
        let text = |(name, sum): (&str, Quantity)| {
            // An amount of the spec keeps its text.
            let own = own.and_then(|own| own.get(name)).filter(|own| Quantity::try_from(*own) == Ok(sum));
            let sum = || ApiQuantity(if name == CPU { sum.to_string() } else { sum.binary() });
            (name.to_owned(), own.cloned().unwrap_or_else(sum))
        };
        Some(sums.iter().map(text).collect::<BTreeMap<_, _>>()).filter(|all| !all.is_empty())
    };
    let requests = texts(&demand.requests(), own.requests.as_ref());
    let limits = texts(&demand.limits(), own.limits.as_ref());
    let is_any = requests.is_some() || limits.is_some();
    is_any.then(|| core::ResourceRequirements { requests, limits, ..Default::default() })
}

/// Returns the user of a container's first process.
fn user(user: &cri::LinuxContainerUser) -> core::ContainerUser {
    let linux = core::LinuxContainerUser {
        uid: user.uid,
        gid: user.gid,
        supplemental_groups: Some(user.supplemental_groups.clone()),
    };
    core::ContainerUser { linux: Some(linux) }
}

/// Returns the volume mounts of a container. The runtime reports recursive read-only mounts once the
/// container is created; until then the status has the spec's value if that is `Enabled`.
fn volume_mounts(
    spec: &core::Container,
    runtime: Option<&cri::ContainerStatus>,
) -> Option<Vec<core::VolumeMountStatus>> {
    let recursive = |mount: &core::VolumeMount| match runtime {
        Some(status) => {
            let made = status.mounts.iter().find(|made| made.container_path == mount.mount_path);
            made.is_some_and(|made| made.recursive_read_only)
        }
        None => mount.recursive_read_only.as_deref() == Some("Enabled"),
    };
    let status = |mount: &core::VolumeMount| core::VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: mount.read_only.filter(|read_only| *read_only),
        recursive_read_only: (mount.read_only == Some(true))
            .then(|| if recursive(mount) { "Enabled" } else { "Disabled" }.to_owned()),
        ..Default::default()
    };
    let mounts: Vec<_> = spec.volume_mounts.iter().flatten().map(status).collect();
    (!mounts.is_empty()).then_some(mounts)
}

fn waiting_state(waiting: &Waiting) -> core::ContainerState {
    core::ContainerState {
        waiting: Some(core::ContainerStateWaiting {
            reason: Some(waiting.reason.clone()),
            message: (!waiting.message.is_empty()).then(|| waiting.message.clone()),
        }),
        ..Default::default()
    }
}
