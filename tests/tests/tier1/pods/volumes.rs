//! Tests of volumes, ConfigMaps and Secrets, and of the CRI configuration for them and the rest of a pod's
//! spec.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use beelet_proto::cri;
use beelet_tests::cri::{Asked, Call};
use serde_json::{Value, json};

use super::node::{Node, Settings, container, containers, pod, until_file, until_seen, with};

fn config_map(value: &str) -> String {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"color": value}})
        .to_string()
}

/// Returns a pod that mounts the ConfigMap.
fn with_conf(name: &str) -> Value {
    let mut main = container("main");
    main["volumeMounts"] = json!([{"name": "conf", "mountPath": "/conf"}]);
    let pod = with(pod(name), "containers", json!([main]));
    with(pod, "volumes", json!([{"name": "conf", "configMap": {"name": "conf"}}]))
}

/// Returns the newest configuration with which a container was created.
fn created(node: &Node, name: &str) -> cri::ContainerConfig {
    node.cri.container(&format!("{name}-n1"), "main").unwrap().config
}

fn mount(config: &cri::ContainerConfig, path: &str) -> cri::Mount {
    config.mounts.iter().find(|mount| mount.container_path == path).unwrap().clone()
}

/// Returns a pod with features that only newer runtimes have: a sub-path of an image volume, and a stop
/// signal.
fn demanding() -> Value {
    let mut main = container("main");
    main["volumeMounts"] = json!([{"name": "art", "mountPath": "/art", "subPath": "themes/dark"}]);
    main["lifecycle"] = json!({"stopSignal": "SIGRTMIN+3"});
    let mut pod = with(pod("web"), "containers", json!([main]));
    pod["spec"]["os"] = json!({"name": "linux"});
    pod["spec"]["volumes"] = json!([{"name": "art", "image": {"reference": super::node::IMAGE}}]);
    pod
}

#[tokio::test]
async fn fields_that_a_runtime_would_ignore_are_refused() {
    let runtime = |version: &str| ("containerd".to_owned(), version.to_owned());
    for (version, missing) in [("v2.1.9", "containerd 2.2"), ("v2.2.3", "containerd 2.3")] {
        let mut node = Node::new(Settings::default());
        node.cri.change(|world| world.runtime = runtime(version));
        node.apply(&demanding());
        node.start().await;
        let refused = |pod: &super::node::View| pod.waits_for("main", "CreateContainerConfigError");
        let message = node.until_pod("web", "to be refused", refused).await.waiting("main").unwrap().1;
        assert!(message.contains(missing), "{message}");
    }
    let mut node = Node::new(Settings::default());
    node.cri.change(|world| world.runtime = runtime("v2.3.0"));
    node.apply(&demanding());
    node.start().await;
    let pod = node.until_ready("web").await;
    let config = created(&node, "web");
    assert_eq!(config.stop_signal(), cri::Signal::Sigrtminplus3);
    let art = mount(&config, "/art");
    assert_eq!((art.image_sub_path.as_str(), art.host_path.as_str()), ("themes/dark", ""));
    assert_eq!(pod.container("main").stop_signal.as_deref(), Some("SIGRTMIN+3"));
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
    let file = Path::new(&mount.host_path).join("color");
    until_file(&file, "red").await;
    node.apply_text("conf", &config_map("blue"));
    until_file(&file, "blue").await;
    node.kill().await;
    node.apply_text("conf", &config_map("green"));
    node.start().await;
    until_file(&file, "green").await;
    assert_eq!(node.until_ready("web").await.uid(), view.uid());
    // The ConfigMap is removed, and the pod's files stay.
    node.remove("conf");
    node.until_relisted().await;
    until_file(&file, "green").await;
    node.remove("web");
    node.until_nothing_is_left(&view).await;
}

