//! Choice of the dead containers and sandboxes to remove: the kubelet's container garbage collection
//! (`pkg/kubelet/kuberuntime/kuberuntime_gc.go`).
//!
//! Takes lists and returns ids. Must never name a running container.

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use jiff::Timestamp;
use serde::Deserialize;

/// Limits of the dead containers to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerGcPolicy {
    /// Minimum age (since creation) for removal.
    pub min_age: Duration,
    /// Number of dead containers kept per container of a pod; negative for no limit.
    pub max_per_pod_container: i64,
    /// Number of dead containers kept in all; negative for no limit.
    pub max_containers: i64,
}

/// The part of a container's state that matters for removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerState {
    /// Running: never collected.
    Running,
    /// Ended.
    Exited,
    /// Created and not (yet) started.
    Created,
}

/// State of a container's pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PodState {
    /// The pod runs, or will.
    Running,
    /// All of the pod's containers have ended for good, and some source still wants the pod (for its status,
    /// its logs).
    Terminated,
    /// No source wants the pod any more.
    Deleted,
}

/// A container that the runtime lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRecord<'a> {
    /// The runtime's id.
    pub id: &'a str,
    /// The pod's uid.
    pub pod_uid: &'a str,
    /// The container's name in the pod's spec.
    pub name: &'a str,
    /// Number of earlier starts of the container; a later attempt is newer regardless of the clock.
    pub attempt: u32,
    /// Creation time.
    pub created_at: Timestamp,
    /// The container's state.
    pub state: ContainerState,
    /// The pod's state.
    pub pod_state: PodState,
}

/// Returns the containers to remove, in order: all of deleted pods (with `evict_terminated` also of
/// terminated ones), then the oldest of each (pod, container name) beyond the policy's number, then, if the
/// total is still too high, the oldest of those with more than an equal share, then the oldest.
///
/// Within a (pod, container name) the oldest comes first.
#[must_use]
pub fn removable_containers<'a>(
    policy: &ContainerGcPolicy,
    now: Timestamp,
    evict_terminated: bool,
    containers: &[ContainerRecord<'a>],
) -> Vec<&'a str> {
    let mut removed = Vec::new();
    let mut units = units(policy, now, containers);
    units.retain(|_, unit| {
        let all_go = match unit.first().map(|container| container.pod_state) {
            Some(PodState::Deleted) => true,
            Some(PodState::Terminated) => evict_terminated,
            _ => false,
        };
        if all_go {
            keep_newest(unit, 0, &mut removed);
        }
        !all_go
    });
    if let Ok(most) = usize::try_from(policy.max_per_pod_container) {
        units.values_mut().for_each(|unit| keep_newest(unit, most, &mut removed));
    }
    if let Ok(most) = usize::try_from(policy.max_containers) {
        keep_newest_of_all(units, most, &mut removed);
    }
    removed
}

type Unit<'r, 'a> = Vec<&'r ContainerRecord<'a>>;

/// Returns the removable containers, by (pod uid, container name).
fn units<'r, 'a>(
    policy: &ContainerGcPolicy,
    now: Timestamp,
    containers: &'r [ContainerRecord<'a>],
) -> BTreeMap<(&'a str, &'a str), Unit<'r, 'a>> {
    let mut units: BTreeMap<_, Unit<'r, 'a>> = BTreeMap::new();
    let min_age = i128::try_from(policy.min_age.as_nanos()).unwrap_or(i128::MAX);
    for container in containers {
        let age = now.as_nanosecond() - container.created_at.as_nanosecond();
        if container.state != ContainerState::Running && age >= min_age {
            units.entry((container.pod_uid, container.name)).or_default().push(container);
        }
    }
    units
}

/// Keeps the `most` newest of a unit and moves the others, oldest first, to `removed`.
fn keep_newest<'a>(unit: &mut Unit<'_, 'a>, most: usize, removed: &mut Vec<&'a str>) {
    if unit.len() <= most {
        return;
    }
    unit.sort_by_key(|container| std::cmp::Reverse((container.attempt, container.created_at, container.id)));
    removed.extend(unit.drain(most..).rev().map(|container| container.id));
}

