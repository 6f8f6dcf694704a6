//! The node of a real cluster: etcd, kube-apiserver, the agent.

use beelet_tests::cluster::{Cluster, User, ask};
use beelet_tests::containerd::block_on;
use beelet_tests::require;
use http::Method;
use serde_json::{Value, json};

#[test]
fn the_control_plane_serves_an_admin_and_keeps_a_node_to_its_own() {
    require!(apiserver);
    let mut cluster = Cluster::start_for_test().unwrap();
    cluster.create("/api/v1/namespaces", &json!({ "metadata": { "name": "mine" } })).unwrap();
    let pod = json!({
        "metadata": { "name": "web" },
        "spec": { "containers": [{ "name": "main", "image": "web:1" }] },
    });
    assert_eq!(cluster.run("n", &pod).unwrap()["spec"]["nodeName"], "n");

    let kubeconfig = cluster.node_kubeconfig("n").unwrap();
    let get = |path: &str| {
        block_on(async { ask(&Cluster::client(&kubeconfig)?, Method::GET, path, "", &Value::Null).await })
    };
    let pods = get("/api/v1/pods?fieldSelector=spec.nodeName%3Dn").unwrap();
    assert_eq!(pods["items"][0]["metadata"]["name"], "web");
    let refused = get("/api/v1/namespaces/default/secrets").unwrap_err();
    assert!(format!("{refused:#}").contains("forbidden"), "{refused:#}");
    let asked = cluster.asked_by("n").unwrap();
    let row = |verb: &str, resource: &str, code| (verb.to_owned(), resource.to_owned(), code);
    assert_eq!(asked, [row("list", "pods", 200), row("list", "secrets", 403)]);

    // It comes back with what it had.
    cluster.kill_server();
    assert!(cluster.get("/readyz").is_err());
    cluster.start_server().unwrap();
    cluster.until("the pod", &Cluster::pod("web"), |pod| pod["metadata"]["uid"].as_str().map(drop)).unwrap();
    assert!(cluster.kubeconfig_of(&User::Admin).unwrap().contains("https://127.0.0.1:"));
}
