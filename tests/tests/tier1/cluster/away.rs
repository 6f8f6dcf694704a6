//! Tests of an API server that is away: from the start, for a while, each second.

use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::{manifests, require};

use super::scene::{LEASE, Member, NODES, own_node};

#[tokio::test]
async fn static_pods_run_before_the_api_server_is_there() {
    require!(root);
    let mut member = Member::spawn(FakeApi::absent(), |options| options);
    member.scene.agent.wait_until_up().unwrap();
    member.scene.apply(&manifests::pod("web", &["/bin/testapp"]));
    member.scene.until_ready("web");
    member.api.come_back();
    member.until_ready().await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_server_that_comes_back_finds_the_lease_renewed_and_one_node() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.until_done(0, Verb::Update, LEASE).await;
    for _ in 0..3 {
        member.api.crash();
        member.scene.until_relisted();
        let first = member.api.asked().len();
        member.api.come_back();
        member.until_done(first, Verb::Update, LEASE).await;
    }
    member.api.sever();
    let before = member.api.remove(&own_node());
    let after = member.until_ready().await;
    assert_ne!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(member.api.all(NODES).len(), 1);
    member.scene.is_well();
}

#[tokio::test]
async fn an_invalid_kubeconfig_ends_the_agent_with_the_reason() {
    require!(root);
    let mut member = Member::spawn(FakeApi::absent(), |options| {
        let kubeconfig = options.arguments.iter().position(|one| one == "--kubeconfig").unwrap() + 1;
        std::fs::write(&options.arguments[kubeconfig], "clusters: [").unwrap();
        options.kubelet("registerNode", true)
    });
    assert!(!member.scene.agent.wait_for_exit().unwrap().success());
    let log = member.scene.agent.log();
    assert!(log.contains("kubeconfig"), "{log}");
}
