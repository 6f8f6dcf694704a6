//! Images that are missing, and what the pull policies do about it.

use beelet_tests::cri::Op;
use serde_json::{Value, json};

use crate::node::{IMAGE, Node, Settings, container, pod, with};

fn on_image(name: &str, image: &str, policy: &str) -> Value {
    let mut main = container("main");
    main["image"] = image.into();
    main["imagePullPolicy"] = policy.into();
    with(pod(name), "containers", json!([main, container("neighbour")]))
}

#[tokio::test]
async fn a_missing_image_is_told_and_holds_up_no_neighbours() {
    let mut node = Node::with(&[on_image("web", "registry.test/app:1", "IfNotPresent")]).await;
    let pod = node.until_pod("web", "to miss its image", |pod| pod.waits_for("main", "ErrImagePull")).await;
    let (_, message) = pod.waiting("main").unwrap();
    assert!(message.contains("registry.test/app:1") && message.contains("not found"), "{message}");
    let pod = node.until_pod("web", "to back off", |pod| pod.waits_for("main", "ImagePullBackOff")).await;
    assert!(pod.running("neighbour") && !pod.ready() && pod.phase() == "Pending");
    node.cri.add_to_registry("registry.test/app:1");
    // An agent that starts anew tries at once.
    node.kill_and_start().await;
    node.until_ready("web").await;
    assert_eq!(node.containers("web"), "main/0+ neighbour/0+");
    assert_eq!(node.cri.count(Op::PullImage), 3);
}

#[tokio::test]
async fn an_image_that_must_not_be_pulled_is_not_pulled() {
    let node = Node::with(&[on_image("web", "registry.test/app:1", "Never")]).await;
    node.cri.add_to_registry("registry.test/app:1");
    let pod =
        node.until_pod("web", "to miss its image", |pod| pod.waits_for("main", "ErrImageNeverPull")).await;
    assert!(pod.waiting("main").unwrap().1.contains("import it"));
    node.until_pod("web", "to run its neighbour", |pod| pod.running("neighbour")).await;
    node.cri.add_image("registry.test/app:1");
    node.until_ready("web").await;
    assert_eq!(node.cri.count(Op::PullImage), 0);
}

#[tokio::test]
async fn an_image_is_pulled_as_its_policy_says() {
    let check = async |policy: &str, pulls: usize| {
        let mut node = Node::new(Settings::default());
        node.cri.add_to_registry(IMAGE);
        node.apply(&on_image("web", IMAGE, policy));
        node.start().await;
        node.until_ready("web").await;
        assert_eq!(node.cri.count(Op::PullImage), pulls, "{policy}");
    };
    check("Always", 1).await;
    check("IfNotPresent", 0).await;
    check("Never", 0).await;
}
