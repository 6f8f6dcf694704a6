//! Tests of grace periods from an API server, which has only a lower bound for them: no number may crash the
//! agent or keep a pod.

use beelet_tests::apiserver::FakeApi;
use beelet_tests::cri::{Asked, Op};
use beelet_tests::require;
use serde_json::json;

use super::scene::Member;
use super::workload::{path, pod};

/// Upper bound of grace periods, in seconds.
const LONGEST: i64 = 366 * 24 * 3600;

/// Extreme numbers of seconds: the limits of the field, a typing error, and one more than the upper bound.
const EXTREMES: [i64; 6] = [i64::MAX, 1_000_000_000_000, LONGEST + 1, 0, -1, i64::MIN];

/// Returns the grace periods with which containers were stopped, in seconds.
fn stops(member: &Member) -> Vec<i64> {
    let asked = member.scene.cri.calls().into_iter().filter_map(|call| match call.asked {
        Asked::StopContainer(request) => Some(request.timeout),
        _ => None,
    });
    asked.collect()
}

/// Asserts that the agent is well and that all grace periods for the runtime are within bounds.
fn is_well(member: &Member) {
    member.scene.is_well();
    let stops = stops(member);
    assert!(!stops.is_empty() && stops.iter().all(|seconds| (0..=LONGEST).contains(seconds)), "{stops:?}");
}

#[tokio::test]
async fn pods_with_any_grace_period_of_their_own_are_deleted_also_over_a_kill_of_the_agent() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let names: Vec<String> = (0..EXTREMES.len()).map(|index| format!("p{index}")).collect();
    for (name, seconds) in names.iter().zip(EXTREMES) {
        let mut pod = pod(name);
        pod["spec"]["terminationGracePeriodSeconds"] = json!(seconds);
        member.api.put(&path(name), pod);
    }
    member.api.put(&path("bystander"), pod("bystander"));
    for name in &names {
        member.until_running(name).await;
    }
    member.until_running("bystander").await;
    let held = member.scene.cri.on(Op::StopContainer).always().hold();
    for name in &names {
        member.api.delete(&path(name));
    }
    held.reached().await;
    member.scene.is_well();
    member.scene.agent.kill9();
    held.release();
    member.scene.cri.heal();
    member.scene.agent.resume().unwrap();
    for name in &names {
        member.until_forgotten(name).await;
        member.until_stopped(name);
    }
    assert!(member.runs("bystander"));
    is_well(&member);
}

#[tokio::test]
async fn pods_deleted_with_the_maximum_int64_end_also_after_a_forced_deletion() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    for name in ["patient", "forced"] {
        member.api.put(&path(name), pod(name));
        member.until_running(name).await;
    }
    let held = member.scene.cri.on(Op::StopContainer).always().hold();
    for name in ["patient", "forced"] {
        member.api.delete_within(&path(name), i64::MAX);
    }
    held.reached().await;
    member.api.remove(&path("forced"));
    member.scene.agent.kill9();
    held.release();
    member.scene.cri.heal();
    member.scene.agent.resume().unwrap();
    member.until_forgotten("patient").await;
    for name in ["patient", "forced"] {
        member.until_stopped(name);
    }
    is_well(&member);
}

/// An earlier agent wrote the pod's grace period into the sandbox, unchecked.
#[tokio::test]
async fn an_orphan_ends_with_any_grace_period_of_its_sandbox() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let periods = [i64::MAX.to_string(), u64::MAX.to_string(), "-1".to_owned()];
    let names: Vec<String> = (0..periods.len()).map(|index| format!("p{index}")).collect();
    for name in &names {
        member.api.put(&path(name), pod(name));
        member.until_running(name).await;
    }
    member.scene.agent.kill9();
    for (name, period) in names.iter().zip(periods) {
        member.api.remove(&path(name));
        member.scene.cri.change(|world| {
            let annotation = beelet_model::labels::GRACE_PERIOD.to_owned();
            for sandbox in world.sandboxes.values_mut().filter(|sandbox| sandbox.pod_name() == *name) {
                sandbox.config.annotations.insert(annotation.clone(), period.clone());
            }
        });
    }
    member.scene.agent.resume().unwrap();
    for name in &names {
        member.scene.poll_until(&format!("{name} to be removed"), || match member.scene.cri.sandbox(name) {
            Some(sandbox) => Err(format!("its sandbox {} still exists", sandbox.id)),
            None => Ok(()),
        });
    }
    is_well(&member);
}
