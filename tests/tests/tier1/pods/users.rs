//! Tests of pods with user namespaces, on runtimes with and without support for them.

use beelet_proto::cri;
use serde_json::{Value, json};

use super::node::{Node, Settings, container, pod, until_seen, with};

/// Returns a pod with a user namespace and a volume: its root has no privileges on the machine.
fn confined(name: &str) -> Value {
    let mut main = container("main");
    main["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    let pod = with(pod(name), "containers", json!([main]));
    with(with(pod, "hostUsers", json!(false)), "volumes", json!([{"name": "data", "emptyDir": {}}]))
}

fn able(node: &Node) {
    let features = cri::RuntimeHandlerFeatures { user_namespaces: true, ..Default::default() };
    let handler = cri::RuntimeHandler { name: String::new(), features: Some(features) };
    node.cri.change(|world| world.runtime_handlers = vec![handler]);
}

fn of_sandbox(node: &Node, name: &str) -> cri::UserNamespace {
    let linux = node.cri.sandbox(&format!("{name}-n1")).unwrap().config.linux.unwrap();
    linux.security_context.unwrap().namespace_options.unwrap().userns_options.unwrap()
}

#[tokio::test]
async fn each_pod_has_its_own_ids_for_its_life() {
    let mut node = Node::new(Settings::default());
    able(&node);
    for name in ["a", "b"] {
        node.apply(&confined(name));
    }
    node.apply(&pod("plain"));
    node.start().await;
    for name in ["a", "b", "plain"] {
        node.until_ready(name).await;
    }
    let [a, b, plain] = ["a", "b", "plain"].map(|name| of_sandbox(&node, name));
    assert_eq!((a.mode(), plain.mode()), (cri::NamespaceMode::Pod, cri::NamespaceMode::Node));
    assert_eq!((&a.uids, a.uids[0].container_id, a.uids[0].length), (&a.gids, 0, 65_536));
    assert!(a.uids[0].host_id >= 65_536 && a.uids[0].host_id.abs_diff(b.uids[0].host_id) >= 65_536);
    let config = node.cri.container("a-n1", "main").unwrap().config;
    let context = config.linux.unwrap().security_context.unwrap();
    assert_eq!(context.namespace_options.unwrap().userns_options.as_ref(), Some(&a));
    assert!(config.mounts.iter().any(|mount| mount.container_path == "/data"));
    assert!(config.mounts.iter().all(|mount| mount.uid_mappings == a.uids && mount.gid_mappings == a.gids));
    // A container that a new agent restarts is in the same namespace.
    node.kill_and_start().await;
    node.cri.exit(&node.cri.container("a-n1", "main").unwrap().id, 1);
    node.until_pod("a", "to be restarted", |pod| {
        pod.running("main") && node.containers("a").contains("main/1+")
    })
    .await;
    let config = node.cri.container("a-n1", "main").unwrap().config;
    assert_eq!(config.mounts[0].uid_mappings, a.uids);
}

#[tokio::test]
async fn a_pod_with_a_damaged_id_record_keeps_its_ids_exclusively() {
    let mut node = Node::new(Settings::default());
    able(&node);
    node.apply(&confined("a"));
    node.start().await;
    node.until_ready("a").await;
    let a = of_sandbox(&node, "a");
    let uid = node.cri.sandbox("a-n1").unwrap().config.metadata.unwrap().uid;
    let record = node.path("pods").join(uid).join("userns");
    let good = std::fs::read_to_string(&record).unwrap();
    for damage in ["", "{}", "link"] {
        std::fs::remove_file(&record).unwrap();
        match damage {
            "link" => std::os::unix::fs::symlink("/etc/hostname", &record).unwrap(),
            text => std::fs::write(&record, text).unwrap(),
        }
        // The runtime knows the ids of running pods, so the agent can restore the record.
        let name = format!("b{}", damage.len());
        node.apply(&confined(&name));
        node.until_ready(&name).await;
        let other = of_sandbox(&node, &name);
        assert!(a.uids[0].host_id.abs_diff(other.uids[0].host_id) >= 65_536, "{damage:?}");
        assert_eq!(std::fs::read_to_string(&record).unwrap(), good, "{damage:?}");
    }
}

#[tokio::test]
async fn a_runtime_without_user_namespaces_gets_no_request_for_them() {
    let node = Node::with(&[confined("web")]).await;
    let refused = |event: &String| {
        event.starts_with("FailedCreatePodSandBox")
            && event.contains("runtime does not support user namespaces")
    };
    until_seen("the refusal", || node.events().iter().any(refused).then_some(()).ok_or("not yet")).await;
    assert!(node.cri.sandbox("web-n1").is_none());
    able(&node);
    node.until_ready("web").await;
}
