//! Computes the status of a pod from its spec, its containers in the runtime, and the results of probes.
//! Pure: the current time is an input.

use beelet_model::status::{OomFacts, ProbeFacts, whole_second};
use std::collections::BTreeMap;

use beelet_policy::{
    node::addresses::host_network_ips,
    pod::{self, KillReason, Tally},
    resources::qos,
};
use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};

use super::runtime_view::{Observation, is_alive};
use beelet_model::{
    failure::PodFailure,
    pod::{NodeFacts, container_of},
    status::runtime_id,
};
use beelet_spec::resize::ResizeFacts;

mod conditions;
mod containers;

use conditions::{condition, conditions, resize_conditions};
use containers::{container, end_unknown, pod_in_force, update_readiness};

pub(crate) use containers::pod_amounts;

/// Waiting state of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// Reason as one word: `ContainerCreating`, `ErrImagePull`, `CrashLoopBackOff`, …
    pub reason: String,
    /// Reason as a sentence.
    pub message: String,
}

/// Inputs of a status.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a> {
    /// The pod with its spec.
    pub pod: &'a core::Pod,
    /// The pod in the runtime.
    pub seen: &'a Observation,
    /// Waiting states of containers, by name.
    pub waiting: &'a BTreeMap<String, Waiting>,
    /// Reasons for past and pending stops of containers, by the runtime's container identifier.
    pub condemned: &'a BTreeMap<String, KillReason>,
    /// Exit codes of containers that the runtime has lost, by name.
    pub last_codes: &'a BTreeMap<String, i32>,
    /// Results of probes, by the runtime's container identifier.
    pub probes: &'a BTreeMap<String, ProbeFacts>,
    /// OOM kills in containers, by the runtime's container identifier.
    pub oom: &'a BTreeMap<String, OomFacts>,
    /// The previous status, source of transition times.
    pub previous: Option<&'a core::PodStatus>,
    /// Permanent failure of the pod.
    pub failure: Option<&'a PodFailure>,
    /// Drivers still hold the pod's resource claims: the pod has not ended yet, even if its containers have.
    pub holds_claims: bool,
    /// State of a resize of the pod.
    pub resize: &'a ResizeFacts,
    /// The node.
    pub node: &'a NodeFacts,
    /// The runtime's name, as in `containerd://<id>`.
    pub runtime_name: &'a str,
    /// Time of the change.
    pub now: Timestamp,
}

/// The role of a container in its pod.
#[derive(Clone, Copy)]
enum Role {
    /// An init container, which ends before the next container starts.
    Init,
    /// A main container or a sidecar, which keeps running.
    Running,
    /// An ephemeral container for debugging, without effect on the pod's phase.
    Ephemeral,
}

/// Returns the state of the readiness condition for these unready containers.
fn are_ready(unready: &[&str]) -> Result<(), (&'static str, String)> {
    if unready.is_empty() {
        return Ok(());
    }
    Err(("ContainersNotReady", format!("containers with unready status: [{}]", unready.join(" "))))
}

