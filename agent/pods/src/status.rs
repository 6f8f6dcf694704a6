//! A pod's status as users of Kubernetes know it, from its spec, what the runtime has and what probes
//! say. Pure: the time comes in.

use beelet_model::status::{OomFacts, ProbeFacts, whole_second};
use std::{collections::BTreeMap, sync::Arc};

use beelet_policy::{
    node::addresses::host_network_ips,
    pod::{self, KillReason, Tally},
    resources::qos,
};
use beelet_proto::cri;
use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};

use super::runtime_view::{Observation, is_alive};
use beelet_model::{
    failure::PodFailure,
    origin::Origin,
    pod::{NodeFacts, container_of},
    status::{runtime_id, timestamp},
};
use beelet_spec::{
    resize::{self, ResizeFacts},
    signals,
};

/// Why a container isn't running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// One word: `ContainerCreating`, `ErrImagePull`, `CrashLoopBackOff`, …
    pub reason: String,
    /// A sentence.
    pub message: String,
}

/// All that a status is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a> {
    /// The pod with its spec.
    pub pod: &'a core::Pod,
    /// What the runtime has.
    pub seen: &'a Observation,
    /// Why containers aren't running, by name.
    pub waiting: &'a BTreeMap<String, Waiting>,
    /// Why containers were or are stopped, by the runtime's container identifier.
    pub condemned: &'a BTreeMap<String, KillReason>,
    /// How containers count as ended, by name, of which the runtime has nothing any more.
    pub last_codes: &'a BTreeMap<String, i32>,
    /// What probes say, by the runtime's container identifier.
    pub probes: &'a BTreeMap<String, ProbeFacts>,
    /// OOM kills in containers, by the runtime's container identifier.
    pub oom: &'a BTreeMap<String, OomFacts>,
    /// The status before this one: transition times come from it.
    pub previous: Option<&'a core::PodStatus>,
    /// Set if the pod was ended for good.
    pub failure: Option<&'a PodFailure>,
    /// Drivers have not taken back its resource claims: it has not ended yet, whatever its containers have.
    pub holds_claims: bool,
    /// How a change of its amounts stands.
    pub resize: &'a ResizeFacts,
    /// The node.
    pub node: &'a NodeFacts,
    /// The runtime's name, as in `containerd://<id>`.
    pub runtime_name: &'a str,
    /// The time of the change.
    pub now: Timestamp,
}

/// Why containers wait that are restarted with all others of their pod, and the condition of such a pod; the
/// kubelet's.
const RESTARTING_ALL: &str = "RestartingAllContainers";
const ALL_RESTARTING: &str = "AllContainersRestarting";

/// Whom a container's first process runs as.
fn user(user: &cri::LinuxContainerUser) -> core::ContainerUser {
    let linux = core::LinuxContainerUser {
        uid: user.uid,
        gid: user.gid,
        supplemental_groups: Some(user.supplemental_groups.clone()),
    };
    core::ContainerUser { linux: Some(linux) }
}

/// A container's mounts of volumes. Whether what is mounted below one is read-only too the runtime knows once
/// the container is made; until then it is what is asked for without fail.
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

/// What is said of an init container that the runtime has forgotten; the kubelet's words.
const FORGOTTEN: &str = "Unable to get init container status from container runtime and pod has been initialized, treat it as \
                         exited normally";

/// What a container is for in its pod.
#[derive(Clone, Copy)]
enum Role {
    /// It runs to its end before the others start.
    Init,
    /// It keeps running: the pod's own containers and its sidecars.
    Running,
    /// It was added to look at the pod, which doesn't count on it.
    Ephemeral,
}

/// Whether a pod's containers are ready of which these are not.
fn are_ready(unready: &[&str]) -> Result<(), (&'static str, String)> {
    if unready.is_empty() {
        return Ok(());
    }
    Err(("ContainersNotReady", format!("containers with unready status: [{}]", unready.join(" "))))
}

