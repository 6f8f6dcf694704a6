//! Tests of `beelet handover` on a fake runtime with a kubelet's pod, and with programs in the place of
//! systemctl.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use beelet_model::labels::{
    ANNOTATION_HASH, ANNOTATION_SOURCE, CONTAINER_HASH, CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID,
};
use beelet_policy::handover::container_hash_of;
use beelet_proto::cri;
use beelet_tests::agent::binary;
use beelet_tests::cri::{Asked, CHANGES, Container, FakeCri, Sandbox};
use beelet_tests::workdir;
use jiff::Timestamp;
use serde_json::{Value, json};

const UID: &str = "0f1e2d3c4b5a69788796a5b4c3d2e1f0";

/// A node with a static pod that a kubelet started, and a configuration of beelet.
struct Scene {
    cri: FakeCri,
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Scene { cri: FakeCri::start(), dir: tempfile::tempdir().unwrap() };
        fs::create_dir_all(scene.path("manifests")).unwrap();
        fs::create_dir_all(scene.path("root/pods").join(UID)).unwrap();
        scene.apply();
        scene.configure("adoptKubeletPods", true);
        scene.start_pod();
        scene
    }

    /// Writes the configuration of beelet, with one more field.
    fn configure(&self, field: &str, value: bool) {
        let kubelet = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "staticPodPath": self.path("manifests"), "containerRuntimeEndpoint": self.cri.endpoint(),
        });
        let mut beelet = json!({
            "apiVersion": "beelet.dev/v1alpha1", "kind": "BeeletConfiguration", "nodeName": "n1",
            "stateDir": self.path("state"), "runDir": self.path("run"), "podsDir": self.path("root/pods"),
            "kubeletDir": self.path("root"), "adoptKubeletPods": true,
        });
        beelet[field] = value.into();
        fs::write(self.path("config.yaml"), format!("{kubelet}\n---\n{beelet}\n")).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn apply(&self) {
        self.apply_with(&json!([]));
    }

    /// Writes the manifest with these volumes, which the container mounts.
    fn apply_with(&self, volumes: &Value) {
        let name = |volume: &Value| json!({"name": volume["name"], "mountPath": volume["name"]});
        let mounts: Vec<Value> = volumes.as_array().unwrap().iter().map(name).collect();
        let main = json!({"name": "main", "image": "web:1", "volumeMounts": mounts});
        let spec = json!({"containers": [main], "volumes": volumes});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec});
        fs::write(self.path("manifests/web.yaml"), pod.to_string()).unwrap();
    }

    /// Adds the sandbox and the container, created now.
    fn start_pod(&self) {
        let text = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let mut labels = text(&[(POD_UID, UID), (POD_NAME, "web-n1"), (POD_NAMESPACE, "default")]);
        let sandbox = Sandbox {
            id: "sandbox".to_owned(),
            config: cri::PodSandboxConfig {
                labels: labels.clone(),
                annotations: text(&[(ANNOTATION_SOURCE, "file"), (ANNOTATION_HASH, UID)]),
                ..Default::default()
            },
            state: cri::PodSandboxState::SandboxReady,
            created_at: i64::try_from(Timestamp::now().as_nanosecond()).unwrap(),
            ip: String::new(),
            info: json!({}),
            runtime_handler: String::new(),
        };
        labels.insert(CONTAINER_NAME.to_owned(), "main".to_owned());
        let of_container = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 2 }),
            labels,
            annotations: text(&[(CONTAINER_HASH, &container_hash_of("main", "web:1"))]),
            ..Default::default()
        };
        self.cri.change(|world| {
            world.sandboxes.insert("sandbox".to_owned(), sandbox);
            let container = Container::running("container", "sandbox", of_container);
            world.containers.insert("container".to_owned(), container);
        });
    }

    /// Writes a program that records its calls, prefixed with `name`, and then runs `script`.
    fn program(&self, name: &str, script: &str) -> PathBuf {
        let program = self.path(name);
        let calls = self.path("calls");
        fs::write(&program, format!("#!/bin/sh\necho {name} $1 >> {}\n{script}\n", calls.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program
    }

    /// Runs `beelet handover`. Returns its exit code and its output.
    fn handover(&self, arguments: &[&str], programs: &[(&str, &Path)]) -> (Option<i32>, String) {
        let mut command = Command::new(binary().unwrap());
        command.args(["handover", "--kubelet-version", "1.36", "--settle", "0s"]);
        if !arguments.contains(&"--timeout") {
            command.args(["--timeout", "1s"]);
        }
        command.arg("--config").arg(self.path("config.yaml")).arg("--root-dir").arg(self.path("root"));
        command.args(arguments);
        for (option, program) in programs {
            command.arg(option).arg(program);
        }
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.code(), text.concat())
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn assert_unchanged(&self) {
        let changes: Vec<_> =
            self.cri.calls().into_iter().filter(|call| CHANGES.contains(&call.asked.op())).collect();
        assert!(changes.is_empty(), "{changes:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_names_each_pod_and_changes_nothing() {
    let scene = Scene::new();
    let (code, text) = scene.handover(&["--check", "--from-kubelet"], &[]);
    assert!(code == Some(0) && text.contains("default/web-n1: is taken over"), "{code:?} {text}");
    let (code, text) = scene.handover(&["--check", "--to-kubelet"], &[]);
    assert!(code == Some(0) && text.contains("1 pods: the kubelet would take over 1;"), "{code:?} {text}");
    // The manifest is newer than the pod.
    scene.apply();
    let (code, text) = scene.handover(&["--check", "--from-kubelet"], &[]);
    let expected = "default/web-n1: would restart: the pod's manifest was changed after the pod started";
    assert!(code == Some(1) && text.contains(expected), "{code:?} {text}");
    let (code, text) = scene.handover(&["--from-kubelet"], &[]);
    assert!(code == Some(1) && text.contains("refusing the hand-over"), "{code:?} {text}");
    scene.assert_unchanged();
    let asked = scene.cri.calls();
    assert!(asked.iter().any(|call| matches!(call.asked, Asked::ListPodSandbox(_))));
    assert_eq!(fs::read_dir(scene.dir.path()).unwrap().count(), 3, "the check wrote a file");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_volumes_are_in_folders_of_beelet_is_not_handed_over_without_force() {
    let scene = Scene::new();
    scene.apply_with(&json!([
        {"name": "data", "emptyDir": {}}, {"name": "host", "hostPath": {"path": "/"}},
        {"name": "about", "downwardAPI": {"items": []}},
    ]));
    scene.start_pod();
    let volumes = scene.path("root/pods").join(UID).join("volumes");
    fs::create_dir_all(volumes.join("kubernetes.io~empty-dir/data")).unwrap();
    fs::create_dir_all(volumes.join("kubernetes.io~downward-api/about")).unwrap();
    for direction in ["--to-kubelet", "--from-kubelet"] {
        let (code, text) = scene.handover(&["--check", direction], &[]);
        assert!(code == Some(0) && text.contains("default/web-n1: is taken over"), "{code:?} {text}");
    }
    fs::create_dir(volumes.join("data")).unwrap();
    fs::create_dir(volumes.join("about")).unwrap();
    let named = |text: &str| {
        let begins = "default/web-n1: would lose volumes: the next agent has the emptyDir volumes data in other folders";
        text.contains(begins) && text.contains("; the next agent has the volumes about in other folders")
    };
    // The container is the kubelet's, so that also beelet, which prefers its own folders, would lose volumes.
    for direction in ["--to-kubelet", "--from-kubelet"] {
        let (code, text) = scene.handover(&["--check", direction], &[]);
        assert!(code == Some(1) && named(&text), "{code:?} {text}");
        let (code, text) = scene.handover(&[direction], &[]);
        assert!(
            code == Some(1) && named(&text) && text.contains("refusing the hand-over"),
            "{code:?} {text}"
        );
    }
    scene.assert_unchanged();
    let kubelet = scene.program("kubelet", "");
    let beelet = scene.program("beelet", "");
    let programs: [(&str, &Path); 2] = [("--kubelet-control", &kubelet), ("--beelet-control", &beelet)];
    let (_, text) = scene.handover(&["--to-kubelet", "--force"], &programs);
    assert!(named(&text), "{text}");
    assert_eq!(scene.calls()[..2], ["beelet stop", "kubelet start"], "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_a_manifest_is_not_handed_over() {
    let scene = Scene::new();
    fs::remove_file(scene.path("manifests/web.yaml")).unwrap();
    let (code, text) = scene.handover(&["--check", "--from-kubelet"], &[]);
    let expected =
        "default/web-n1: would be stopped: no source of beelet names the pod: beelet would stop it";
    assert!(code == Some(1) && text.contains(expected), "{code:?} {text}");
    let (code, text) = scene.handover(&["--from-kubelet"], &[]);
    assert!(code == Some(1) && text.contains("refusing the hand-over"), "{code:?} {text}");
    scene.assert_unchanged();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_adopts_no_pod_is_refused() {
    let scene = Scene::new();
    scene.configure("adoptKubeletPods", false);
    for arguments in [&["--check", "--from-kubelet"][..], &["--from-kubelet", "--force"]] {
        let (code, text) = scene.handover(arguments, &[]);
        assert!(code == Some(1) && text.contains("lacks `adoptKubeletPods: true`"), "{code:?} {text}");
    }
    let (code, text) = scene.handover(&["--check", "--to-kubelet"], &[]);
    assert_eq!(code, Some(0), "{text}");
    scene.assert_unchanged();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_stops_the_pods_with_the_agent_is_refused() {
    let scene = Scene::new();
    scene.configure("stopPodsOnExit", true);
    for arguments in [&["--check", "--to-kubelet"][..], &["--from-kubelet"], &["--to-kubelet", "--force"]] {
        let (code, text) = scene.handover(arguments, &[]);
        assert!(code == Some(1) && text.contains("`stopPodsOnExit: true`"), "{code:?} {text}");
    }
    scene.assert_unchanged();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_old_agent_comes_back_if_the_new_one_does_not_start() {
    let scene = Scene::new();
    let kubelet = scene.program("kubelet", "");
    let beelet = scene.program("beelet", "test $1 = stop");
    let programs: [(&str, &Path); 2] = [("--kubelet-control", &kubelet), ("--beelet-control", &beelet)];
    let (code, text) = scene.handover(&["--from-kubelet"], &programs);
    assert_eq!(scene.calls(), ["kubelet stop", "beelet start", "beelet stop", "kubelet start"], "{text}");
    // The kubelet of this test never drives the runtime.
    assert!(code == Some(1) && text.contains("cannot start beelet"), "{code:?} {text}");
    assert!(text.contains("the kubelet is not back"), "{text}");
    scene.assert_unchanged();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_old_agent_comes_back_if_the_new_one_does_not_account_for_a_pod() {
    let scene = Scene::new();
    let kubelet = scene.program("kubelet", "");
    let beelet = scene.program("beelet", "");
    let programs: [(&str, &Path); 2] = [("--kubelet-control", &kubelet), ("--beelet-control", &beelet)];
    let (_, text) = scene.handover(&["--from-kubelet"], &programs);
    assert!(text.contains("no agent answers"), "{text}");
    assert_eq!(scene.calls(), ["kubelet stop", "beelet start", "beelet stop", "kubelet start"], "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_old_agent_comes_back_if_the_new_one_stops_a_container() {
    let scene = std::sync::Arc::new(Scene::new());
    let kubelet = scene.program("kubelet", "");
    let (started, go) = (scene.path("started"), scene.path("go"));
    let wait = format!("touch {}; while ! test -e {}; do sleep 0.02; done", started.display(), go.display());
    let beelet = scene.program("beelet", &format!("if test $1 = start; then {wait}; fi"));
    let of_thread = std::sync::Arc::clone(&scene);
    let handover = tokio::task::spawn_blocking(move || {
        let programs: [(&str, &Path); 2] = [("--kubelet-control", &kubelet), ("--beelet-control", &beelet)];
        of_thread.handover(&["--from-kubelet", "--timeout", "20s"], &programs)
    });
    workdir::wait_for("the start of beelet", workdir::PATIENCE, || fs::metadata(&started)).unwrap();
    scene.cri.exit("container", 1);
    fs::write(go, "").unwrap();
    let (code, text) = handover.await.unwrap();
    assert!(code == Some(1) && text.contains("default/web-n1: container main does not run on"), "{text}");
    assert_eq!(scene.calls(), ["kubelet stop", "beelet start", "beelet stop", "kubelet start"], "{text}");
}
