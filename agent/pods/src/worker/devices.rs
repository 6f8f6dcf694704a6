//! Allocation of a pod's devices, which precedes its sandbox and its containers.

use std::{collections::BTreeSet, sync::Arc};

use beelet_policy::pod::{self, Actions, ContainerState};
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::watch, time::Instant};

use crate::{plan::PodPlan, runtime_view::Observation, status::Waiting};
use beelet_devices::{Circumstances, DeviceRefusal, Devices, NodeDevices};
use beelet_pinning::{PinRefusal, Pinning, Session};

/// Reason in the status of a container that waits for devices.
const WAITING: &str = "WaitingForDevices";

/// Result of a request for a pod's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Granted {
    /// The pod has its devices.
    Yes,
    /// The pod waits, at most until this time.
    No(Option<Instant>),
}

/// The devices of a worker's pod.
#[derive(Debug)]
pub(super) struct DeviceGrant {
    devices: Devices,
    pinning: Pinning,
    /// Attempt number of the sandbox for which the pod has its devices.
    sandbox: Option<u32>,
    /// Waiting reason of the pod, if it has to wait.
    waiting: Option<Waiting>,
    changes: watch::Receiver<Arc<NodeDevices>>,
}

impl DeviceGrant {
    pub(super) fn new(devices: Devices, pinning: Pinning) -> Self {
        Self { changes: devices.node(), devices, pinning, sandbox: None, waiting: None }
    }

    /// Clears the grant of a pod that releases its resources.
    pub(super) fn revoke(&mut self) {
        (self.sandbox, self.waiting) = (None, None);
    }

    /// Waits for a change of the node's devices; forever if the pod does not wait for devices.
    pub(super) async fn changed(&mut self) {
        if self.waiting.is_none() {
            std::future::pending::<()>().await;
        }
        let _ = self.changes.changed().await;
    }

    /// Allocates the pod's devices, if `actions` create a sandbox or start containers.
    pub(super) async fn have(&mut self, plan: &PodPlan, seen: &Observation, actions: &Actions) -> Granted {
        let current = current(seen);
        let wanted = actions.create_sandbox.or_else(|| {
            (!actions.start.is_empty()).then(|| current.map(|sandbox| sandbox.attempt)).flatten()
        });
        let Some(wanted) = wanted.filter(|wanted| self.sandbox != Some(*wanted)) else { return Granted::Yes };
        let ended = ended(&plan.pod, seen);
        // A pod with a sandbox is never refused: it was admitted before this agent started.
        let in_place = actions.create_sandbox.is_none();
        let circumstances = beelet_pinning::Circumstances { ended: ended.clone(), runs: in_place };
        let pins = self.pinning.begin(&plan.pod, circumstances);
        // A pod that an earlier agent started keeps its devices, regardless of the plugins' state.
        let has_devices = in_place && self.devices.has_all(&plan.pod, &ended);
        if has_devices && pins.is_none() {
            self.sandbox = Some(wanted);
            return Granted::Yes;
        }
        // No container runs in a sandbox that does not exist yet; containers of the old sandbox do not count.
        let kept = current.filter(|_| in_place);
        let running = kept.map(|sandbox| running(seen, sandbox)).unwrap_or_default();
        let restarting = !seen.pod.sandboxes.is_empty();
        self.changes.borrow_and_update();
        let admitted = if has_devices {
            Ok(())
        } else {
            let aligner = pins.as_ref().map(Session::aligner);
            self.devices.admit(&plan.pod, Circumstances { running, ended, restarting }, aligner).await
        };
        let admitted = match (admitted, pins) {
            (Ok(()), Some(pins)) => pins.finish().await.map_err(of_pins),
            (admitted, _) => admitted,
        };
        match admitted {
            Ok(()) => {
                (self.sandbox, self.waiting) = (Some(wanted), None);
                Granted::Yes
            }
            Err(DeviceRefusal::Wait { message, until }) => {
                self.waiting = Some(Waiting { reason: WAITING.to_owned(), message });
                Granted::No(Some(until))
            }
            // The manager ends the pod.
            Err(DeviceRefusal::Failed { message }) => {
                self.waiting = Some(Waiting { reason: WAITING.to_owned(), message });
                Granted::No(None)
            }
        }
    }

    /// Releases the devices of ended init containers that no later container needs.
    pub(super) fn release_ended(&self, plan: &PodPlan, seen: &Observation) {
        if plan.pod.spec.as_ref().is_some_and(pod::may_restart_all) {
            // The init containers may run again in the same sandbox.
            return;
        }
        for name in ended(&plan.pod, seen) {
            if self.devices.holds(&plan.uid, &name) {
                self.devices.release(&plan.uid, &name);
            }
        }
    }

