//! Tests of missing images, pull policies and registry credentials.

use beelet_tests::cri::Op;
use serde_json::{Value, json};

use super::node::{IMAGE, Node, Settings, container, pod, with};

fn on_image(name: &str, image: &str, policy: &str) -> Value {
    let mut main = container("main");
    main["image"] = image.into();
    main["imagePullPolicy"] = policy.into();
    with(pod(name), "containers", json!([main, container("neighbour")]))
}

#[tokio::test]
async fn a_missing_image_is_reported_and_delays_no_neighbours() {
    let mut node = Node::with(&[on_image("web", "registry.test/app:1", "IfNotPresent")]).await;
    let pod = node.until_pod("web", "to miss its image", |pod| pod.waits_for("main", "ErrImagePull")).await;
    let (_, message) = pod.waiting("main").unwrap();
    assert!(message.contains("registry.test/app:1") && message.contains("not found"), "{message}");
    let pod = node.until_pod("web", "to back off", |pod| pod.waits_for("main", "ImagePullBackOff")).await;
    assert!(pod.running("neighbour") && !pod.ready() && pod.phase() == "Pending");
    node.cri.add_to_registry("registry.test/app:1");
    // A new agent retries at once.
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
    assert!(pod.waiting("main").unwrap().1.contains("import the image"));
    node.until_pod("web", "to run its neighbour", |pod| pod.running("neighbour")).await;
    node.cri.add_image("registry.test/app:1");
    node.until_ready("web").await;
    assert_eq!(node.cri.count(Op::PullImage), 0);
}

