//! The initial control value of a pod's worker, from the record of the pod.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_policy::pod::UNKNOWN_EXIT;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::watch;

use super::deletion::Deletion;
use crate::{
    records::PodRecord,
    runtime_view::Network,
    worker::{Control, Terminate},
};
use beelet_model::{
    pod::container_of,
    status::{ProbeFacts, has_ended, runtime_id},
};

/// Records the restart counts and exit codes of a pod's newest status for the worker, because the runtime may
/// lose its records. Does not wake the worker.
pub(super) fn remember(control: &watch::Sender<Control>, status: &core::PodStatus) {
    control.send_if_modified(|c| {
        for (name, count) in next_counts(Some(status)) {
            if c.counts.get(&name).is_none_or(|known| *known < count) {
                Arc::make_mut(&mut c.counts).insert(name, count);
            }
        }
        let codes = last_codes(status);
        if c.verdicts.last_codes != codes {
            c.verdicts.last_codes = codes;
        }
        false
    });
}

/// Returns the exit codes of containers from a status. A running container has the code that applies if the
/// runtime loses the container.
fn last_codes(status: &core::PodStatus) -> BTreeMap<String, i32> {
    let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let code = |status: &core::ContainerStatus| {
        let state = status.state.as_ref()?;
        if state.running.is_some() {
            return Some(UNKNOWN_EXIT);
        }
        let ended = state.terminated.as_ref().or_else(|| status.last_state.as_ref()?.terminated.as_ref());
        ended.map(|ended| ended.exit_code)
    };
    all.filter_map(|status| Some((status.name.clone(), code(status)?))).collect()
}

/// Returns the restart counts of the next instances of containers that have run before.
pub(super) fn next_counts(status: Option<&core::PodStatus>) -> BTreeMap<String, u32> {
    let all = status
        .into_iter()
        .flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses).flatten());
    all.filter_map(|status| {
        let count = u32::try_from(status.restart_count).ok()?;
        // The status of a container that the runtime has lost already has the count of the next instance.
        let next = if status.container_id.is_some() { count.checked_add(1)? } else { count };
        (next > 0).then(|| (status.name.clone(), next))
    })
    .collect()
}

/// Adopts what a kubelet has written about an adopted pod to the API server: its status, and the results
/// of its probes, so that a container that was ready stays ready.
pub(super) fn adopt_status(kept: &mut PodRecord, pod: &core::Pod, status: &Arc<core::PodStatus>) {
    let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let known = all.filter(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()));
    let facts = known.filter_map(|status| {
        let spec = container_of(pod, &status.name)?;
        let ready = spec.readiness_probe.is_some().then_some(status.ready);
        let started = status.started.filter(|started| *started && spec.startup_probe.is_some());
        Some((runtime_id(status)?.to_owned(), ProbeFacts { ready, started }))
    });
    kept.probes = facts.collect();
    kept.status = Some(Arc::clone(status));
}

/// Returns the network of a pod's sandbox from an earlier agent's record, or None if it is unknown.
pub(super) fn network_of(kept: &PodRecord, pod: &core::Pod) -> Option<Network> {
    let on_host = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    if on_host {
        return Some(Network { ips: Vec::new(), netns: None });
    }
    let addresses = kept.status.as_ref()?.pod_ips.iter().flatten();
    let ips: Vec<String> = addresses.map(|address| address.ip.clone()).collect();
    let is_known = kept.netns.is_some() && !ips.is_empty();
    is_known.then(|| Network { ips, netns: kept.netns.clone() })
}