    /// Returns the containers that wait for devices: all that `actions` would start.
    pub(super) fn waiting(&self, plan: &PodPlan, actions: &Actions) -> Vec<(String, Waiting)> {
        let Some(waiting) = &self.waiting else { return Vec::new() };
        let spec = plan.pod.spec.as_ref();
        let all = spec.into_iter().flat_map(|s| s.init_containers.iter().flatten().chain(&s.containers));
        let starts = |name: &str| {
            actions.create_sandbox.is_some() || actions.start.iter().any(|start| start.name == name)
        };
        all.filter(|c| starts(&c.name)).map(|c| (c.name.clone(), waiting.clone())).collect()
    }
}

/// Converts a refusal of CPUs or memory: the worker treats it like a refusal of devices.
fn of_pins(refusal: PinRefusal) -> DeviceRefusal {
    match refusal {
        PinRefusal::Wait { message, until } => DeviceRefusal::Wait { message, until },
        PinRefusal::Failed { message } => DeviceRefusal::Failed { message },
    }
}

/// Returns the sandbox in which containers are started.
fn current(seen: &Observation) -> Option<&pod::Sandbox> {
    seen.pod.sandboxes.iter().filter(|s| s.ready).max_by_key(|s| (s.attempt, &s.id))
}

fn running(seen: &Observation, sandbox: &pod::Sandbox) -> BTreeSet<String> {
    let here = seen.pod.containers.iter().filter(|c| c.sandbox_id == sandbox.id);
    let runs = here.filter(|c| matches!(c.state, ContainerState::Running { .. }));
    runs.map(|c| c.name.clone()).collect()
}

/// Returns the init containers that have ended permanently: with exit code 0, in the current sandbox, and
/// with a later container already started.
fn ended(pod: &core::Pod, seen: &Observation) -> BTreeSet<String> {
    let Some((spec, sandbox)) = pod.spec.as_ref().zip(current(seen)) else { return BTreeSet::new() };
    let started = |name: &str| {
        let here = |c: &&pod::Container| c.sandbox_id == sandbox.id && c.name == name;
        seen.pod.containers.iter().filter(here).any(|c| c.state != ContainerState::Created)
    };
    let ended_well = |name: &str| {
        let newest = seen.newest(name).filter(|c| c.sandbox_id == sandbox.id);
        newest.is_some_and(|c| matches!(c.state, ContainerState::Exited { exit_code: 0, .. }))
    };
    let inits: &[core::Container] = spec.init_containers.as_deref().unwrap_or_default();
    let later = |i: usize| inits.iter().skip(i + 1).chain(&spec.containers);
    let ended = inits.iter().enumerate().filter(|(i, init)| {
        !pod::is_sidecar(init) && ended_well(&init.name) && later(*i).any(|c| started(&c.name))
    });
    ended.map(|(_, init)| init.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_init_container_has_ended_permanently_once_the_next_was_started() {
        let pod: core::Pod = serde_json::from_value(json!({ "spec": {
            "initContainers": [{ "name": "a" }, { "name": "s", "restartPolicy": "Always" }, { "name": "b" }],
            "containers": [{ "name": "c" }],
        }}))
        .unwrap();
        let check = |containers: &[(&str, &str, i32)], expected: &[&str]| {
            let sandbox = |id: &str, attempt, ready| pod::Sandbox { id: id.into(), attempt, ready };
            let container = |(name, sandbox, code): &(&str, &str, i32)| pod::Container {
                id: format!("{name}-{sandbox}"),
                name: (*name).to_owned(),
                attempt: 0,
                sandbox_id: (*sandbox).to_owned(),
                state: match code {
                    -1 => ContainerState::Running { started_at: Timestamp::UNIX_EPOCH },
                    code => ContainerState::Exited {
                        exit_code: *code,
                        started_at: None,
                        finished_at: Timestamp::UNIX_EPOCH,
                    },
                },
                restart_delay: std::time::Duration::ZERO,
                round: 0,
            };
            let observed = pod::Observed {
                sandboxes: vec![sandbox("old", 0, false), sandbox("new", 1, true)],
                containers: containers.iter().map(container).collect(),
            };
            let seen = Observation { pod: observed, ..Observation::default() };
            let names: Vec<String> = ended(&pod, &seen).into_iter().collect();
            assert_eq!(names, expected, "{containers:?}");
        };
        check(&[], &[]);
        check(&[("a", "new", 0)], &[]);
        check(&[("a", "new", 0), ("s", "new", -1)], &["a"]);
        check(&[("a", "new", 1), ("s", "new", -1)], &[]);
        check(&[("a", "new", 0), ("s", "new", -1), ("b", "new", 0), ("c", "new", -1)], &["a", "b"]);
        check(&[("a", "old", 0), ("c", "old", 0)], &[]);
    }
}
