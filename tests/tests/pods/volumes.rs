//! Volumes, ConfigMaps and Secrets, and what the runtime is told of them and of the rest of a pod's spec.

use beelet_proto::cri;
use beelet_tests::cri::Asked;
use serde_json::{Value, json};

use crate::node::{Node, Settings, container, pod, until_file, with};

fn config_map(value: &str) -> String {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"color": value}})
        .to_string()
}

/// A pod that mounts the ConfigMap.
fn with_conf(name: &str) -> Value {
    let mut main = container("main");
    main["volumeMounts"] = json!([{"name": "conf", "mountPath": "/conf"}]);
    let pod = with(pod(name), "containers", json!([main]));
    with(pod, "volumes", json!([{"name": "conf", "configMap": {"name": "conf"}}]))
}

/// The newest configuration that a container was created with.
fn created(node: &Node, name: &str) -> cri::ContainerConfig {
    node.cri.container(&format!("{name}-n1"), "main").unwrap().config
}

fn mount(config: &cri::ContainerConfig, path: &str) -> cri::Mount {
    config.mounts.iter().find(|mount| mount.container_path == path).unwrap().clone()
}

#[tokio::test]
async fn a_config_map_is_mounted_and_kept_up_to_date_also_over_a_kill() {
    let mut node = Node::new(Settings::default());
    node.apply_text("conf", &config_map("red"));
    node.apply(&with_conf("web"));
    node.start().await;
    let view = node.until_ready("web").await;
    let mount = mount(&created(&node, "web"), "/conf");
    assert!(mount.readonly);
    let file = std::path::Path::new(&mount.host_path).join("color");
    until_file(&file, "red").await;
    node.apply_text("conf", &config_map("blue"));
    until_file(&file, "blue").await;
    node.kill().await;
    node.apply_text("conf", &config_map("green"));
    node.start().await;
    until_file(&file, "green").await;
    assert_eq!(node.until_ready("web").await.uid(), view.uid());
    // What the pod needs is gone, and what it has stays.
    node.remove("conf");
    node.until_relisted().await;
    until_file(&file, "green").await;
    node.remove("web");
    node.until_nothing_is_left(&view).await;
}

#[tokio::test]
async fn a_pod_starts_as_soon_as_its_config_map_is_there() {
    let mut node = Node::new(Settings::default());
    node.apply(&with_conf("web"));
    node.start().await;
    node.until_pod("web", "to be pending", |pod| pod.phase() == "Pending").await;
    node.apply_text("conf", &config_map("red"));
    node.until_ready("web").await;
}

#[tokio::test]
async fn the_runtime_is_told_what_the_spec_says() {
    let mut main = container("main");
    main["securityContext"] =
        json!({"allowPrivilegeEscalation": false, "runAsUser": 7, "capabilities": {"drop": ["ALL"]}});
    main["ports"] = json!([{"containerPort": 80, "hostPort": 8080}]);
    main["env"] = json!([{"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]);
    let mut web = with(pod("web"), "containers", json!([main]));
    for (field, value) in [
        ("shareProcessNamespace", json!(true)),
        ("subdomain", json!("front")),
        ("hostname", json!("www")),
        ("runtimeClassName", json!("kata")),
        ("hostAliases", json!([{"ip": "192.0.2.9", "hostnames": ["printer"]}])),
        (
            "securityContext",
            json!({"fsGroup": 9, "sysctls": [{"name": "net/ipv4/tcp_syncookies", "value": "1"}]}),
        ),
    ] {
        web = with(web, field, value);
    }
    let node = Node::with(&[web]).await;
    node.until_ready("web").await;
    let sandbox = node.cri.sandbox("web-n1").unwrap();
    assert_eq!((sandbox.config.hostname.as_str(), sandbox.runtime_handler.as_str()), ("www", "kata"));
    assert_eq!(sandbox.config.port_mappings[0].host_port, 8080);
    let linux = sandbox.config.linux.unwrap();
    assert_eq!(linux.sysctls["net.ipv4.tcp_syncookies"], "1");
    let config = created(&node, "web");
    assert_eq!(config.envs[0].value, "4", "what the node has");
    let context = config.linux.clone().unwrap().security_context.unwrap();
    assert!(context.no_new_privs);
    assert_eq!((context.run_as_user.unwrap().value, context.supplemental_groups), (7, vec![9]));
    assert_eq!(context.namespace_options.unwrap().pid(), cri::NamespaceMode::Pod);
    let hosts = std::fs::read_to_string(mount(&config, "/etc/hosts").host_path).unwrap();
    assert!(hosts.contains("192.0.2.9\tprinter\n"), "{hosts}");
    assert!(mount(&config, "/dev/termination-log").host_path.contains("/containers/main/0"));
}

#[tokio::test]
async fn unsafe_kernel_settings_make_no_pod() {
    let context = json!({"sysctls": [{"name": "kernel.msgmax", "value": "1"}]});
    let node = Node::with(&[with(pod("web"), "securityContext", context)]).await;
    let message =
        node.until("the rejection", |table| table.rejected.first().map(|r| r.message.clone())).await;
    assert!(message.contains("allowedUnsafeSysctls"), "{message}");
    let asked = node.cri.calls().into_iter().any(|call| matches!(call.asked, Asked::RunPodSandbox(_)));
    assert!(!asked);
}

#[tokio::test]
async fn last_words_are_told_of_a_container_that_was_restarted() {
    let node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    let file = mount(&created(&node, "web"), "/dev/termination-log").host_path;
    std::fs::write(file, "out of cheese").unwrap();
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 3);
    let view = node.until_pod("web", "to be restarted", |pod| pod.container("main").restart_count == 1).await;
    let last = view.container("main").last_state.unwrap().terminated.unwrap();
    assert_eq!((last.exit_code, last.message.as_deref()), (3, Some("out of cheese")));
}
