//! Volumes of real pods: their contents in containers, changes, and removal.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::node::{Node, check_lines, container, object, script};
use beelet_tests::images;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{require, requires};
use serde_json::{Value, json};

/// Returns the pod with these volumes, and these mounts in its container `main`.
fn with_volumes(mut pod: Value, volumes: Value, mounts: Value) -> Value {
    pod["spec"]["volumes"] = volumes;
    pod["spec"]["containers"][0]["volumeMounts"] = mounts;
    pod
}

#[test]
fn every_kind_of_volume_has_its_content_and_is_removed_with_its_pod() {
    require!(containerd);
    let node = Node::start(|options| options);
    let host = node.agent.dir().join("host");
    fs::create_dir(&host).unwrap();
    fs::write(host.join("given"), "from the machine\n").unwrap();
    node.apply(&object("ConfigMap", "conf", &json!({"color": "red", "shape": "round"})));
    node.apply(&object("Secret", "word", &json!({"pass": "sesame"})));
    let main = "
        id -u; id -G
        echo disk > /disk/a && stat -c 'disk %a %g' /disk/a /disk
        echo memory > /memory/a && df -k /memory | tail -1 | awk '{print \"memory\", $1, $2}'
        cat /host/given; echo to the machine > /host/made; cat /file
        cat /conf/color; echo; cat /conf/deep/shape; echo; ls /conf; readlink /conf/color
        cat /word/pass; echo; stat -Lc 'word %a %g' /word/pass; df -k /word | tail -1 | awk '{print \"word\", $1}'
        cat /about/labels; echo; cat /about/cpu; echo
        cat /all/color; echo; cat /all/pass; echo; cat /all/name; echo
        echo x > /conf/new || echo conf is read-only
        echo x > /ro/new || echo ro is read-only
        pwd > /part/where && ls /disk/parts /disk/parts/one; ls -d /disk/by/$POD
        echo $COLOR $PASS $CPU $M_shape $ALL; echo all seen
        until [ -e /host/go ]; do sleep 0.05; done";
    let mut pod = with_volumes(
        script("every", main),
        json!([
            {"name": "disk", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "host", "hostPath": {"path": host, "type": "Directory"}},
            {"name": "file", "hostPath": {"path": host.join("given"), "type": "File"}},
            {"name": "made", "hostPath": {"path": host.join("folder"), "type": "DirectoryOrCreate"}},
            {"name": "conf", "configMap": {"name": "conf", "items": [{"key": "color", "path": "color"}, {"key": "shape", "path": "deep/shape"}]}},
            {"name": "word", "secret": {"secretName": "word", "defaultMode": 0o400}},
            {"name": "about", "downwardAPI": {"items": [
                {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
                {"path": "cpu", "resourceFieldRef": {"containerName": "main", "resource": "requests.cpu", "divisor": "1m"}},
            ]}},
            {"name": "all", "projected": {"sources": [
                {"configMap": {"name": "conf"}}, {"secret": {"name": "word"}},
                {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
            ]}},
        ]),
        json!([
            {"name": "disk", "mountPath": "/disk"},
            {"name": "disk", "mountPath": "/ro", "readOnly": true},
            {"name": "disk", "mountPath": "/part", "subPath": "parts/one"},
            {"name": "disk", "mountPath": "/by", "subPathExpr": "by/$(POD)"},
            {"name": "memory", "mountPath": "/memory"},
            {"name": "host", "mountPath": "/host"},
            {"name": "file", "mountPath": "/file", "readOnly": true},
            {"name": "made", "mountPath": "/made"},
            {"name": "conf", "mountPath": "/conf"},
            {"name": "word", "mountPath": "/word"},
            {"name": "about", "mountPath": "/about"},
            {"name": "all", "mountPath": "/all"},
        ]),
    );
    pod["spec"]["securityContext"] = json!({"runAsUser": 1000, "fsGroup": 2000});
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "250m"}});
    pod["spec"]["containers"][0]["env"] = json!([
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "color"}}},
        {"name": "PASS", "valueFrom": {"secretKeyRef": {"name": "word", "key": "pass"}}},
        {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}},
        {"name": "ALL", "value": "$(COLOR)-$(M_shape)"},
    ]);
    pod["spec"]["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "conf"}, "prefix": "M_"}]);
    // The machine's folder belongs to root: any user may write to it for this test.
    fs::set_permissions(&host, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    node.apply(&pod);
    let running = node.wait("every", "to run", beelet_tests::pods::PodView::ready);
    let folder = node.folder(&running);
    node.wait_file(&node.log_path(&running, "main", 0), |text| text.contains(" all seen"));
    assert!(node.mounts_below(&folder).len() >= 6, "{:?}", node.mounts_below(&folder));
    fs::write(host.join("go"), "").unwrap();
    let text = node.output("every");
    check_lines(
        &text,
        &[
            "1000",
            "0 2000",
            "disk 644 2000",
            "disk 2777 2000",
            "memory tmpfs 1024",
            "from the machine",
            "red",
            "round",
            "color",
            "deep",
            "..data/color",
            "sesame",
            "word 440 2000",
            "word tmpfs",
            "app=\"every\"",
            "250",
            "every-testnode",
            "conf is read-only",
            "ro is read-only",
            "one",
            "where",
            "/disk/by/every-testnode",
            "red sesame 250 round red-round",
        ],
    );
    assert_eq!(fs::read_to_string(host.join("made")).unwrap(), "to the machine\n");
    assert!(host.join("folder").is_dir());

    // A pod that has ended needs its volumes no more; its logs stay until the manifest is removed.
    let pod = node.wait("every", "to be known", |_| true);
    wait_for("the volumes to be removed", PATIENCE, || {
        let mounts = node.mounts_below(&folder);
        if mounts.is_empty() && !folder.join("volumes").exists() {
            Ok(())
        } else {
            Err(format!("{mounts:?}"))
        }
    })
    .unwrap();
    assert!(node.log_path(&pod, "main", 0).exists());
    node.remove("every");
    node.wait_gone("every");
    assert!(!folder.exists() && node.mounts_below(&folder).is_empty());
    assert!(!node.pod_logs(&pod).exists());
    assert_eq!(fs::read_to_string(host.join("given")).unwrap(), "from the machine\n");
}

#[test]
fn containers_of_any_user_read_volumes_of_objects_and_other_users_of_the_machine_do_not() {
    require!(containerd);
    // The agent runs under its unit's umask, 077, as in all of these tests.
    let node = Node::start(|options| options);
    let made = node.agent.dir().join("made/folder");
    node.apply(&object("ConfigMap", "conf", &json!({"color": "red"})));
    node.apply(&object("Secret", "word", &json!({"pass": "sesame"})));
    let mut pod = with_volumes(
        script(
            "user",
            "id -u; cat /conf/color; echo; cat /word/pass; echo; cat /all/color; echo; stat -c %a /made",
        ),
        json!([
            {"name": "conf", "configMap": {"name": "conf"}},
            {"name": "word", "secret": {"secretName": "word"}},
            {"name": "all", "projected": {"sources": [{"configMap": {"name": "conf"}}]}},
            {"name": "made", "hostPath": {"path": made, "type": "DirectoryOrCreate"}},
        ]),
        json!([
            {"name": "conf", "mountPath": "/conf"},
            {"name": "word", "mountPath": "/word"},
            {"name": "all", "mountPath": "/all"},
            {"name": "made", "mountPath": "/made"},
        ]),
    );
    pod["spec"]["securityContext"] = json!({"runAsUser": 1000});
    node.apply(&pod);
    check_lines(&node.output("user"), &["1000", "red", "sesame", "755"]);
    let pod = node.wait("user", "to be known", |_| true);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
    let logs = node.pod_logs(&pod);
    assert_eq!((mode(&logs), mode(&logs.join("main"))), (0o755, 0o755));
    assert_eq!(mode(&node.folder(&pod)), 0o750);
}

#[test]
fn a_changed_config_map_is_seen_by_the_pods_that_run() {
    require!(containerd);
    let mut node = Node::start(|options| options);
    node.apply(&object("ConfigMap", "conf", &json!({"color": "red"})));
    let watch = "while true; do cat /conf/color; echo; sleep 0.1; done";
    let pod = with_volumes(
        script("watcher", watch),
        json!([{"name": "conf", "configMap": {"name": "conf"}}]),
        json!([{"name": "conf", "mountPath": "/conf"}]),
    );
    node.apply(&pod);
    let pod = node.wait("watcher", "to run", beelet_tests::pods::PodView::ready);
    let log = node.log_path(&pod, "main", 0);
    node.wait_file(&log, |text| text.contains(" red\n"));
    node.apply(&object("ConfigMap", "conf", &json!({"color": "blue"})));
    node.wait_file(&log, |text| text.contains(" blue\n"));
    // Changes during the agent's absence appear after its return.
    node.agent.kill9();
    node.apply(&object("ConfigMap", "conf", &json!({"color": "green"})));
    node.agent.resume().unwrap();
    let text = node.wait_file(&log, |text| text.contains(" green\n"));
    assert!(text.lines().all(|line| !line.ends_with(" F ")), "half a change was visible:\n{text}");
    let after = node.wait("watcher", "to run", beelet_tests::pods::PodView::ready);
    assert_eq!((after.restarts(), after.uid()), (0, pod.uid()));
}

#[test]
fn a_pod_waits_for_the_objects_that_it_needs() {
    require!(containerd);
    let node = Node::start(|options| options);
    let mut pod = with_volumes(
        script("waiter", "cat /conf/color; echo; echo $PASS"),
        json!([{"name": "conf", "configMap": {"name": "conf"}}]),
        json!([{"name": "conf", "mountPath": "/conf"}]),
    );
    pod["spec"]["containers"][0]["env"] =
        json!([{"name": "PASS", "valueFrom": {"secretKeyRef": {"name": "word", "key": "pass"}}}]);
    node.apply(&pod);
    node.wait("waiter", "to be pending", |pod| pod.phase() == "Pending");
    node.apply(&object("ConfigMap", "conf", &json!({"color": "red"})));
    let message = node.waiting("waiter", "main", "CreateContainerConfigError");
    assert!(message.contains("Secret default/word not found"), "{message}");
    node.apply(&object("Secret", "word", &json!({"pass": "sesame"})));
    check_lines(&node.output("waiter"), &["red", "sesame"]);
}

#[test]
fn a_link_that_a_container_made_leads_no_mount_out_of_its_volume() {
    require!(containerd);
    let node = Node::start(|options| options);
    let outside = node.agent.dir().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "untouched").unwrap();
    let mount = |path: &str, part: &str| json!([{"name": "v", "mountPath": path, "subPath": part}]);
    let links = format!(
        "ln -s / /v/root; ln -s ../../../../.. /v/up; ln -s {} /v/out; mkdir /v/in; ln -s in /v/good",
        outside.display()
    );
    let mut init = container("init", &links);
    init["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    for (name, part) in [("root", "root/etc"), ("up", "up"), ("out", "out")] {
        let mut pod = with_volumes(
            script(name, "ls /part"),
            json!([{"name": "v", "emptyDir": {}}]),
            mount("/part", part),
        );
        pod["spec"]["initContainers"] = json!([init]);
        node.apply(&pod);
        let message = node.waiting(name, "main", "CreateContainerConfigError");
        assert!(message.contains("leads out of the volume"), "{message}");
        node.remove(name);
        node.wait_gone(name);
    }
    let mut pod = with_volumes(
        script("good", "echo x > /part/f; ls /v/in"),
        json!([{"name": "v", "emptyDir": {}}]),
        json!([
            {"name": "v", "mountPath": "/part", "subPath": "good"}, {"name": "v", "mountPath": "/v"},
        ]),
    );
    pod["spec"]["initContainers"] = json!([init]);
    node.apply(&pod);
    check_lines(&node.output("good"), &["f"]);
    node.remove("good");
    node.wait_gone("good");
    assert_eq!(fs::read_to_string(outside.join("secret")).unwrap(), "untouched");
}