impl Inputs<'_> {
    /// Returns the pod's status.
    pub(crate) fn status(&self) -> core::PodStatus {
        let default_spec = core::PodSpec::default();
        let spec = self.pod.spec.as_ref().unwrap_or(&default_spec);
        let inits: Vec<&core::Container> = spec.init_containers.iter().flatten().collect();
        let mains: Vec<&core::Container> = spec.containers.iter().collect();
        let initialized = self.initialized(&inits, &mains);
        let role = |c: &core::Container| if pod::is_sidecar(c) { Role::Running } else { Role::Init };
        let init_statuses: Vec<_> = inits.iter().map(|c| container(self, c, role(c), false)).collect();
        let statuses: Vec<_> = mains.iter().map(|c| container(self, c, Role::Running, initialized)).collect();
        let ephemeral = pod::ephemeral_containers(spec);
        let ephemeral: Vec<_> =
            ephemeral.iter().map(|c| container(self, c, Role::Ephemeral, inits.is_empty())).collect();
        let tally = self.tally(spec, &inits, initialized, &statuses);
        // A pod that was refused before its sandbox was created holds no resources. The sandbox of an
        // admitted pod may have been created after the last observation.
        let is_untouched = self.seen.pod.sandboxes.is_empty() && self.seen.pod.containers.is_empty();
        let phase = match self.failure {
            Some(failure) if failure.has_stopped() => failure.final_phase(&statuses),
            Some(failure) if failure.is_refusal() && is_untouched => "Failed",
            _ => pod::phase(tally),
        };
        let (ips, host) = (self.pod_ips(spec), self.node.host.now());
        // A pod that failed before its first container has no container statuses, as under the kubelet.
        let never_ran = self.failure.is_some()
            && statuses.iter().chain(&init_statuses).all(|status| status.container_id.is_none());
        let mut status = core::PodStatus {
            phase: Some(self.held_phase(phase).to_owned()),
            conditions: Some(conditions(self, phase, initialized, &inits, &init_statuses, &statuses)),
            host_ip: host.first().map(ToString::to_string),
            host_ips: (!host.is_empty())
                .then(|| host.iter().map(|ip| core::HostIP { ip: ip.to_string() }).collect()),
            pod_ip: ips.first().cloned(),
            pod_ips: (!ips.is_empty()).then(|| ips.into_iter().map(|ip| core::PodIP { ip }).collect()),
            resources: pod_in_force(self, phase).or_else(|| pod_amounts(self.pod)),
            allocated_resources: pod_amounts(self.pod).and_then(|amounts| amounts.requests),
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
                let conditions = resize_conditions(self, &status);
                status.conditions.get_or_insert_default().extend(conditions);
            }
        }
        status
    }

    /// Returns the phase for publication. Readers consider the devices of an ended pod free, so the pod keeps
    /// its phase until its claims are released. All other fields are published immediately
    /// (`mergePodStatus`).
    fn held_phase<'p>(&'p self, phase: &'p str) -> &'p str {
        let is_final = |phase: &str| matches!(phase, "Succeeded" | "Failed");
        if !self.holds_claims || !is_final(phase) {
            return phase;
        }
        match self.previous.and_then(|previous| previous.phase.as_deref()) {
            Some(published) if is_final(published) => phase,
            published => published.unwrap_or("Running"),
        }
    }

    /// Returns the recorded status with the latest probe results, for a pod without an observation: a
    /// listener that opens or closes must change readiness even while the runtime hangs.
    pub(crate) fn known(&self, known: &core::PodStatus) -> core::PodStatus {
        let mut status = known.clone();
        let is_sidecar = |name: &str| container_of(self.pod, name).is_some_and(pod::is_sidecar);
        let inits = status.init_container_statuses.iter_mut().flatten().filter(|one| is_sidecar(&one.name));
        let mut is_changed = false;
        for one in inits.chain(status.container_statuses.iter_mut().flatten()) {
            is_changed |= update_readiness(self, one);
        }
        if is_changed {
            let sidecars =
                status.init_container_statuses.iter().flatten().filter(|one| is_sidecar(&one.name));
            let all = status.container_statuses.iter().flatten().chain(sidecars);
            let unready: Vec<&str> = all.filter(|one| !one.ready).map(|one| one.name.as_str()).collect();
            let ready = are_ready(&unready);
            for one in status.conditions.iter_mut().flatten() {
                if matches!(one.type_.as_str(), "Ready" | "ContainersReady") {
                    *one = condition(self, &one.type_, ready.clone());
                }
            }
        }
        if let Some(failure) = self.failure {
            failure.mark(&mut status, self.previous, self.now);
        }
        status
    }

    /// Returns the addresses of the pod's sandbox. Without a sandbox the pod keeps its last addresses, which
    /// readers of an ended pod need too (the kubelet's getPodIPs).
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

    /// Returns true if the pod's main containers may run: one exists already, or every init container has
    /// succeeded or, if a sidecar, has started. Without a sandbox, the containers of the removed sandbox
    /// count.
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

    /// Returns true if a main container was created in the current sandbox, or ran in a removed sandbox.
    fn begun<'c>(&self, mains: impl IntoIterator<Item = &'c core::Container>) -> bool {
        let mut mains = mains.into_iter();
        match &self.seen.sandbox {
            Some(sandbox) => {
                mains.filter_map(|c| self.seen.newest(&c.name)).any(|n| n.sandbox_id == sandbox.id)
            }
            None => mains.any(|c| match self.seen.newest(&c.name) {
                Some(newest) => !matches!(newest.state, pod::ContainerState::Created),
                // A lost container that does not restart needs no init containers.
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
            let is_replaced = self.waiting.contains_key(&c.name);
            matches!(state, Some(pod::ContainerState::Exited { exit_code, .. })
                if *exit_code != 0 && !is_replaced && !pod::init_restarts(spec, c, *exit_code))
        });
        // A sidecar that is still stopping keeps the pod in phase Running (getPhase).
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

    /// Returns the number of sidecars that may run, in any sandbox.
    fn running_sidecars(&self, inits: &[&core::Container]) -> usize {
        let runs = |spec: &core::Container| {
            self.seen.pod.containers.iter().any(|c| c.name == spec.name && is_alive(c))
        };
        inits.iter().filter(|spec| pod::is_sidecar(spec) && runs(spec)).count()
    }

    /// Returns true if the reason for the stop of the newest container implies a restart.
    fn comes_back(&self, spec: &core::PodSpec, container: &core::Container) -> bool {
        let reason = self.seen.newest(&container.name).and_then(|newest| self.condemned.get(&newest.id));
        reason.is_some_and(|reason| reason.is_for_a_restart()) && pod::restarts_when_killed(spec, container)
    }

    /// Returns true if a container will be replaced by a restart of all containers.
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

    /// Returns the recorded status of an ended pod of which the runtime has lost containers. A lost container
    /// that is running in the recorded status (such as the API server's status of a lost node's pod) has
    /// ended.
    pub(crate) fn as_forgotten(&self, known: &core::PodStatus) -> core::PodStatus {
        let mut status = known.clone();
        let usual = status.init_container_statuses.iter_mut().chain(&mut status.container_statuses);
        for one in usual.chain(&mut status.ephemeral_container_statuses).flatten() {
            if !runtime_id(one).is_some_and(|id| self.seen.is_running(id)) {
                end_unknown(self, one);
                one.ready = false;
            }
        }
        status
    }

    /// Returns true if a container that ended with this exit code restarts: none of a deleted pod does.
    fn restarts(&self, container: &core::Container, role: Role, code: i32) -> bool {
        if self.pod.metadata.deletion_timestamp.is_some() {
            return false;
        }
        let Some(spec) = &self.pod.spec else { return false };
        match role {
            Role::Init => pod::init_restarts(spec, container, code),
            Role::Running => pod::restarts(spec, container, code),
            Role::Ephemeral => false,
        }
    }

    fn container_id(&self, id: &str) -> String {
        format!("{}://{id}", self.runtime_name)
    }
}

#[cfg(test)]
mod tests;