fn keep_newest_of_all<'a>(
    mut units: BTreeMap<(&str, &str), Unit<'_, 'a>>,
    most: usize,
    removed: &mut Vec<&'a str>,
) {
    let count = |units: &BTreeMap<_, Unit<'_, 'a>>| units.values().map(Vec::len).sum::<usize>();
    if count(&units) <= most {
        return;
    }
    let share = (most / units.len()).max(1);
    units.values_mut().for_each(|unit| keep_newest(unit, share, removed));
    let mut left: Unit<'_, 'a> = units.into_values().flatten().collect();
    keep_newest(&mut left, most, removed);
}

/// A pod sandbox that the runtime lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxRecord<'a> {
    /// The runtime's id.
    pub id: &'a str,
    /// The pod's uid.
    pub pod_uid: &'a str,
    /// Number of earlier sandboxes of the pod.
    pub attempt: u32,
    /// Creation time.
    pub created_at: Timestamp,
    /// True if the sandbox is ready: its network is up.
    pub ready: bool,
    /// The pod's state.
    pub pod_state: PodState,
}

/// Returns the sandboxes to remove, oldest first within a pod: not ready, without containers
/// (`with_containers` has the ids of those that still have some), and either of a deleted pod (with
/// `evict_terminated` also of a terminated one) or not the pod's newest.
#[must_use]
pub fn removable_sandboxes<'a>(
    evict_terminated: bool,
    sandboxes: &[SandboxRecord<'a>],
    with_containers: &HashSet<&str>,
) -> Vec<&'a str> {
    let mut pods: BTreeMap<&str, Vec<&SandboxRecord<'a>>> = BTreeMap::new();
    for sandbox in sandboxes {
        pods.entry(sandbox.pod_uid).or_default().push(sandbox);
    }
    let mut removed = Vec::new();
    for mut pod in pods.into_values() {
        pod.sort_by_key(|sandbox| (sandbox.attempt, sandbox.created_at, sandbox.id));
        let all_may_go = match pod.first().map(|sandbox| sandbox.pod_state) {
            Some(PodState::Deleted) => true,
            Some(PodState::Terminated) => evict_terminated,
            _ => false,
        };
        if !all_may_go {
            pod.pop();
        }
        let idle = |sandbox: &&&SandboxRecord<'a>| !sandbox.ready && !with_containers.contains(sandbox.id);
        removed.extend(pod.iter().filter(idle).map(|sandbox| sandbox.id));
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + seconds).unwrap()
    }

    fn policy(max_per_pod_container: i64, max_containers: i64) -> ContainerGcPolicy {
        ContainerGcPolicy { min_age: Duration::from_secs(60), max_per_pod_container, max_containers }
    }

    fn dead<'a>(id: &'a str, pod_uid: &'a str, name: &'a str, created: i64) -> ContainerRecord<'a> {
        ContainerRecord {
            id,
            pod_uid,
            name,
            attempt: 0,
            created_at: at(created),
            state: ContainerState::Exited,
            pod_state: PodState::Running,
        }
    }

    fn check(policy: &ContainerGcPolicy, containers: &[ContainerRecord<'_>], expectation: &[&str]) {
        assert_eq!(removable_containers(policy, at(0), false, containers), expectation);
    }

    #[test]
    fn the_newest_of_each_container_stay_and_the_oldest_goes_first() {
        let containers = [
            dead("new", "p", "c", -70),
            dead("oldest", "p", "c", -90),
            dead("old", "p", "c", -80),
            dead("x", "p", "d", -99),
        ];
        check(&policy(1, -1), &containers, &["oldest", "old"]);
        check(&policy(0, -1), &containers, &["oldest", "old", "new", "x"]);
        check(&policy(-1, -1), &containers, &[]);
    }

    #[test]
    fn exactly_the_minimum_age_is_old_enough() {
        check(&policy(0, -1), &[dead("a", "p", "c", -60), dead("b", "p", "c", -59)], &["a"]);
    }

    #[test]
    fn running_containers_are_never_removed() {
        let running = ContainerRecord {
            state: ContainerState::Running,
            pod_state: PodState::Deleted,
            ..dead("a", "p", "c", -99)
        };
        check(&policy(0, 0), &[running], &[]);
    }

    #[test]
    fn a_later_attempt_is_newer_whatever_the_clock_says() {
        let later = ContainerRecord { attempt: 1, ..dead("later", "p", "c", -99) };
        check(&policy(1, -1), &[later, dead("earlier", "p", "c", -70)], &["earlier"]);
    }

    #[test]
    fn an_excess_in_total_is_cut_to_equal_shares_then_the_oldest_are_removed() {
        let containers = [
            dead("a1", "p", "a", -99),
            dead("a2", "p", "a", -98),
            dead("a3", "p", "a", -97),
            dead("b1", "p", "b", -96),
        ];
        check(&policy(-1, 2), &containers, &["a1", "a2"]);
        check(&policy(-1, 1), &containers, &["a1", "a2", "a3"]);
    }

    #[test]
    fn containers_of_deleted_pods_are_removed_and_of_terminated_ones_on_request() {
        let of = |id, uid, pod_state| ContainerRecord { pod_state, ..dead(id, uid, "c", -99) };
        let containers = [
            of("d", "1", PodState::Deleted),
            of("t", "2", PodState::Terminated),
            of("r", "3", PodState::Running),
        ];
        assert_eq!(removable_containers(&policy(1, -1), at(0), false, &containers), ["d"]);
        assert_eq!(removable_containers(&policy(1, -1), at(0), true, &containers), ["d", "t"]);
    }

    #[test]
    fn the_newest_sandbox_of_a_wanted_pod_stays() {
        let sandbox = |id, created, ready, pod_state| SandboxRecord {
            id,
            pod_uid: "p",
            attempt: 0,
            created_at: at(created),
            ready,
            pod_state,
        };
        let of = |state| {
            [
                sandbox("old", -9, false, state),
                sandbox("ready", -8, true, state),
                sandbox("used", -7, false, state),
                sandbox("new", -6, false, state),
            ]
        };
        let used = HashSet::from(["used"]);
        assert_eq!(removable_sandboxes(false, &of(PodState::Running), &used), ["old"]);
        assert_eq!(removable_sandboxes(false, &of(PodState::Terminated), &used), ["old"]);
        assert_eq!(removable_sandboxes(true, &of(PodState::Terminated), &used), ["old", "new"]);
        assert_eq!(removable_sandboxes(false, &of(PodState::Deleted), &used), ["old", "new"]);
    }

    proptest! {
        #[test]
        fn a_second_round_removes_no_more(
            rows in prop::collection::vec((0..4_u8, 0..3_u8, -200..0_i64, 0..3_u8, 0..3_u8), 0..40),
            per_unit in -1..4_i64, most in -1..10_i64, evict_terminated: bool,
        ) {
            let ids: Vec<String> = (0..rows.len()).map(|i| format!("c{i}")).collect();
            let text = ["a", "b", "c", "d"];
            let containers: Vec<_> = rows.iter().zip(&ids).map(|(&(pod, name, created, state, _), id)| ContainerRecord {
                state: [ContainerState::Running, ContainerState::Exited, ContainerState::Created][usize::from(state)],
                // Every pod has a single state.
                pod_state: [PodState::Running, PodState::Terminated, PodState::Deleted, PodState::Running][usize::from(pod)],
                ..dead(id, text[usize::from(pod)], text[usize::from(name)], created)
            }).collect();
            let policy = policy(per_unit, most);
            let removed = removable_containers(&policy, at(0), evict_terminated, &containers);
            let unique: HashSet<_> = removed.iter().collect();
            prop_assert_eq!(unique.len(), removed.len());
            let gone = |c: &&ContainerRecord<'_>| unique.contains(&c.id);
            prop_assert!(containers.iter().filter(gone).all(|c| c.state != ContainerState::Running && c.created_at <= at(-60)));
            let left: Vec<_> = containers.iter().filter(|c| !gone(c)).cloned().collect();
            prop_assert!(removable_containers(&policy, at(0), evict_terminated, &left).is_empty());
        }
    }
}