#[test]
fn mounts_spread_between_the_machine_and_privileged_containers_as_they_say() {
    require!(containerd);
    let node = Node::start(|options| options);
    let shared = node.agent.dir().join("shared");
    fs::create_dir(&shared).unwrap();
    // Mounts propagate only across a shared mount.
    let mounted = beelet_tests::guards::Mount::tmpfs(&shared, 1 << 20).unwrap();
    rustix::mount::mount_change(&shared, rustix::mount::MountPropagationFlags::SHARED).unwrap();
    fs::create_dir(shared.join("inner")).unwrap();
    let mut maker = with_volumes(
        script(
            "maker",
            "mount -t tmpfs inner /shared/inner && touch /shared/inner/seen && echo mounted; sleep 1000",
        ),
        json!([{"name": "shared", "hostPath": {"path": shared}}]),
        json!([{"name": "shared", "mountPath": "/shared", "mountPropagation": "Bidirectional"}]),
    );
    maker["spec"]["containers"][0]["securityContext"] = json!({"privileged": true});
    node.apply(&maker);
    let pod = node.wait("maker", "to run", beelet_tests::pods::PodView::ready);
    node.wait_file(&node.log_path(&pod, "main", 0), |text| text.contains(" mounted"));
    assert!(shared.join("inner/seen").exists(), "the mount is invisible on the machine");
    let reader = with_volumes(
        script("reader", "ls /shared/inner"),
        json!([{"name": "shared", "hostPath": {"path": shared}}]),
        json!([{"name": "shared", "mountPath": "/shared", "mountPropagation": "HostToContainer"}]),
    );
    node.apply(&reader);
    check_lines(&node.output("reader"), &["seen"]);
    node.remove("maker");
    node.wait_gone("maker");
    drop(mounted);
}

