//! Grace periods as an API server lets them through: it bounds them below only, and no number may end the
//! agent or keep a pod.

use beelet_tests::apiserver::FakeApi;
use beelet_tests::cri::{Asked, Op};
use beelet_tests::require;
use serde_json::json;

use super::scene::Member;
use super::workload::{path, pod};

/// The longest grace period that anything gets, in seconds.
const LONGEST: i64 = 366 * 24 * 3600;

/// Seconds at the ends of what a field holds, a typing error, and one more than the longest.
const EXTREMES: [i64; 6] = [i64::MAX, 1_000_000_000_000, LONGEST + 1, 0, -1, i64::MIN];

/// The seconds that containers were given to stop.
fn stops(member: &Member) -> Vec<i64> {
    let asked = member.scene.cri.calls().into_iter().filter_map(|call| match call.asked {
        Asked::StopContainer(request) => Some(request.timeout),
        _ => None,
    });
    asked.collect()
}

/// The agent lives, none of its parts has panicked, and the runtime was given no time that it can't count.
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
async fn a_pod_that_is_given_all_seconds_of_an_int64_goes_and_a_forced_deletion_too() {
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

/// An agent before this one wrote what the pod said.
#[tokio::test]
async fn an_orphan_goes_whatever_grace_period_its_sandbox_has() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let said = [i64::MAX.to_string(), u64::MAX.to_string(), "-1".to_owned()];
    let names: Vec<String> = (0..said.len()).map(|index| format!("p{index}")).collect();
    for name in &names {
        member.api.put(&path(name), pod(name));
        member.until_running(name).await;
    }
    member.scene.agent.kill9();
    for (name, said) in names.iter().zip(said) {
        member.api.remove(&path(name));
        member.scene.cri.change(|world| {
            let annotation = beelet_model::labels::GRACE_PERIOD.to_owned();
            for sandbox in world.sandboxes.values_mut().filter(|sandbox| sandbox.pod_name() == *name) {
                sandbox.config.annotations.insert(annotation.clone(), said.clone());
            }
        });
    }
    member.scene.agent.resume().unwrap();
    for name in &names {
        member.scene.poll_until(&format!("{name} to be gone"), || match member.scene.cri.sandbox(name) {
            Some(sandbox) => Err(format!("its sandbox {} is there", sandbox.id)),
            None => Ok(()),
        });
    }
    is_well(&member);
}
