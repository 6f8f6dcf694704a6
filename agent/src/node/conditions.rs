//! The node's conditions as in a kubelet's Node status (`pkg/kubelet/nodestatus/setters.go`): pressures and
//! readiness, with their transition times.

use std::collections::BTreeMap;

use beelet_policy::eviction::NodeCondition;
use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};
use tokio::sync::watch;

use super::health::Health;
use beelet_model::pressure::Conditions;

/// Pressures in the kubelet's order.
const PRESSURES: [NodeCondition; 3] =
    [NodeCondition::MemoryPressure, NodeCondition::DiskPressure, NodeCondition::PidPressure];

/// State of each pressure and the time of its last transition.
pub(super) type Since = BTreeMap<NodeCondition, (bool, Timestamp)>;

/// Records the transitions of pressures until the sender is dropped. At first the node has none, as of now.
pub(super) fn follow(
    mut pressures: watch::Receiver<Conditions>,
) -> (watch::Receiver<Since>, impl Future<Output = ()> + Send) {
    let now = Timestamp::now();
    let (out, since) = watch::channel(PRESSURES.map(|pressure| (pressure, (false, now))).into());
    let work = async move {
        loop {
            let held = pressures.borrow_and_update().clone();
            out.send_modify(|since| record(since, &held, Timestamp::now()));
            if pressures.changed().await.is_err() {
                return;
            }
        }
    };
    (since, work)
}

fn record(since: &mut Since, held: &Conditions, now: Timestamp) {
    for (pressure, (has, at)) in since {
        let holds = held.contains(pressure);
        if *has != holds {
            (*has, *at) = (holds, now);
        }
    }
}

/// Returns all current conditions. `goes_down` is the start of the machine's shutdown, if it is shutting
/// down.
pub(super) fn list(
    pressures: &Since,
    health: &Health,
    goes_down: Option<Timestamp>,
) -> Vec<core::NodeCondition> {
    let pressures = PRESSURES.iter().filter_map(|pressure| {
        let (has, since) = pressures.get(pressure)?;
        let (reason, message) = words(*pressure, *has);
        Some(condition(pressure.name(), *has, *since, reason, message))
    });
    let now = Timestamp::now();
    let since = now.checked_sub(health.lasted()).unwrap_or(now);
    pressures.chain([ready(health.check(), since, goes_down)]).collect()
}

fn ready(health: Result<(), String>, since: Timestamp, goes_down: Option<Timestamp>) -> core::NodeCondition {
    match (health, goes_down) {
        (Ok(()), None) => condition("Ready", true, since, "KubeletReady", "kubelet is posting ready status"),
        // The kubelet's message.
        (Ok(()), Some(at)) => condition("Ready", false, at, "KubeletNotReady", "node is shutting down"),
        (Err(error), _) => condition("Ready", false, since, "KubeletNotReady", &error),
    }
}

fn words(pressure: NodeCondition, has: bool) -> (&'static str, &'static str) {
    match (pressure, has) {
        (NodeCondition::MemoryPressure, true) => {
            ("KubeletHasInsufficientMemory", "kubelet has insufficient memory available")
        }
        (NodeCondition::MemoryPressure, false) => {
            ("KubeletHasSufficientMemory", "kubelet has sufficient memory available")
        }
        (NodeCondition::DiskPressure, true) => ("KubeletHasDiskPressure", "kubelet has disk pressure"),
        (NodeCondition::DiskPressure, false) => ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        (NodeCondition::PidPressure, true) => {
            ("KubeletHasInsufficientPID", "kubelet has insufficient PID available")
        }
        (NodeCondition::PidPressure, false) => {
            ("KubeletHasSufficientPID", "kubelet has sufficient PID available")
        }
    }
}

fn condition(name: &str, holds: bool, since: Timestamp, reason: &str, message: &str) -> core::NodeCondition {
    core::NodeCondition {
        type_: name.to_owned(),
        status: if holds { "True" } else { "False" }.to_owned(),
        last_transition_time: Some(Time(since)),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_pressure_is_there_since_it_came_and_away_since_it_went() {
        let (told, pressures) = watch::channel(Conditions::new());
        let (since, work) = follow(pressures);
        let working = tokio::spawn(work);
        let memory = |since: &Since| since[&NodeCondition::MemoryPressure];
        let (began, mut changes) = (memory(&since.borrow()), since.clone());
        assert!(!began.0);
        told.send_replace([NodeCondition::MemoryPressure].into());
        let came = memory(&changes.wait_for(|since| memory(since).0).await.unwrap());
        assert!(came.1 > began.1);
        // Another pressure does not affect this one.
        told.send_replace([NodeCondition::MemoryPressure, NodeCondition::DiskPressure].into());
        let other = |since: &Since| since[&NodeCondition::DiskPressure].0;
        assert_eq!(memory(&changes.wait_for(other).await.unwrap()), came);
        told.send_replace(Conditions::new());
        let went = memory(&changes.wait_for(|since| !memory(since).0).await.unwrap());
        assert!(went.1 > came.1);
        drop(told);
        working.await.unwrap();
    }

    #[test]
    fn a_node_whose_runtime_has_not_answered_is_short_of_nothing_and_not_ready() {
        let since = follow(watch::channel(Conditions::new()).1).0;
        let listed = list(&since.borrow(), &Health::new("unix:///run/none.sock"), None);
        let said: Vec<_> =
            listed.iter().map(|c| (c.type_.as_str(), c.status.as_str(), c.reason.as_deref())).collect();
        assert_eq!(
            said,
            [
                ("MemoryPressure", "False", Some("KubeletHasSufficientMemory")),
                ("DiskPressure", "False", Some("KubeletHasNoDiskPressure")),
                ("PIDPressure", "False", Some("KubeletHasSufficientPID")),
                ("Ready", "False", Some("KubeletNotReady")),
            ]
        );
        assert!(listed[3].message.as_ref().unwrap().contains("/run/none.sock"));
    }

    #[test]
    fn a_node_that_shuts_down_is_not_ready_since_then() {
        let (long_ago, now) = (Timestamp::from_second(1_700_000_000).unwrap(), Timestamp::now());
        let at = |ready: core::NodeCondition| (ready.status, ready.last_transition_time.unwrap().0);
        assert_eq!(at(ready(Ok(()), long_ago, None)), ("True".to_owned(), long_ago));
        assert_eq!(at(ready(Ok(()), long_ago, Some(now))), ("False".to_owned(), now));
        let down = ready(Ok(()), long_ago, Some(now));
        assert_eq!(down.message.as_deref(), Some("node is shutting down"));
        let failing = ready(Err("no answer".to_owned()), long_ago, Some(now));
        assert_eq!(failing.message.as_deref(), Some("no answer"));
    }
}
