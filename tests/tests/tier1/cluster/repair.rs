//! Tests of the conditions that node repair acts on.

use beelet_tests::apiserver::FakeApi;
use beelet_tests::cri::{Held, Op};
use beelet_tests::require;
use serde_json::{Value, json};

use super::scene::{Member, own_node, status_of};

fn condition(api: &FakeApi, name: &str) -> Option<Value> {
    let node = api.get(&own_node())?;
    node["status"]["conditions"].as_array()?.iter().find(|one| one["type"] == name).cloned()
}

#[tokio::test]
async fn a_hung_runtime_is_a_condition_of_each_convention_until_it_answers() {
    require!(root);
    let conventions = json!(["EKS", "NodeProblemDetector"]);
    let member =
        Member::start(FakeApi::start(), |options| options.beelet("nodeConditions", conventions)).await;
    let is = |name: &'static str, status: &'static str| {
        move |api: &FakeApi| condition(api, name).filter(|one| one["status"] == status)
    };
    for ready in ["ContainerRuntimeReady", "StorageReady", "NetworkingReady"] {
        member.api.wait_until(ready, is(ready, "True")).await;
    }
    assert!(condition(&member.api, "KernelReady").is_some());
    let healthy = member.api.wait_until("health", is("ContainerRuntimeUnhealthy", "False")).await;
    assert_eq!(healthy["reason"], "ContainerRuntimeIsHealthy");
    // No list is answered: the relist hears nothing from the runtime.
    let held = [Op::ListPodSandbox, Op::ListContainers].map(|op| member.scene.cri.on(op).always().hold());
    let hung = member.api.wait_until("the runtime to be hung", is("ContainerRuntimeReady", "False")).await;
    assert_eq!(hung["reason"], "ContainerRuntimeNotAnswering");
    assert!(
        hung["lastTransitionTime"].is_string() && hung["message"].as_str().unwrap().contains("not answered")
    );
    member.api.wait_until("the other convention", is("ContainerRuntimeUnhealthy", "True")).await;
    member.scene.cri.heal();
    held.into_iter().for_each(Held::release);
    member.api.wait_until("the runtime to be ready", is("ContainerRuntimeReady", "True")).await;
    member.api.wait_until("the runtime to be healthy", is("ContainerRuntimeUnhealthy", "False")).await;
}

#[tokio::test]
async fn a_node_without_a_convention_has_only_the_kubelets_conditions() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let node = member.api.get(&own_node()).unwrap();
    assert_eq!(node["status"]["conditions"].as_array().unwrap().len(), 4, "{node:#}");
    assert_eq!(status_of(&node, "ContainerRuntimeReady"), None);
}