/// Returns the initial control value for the worker of a pod whose own grace period is `own`.
pub(super) fn control_of(
    kept: &PodRecord,
    deletion: Option<&Deletion>,
    counts: Arc<BTreeMap<String, u32>>,
    own: Duration,
) -> Control {
    let ended = kept.failure.is_none() && has_ended(kept.status.as_deref());
    let mut control = Control { ended, counts, ..Control::default() };
    if let Some(failure) = &kept.failure {
        control.fail(Terminate { grace: failure.grace }, own);
    }
    if let Some(deletion) = deletion {
        control.fail(Terminate { grace: Some(deletion.grace) }, own);
    }
    let started = kept.probes.iter().filter(|(_, facts)| facts.started == Some(true));
    control.verdicts.started = started.map(|(id, _)| id.clone()).collect();
    control.verdicts.hooked.clone_from(&kept.hooked);
    // The kubelet does not keep the status of a static pod across its own restart: the pod runs again.
    let status = kept.status.as_deref().filter(|_| kept.origin.origin.is_api());
    control.verdicts.last_codes = status.map(last_codes).unwrap_or_default();
    control
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn status(states: &[(&str, i32, Option<&str>, Value, Value)]) -> core::PodStatus {
        let of = |(name, count, id, state, last): &(&str, i32, Option<&str>, Value, Value)| {
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": count,
                "containerID": id, "state": state, "lastState": last})
        };
        let all: Vec<Value> = states.iter().map(of).collect();
        serde_json::from_value(json!({ "containerStatuses": all })).unwrap()
    }

    #[test]
    fn a_container_that_was_ready_under_a_kubelet_is_ready_at_once() {
        let probe = json!({"exec": {"command": ["true"]}});
        let running = |name: &str, id: &str, ready: bool| {
            json!({"name": name, "image": "", "imageID": "", "ready": ready, "started": true, "restartCount": 2,
                "containerID": id, "state": {"running": {}}})
        };
        let mut done = running("done", "c://4", true);
        done["state"] = json!({"terminated": {"exitCode": 0}});
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"containers": [
                {"name": "ready", "readinessProbe": probe, "startupProbe": probe},
                {"name": "not", "readinessProbe": probe}, {"name": "plain"}, {"name": "done"},
            ]},
            "status": {"phase": "Running", "containerStatuses": [
                running("ready", "c://1", true), running("not", "c://2", false), running("plain", "c://3", true),
                done,
            ]},
        }))
        .unwrap();
        let mut kept = PodRecord::new(crate::manager::keeping::runtime_pod(&pod));
        adopt_status(&mut kept, &pod, &Arc::new(pod.status.clone().unwrap()));
        let facts = |ready, started| ProbeFacts { ready, started };
        let expected =
            [("1", facts(Some(true), Some(true))), ("2", facts(Some(false), None)), ("3", facts(None, None))];
        assert_eq!(kept.probes, expected.map(|(id, facts)| (id.to_owned(), facts)).into());
        assert_eq!(next_counts(kept.status.as_deref())["ready"], 3);
    }

    #[test]
    fn counts_and_codes_of_running_containers_survive_their_loss_in_the_runtime() {
        let (none, ended) = (json!({}), |code: i32| json!({"terminated": {"exitCode": code}}));
        let waits = json!({"waiting": {"reason": "ContainerCreating"}});
        let control = watch::Sender::new(Control::default());
        let worker = control.subscribe();
        let known = |worker: &watch::Receiver<Control>| {
            let control = worker.borrow();
            let counts: Vec<_> = control.counts.iter().map(|(name, count)| (name.clone(), *count)).collect();
            (counts, control.verdicts.last_codes.clone().into_iter().collect::<Vec<_>>())
        };
        let named = |all: &[(&str, i32)]| all.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect::<Vec<_>>();
        let counted =
            |all: &[(&str, u32)]| all.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect::<Vec<_>>();
        remember(
            &control,
            &status(&[
                ("new", 0, None, waits.clone(), none.clone()),
                ("runs", 2, Some("c://1"), json!({"running": {}}), ended(1)),
                ("done", 0, Some("c://2"), ended(0), none.clone()),
            ]),
        );
        let codes = named(&[("done", 0), ("runs", 137)]);
        assert_eq!(known(&worker), (counted(&[("done", 1), ("runs", 3)]), codes.clone()));
        assert!(!worker.has_changed().unwrap(), "the worker must not wake");
        // A lost container increments its count once.
        let lost = status(&[("runs", 3, None, waits, ended(137)), ("done", 0, None, ended(0), none)]);
        remember(&control, &lost);
        assert_eq!(known(&worker), (counted(&[("done", 1), ("runs", 3)]), codes));
    }
}
