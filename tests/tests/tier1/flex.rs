//! Volumes of `flexVolume` drivers, which are scripts that mount file systems in memory: for static pods and
//! for pods of an API server.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use beelet_tests::apiserver::FakeApi;
use beelet_tests::{guards, require};
use serde_json::{Value, json};

use crate::cluster::scene::{Member, own_node};
use crate::cluster::storage::{bind, claiming, pending};
use crate::cluster::workload::{path, pod as assigned};
use crate::hostile::scene::{Scene, on_node, pod};

const DRIVER: &str = "example.com/shelf";

/// Installs a driver in the agent's folder. The driver records its calls.
fn install(dir: &Path, script: &str) {
    let place = dir.join("drivers/example.com~shelf");
    fs::create_dir_all(&place).unwrap();
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> {}\nok() {{ echo '{{\"status\": \"Success\"}}'; }}\n\
         fail() {{ echo '{{\"status\": \"Failure\", \"message\": \"the shelf is locked\"}}'; exit 1; }}\n\
         case $1 in\n{script}\n*) echo '{{\"status\": \"Not supported\"}}'; exit 1;;\nesac\n",
        dir.join("calls").display()
    );
    fs::write(place.join("new"), script).unwrap();
    fs::set_permissions(place.join("new"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(place.join("new"), place.join("shelf")).unwrap();
}

/// Returns the commands that the driver was called with.
fn commands(dir: &Path) -> Vec<String> {
    let calls = fs::read_to_string(dir.join("calls")).unwrap_or_default();
    calls.lines().filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
}

fn count(dir: &Path, command: &str) -> usize {
    commands(dir).iter().filter(|one| *one == command).count()
}

/// Returns a pod with a volume of this source.
fn with_flex(mut pod: Value, source: &Value) -> Value {
    pod["spec"]["volumes"] = json!([{"name": "data", "flexVolume": source}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pod
}

/// Returns the path of the pod's volume on the machine.
fn mounted(scene: &Scene, pod: &str) -> PathBuf {
    let container = scene.cri.container(pod, "main").unwrap();
    let mount = container.config.mounts.iter().find(|mount| mount.container_path == "/data").unwrap();
    PathBuf::from(&mount.host_path)
}

fn until_nothing_is_mounted(scene: &Scene) {
    let dir = scene.dir.path().to_owned();
    scene.poll_until("all volumes to be unmounted", || {
        let mounts = guards::mounts().map_err(|error| error.to_string())?;
        match mounts.iter().find(|mount| mount.path.starts_with(&dir)) {
            Some(mount) => Err(format!("{mount:?}")),
            None => Ok(()),
        }
    });
}

const MOUNTS: &str = "init) echo '{\"status\": \"Success\", \"capabilities\": {\"attach\": false}}';;\n\
    mount) mount -t tmpfs shelf \"$2\" || fail; echo \"$3\" > \"$2/options\"; ok;;\n\
    unmount) [ -e $(dirname $0)/locked ] && fail; umount \"$2\" || fail; ok;;";

#[test]
fn a_driver_mounts_and_unmounts_a_static_pods_volume_despite_kills_and_faults() {
    require!(root);
    let mut scene = Scene::start(|dir, options| {
        install(dir, MOUNTS);
        options.kubelet("volumePluginDir", dir.join("drivers").display().to_string())
    });
    let dir = scene.dir.path().to_owned();
    let source =
        json!({"driver": DRIVER, "fsType": "ext4", "options": {"size": "1m"}, "secretRef": {"name": "key"}});
    let mut web = with_flex(pod("web"), &source);
    web["spec"]["securityContext"] = json!({"fsGroup": 2000});
    scene.apply(&web);
    // The pod waits for its Secret, which must have the driver's type.
    let secret = |kind: &str| {
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}, "type": kind,
            "stringData": {"password": "hush"}})
        .to_string()
    };
    scene.agent.apply("key.yaml", secret("Opaque")).unwrap();
    scene.until_logged("cannot get secret of type example.com/shelf");
    assert_eq!(count(&dir, "mount"), 0);
    scene.agent.apply("key.yaml", secret(DRIVER)).unwrap();
    scene.until_ready("web");
    let place = mounted(&scene, &on_node("web"));
    assert!(
        place.ends_with("volumes/data") || place.ends_with("volumes/example.com~shelf/data"),
        "{place:?}"
    );
    let options = fs::read_to_string(place.join("options")).unwrap();
    let options: Value = serde_json::from_str(&options).unwrap();
    let expected = [
        ("size", "1m"),
        ("kubernetes.io/fsType", "ext4"),
        ("kubernetes.io/readwrite", "rw"),
        ("kubernetes.io/pod.name", &on_node("web")),
        ("kubernetes.io/mounterArgs.FsGroup", "2000"),
        ("kubernetes.io/secret/password", "aHVzaA=="),
    ];
    for (key, value) in expected {
        assert_eq!(options[key], value, "{key}");
    }
    assert_eq!(fs::metadata(&place).unwrap().gid(), 2000);
    assert!(!scene.agent.log().contains("aHVzaA"), "a secret is in the log");
    // A killed agent doesn't mount the volume again, and its driver may refuse for a while.
    scene.agent.kill9();
    scene.agent.resume().unwrap();
    scene.until_ready("web");
    assert_eq!(count(&dir, "mount"), 1);
    fs::write(dir.join("drivers/example.com~shelf/locked"), "").unwrap();
    scene.remove("web");
    scene.poll_until("the driver to refuse", || match count(&dir, "unmount") {
        0 => Err(format!("{:?}", commands(&dir))),
        _ => Ok(()),
    });
    assert!(place.join("options").exists());
    scene.agent.kill9();
    fs::remove_file(dir.join("drivers/example.com~shelf/locked")).unwrap();
    scene.agent.resume().unwrap();
    scene.until_gone("web");
    until_nothing_is_mounted(&scene);
    // The pod has no manifest, and a killed agent has no row for it in its table.
    scene.poll_until("the pod's folder to be removed", || {
        if place.exists() { Err(place.display().to_string()) } else { Ok(()) }
    });
    scene.is_well();
}