#[tokio::test]
async fn a_volume_removed_under_a_running_pod_is_restored_and_reported() {
    let mut node = Node::new(Settings::default());
    node.apply_text("conf", &config_map("red"));
    let mut web = with_conf("web");
    let scratch = json!({"name": "scratch", "mountPath": "/scratch"});
    web["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(scratch);
    web["spec"]["volumes"].as_array_mut().unwrap().push(json!({"name": "scratch", "emptyDir": {}}));
    node.apply(&web);
    node.start().await;
    let uid = node.until_ready("web").await.uid();
    let file = PathBuf::from(mount(&created(&node, "web"), "/conf").host_path).join("color");
    let count = |reason: &str| node.events().iter().filter(|event| event.starts_with(reason)).count();
    assert_eq!((count("VolumeRestored: "), count("VolumeLost: ")), (0, 0), "{:#?}", node.events());
    std::fs::remove_dir_all(node.path("pods").join(&uid)).unwrap();
    until_file(&file, "red").await;
    until_seen("both events", || match (count("VolumeRestored: "), count("VolumeLost: ")) {
        (1, 1) => Ok(()),
        others => Err(format!("{others:?}")),
    })
    .await;
    assert!(node.path("pods").join(&uid).join("volumes/scratch").is_dir());
    assert_eq!(node.until_ready("web").await.restarts()["main"], 0);
    // The volumes of a removed pod are not restored.
    let web = node.until_ready("web").await;
    node.remove("web");
    node.until_nothing_is_left(&web).await;
}

#[tokio::test]
async fn a_container_that_starts_again_finds_its_volumes_whole() {
    let mut node = Node::new(Settings { volume_check: Duration::from_secs(3600), ..Settings::default() });
    node.apply_text("conf", &config_map("red"));
    node.apply(&with_conf("web"));
    node.start().await;
    let uid = node.until_ready("web").await.uid();
    std::fs::remove_dir_all(node.path("pods").join(&uid).join("volumes")).unwrap();
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 1);
    let again = |pod: &super::node::View| pod.restarts()["main"] == 1 && pod.running("main");
    node.until_pod("web", "to run again", again).await;
    let file = PathBuf::from(mount(&created(&node, "web"), "/conf").host_path).join("color");
    assert_eq!(std::fs::read_to_string(file).unwrap(), "red");
    assert!(node.events().iter().any(|event| event.starts_with("VolumeRestored: volume conf")));
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

/// For each list call the runtime walks over all of its objects: a ConfigMap must not cause calls for a
/// thousand pods.
#[tokio::test]
async fn a_running_pod_is_not_listed_for_another_pods_objects() {
    let mut node = Node::new(Settings::default());
    node.apply(&pod("other"));
    node.start().await;
    let other = node.until_ready("other").await.uid().to_owned();
    node.until_relisted().await;
    let first = node.cri.calls().len();
    node.apply(&with_conf("web"));
    node.until_pod("web", "to be pending", |pod| pod.phase() == "Pending").await;
    node.apply_text("conf", &config_map("red"));
    let web = node.until_ready("web").await.uid().to_owned();
    node.until_relisted().await;
    let lists = |uid: &str| {
        let of_pod = |call: &Call| match &call.asked {
            Asked::ListContainers(request) => {
                request.filter.iter().any(|filter| filter.label_selector.values().any(|value| value == uid))
            }
            _ => false,
        };
        node.cri.calls().iter().skip(first).filter(|call| of_pod(call)).count()
    };
    assert_eq!((lists(&other), lists(&web) > 0), (0, true), "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_new_key_ends_the_back_off_of_the_container_that_lacked_it() {
    const KEYS: [&str; 4] = ["one", "two", "three", "four"];
    let variable = |key: &str| {
        let from = json!({"configMapKeyRef": {"name": "conf", "key": key}});
        json!({"name": key.to_uppercase(), "valueFrom": from})
    };
    let conf = |keys: &[&str]| {
        let data: BTreeMap<&str, &str> = keys.iter().map(|key| (*key, "here")).collect();
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": data})
            .to_string()
    };
    let mut main = container("main");
    main["env"] = KEYS.iter().map(|key| variable(key)).collect();
    let mut node = Node::new(Settings::default());
    node.apply_text("conf", &conf(&[]));
    node.apply(&with(pod("web"), "containers", json!([main])));
    node.start().await;
    // Each change causes a new attempt. With the pauses alone the last attempt would follow 80 s after the
    // one before, which is longer than the test's deadline.
    for (here, missing) in KEYS.iter().enumerate() {
        node.apply_text("conf", &conf(&KEYS[..here]));
        let lacks = |pod: &super::node::View| {
            pod.waits_for("main", "CreateContainerConfigError")
                && pod.waiting("main").is_some_and(|(_, message)| message.contains(missing))
        };
        node.until_pod("web", &format!("to lack the key {missing}"), lacks).await;
    }
    node.apply_text("conf", &conf(&KEYS));
    node.until_ready("web").await;
    assert_eq!(created(&node, "web").envs.iter().filter(|variable| variable.value == b"here").count(), 4);
}

/// Sixteen bytes that are doubled 33 times are 128 GiB. Each pod's status names the text that is too long;
/// other pods start.
#[tokio::test]
async fn text_that_grows_is_refused_with_the_variables_name_and_other_pods_start() {
    let mut doubling = vec![json!({"name": "V0", "value": "0123456789abcdef"})];
    let next = |n: usize| json!({"name": format!("V{n}"), "value": format!("$(V{0})$(V{0})", n - 1)});
    doubling.extend((1..=33).map(next));
    let long = json!([{"name": "A", "value": "x".repeat(8 << 10)}]);
    let many = "$(A)".repeat(1000);
    let too_long = "is longer than 1048576 bytes once its references are replaced";
    let cases = [
        ("doubling", json!({"env": doubling}), "environment variable V17 of container main: its value"),
        ("words", json!({"env": long.clone(), "args": ["x", many.clone()]}), "args[1] of container main"),
    ];
    let mut node = Node::new(Settings::default());
    let grown = |name: &str, more: &Value| {
        let mut main = container("main");
        main.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with(pod(name), "containers", json!([main]))
    };
    for (name, more, _) in &cases {
        node.apply(&grown(name, more));
    }
    let exec = json!({"exec": {"command": ["test", many]}});
    node.apply(&grown("probed", &json!({"env": long, "readinessProbe": exec})));
    node.apply(&pod("other"));
    node.start().await;
    node.until_ready("other").await;
    for (name, _, expected) in &cases {
        let refused = |pod: &super::node::View| pod.waits_for("main", "CreateContainerConfigError");
        let message = node.until_pod(name, "to be refused", refused).await.waiting("main").unwrap().1;
        assert!(message.contains(&format!("{expected} {too_long}")), "{message}");
    }
    let probed = node.until_pod("probed", "to run", |pod| pod.running("main")).await;
    assert!(!probed.ready());
    node.until_relisted().await;
    assert!(node.cri.container("doubling-n1", "main").is_none(), "{}", node.cri.transcript());
}

/// A path of 1.4 MB in a manifest is 700,000 folders.
#[tokio::test]
async fn a_mount_point_of_two_thousand_levels_works_and_one_of_five_thousand_is_refused() {
    let nested = |name: &str, levels: usize| {
        let mut main = container("main");
        let deep = format!("/conf{}", "/a".repeat(levels));
        main["volumeMounts"] =
            json!([{"name": "conf", "mountPath": "/conf"}, {"name": "scratch", "mountPath": deep}]);
        let pod = with(pod(name), "containers", json!([main]));
        let volumes =
            json!([{"name": "conf", "configMap": {"name": "conf"}}, {"name": "scratch", "emptyDir": {}}]);
        with(pod, "volumes", volumes)
    };
    let mut node = Node::new(Settings::default());
    node.apply_text("conf", &config_map("red"));
    node.apply(&nested("web", 2000));
    node.apply(&nested("deep", 5000));
    node.start().await;
    node.until_ready("web").await;
    let why = node.until("the rejection", |table| table.rejected.first().map(|r| r.message.clone())).await;
    let words = "of 10005 bytes is longer than the 4096 bytes that Linux allows";
    assert!(why.contains("spec.containers[0].volumeMounts[1].mountPath: ") && why.contains(words), "{why}");
    assert!(node.cri.container("deep-n1", "main").is_none());
}

#[tokio::test]
async fn the_cri_configuration_has_the_fields_of_the_spec() {
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
    assert_eq!(config.envs[0].value, b"4", "the node's CPUs");
    let context = config.linux.clone().unwrap().security_context.unwrap();
    assert!(context.no_new_privs);
    assert_eq!((context.run_as_user.unwrap().value, context.supplemental_groups), (7, vec![9]));
    assert_eq!(context.namespace_options.unwrap().pid(), cri::NamespaceMode::Pod);
    let hosts = std::fs::read_to_string(mount(&config, "/etc/hosts").host_path).unwrap();
    assert!(hosts.contains("192.0.2.9\tprinter\n"), "{hosts}");
    let hostname = mount(&config, "/etc/hostname");
    assert!(hostname.host_path.ends_with("/etc-hostname/0") && hostname.selinux_relabel, "{hostname:?}");
    assert_eq!(std::fs::read_to_string(&hostname.host_path).unwrap(), "www\n");
    let resolver = std::fs::read_to_string(mount(&config, "/etc/resolv.conf").host_path).unwrap();
    let servers = sandbox.config.dns_config.unwrap().servers;
    assert!(servers.iter().all(|server| resolver.contains(&format!("nameserver {server}\n"))), "{resolver}");
    assert!(mount(&config, "/dev/termination-log").host_path.contains("/containers/main/0"));
}

#[tokio::test]
async fn a_pod_with_unsafe_sysctls_is_rejected() {
    let context = json!({"sysctls": [{"name": "kernel.msgmax", "value": "1"}]});
    let node = Node::with(&[with(pod("web"), "securityContext", context)]).await;
    let message =
        node.until("the rejection", |table| table.rejected.first().map(|r| r.message.clone())).await;
    assert!(message.contains("allowedUnsafeSysctls"), "{message}");
    let asked = node.cri.calls().into_iter().any(|call| matches!(call.asked, Asked::RunPodSandbox(_)));
    assert!(!asked);
}

#[tokio::test]
async fn a_restarted_container_reports_its_termination_message() {
    let node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    let file = mount(&created(&node, "web"), "/dev/termination-log").host_path;
    std::fs::write(file, "out of cheese").unwrap();
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 3);
    let view = node.until_pod("web", "to be restarted", |pod| pod.container("main").restart_count == 1).await;
    let last = view.container("main").last_state.unwrap().terminated.unwrap();
    assert_eq!((last.exit_code, last.message.as_deref()), (3, Some("out of cheese")));
}

/// Returns the folders of a pod's cgroup.
fn cgroup_folders(node: &Node, uid: &str) -> Vec<PathBuf> {
    let is_cgroup =
        |path: &PathBuf| path.starts_with(node.path("cgroup")) && path.to_string_lossy().contains(uid);
    node.files().into_iter().filter(is_cgroup).collect()
}

#[tokio::test]
async fn an_ended_pod_releases_its_volumes_and_its_cgroup_and_keeps_its_containers() {
    let job = with(pod("job"), "restartPolicy", json!("Never"));
    let job = with(job, "volumes", json!([{"name": "scratch", "emptyDir": {}}]));
    let mut node = Node::with(&[job]).await;
    let view = node.until_ready("job").await;
    let folder = node.path("pods").join(view.uid());
    let words = mount(&created(&node, "job"), "/dev/termination-log").host_path;
    assert!(folder.join("volumes/scratch").is_dir() && !cgroup_folders(&node, &view.uid()).is_empty());
    std::fs::write(words, "all done").unwrap();
    node.cri.exit(&node.cri.container("job-n1", "main").unwrap().id, 0);
    let released = || {
        let left = cgroup_folders(&node, &view.uid());
        if folder.join("volumes").exists() || !left.is_empty() { Err(format!("{left:?}")) } else { Ok(()) }
    };
    until_seen("the removal of its volumes and cgroup", released).await;
    let ended = |pod: &super::node::View| {
        let state = pod.container("main").state.and_then(|state| state.terminated);
        pod.phase() == "Succeeded" && state.is_some_and(|state| state.message.as_deref() == Some("all done"))
    };
    node.until_pod("job", "to have succeeded", ended).await;
    // A new agent creates nothing again, and the termination message can still be read.
    node.kill_and_start().await;
    node.until_pod("job", "to have succeeded", ended).await;
    node.until_relisted().await;
    assert_eq!(node.containers("job"), "main/0-");
    assert!(!folder.join("volumes").exists() && cgroup_folders(&node, &view.uid()).is_empty());
    // The same holds after the garbage collection of its containers.
    let main = node.cri.container("job-n1", "main").unwrap().id;
    node.cri.change(|world| drop(world.containers.remove(&main)));
    node.cri.wait_until("the container's removal", |world| containers(world, "job").is_empty()).await;
    node.until_relisted().await;
    assert_eq!(containers(&node.cri.world(), "job"), "");
    node.remove("job");
    node.until_nothing_is_left(&view).await;
}

#[tokio::test]
async fn a_cancelled_start_has_ended_before_its_pod_is_removed() {
    let uid = "0123456789abcdef0123456789abcdef";
    let mut web = pod("web");
    web["metadata"]["uid"] = json!(uid);
    let mut node = Node::new(Settings::default());
    // Reading the FIFO blocks until a writer opens it.
    let hosts = node.path("pods").join(uid).join("etc-hosts");
    std::fs::create_dir(hosts.parent().unwrap()).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &hosts, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    node.apply(&web);
    node.start().await;
    let writer = std::cell::OnceCell::new();
    until_seen("the file to be read", || {
        let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(&hosts, flags, rustix::fs::Mode::empty()).map(|open| drop(writer.set(open)))
    })
    .await;
    let view = node.until_pod("web", "to exist", |_| true).await;
    node.remove("web");
    node.cri.wait_until("its sandbox to be removed", |world| world.sandboxes.is_empty()).await;
    // The start continues, and creates the file again.
    std::fs::remove_file(&hosts).unwrap();
    drop(writer);
    node.until_gone("web").await;
    node.until_nothing_is_left(&view).await;
    assert!(!hosts.parent().unwrap().exists());
}

#[tokio::test]
async fn folders_of_unknown_pods_are_removed_and_all_others_stay() {
    let mut node = Node::new(Settings::default());
    let of = |name: &str| node.path("pods").join(name);
    let orphan = of("00000000000000000000000000000bad");
    for folder in [&orphan, &of("lost+found"), &of("mine")] {
        std::fs::create_dir_all(folder.join("volumes/x")).unwrap();
        std::fs::write(folder.join("volumes/x/file"), "").unwrap();
    }
    let others: [PathBuf; 2] = [of("lost+found"), of("mine")];
    node.apply(&with(pod("web"), "volumes", json!([{"name": "scratch", "emptyDir": {}}])));
    node.start().await;
    let view = node.until_ready("web").await;
    let gone = |path: &Path| if path.exists() { Err(path.display().to_string()) } else { Ok(()) };
    until_seen("the folder's removal", || gone(&orphan)).await;
    assert!(others.iter().all(|path| path.join("volumes/x/file").exists()));
    assert!(node.path("pods").join(view.uid()).join("volumes/scratch").is_dir());
}

#[tokio::test]
async fn without_a_manifest_folder_orphans_are_removed_too_and_running_pods_stay() {
    let mut node =
        Node::with(&[with(pod("web"), "volumes", json!([{"name": "scratch", "emptyDir": {}}]))]).await;
    let view = node.until_ready("web").await;
    node.kill().await;
    node.settings.static_pods = false;
    let orphan = node.path("pods/00000000000000000000000000000bad");
    std::fs::create_dir_all(orphan.join("volumes/x")).unwrap();
    node.start().await;
    let gone = || if orphan.exists() { Err("the folder still exists") } else { Ok(()) };
    until_seen("the folder's removal", gone).await;
    // The scan that found this folder has seen the pod's folder too.
    assert!(node.path("pods").join(view.uid()).join("volumes/scratch").is_dir());
    assert_eq!(node.cri.world().sandboxes.len(), 1);
    assert!(node.cri.sandbox("web-n1").is_some());
}

#[tokio::test]
async fn a_variable_comes_from_a_file_that_an_init_container_has_written() {
    let mut main = container("main");
    let from = json!({"fileKeyRef": {"volumeName": "said", "path": "vars", "key": "COLOR"}});
    main["env"] = json!([{"name": "SHADE", "valueFrom": from}]);
    let pod = with(pod("web"), "containers", json!([main]));
    let pod = with(pod, "initContainers", json!([container("writer")]));
    let node = Node::with(&[with(pod, "volumes", json!([{"name": "said", "emptyDir": {}}]))]).await;
    let seen = node.until_pod("web", "to run its init container", |pod| pod.running("writer")).await;
    let file = node.path(&format!("pods/{}/volumes/said/vars", seen.uid()));
    std::fs::write(file, "# of the init container\nCOLOR='$(SHADE) blue'\n").unwrap();
    node.cri.exit(&node.cri.container("web-n1", "writer").unwrap().id, 0);
    node.until_ready("web").await;
    let config = created(&node, "web");
    let shade = config.envs.iter().find(|one| one.key == "SHADE").unwrap();
    assert_eq!(shade.value, b"$(SHADE) blue");
}