#[tokio::test]
async fn an_image_is_pulled_according_to_its_policy() {
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

#[tokio::test]
async fn pods_that_want_the_same_image_share_one_pull() {
    let mut node = Node::new(Settings::default());
    node.cri.add_to_registry("registry.test/app:1");
    let held = node.cri.on(Op::PullImage).hold();
    for name in ["a", "b", "c"] {
        node.apply(&on_image(name, "registry.test/app:1", "IfNotPresent"));
    }
    node.start().await;
    held.reached().await;
    // All pods have queried the image, and wait for the pull or will do so.
    let queried = |call: &beelet_tests::cri::Call| match &call.asked {
        beelet_tests::cri::Asked::ImageStatus(asked) => {
            asked.image.as_ref().is_some_and(|image| image.image.contains("registry.test"))
        }
        _ => false,
    };
    let queries = async || node.cri.calls().iter().filter(|call| queried(call)).count();
    // Each pod queries once, and one pod again before the pull.
    while queries().await < 4 {
        node.cri.wait_for_after("a query", node.cri.calls().len().saturating_sub(1), |_| true).await;
        tokio::task::yield_now().await;
    }
    held.release();
    for name in ["a", "b", "c"] {
        node.until_ready(name).await;
    }
    assert_eq!(node.cri.count(Op::PullImage), 1);
}

#[tokio::test]
async fn a_removed_pod_does_not_cancel_another_pods_pull() {
    let mut node = Node::new(Settings::default());
    node.cri.add_to_registry("registry.test/app:1");
    let held = node.cri.on(Op::PullImage).hold();
    node.apply(&on_image("first", "registry.test/app:1", "Always"));
    node.start().await;
    held.reached().await;
    node.apply(&on_image("second", "registry.test/app:1", "Always"));
    node.until_pod("second", "to have its sandbox", |_| node.done(&[Op::RunPodSandbox]) == 2).await;
    node.remove("first");
    node.until_gone("first").await;
    held.release();
    node.until_ready("second").await;
}

#[tokio::test]
async fn secrets_open_registries() {
    let mut node = Node::new(Settings::default());
    node.cri.add_to_registry("registry.test/app:1");
    let auths = json!({"auths": {"registry.test": {"username": "me", "password": "hush"}}});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"}, "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": auths.to_string()}});
    node.apply_text("login", &secret.to_string());
    let pod = on_image("web", "registry.test/app:1", "Always");
    node.apply(&with(pod, "imagePullSecrets", json!([{"name": "login"}])));
    node.start().await;
    node.until_ready("web").await;
    let calls = node.cri.calls();
    let pulled = calls.iter().find_map(|call| match &call.asked {
        beelet_tests::cri::Asked::PullImage(asked) => asked.auth.clone(),
        _ => None,
    });
    let auth = pulled.unwrap();
    assert_eq!((auth.username.as_str(), auth.password.as_str()), ("me", "hush"));
}

#[tokio::test]
async fn an_invalid_image_name_is_reported() {
    let node = Node::with(&[on_image("web", "registry.test/App:1", "IfNotPresent")]).await;
    let pod = node
        .until_pod("web", "to have no valid image", |pod| pod.waits_for("main", "InvalidImageName"))
        .await;
    assert!(pod.waiting("main").unwrap().1.contains("no capital letters"));
    assert_eq!(node.cri.count(Op::PullImage), 0);
}

/// Returns a pod with a secret for the registry.
fn with_login(name: &str, secret: &str) -> Value {
    let pod = on_image(name, "registry.test/app:1", "IfNotPresent");
    with(pod, "imagePullSecrets", json!([{"name": secret}]))
}

fn login(name: &str, password: &str) -> String {
    let auths = json!({"auths": {"registry.test": {"username": "me", "password": password}}});
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": auths.to_string()}})
    .to_string()
}

#[tokio::test]
async fn an_image_pulled_with_a_secret_requires_credentials_from_other_pods() {
    let mut node = Node::new(Settings::default());
    node.cri.add_to_registry("registry.test/app:1");
    node.apply_text("login", &login("login", "hush"));
    node.apply_text("same", &login("same", "hush"));
    node.apply(&with_login("owner", "login"));
    node.start().await;
    node.until_ready("owner").await;
    assert_eq!(node.cri.count(Op::PullImage), 1);
    // The same holds across a restart of the agent.
    node.kill_and_start().await;
    node.apply(&with_login("friend", "same"));
    node.until_ready("friend").await;
    assert_eq!(node.cri.count(Op::PullImage), 1, "the same credentials open the present image");
    node.apply(&on_image("never", "registry.test/app:1", "Never"));
    node.until_pod("never", "to be refused", |pod| pod.waits_for("main", "ErrImageNeverPull")).await;
    node.apply(&on_image("stranger", "registry.test/app:1", "IfNotPresent"));
    node.until_ready("stranger").await;
    assert_eq!(node.cri.count(Op::PullImage), 2, "a pod without credentials must pull");
    let events = node.events();
    for part in ["Pulling: Pulling image", "Pulled: Successfully pulled image", "already present on machine"]
    {
        assert!(events.iter().any(|event| event.contains(part)), "no {part:?} in {events:#?}");
    }
}

#[tokio::test]
async fn a_credential_provider_opens_its_registries() {
    let mut node = Node::new(Settings {
        configure: |config| {
            let dir = config.beelet.kubelet_dir.clone();
            let script = "#!/bin/sh\nread -r line\necho '{\"kind\":\"CredentialProviderResponse\",\
                \"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\"cacheKeyType\":\"Registry\",\
                \"auth\":{\"registry.test\":{\"username\":\"node\",\"password\":\"hush\"}}}'\n";
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("helper"), script).unwrap();
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(dir.join("helper"), mode).unwrap();
            let text = "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n\
                - {name: helper, matchImages: [registry.test], defaultCacheDuration: 1h, \
                apiVersion: credentialprovider.kubelet.k8s.io/v1}\n";
            std::fs::write(dir.join("providers.yaml"), text).unwrap();
            let read = beelet_config::CredentialProviders::read(&dir.join("providers.yaml"), &dir);
            config.credential_providers = Some(read.unwrap());
        },
        ..Settings::default()
    });
    node.cri.add_to_registry("registry.test/app:1");
    node.apply(&on_image("web", "registry.test/app:1", "Always"));
    node.start().await;
    node.until_ready("web").await;
    let pulled = node.cri.calls().into_iter().find_map(|call| match call.asked {
        beelet_tests::cri::Asked::PullImage(asked) => asked.auth,
        _ => None,
    });
    let auth = pulled.unwrap();
    assert_eq!((auth.username.as_str(), auth.password.as_str()), ("node", "hush"));
}