#[test]
fn a_standalone_node_attaches_volumes_itself() {
    require!(root);
    let scene = Scene::start(|dir, options| {
        // The agent mounts the attached device for pods: the driver has neither mount nor unmount.
        let script = "init) ok;;\nattach) echo '{\"status\": \"Success\", \"device\": \"/dev/shelf\"}';;\n\
            waitforattach) ok;;\nmountdevice) mount -t tmpfs \"$3\" \"$2\" || fail; ok;;\n\
            unmountdevice) umount \"$2\" || fail; ok;;\ndetach) ok;;";
        install(dir, script);
        options.kubelet("volumePluginDir", dir.join("drivers").display().to_string())
    });
    let dir = scene.dir.path().to_owned();
    for name in ["one", "two"] {
        scene.apply(&with_flex(pod(name), &json!({"driver": DRIVER, "readOnly": name == "two"})));
        scene.until_ready(name);
    }
    assert_eq!((count(&dir, "mountdevice"), count(&dir, "attach")), (1, 1));
    fs::write(mounted(&scene, &on_node("one")).join("written"), "1").unwrap();
    let second = mounted(&scene, &on_node("two"));
    assert!(second.join("written").exists());
    assert!(fs::write(second.join("other"), "").is_err(), "the second pod could write");
    scene.remove("one");
    scene.until_gone("one");
    assert_eq!((count(&dir, "unmountdevice"), count(&dir, "detach")), (0, 0));
    scene.remove("two");
    scene.until_gone("two");
    assert_eq!((count(&dir, "unmountdevice"), count(&dir, "detach")), (1, 1));
    until_nothing_is_mounted(&scene);
    scene.is_well();
}

#[tokio::test]
async fn a_claims_volume_is_used_once_a_controller_has_attached_it() {
    require!(root);
    const CLAIM: &str = "/api/v1/namespaces/default/persistentvolumeclaims/data";
    const SECRET: &str = "/api/v1/namespaces/vault/secrets/key";
    let mut drivers = PathBuf::new();
    let member = Member::start(FakeApi::start(), |options| {
        drivers = options.manifests().parent().unwrap().join("flex");
        options.kubelet("volumePluginDir", drivers.join("drivers").display().to_string())
    })
    .await;
    member.api.put(CLAIM, pending());
    let source = json!({"driver": DRIVER, "secretRef": {"name": "key", "namespace": "vault"}});
    bind(&member.api, CLAIM, &json!({"flexVolume": source, "accessModes": ["ReadWriteOnce"]}));
    member.api.put(&path("web"), claiming("web"));
    member.until_event("FailedMount", "for volume \"pv-1\" err=no volume plugin matched").await;
    let script = "init) ok;;\nmountdevice) mount -t tmpfs \"$3\" \"$2\" || fail; ok;;\n\
        mount) echo \"$3\" > options; mount --bind PLACE \"$2\" || fail; echo \"$3\" > \"$2/options\"; ok;;\n\
        unmount) umount \"$2\" || fail; ok;;\nunmountdevice) umount \"$2\" || fail; ok;;";
    let device = member.scene.dir.path().join("agent/kubelet/plugins/kubernetes.io/flexvolume");
    let device = device.join("example.com/shelf/mounts/pv-1");
    let script =
        script.replace("echo \"$3\" > options; ", "").replace("PLACE", &device.display().to_string());
    install(&drivers, &script);
    let name = "example.com/shelf/pv-1";
    let in_use =
        |api: &FakeApi| api.get(&own_node()).filter(|node| node["status"]["volumesInUse"] == json!([name]));
    member.api.wait_until("the volume to be in use", in_use).await;
    assert_eq!(commands(&drivers), ["init"]);
    member.api.put(SECRET, json!({"type": DRIVER, "data": {"k": "aHVzaA=="}}));
    let attached = json!({"status": {"volumesAttached": [{"name": name, "devicePath": "shelf-7"}]}});
    member.api.patch(&format!("{}/status", own_node()), &attached);
    member.until_running("web").await;
    let options = fs::read_to_string(Path::new(&member.mounted("web")).join("options")).unwrap();
    assert!(options.contains("\"kubernetes.io/secret/k\":\"aHVzaA==\""), "{options}");
    let mounts = guards::mounts().unwrap();
    assert!(mounts.iter().any(|mount| mount.path == device), "{mounts:?}");
    assert_eq!((count(&drivers, "attach"), count(&drivers, "waitforattach")), (0, 1));
    // Other pods don't wait for this one.
    member.api.put(&path("other"), assigned("other"));
    member.until_running("other").await;
    member.api.delete(&path("web"));
    let free = |api: &FakeApi| {
        let node = api.get(&own_node())?;
        node["status"]["volumesInUse"].as_array().is_none_or(Vec::is_empty).then_some(())
    };
    member.api.wait_until("the volume to be no longer in use", free).await;
    assert_eq!((count(&drivers, "unmountdevice"), count(&drivers, "detach")), (1, 0));
    until_nothing_is_mounted(&member.scene);
    member.scene.is_well();
}