impl Inputs<'_> {
    /// The pod's status.
    pub(crate) fn status(&self) -> core::PodStatus {
        let default_spec = core::PodSpec::default();
        let spec = self.pod.spec.as_ref().unwrap_or(&default_spec);
        let inits: Vec<&core::Container> = spec.init_containers.iter().flatten().collect();
        let mains: Vec<&core::Container> = spec.containers.iter().collect();
        let initialized = self.initialized(&inits, &mains);
        let role = |c: &core::Container| if pod::is_sidecar(c) { Role::Running } else { Role::Init };
        let init_statuses: Vec<_> = inits.iter().map(|c| self.container(c, role(c), false)).collect();
        let statuses: Vec<_> = mains.iter().map(|c| self.container(c, Role::Running, initialized)).collect();
        let ephemeral = pod::ephemeral_containers(spec);
        let ephemeral: Vec<_> =
            ephemeral.iter().map(|c| self.container(c, Role::Ephemeral, inits.is_empty())).collect();
        let tally = self.tally(spec, &inits, initialized, &statuses);
        // Nothing has to be given back by a pod that was refused before anything was made. For one that had
        // been let in, a sandbox may be on its way that nobody has seen yet.
        let is_untouched = self.seen.pod.sandboxes.is_empty() && self.seen.pod.containers.is_empty();
        let phase = match self.failure {
            Some(failure) if failure.has_stopped() || failure.is_refusal() && is_untouched => "Failed",
            _ => pod::phase(tally),
        };
        let (ips, host) = (self.pod_ips(spec), self.node.host.now());
        // A pod that was refused before it had a container has no status of one, as under the kubelet.
        let never_ran = self.failure.is_some()
            && statuses.iter().chain(&init_statuses).all(|status| status.container_id.is_none());
        let mut status = core::PodStatus {
            phase: Some(self.held_phase(phase).to_owned()),
            conditions: Some(self.conditions(phase, initialized, &inits, &init_statuses, &statuses)),
            host_ip: host.first().map(ToString::to_string),
            host_ips: (!host.is_empty())
                .then(|| host.iter().map(|ip| core::HostIP { ip: ip.to_string() }).collect()),
            pod_ip: ips.first().cloned(),
            pod_ips: (!ips.is_empty()).then(|| ips.into_iter().map(|ip| core::PodIP { ip }).collect()),
            resources: self.pod_in_force(phase).or_else(|| resize::pod_amounts(self.pod)),
            allocated_resources: resize::pod_amounts(self.pod).and_then(|amounts| amounts.requests),
            qos_class: qos::qos_class(self.pod).ok().map(|class| class.to_string()),
            start_time: self
                .previous
                .and_then(|p| p.start_time.clone())
                .or(Some(Time(whole_second(self.now)))),
            init_container_statuses: (!never_ran && !init_statuses.is_empty()).then_some(init_statuses),
            container_statuses: (!never_ran).then_some(statuses),
            ephemeral_container_statuses: (!never_ran && !ephemeral.is_empty()).then_some(ephemeral),
            ..Default::default()
        };
        match self.failure {
            Some(failure) => failure.mark(&mut status, self.previous, self.now),
            None => {
                let conditions = self.resize_conditions(&status);
                status.conditions.get_or_insert_default().extend(conditions);
            }
        }
        status
    }

    /// The phase that is told. Who hears that a pod has ended takes its devices for free, so that it keeps
    /// its phase until they are; all else is told at once (`mergePodStatus`).
    fn held_phase<'p>(&'p self, phase: &'p str) -> &'p str {
        let is_final = |phase: &str| matches!(phase, "Succeeded" | "Failed");
        if !self.holds_claims || !is_final(phase) {
            return phase;
        }
        match self.previous.and_then(|previous| previous.phase.as_deref()) {
            Some(told) if is_final(told) => phase,
            told => told.unwrap_or("Running"),
        }
    }

    /// What was known before the runtime was asked, with what probes have said since: a listener that comes
    /// or goes while the runtime hangs is seen all the same.
    pub(crate) fn known(&self, known: &core::PodStatus) -> core::PodStatus {
        let mut status = known.clone();
        let is_sidecar = |name: &str| container_of(self.pod, name).is_some_and(pod::is_sidecar);
        let inits = status.init_container_statuses.iter_mut().flatten().filter(|one| is_sidecar(&one.name));
        let mut is_changed = false;
        for one in inits.chain(status.container_statuses.iter_mut().flatten()) {
            is_changed |= self.take_over(one);
        }
        if is_changed {
            let sidecars =
                status.init_container_statuses.iter().flatten().filter(|one| is_sidecar(&one.name));
            let all = status.container_statuses.iter().flatten().chain(sidecars);
            let unready: Vec<&str> = all.filter(|one| !one.ready).map(|one| one.name.as_str()).collect();
            let ready = are_ready(&unready);
            for one in status.conditions.iter_mut().flatten() {
                if matches!(one.type_.as_str(), "Ready" | "ContainersReady") {
                    *one = self.condition(&one.type_, ready.clone());
                }
            }
        }
        if let Some(failure) = self.failure {
            failure.mark(&mut status, self.previous, self.now);
        }
        status
    }

    /// Takes over into the status of a container that runs what probes have said. Returns true if it is
    /// ready now and was not, or the other way round.
    fn take_over(&self, status: &mut core::ContainerStatus) -> bool {
        let Some(spec) = container_of(self.pod, &status.name) else { return false };
        let facts = runtime_id(status).and_then(|id| self.probes.get(id));
        let runs = status.state.as_ref().is_some_and(|state| state.running.is_some());
        let Some(facts) = facts.filter(|_| runs) else { return false };
        if facts.started == Some(true) {
            status.started = Some(true);
        }
        let has_probe = spec.readiness_probe.is_some();
        let ready = status.started == Some(true) && (!has_probe || facts.ready == Some(true));
        std::mem::replace(&mut status.ready, ready) != ready
    }

    /// The addresses of the pod's sandbox; while it has none, those that it had last: who looks at a pod that
    /// has ended wants to know them too (the kubelet's getPodIPs).
    fn pod_ips(&self, spec: &core::PodSpec) -> Vec<String> {
        let ips = match &self.seen.sandbox {
            Some(_) if spec.host_network == Some(true) => {
                host_network_ips(&self.node.host.now(), self.previous)
            }
            Some(sandbox) => self.node.host.sorted(&sandbox.ips),
            None => Vec::new(),
        };
        if !ips.is_empty() {
            return ips;
        }
        let before = self.previous.iter().flat_map(|status| status.pod_ips.iter().flatten());
        before.map(|address| address.ip.clone()).collect()
    }

    /// Returns true if the pod's own containers may run: they exist already, or every init container has done
    /// its part. Once the sandbox is gone, what ran in it says so.
    fn initialized(&self, inits: &[&core::Container], mains: &[&core::Container]) -> bool {
        if self.begun(mains.iter().copied()) {
            return true;
        }
        inits.iter().all(|spec| {
            let Some(container) = self.seen.newest(&spec.name) else { return false };
            match container.state {
                pod::ContainerState::Exited { exit_code, .. } => exit_code == 0 && !pod::is_sidecar(spec),
                pod::ContainerState::Running { .. } => pod::is_sidecar(spec) && self.started(spec, container),
                _ => false,
            }
        })
    }

    /// Whether one of the pod's own containers has been made in its sandbox, or ran in the one that is gone.
    fn begun<'c>(&self, mains: impl IntoIterator<Item = &'c core::Container>) -> bool {
        let mut mains = mains.into_iter();
        match &self.seen.sandbox {
            Some(sandbox) => {
                mains.filter_map(|c| self.seen.newest(&c.name)).any(|n| n.sandbox_id == sandbox.id)
            }
            None => mains.any(|c| match self.seen.newest(&c.name) {
                Some(newest) => !matches!(newest.state, pod::ContainerState::Created),
                // It never runs again, and so nothing runs before it.
                None => {
                    self.last_codes.get(&c.name).is_some_and(|code| !self.restarts(c, Role::Running, *code))
                }
            }),
        }
    }

    fn tally(
        &self,
        spec: &core::PodSpec,
        inits: &[&core::Container],
        initialized: bool,
        statuses: &[core::ContainerStatus],
    ) -> Tally {
        let init_failed = inits.iter().filter(|c| !pod::is_sidecar(c)).any(|c| {
            let state = self.seen.newest(&c.name).filter(|n| !self.is_past(n)).map(|n| &n.state);
            matches!(state, Some(pod::ContainerState::Exited { exit_code, .. })
                if *exit_code != 0 && !pod::init_restarts(spec, c, *exit_code))
        });
        // A sidecar that is stopped last, and takes its time, is a part of the pod that runs (getPhase).
        let sidecars = self.running_sidecars(inits);
        let mut tally = Tally {
            init_failed: init_failed && sidecars == 0,
            init_pending: usize::from(!initialized),
            running: sidecars,
            ..Tally::default()
        };
        for (container, status) in spec.containers.iter().zip(statuses) {
            let now = status.state.as_ref();
            let ended = |state: Option<&core::ContainerState>| {
                state.and_then(|s| s.terminated.as_ref().map(|t| t.exit_code))
            };
            if now.is_some_and(|s| s.running.is_some()) {
                tally.running += 1;
                continue;
            }
            match ended(now).or_else(|| ended(status.last_state.as_ref())) {
                Some(_) if self.waiting.contains_key(&container.name) => tally.restarting += 1,
                Some(_) if self.seen.newest(&container.name).is_some_and(|n| self.is_past(n)) => {
                    tally.restarting += 1;
                }
                Some(code) if pod::restarts(spec, container, code) => tally.restarting += 1,
                Some(_) if self.comes_back(spec, container) => tally.restarting += 1,
                Some(0) => tally.succeeded += 1,
                Some(_) => tally.failed += 1,
                None => tally.waiting += 1,
            }
        }
        tally
    }

    /// The number of sidecars that may run, in whichever sandbox.
    fn running_sidecars(&self, inits: &[&core::Container]) -> usize {
        let runs = |spec: &core::Container| {
            self.seen.pod.containers.iter().any(|c| c.name == spec.name && is_alive(c))
        };
        inits.iter().filter(|spec| pod::is_sidecar(spec) && runs(spec)).count()
    }

    /// Whether the newest container of that name is started again for the reason that it was stopped for.
    fn comes_back(&self, spec: &core::PodSpec, container: &core::Container) -> bool {
        let reason = self.seen.newest(&container.name).and_then(|newest| self.condemned.get(&newest.id));
        reason.is_some_and(|reason| reason.is_for_a_restart()) && pod::restarts_when_killed(spec, container)
    }

    /// Returns true if a container is to be replaced because all are restarted.
    fn is_past(&self, container: &pod::Container) -> bool {
        let spec = self.pod.spec.as_ref();
        spec.is_some_and(|spec| pod::Round::of(spec, &self.seen.pod).is_past(container))
    }

    fn started(&self, spec: &core::Container, container: &pod::Container) -> bool {
        let running = matches!(container.state, pod::ContainerState::Running { .. });
        let facts = self.probes.get(&container.id).copied().unwrap_or_default();
        running && (spec.startup_probe.is_none() || facts.started == Some(true))
    }

    fn ready(&self, spec: &core::Container, container: &pod::Container) -> bool {
        let facts = self.probes.get(&container.id).copied().unwrap_or_default();
        self.started(spec, container) && (spec.readiness_probe.is_none() || facts.ready == Some(true))
    }

    /// The status of one container. `may_run` is false while init containers hold it back, and for these
    /// themselves.
    fn container(&self, spec: &core::Container, role: Role, may_run: bool) -> core::ContainerStatus {
        let newest = self.seen.newest(&spec.name);
        if newest.is_none()
            && self.failure.is_some()
            && let Some(last) = self.last_known(&spec.name)
        {
            return last;
        }
        if newest.is_none()
            && matches!(role, Role::Init)
            && self.begun(self.pod.spec.iter().flat_map(|pod| &pod.containers))
        {
            return self.forgotten(spec);
        }
        if newest.is_none()
            && let Some(lost) = self.lost(spec, role, may_run)
        {
            return lost;
        }
        let runtime = newest.and_then(|c| self.seen.containers.get(&c.id)).map(Arc::as_ref);
        let started = newest.is_some_and(|c| self.started(spec, c));
        let ready = newest.is_some_and(|c| match role {
            // Its readiness is that it has done its part.
            Role::Init => {
                matches!(c.state, pod::ContainerState::Exited { exit_code: 0, .. }) && !self.is_past(c)
            }
            Role::Running => self.ready(spec, c),
            Role::Ephemeral => false,
        });
        let (state, last_state) = self.states(spec, newest, may_run);
        let image = runtime.and_then(|r| r.image.as_ref()).map(|i| {
            if i.user_specified_image.is_empty() { i.image.clone() } else { i.user_specified_image.clone() }
        });
        core::ContainerStatus {
            name: spec.name.clone(),
            container_id: newest.map(|c| self.container_id(&c.id)),
            image: image.or_else(|| spec.image.clone()).unwrap_or_default(),
            image_id: runtime.map(|r| r.image_ref.clone()).unwrap_or_default(),
            ready,
            started: (!matches!(role, Role::Ephemeral)).then_some(started),
            restart_count: newest.map_or(0, |c| i32::try_from(c.attempt).unwrap_or(i32::MAX)),
            resources: newest.and_then(|c| self.in_force(c)).or_else(|| resize::amounts(spec)),
            allocated_resources: resize::amounts(spec).and_then(|amounts| amounts.requests),
            stop_signal: runtime.and_then(|status| signals::name(status.stop_signal())),
            user: runtime.and_then(|status| status.user.as_ref()?.linux.as_ref()).map(user),
            volume_mounts: volume_mounts(spec, runtime),
            state: Some(state),
            last_state,
            ..Default::default()
        }
    }

    /// The amounts that were in force when the same running container was last looked at: they are until the
    /// cgroups say otherwise, whatever the manifest says by now.
    fn in_force(&self, container: &pod::Container) -> Option<core::ResourceRequirements> {
        if !matches!(container.state, pod::ContainerState::Running { .. }) {
            return None;
        }
        let (previous, id) = (self.previous?, self.container_id(&container.id));
        let all = previous.init_container_statuses.iter().chain(&previous.container_statuses).flatten();
        let same = |status: &&core::ContainerStatus| {
            let ran = status.state.as_ref().is_some_and(|state| state.running.is_some());
            ran && status.container_id.as_ref() == Some(&id)
        };
        all.into_iter().find(same)?.resources.clone()
    }

    /// The amounts of the pod as a whole that were in force when it was last looked at: they are until its
    /// cgroup says otherwise.
    fn pod_in_force(&self, phase: &str) -> Option<core::ResourceRequirements> {
        let ran = |status: &&core::PodStatus| status.phase.as_deref() == Some("Running");
        self.previous.filter(ran).filter(|_| phase == "Running")?.resources.clone()
    }

    /// What was last known of a container whose records the runtime no longer has. One that was last seen
    /// running has ended, nobody knows how: the kubelet's word for it.
    fn last_known(&self, name: &str) -> Option<core::ContainerStatus> {
        let previous = self.previous?;
        let usual = previous.init_container_statuses.iter().chain(&previous.container_statuses);
        let all = usual.chain(&previous.ephemeral_container_statuses).flatten();
        let mut last = all.into_iter().find(|status| status.name == name)?.clone();
        self.end_unknown(&mut last);
        (last.ready, last.started) = (false, last.started.and(Some(false)));
        Some(last)
    }

    /// Ends a container in words that was last seen running, and is not there any more.
    fn end_unknown(&self, last: &mut core::ContainerStatus) {
        let Some(running) = last.state.as_mut().and_then(|state| state.running.take()) else { return };
        last.state = Some(core::ContainerState {
            terminated: Some(core::ContainerStateTerminated {
                container_id: last.container_id.clone(),
                exit_code: 137,
                finished_at: Some(Time(whole_second(self.now))),
                started_at: running.started_at,
                reason: Some("ContainerStatusUnknown".to_owned()),
                message: Some("The container could not be located when the pod was terminated".to_owned()),
                signal: None,
            }),
            ..Default::default()
        });
    }

    /// The known status of a pod that has ended, and of whose containers the runtime has forgotten some. A
    /// container that ran by that status (the API server's word on a lost node's pod) and is not there has
    /// ended.
    pub(crate) fn as_forgotten(&self, known: &core::PodStatus) -> core::PodStatus {
        let mut status = known.clone();
        let usual = status.init_container_statuses.iter_mut().chain(&mut status.container_statuses);
        for one in usual.chain(&mut status.ephemeral_container_statuses).flatten() {
            if !runtime_id(one).is_some_and(|id| self.seen.is_running(id)) {
                self.end_unknown(one);
                one.ready = false;
            }
        }
        status
    }

    /// A container that the runtime has lost after it ran: it has ended, nobody knows how, and the next one
    /// is one more (convertToAPIContainerStatuses).
    fn lost(&self, spec: &core::Container, role: Role, may_run: bool) -> Option<core::ContainerStatus> {
        let code = *self.last_codes.get(&spec.name)?;
        if matches!(role, Role::Init) && code == 0 {
            return None; // it runs again with the pod's next sandbox, or is forgotten
        }
        let mut status = self.last_known(&spec.name)?;
        if self.ran(&spec.name) && self.pod.metadata.deletion_timestamp.is_none() {
            status.restart_count = status.restart_count.saturating_add(1);
        }
        if self.restarts(spec, role, code) {
            if status.state.as_ref().is_some_and(|state| state.terminated.is_some()) {
                status.last_state = status.state.take();
            }
            let fallback = if may_run { "ContainerCreating" } else { "PodInitializing" };
            let default = Waiting { reason: fallback.to_owned(), message: String::new() };
            status.state = Some(waiting_state(self.waiting.get(&spec.name).unwrap_or(&default)));
        }
        status.container_id = None;
        Some(status)
    }

    /// Returns true if a container ran when its pod's status was last made.
    fn ran(&self, name: &str) -> bool {
        let status = self.previous.into_iter();
        let all =
            status.flat_map(|s| s.init_container_statuses.iter().chain(&s.container_statuses).flatten());
        let mut of_name = all.filter(|status| status.name == name);
        of_name.any(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
    }

    /// Returns true if a container that ended with this code is started again.
    fn restarts(&self, container: &core::Container, role: Role, code: i32) -> bool {
        let Some(spec) = &self.pod.spec else { return false };
        match role {
            Role::Init => pod::init_restarts(spec, container, code),
            Role::Running => pod::restarts(spec, container, code),
            Role::Ephemeral => false,
        }
    }

    /// An init container that the runtime has forgotten after it had done its part. Of a static pod, whose
    /// status the kubelet keeps nowhere, that is all that is said (convertToAPIContainerStatuses).
    fn forgotten(&self, spec: &core::Container) -> core::ContainerStatus {
        let last = self.last_known(&spec.name);
        let last = last.filter(|last| last.state.as_ref().is_some_and(|state| state.terminated.is_some()));
        let is_kept = last.is_some() && Origin::of(self.pod).is_api();
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

    fn container_id(&self, id: &str) -> String {
        format!("{}://{id}", self.runtime_name)
    }

    /// The container's state, and the one before it where that tells how it ended.
    fn states(
        &self,
        spec: &core::Container,
        newest: Option<&pod::Container>,
        may_run: bool,
    ) -> (core::ContainerState, Option<core::ContainerState>) {
        let ended =
            newest.and_then(|c| self.seen.containers.get(&c.id)).map(|status| self.terminated(spec, status));
        let before = newest.and_then(|c| {
            let dead = self.seen.pod.containers.iter().filter(|d| d.name == spec.name && d.id != c.id);
            let last = dead.max_by_key(|d| d.attempt)?;
            self.seen.containers.get(&last.id).map(|status| self.terminated(spec, status))
        });
        let waiting = self.waiting.get(&spec.name);
        match newest.map(|c| &c.state) {
            Some(pod::ContainerState::Running { started_at }) => {
                let running =
                    core::ContainerStateRunning { started_at: Some(Time(whole_second(*started_at))) };
                (core::ContainerState { running: Some(running), ..Default::default() }, before)
            }
            // Ended and held back from running again: it waits, and its end is the last state.
            Some(pod::ContainerState::Exited { .. }) => match waiting {
                Some(waiting) => (waiting_state(waiting), ended),
                None if newest.is_some_and(|c| self.is_past(c)) => {
                    let message = "all containers of the pod are restarted".to_owned();
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

    fn terminated(&self, spec: &core::Container, status: &cri::ContainerStatus) -> core::ContainerState {
        // 137: SIGKILL, which is what the OOM killer sends.
        let oom = self.oom.get(&status.id).filter(|facts| facts.first || status.exit_code == 137);
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
                container_id: Some(self.container_id(&status.id)),
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

    fn conditions(
        &self,
        phase: &str,
        initialized: bool,
        inits: &[&core::Container],
        init_statuses: &[core::ContainerStatus],
        statuses: &[core::ContainerStatus],
    ) -> Vec<core::PodCondition> {
        let finished = phase == "Succeeded" || phase == "Failed";
        let sidecars =
            inits.iter().zip(init_statuses).filter(|(spec, _)| pod::is_sidecar(spec)).map(|(_, s)| s);
        let unready: Vec<&str> =
            statuses.iter().chain(sidecars).filter(|s| !s.ready).map(|s| s.name.as_str()).collect();
        let incomplete: Vec<&str> =
            init_statuses.iter().filter(|s| !s.ready).map(|s| s.name.as_str()).collect();
        let ready = if finished {
            Err(if phase == "Succeeded" {
                ("PodCompleted", String::new())
            } else {
                ("PodFailed", String::new())
            })
        } else {
            are_ready(&unready)
        };
        let init = if initialized || phase == "Succeeded" {
            Ok(())
        } else {
            let list = incomplete.join(" ");
            Err(("ContainersNotInitialized", format!("containers with incomplete status: [{list}]")))
        };
        let sandbox = if self.seen.sandbox.is_some() { Ok(()) } else { Err(("", String::new())) };
        let mut conditions = vec![
            self.condition("PodReadyToStartContainers", sandbox),
            self.condition("Initialized", init),
            self.condition("Ready", ready.clone()),
            self.condition("ContainersReady", ready),
            self.condition("PodScheduled", Ok(())),
        ];
        conditions.extend(self.restart_condition(phase));
        conditions
    }

    /// How far a restart of all containers is, of a pod that may ask for one.
    fn restart_condition(&self, phase: &str) -> Option<core::PodCondition> {
        let spec = self.pod.spec.as_ref().filter(|spec| pod::may_restart_all(spec))?;
        let state = match phase {
            "Succeeded" => Err(("PodCompleted", String::new())),
            "Failed" => Err(("PodFailed", String::new())),
            _ if pod::Round::of(spec, &self.seen.pod).begins => Ok(()),
            _ => Err(("", String::new())),
        };
        let begins = state.is_ok();
        let mut condition = self.condition(ALL_RESTARTING, state);
        if begins {
            condition.reason = Some("RestartAllContainersStarted".to_owned());
            condition.message = Some("container exited with restart policy rule".to_owned());
        }
        Some(condition)
    }

    /// What is to be said of a change of the pod's amounts, while there is something.
    fn resize_conditions(&self, status: &core::PodStatus) -> Vec<core::PodCondition> {
        let spec = self.pod.spec.iter();
        let specs = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        let statuses = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
        let statuses: BTreeMap<&str, _> = statuses.map(|status| (status.name.as_str(), status)).collect();
        let behind = |spec: &core::Container| {
            let status = statuses.get(spec.name.as_str());
            let runs = |status: &&&core::ContainerStatus| {
                status.state.as_ref().is_some_and(|state| state.running.is_some())
            };
            status.filter(runs).is_some_and(|status| status.resources != resize::amounts(spec))
        };
        let mut found = Vec::new();
        if let Some(pending) = &self.resize.pending {
            found.push(self.resize_condition(resize::PENDING, pending.reason, &pending.message));
        }
        let as_a_whole =
            status.phase.as_deref() == Some("Running") && status.resources != resize::pod_amounts(self.pod);
        if as_a_whole || specs.into_iter().any(behind) {
            let error = self.resize.error.as_deref().unwrap_or_default();
            let reason = if error.is_empty() { "" } else { "Error" };
            found.push(self.resize_condition(resize::IN_PROGRESS, reason, error));
        }
        found
    }

    fn resize_condition(&self, kind: &str, reason: &str, message: &str) -> core::PodCondition {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let condition = self.condition(kind, Ok(()));
        core::PodCondition { reason: some(reason), message: some(message), ..condition }
    }

    /// A condition whose transition time moves only when its status does.
    fn condition(&self, kind: &str, state: Result<(), (&str, String)>) -> core::PodCondition {
        let status = if state.is_ok() { "True" } else { "False" };
        let before =
            self.previous.iter().flat_map(|p| p.conditions.iter().flatten()).find(|c| c.type_ == kind);
        let since = before.filter(|c| c.status == status).and_then(|c| c.last_transition_time.clone());
        let (reason, message) = state.err().unwrap_or_default();
        core::PodCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            last_transition_time: since.or(Some(Time(whole_second(self.now)))),
            reason: (!reason.is_empty()).then(|| reason.to_owned()),
            message: (!message.is_empty()).then_some(message),
            ..Default::default()
        }
    }
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

#[cfg(test)]
mod tests;