#[test]
fn an_image_volume_needs_a_runtime_that_has_them() {
    require!(containerd);
    let volume = || {
        with_volumes(
            script("image", "cat /image/www/index.html; echo x > /image/x || echo read-only"),
            json!([{"name": "image", "image": {"reference": images::APP, "pullPolicy": "Never"}}]),
            json!([{"name": "image", "mountPath": "/image"}]),
        )
    };
    let node = Node::start(|options| options);
    if node.containerd.version() < (2, 1) {
        node.apply(&volume());
        let message = node.waiting("image", "main", "CreateContainerConfigError");
        assert!(message.contains("cannot mount images; containerd 2.1"), "{message}");
    }
    drop(node);
    if let Err(missing) = requires::containerd_2() {
        requires::skip(&missing);
        return;
    }
    let containerd = beelet_tests::containerd::Containerd::start_version_2_for_test().unwrap();
    let node = Node::on(containerd, |options| options);
    node.apply(&volume());
    check_lines(&node.output("image"), &["hello from beelet", "read-only"]);
}

#[test]
fn a_restarted_container_finds_its_volumes_as_it_left_them() {
    require!(containerd);
    let node = Node::start(|options| options);
    let count = "echo x >> /disk/count; echo x >> /memory/count; wc -l < /disk/count; wc -l < /memory/count; \
                 stat -c %a /disk; test $(wc -l < /part/count) -ge 3 && exit 0; exit 1";
    let mut pod = with_volumes(
        script("counter", count),
        json!([{"name": "disk", "emptyDir": {}}, {"name": "memory", "emptyDir": {"medium": "Memory"}}]),
        json!([
            {"name": "disk", "mountPath": "/disk"}, {"name": "memory", "mountPath": "/memory"},
            {"name": "disk", "mountPath": "/part", "subPathExpr": "."},
        ]),
    );
    pod["spec"]["restartPolicy"] = json!("OnFailure");
    node.apply(&pod);
    let pod = node.wait("counter", "to end", |pod| pod.phase() == "Succeeded");
    assert_eq!(node.log(&pod, "main", 2), "3\n3\n777\n");
    // Logs of older attempts are deleted, except for the last but one.
    assert!(!node.log_path(&pod, "main", 0).exists() && node.log_path(&pod, "main", 1).exists());
}
