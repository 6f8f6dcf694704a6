//! Volumes as a pod sees them: plain folders, no root.

use std::fs;
use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::{
    csi::CsiVolumes,
    loss::Loss,
    operations::Operations,
    plugin::Sources,
    top_folder::{make_top, open_top},
};
use beelet_csi::Csi;
use beelet_model::objects::Objects;
use beelet_model::storage::{Claimed, VolumesInUse};
use beelet_policy::handover::Places;
use beelet_spec::env::Environment;
use beelet_state::events::Recorder;
use k8s_openapi::api::core::v1 as core;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn pod(spec: serde_json::Value) -> core::Pod {
    serde_json::from_value(json!({"metadata": {"uid": "u1", "namespace": "shop"}, "spec": spec})).unwrap()
}

fn facts() -> MountFacts {
    MountFacts { env: Environment::default(), images: BTreeMap::new(), recursive_read_only: false }
}

fn set_up(pod: &core::Pod, dir: &Path) -> (PodVolumes, Result<(), Error>) {
    let volumes = PodVolumes::of(pod, dir, &Plugins::default());
    let (objects, node) = (Objects::default(), beelet_spec::fixtures::node());
    let done = volumes
        .set_up(&Sources { pod, objects: &objects, node: &node, prepared: &Prepared::default() }, &|| false);
    (volumes, done)
}

#[test]
fn tearing_down_does_not_follow_symbolic_links() {
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("kept"), "").unwrap();
    let pod = pod(json!({"containers": [], "volumes": [{"name": "scratch", "emptyDir": {}}]}));
    let (volumes, done) = set_up(&pod, &dir.path().join("pods"));
    done.unwrap();
    std::os::unix::fs::symlink(&outside, volumes.path("scratch").join("link")).unwrap();
    volumes.tear_down().unwrap();
    assert!(outside.join("kept").exists());
    assert!(!dir.path().join("pods/u1").exists());
}

#[test]
fn a_volume_that_a_kubelet_has_set_up_stays_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let pod = pod(json!({"containers": [], "volumes": [
        {"name": "scratch", "emptyDir": {}}, {"name": "about", "downwardAPI": {"items": []}},
        {"name": "new", "emptyDir": {}},
    ]}));
    let volumes = dir.path().join("u1/volumes");
    let of_kubelet = volumes.join("kubernetes.io~empty-dir/scratch");
    fs::create_dir_all(&of_kubelet).unwrap();
    fs::create_dir_all(volumes.join("kubernetes.io~downward-api/about")).unwrap();
    fs::write(of_kubelet.join("file"), "kept").unwrap();
    let (made, done) = set_up(&pod, dir.path());
    done.unwrap();
    assert_eq!(made.path("scratch"), of_kubelet);
    assert_eq!(made.path("about"), volumes.join("kubernetes.io~downward-api/about"));
    assert_eq!(made.path("new"), volumes.join("new"));
    assert_eq!(made.read("scratch", Path::new("file")).unwrap(), b"kept");
    assert!(!volumes.join("scratch").exists());
    // A kubelet that runs in between makes a second place, which stays unused.
    fs::create_dir_all(volumes.join("kubernetes.io~empty-dir/new")).unwrap();
    assert_eq!(made.path("new"), volumes.join("new"));
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let expected = Places { of_beelet: set(&["new"]), of_kubelet: set(&["scratch", "about", "new"]) };
    assert_eq!(places(&pod, &dir.path().join("u1")), expected);
    made.tear_down().unwrap();
    assert!(!dir.path().join("u1").exists());
}

#[test]
fn a_missing_object_fails_only_mounted_volumes() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = json!([
        {"name": "conf", "configMap": {"name": "m"}}, {"name": "none", "hostPath": {"path": "/none", "type": "Directory"}},
    ]);
    let of = |mounts: serde_json::Value| {
        let containers = json!([{"name": "c", "volumeMounts": mounts}]);
        set_up(&pod(json!({"containers": containers, "volumes": volumes})), dir.path()).1
    };
    assert_eq!(
        of(json!([{"name": "conf", "mountPath": "/etc/app"}])).unwrap_err().to_string(),
        "volume conf: ConfigMap shop/m not found; put its manifest next to the pod's"
    );
    assert!(
        of(json!([{"name": "none", "mountPath": "/x"}]))
            .unwrap_err()
            .to_string()
            .starts_with("volume none: ")
    );
    // A volume that no container mounts delays nothing.
    of(json!([])).unwrap();
}

#[test]
fn a_volume_of_objects_has_mount_points_for_volumes_that_are_mounted_below_it() {
    let dir = tempfile::tempdir().unwrap();
    let pod = pod(json!({
        "containers": [{"name": "c", "volumeMounts": [
            {"name": "conf", "mountPath": "/etc/app"}, {"name": "cache", "mountPath": "/etc/app/var/cache"},
        ]}],
        "volumes": [
            {"name": "conf", "configMap": {"name": "m", "optional": true}}, {"name": "cache", "emptyDir": {}},
        ],
    }));
    let (volumes, done) = set_up(&pod, dir.path());
    done.unwrap();
    assert!(volumes.path("conf").join("var/cache").is_dir());
}

#[test]
fn only_the_top_folder_of_a_volume_is_open_to_any_user() {
    use std::os::unix::fs::PermissionsExt;
    let name = "only_the_top_folder_of_a_volume_is_open_to_any_user";
    let strict = ["sh", "-c", "umask 077; exec \"$0\" \"$@\""];
    if !beelet_testing::again::in_child(module_path!(), name, &strict) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let top = dir.path().join("pods/u1/volumes/conf");
    for made_before in [false, true] {
        if made_before {
            fs::set_permissions(&top, fs::Permissions::from_mode(0o700)).unwrap();
        }
        make_top(&top).unwrap();
        assert_eq!(top.metadata().unwrap().permissions().mode() & 0o7777, 0o755);
    }
    for above in ["pods/u1/volumes", "pods/u1", "pods"] {
        let mode = dir.path().join(above).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o750, "{above}");
    }
}

#[test]
fn a_secret_is_not_written_to_the_disk_below_a_volume_that_was_unmounted() {
    let dir = tempfile::tempdir().unwrap();
    let pod = pod(json!({"containers": [], "volumes": [
        {"name": "about", "downwardAPI": {"items": [{"path": "uid", "fieldRef": {"fieldPath": "metadata.uid"}}]}},
    ]}));
    let volumes = PodVolumes::of(&pod, dir.path(), &Plugins::default());
    let path = volumes.path("about");
    fs::create_dir_all(&path).unwrap();
    std::os::unix::fs::symlink("..old", path.join("..data")).unwrap();
    let (objects, node) = (Objects::default(), beelet_spec::fixtures::node());
    let sources = Sources { pod: &pod, objects: &objects, node: &node, prepared: &Prepared::default() };
    assert_eq!(volumes.refresh(&sources).unwrap(), 0);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "nothing was written");
    assert!(open_top(&path, true).unwrap().is_none() && open_top(&path, false).unwrap().is_some());
}

fn check_mount(mount: serde_json::Value, expected: Result<(&str, bool), &str>) {
    let pod = pod(json!({
        "containers": [{"name": "c", "volumeMounts": [mount]}],
        "volumes": [
            {"name": "scratch", "emptyDir": {}},
            {"name": "conf", "configMap": {"name": "m"}},
            {"name": "host", "hostPath": {"path": "/srv"}},
            {"name": "image", "image": {"reference": "x"}},
        ]
    }));
    let volumes = PodVolumes::of(&pod, Path::new("/pods"), &Plugins::default());
    let mut facts = facts();
    facts.images.insert("image".to_owned(), "sha256:1".to_owned());
    let made = volumes.mounts(&pod.spec.as_ref().unwrap().containers[0], &facts, &|| false);
    let shown = made.map(|mounts| (mounts[0].host_path.clone(), mounts[0].readonly));
    match (shown, expected) {
        (Ok((path, readonly)), Ok(expected)) => assert_eq!((path.as_str(), readonly), expected, "{mount}"),
        (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
        (shown, expected) => panic!("{mount}: {shown:?}, not {expected:?}"),
    }
}

#[test]
fn volumes_are_mounted_from_their_location() {
    check_mount(json!({"name": "scratch", "mountPath": "/a"}), Ok(("/pods/u1/volumes/scratch", false)));
    check_mount(json!({"name": "host", "mountPath": "/a", "readOnly": true}), Ok(("/srv", true)));
    // Volumes of objects are read-only, even if the mount does not ask for it.
    check_mount(json!({"name": "conf", "mountPath": "/a"}), Ok(("/pods/u1/volumes/conf", true)));
    check_mount(json!({"name": "image", "mountPath": "/a"}), Ok(("", true)));
    check_mount(json!({"name": "none", "mountPath": "/a"}), Err("the pod has no volume none"));
}

#[test]
fn only_writable_volumes_of_the_agent_are_relabelled() {
    let check = |source: serde_json::Value, expected: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut volume = json!({"name": "data"});
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let pod = pod(json!({
            "containers": [{"name": "c", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
            "volumes": [volume],
        }));
        let plugins = plugins(&LocalDisks::new(dir.path(), dir.path()), dir.path());
        let volumes = PodVolumes::of(&pod, dir.path(), &plugins);
        // For volumes that a driver has mounted, a link leads to the mount.
        let place = dir.path().join("u1/volumes/vendor~driver/data");
        volumes.link("data", &place).unwrap();
        let made = volumes.mounts(&pod.spec.as_ref().unwrap().containers[0], &facts(), &|| false).unwrap();
        assert_eq!(made[0].selinux_relabel, expected, "{source}");
    };
    check(json!({"emptyDir": {}}), true);
    check(json!({"configMap": {"name": "m"}}), true);
    check(json!({"secret": {"secretName": "s"}}), true);
    check(json!({"hostPath": {"path": "/srv"}}), false);
    for (read_only, expected) in [(false, true), (true, false)] {
        check(json!({"flexVolume": {"driver": "vendor/driver", "readOnly": read_only}}), expected);
        check(json!({"csi": {"driver": "vendor", "readOnly": read_only}}), expected);
        check(json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": read_only}}), expected);
        check(json!({"gcePersistentDisk": {"pdName": "d", "readOnly": read_only}}), expected);
    }
}

#[test]
fn the_runtime_gets_the_sub_path_of_an_image() {
    let pod = pod(json!({
        "containers": [{"name": "c", "volumeMounts": [{"name": "image", "mountPath": "/a", "subPath": "x/y"}]}],
        "volumes": [{"name": "image", "image": {"reference": "x"}}],
    }));
    let mounts = PodVolumes::of(&pod, Path::new("/pods"), &Plugins::default()).mounts(
        &pod.spec.as_ref().unwrap().containers[0],
        &facts(),
        &|| false,
    );
    assert_eq!(mounts.unwrap()[0].image_sub_path, "x/y");
}

#[test]
fn impossible_mounts_are_refused() {
    check_mount(
        json!({"name": "image", "mountPath": "/a", "subPath": "../x"}),
        Err("must be relative and without '..'"),
    );
    check_mount(
        json!({"name": "host", "mountPath": "/a", "readOnly": true, "recursiveReadOnly": "Enabled"}),
        Err("`recursiveReadOnly: Enabled` needs"),
    );
    check_mount(
        json!({"name": "host", "mountPath": "/a", "readOnly": true, "recursiveReadOnly": "IfPossible"}),
        Ok(("/srv", true)),
    );
    check_mount(
        json!({"name": "scratch", "mountPath": "/a", "subPathExpr": "$(NONE)"}),
        Err("subPathExpr refers to the variable NONE"),
    );
    let deep = |levels: usize| vec!["a"; levels].join("/");
    let of_image = |part: &str| json!({"name": "image", "mountPath": "/a", "subPath": part});
    check_mount(of_image(&deep(2000)), Ok(("", true)));
    check_mount(of_image(&deep(5000)), Err("of 9999 bytes is longer than the 4096 bytes that Linux allows"));
    check_mount(
        json!({"name": "image", "mountPath": "/a", "subPathExpr": deep(5000)}),
        Err("subPathExpr is longer than 4096 bytes once its references are replaced"),
    );
    for path in ["../x", "/x", "a/../b"] {
        check_mount(
            json!({"name": "scratch", "mountPath": "/a", "subPath": path}),
            Err("must be relative and without '..'"),
        );
    }
}

#[test]
fn the_number_of_sub_path_folders_per_container_is_limited() {
    let check = |mounts: usize, expected: Result<usize, &str>| {
        let part = |n: usize| json!({"name": "image", "mountPath": format!("/{n}"), "subPath": vec!["a"; 2000].join("/")});
        let mounts: Vec<_> = (0..mounts).map(part).collect();
        let pod = pod(json!({
            "containers": [{"name": "c", "volumeMounts": mounts}],
            "volumes": [{"name": "image", "image": {"reference": "x"}}],
        }));
        let volumes = PodVolumes::of(&pod, Path::new("/pods"), &Plugins::default());
        let made = volumes.mounts(&pod.spec.as_ref().unwrap().containers[0], &facts(), &|| false);
        match (made.map(|mounts| mounts.len()).map_err(|e| e.to_string()), expected) {
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (made, expected) => assert_eq!(made, expected.map_err(str::to_owned)),
        }
    };
    check(10, Ok(10));
    check(11, Err("mount /10 of container c: the pod's volumes need more than 20000 files and folders"));
    check(365, Err("more than 20000 files and folders"));
}

#[test]
fn empty_dirs_have_the_kubelets_modes() {
    use std::os::unix::fs::PermissionsExt;
    let own_mounts = ["unshare", "--mount", "--propagation", "private"];
    let name = "empty_dirs_have_the_kubelets_modes";
    if !rustix::process::geteuid().is_root()
        || !beelet_testing::again::in_child(module_path!(), name, &own_mounts)
    {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pod = pod(json!({"containers": [], "securityContext": {"fsGroup": 123}, "volumes": [
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]}));
    let (volumes, done) = set_up(&pod, dir.path());
    done.unwrap();
    let mode = |volume: &str| volumes.path(volume).metadata().unwrap().permissions().mode() & 0o7777;
    // As under the kubelet, a group's folder passes the group on, and memory has a tmpfs's own mode.
    assert_eq!((mode("disk"), mode("memory")), (0o2777, 0o3777));
    volumes.tear_down().unwrap();
}

/// Returns a claim that is bound to a PersistentVolume with this spec.
fn claimed(name: &str, spec: serde_json::Value, read_only: bool) -> Claimed {
    let volume = json!({"metadata": {"name": name}, "spec": spec});
    let volume = Arc::new(serde_json::from_value(volume).unwrap());
    Claimed { volume, claim: Arc::default(), read_only }
}

fn claiming(uid: &str, group: Option<u32>) -> core::Pod {
    serde_json::from_value(json!({"metadata": {"uid": uid}, "spec": {
        "securityContext": {"fsGroup": group},
        "containers": [{"name": "c", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    }}))
    .unwrap()
}

/// Returns the plugins of a node with these disks and without drivers.
fn plugins(local: &LocalDisks, pods: &Path) -> Plugins {
    let flex = FlexVolumes::open("n1", (pods, pods), pods, VolumesInUse::default());
    let remote = RemoteDisks::open((pods, pods), VolumesInUse::default());
    let csi = Csi::open("n1", (pods, pods), VolumesInUse::default(), beelet_csi::Metrics::default());
    let csi = CsiVolumes { csi, events: Recorder::default(), node_name: "n1".to_owned() };
    Plugins::new(csi, &Disks::new(local.clone(), flex, remote), Operations::default())
}

/// Sets up the pod's volume `data` from its claim. Returns the volume's path on the machine.
fn set_up_claim(
    pod: &core::Pod,
    (pods, disks): (&Path, &LocalDisks),
    claimed: &Claimed,
) -> (PodVolumes, Result<PathBuf, Error>) {
    let volumes = PodVolumes::of(pod, pods, &plugins(disks, pods));
    let (objects, node) = (Objects::default(), beelet_spec::fixtures::node());
    let claims = [("data".to_owned(), claimed.clone())].into();
    let prepared = Prepared { claims, ..Prepared::default() };
    let done =
        volumes.set_up(&Sources { pod, objects: &objects, node: &node, prepared: &prepared }, &|| false);
    let container = &pod.spec.as_ref().unwrap().containers[0];
    let place =
        done.and_then(|()| Ok(PathBuf::from(&volumes.mounts(container, &facts(), &|| false)?[0].host_path)));
    (volumes, place)
}

#[test]
fn a_local_volume_outlives_its_pod() {
    use std::os::unix::fs::MetadataExt;
    let own_mounts = ["unshare", "--mount", "--propagation", "private"];
    let name = "a_local_volume_outlives_its_pod";
    if !rustix::process::geteuid().is_root()
        || !beelet_testing::again::in_child(module_path!(), name, &own_mounts)
    {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (pods, shelf) = (dir.path().join("pods"), dir.path().join("shelf"));
    fs::create_dir(&shelf).unwrap();
    fs::write(shelf.join("kept"), "1").unwrap();
    let disks = LocalDisks::new(dir.path(), &pods);
    let at = (pods.as_path(), &disks);
    let group = |path: &Path| path.metadata().unwrap().gid();

    let host = claimed("h", json!({"hostPath": {"path": shelf}}), false);
    let (volumes, place) = set_up_claim(&claiming("u0", None), at, &host);
    assert_eq!(place.unwrap(), shelf);
    volumes.tear_down().unwrap();

    let spec = |more: serde_json::Value| {
        let mut spec = json!({"local": {"path": shelf}, "accessModes": ["ReadWriteOnce"]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    let local = claimed("l", spec(json!({})), false);
    let (first, place) = set_up_claim(&claiming("u1", Some(1234)), at, &local);
    assert_eq!(place.unwrap(), pods.join("u1/volumes/kubernetes.io~local-volume/l"));
    assert_eq!((group(&shelf), group(&shelf.join("kept"))), (1234, 1234));
    // The volume keeps the first pod's group while that pod exists.
    let (second, place) = set_up_claim(&claiming("u2", Some(5678)), at, &local);
    assert_eq!(fs::read_to_string(place.unwrap().join("kept")).unwrap(), "1");
    assert_eq!(group(&shelf), 1234);
    let alone = claimed("l", spec(json!({"accessModes": ["ReadWriteOncePod"]})), false);
    let (third, place) = set_up_claim(&claiming("u3", None), at, &alone);
    assert!(place.unwrap_err().to_string().contains("already in use by another pod"));
    for volumes in [first, second, third] {
        volumes.tear_down().unwrap();
    }
    let (volumes, place) = set_up_claim(&claiming("u3", None), at, &alone);
    place.unwrap();
    volumes.tear_down().unwrap();

    let check = |name: &str, options: serde_json::Value, read_only: bool, writable: bool| {
        let (volumes, place) = set_up_claim(
            &claiming("u4", None),
            at,
            &claimed(name, spec(json!({"mountOptions": options})), read_only),
        );
        assert_eq!(fs::write(place.unwrap().join("new"), "").is_ok(), writable, "{name}");
        volumes.tear_down().unwrap();
    };
    check("w", json!(["noexec"]), false, true);
    check("r", json!([]), true, false);
    check("o", json!(["noexec"]), true, false);

    let (_, place) = set_up_claim(
        &claiming("u5", None),
        at,
        &claimed("n", json!({"rbd": {"image": "i", "monitors": []}}), false),
    );
    assert!(place.unwrap_err().to_string().contains("of this kind"));
    assert_eq!(fs::read_to_string(shelf.join("kept")).unwrap(), "1");
    assert!(mounts::below(dir.path()).unwrap().is_empty());
}

#[test]
fn a_volume_of_objects_stays_current_next_to_a_claim() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = dir.path().join("shelf");
    fs::create_dir(&shelf).unwrap();
    let pod = pod(json!({
        "containers": [{"name": "c", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "conf", "configMap": {"name": "m"}},
        ],
    }));
    let objects = |value: &str| {
        let map = json!({"metadata": {"name": "m", "namespace": "shop"}, "data": {"a": value}});
        let mut objects = Objects::default();
        let map = Arc::new(serde_json::from_value(map).unwrap());
        objects.add(Path::new(""), &beelet_model::objects::Object::ConfigMap(map));
        objects
    };
    let (old, new, node) = (objects("1"), objects("2"), beelet_spec::fixtures::node());
    let claims = [("data".to_owned(), claimed("pv", json!({"hostPath": {"path": shelf}}), false))].into();
    let prepared = Prepared { claims, ..Prepared::default() };
    let sources = Sources { pod: &pod, objects: &old, node: &node, prepared: &prepared };
    let pods = dir.path().join("pods");
    let disks = plugins(&LocalDisks::new(dir.path(), &pods), &pods);
    let volumes = PodVolumes::of(&pod, &pods, &disks);
    volumes.set_up(&sources, &|| false).unwrap();
    assert_eq!(volumes.refresh(&Sources { objects: &new, ..sources }).unwrap(), 1);
    assert_eq!(fs::read_to_string(volumes.path("conf").join("a")).unwrap(), "2");
}

#[test]
fn a_disk_is_formatted_mounted_once_for_all_pods_and_unmounted_with_the_last() {
    let own_mounts = ["unshare", "--mount", "--propagation", "private"];
    let name = "a_disk_is_formatted_mounted_once_for_all_pods_and_unmounted_with_the_last";
    if !rustix::process::geteuid().is_root()
        || !beelet_testing::again::in_child(module_path!(), name, &own_mounts)
    {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let Some(device) = LoopDevice::of(&image) else { return };
    let pods = dir.path().join("pods");
    let disks = LocalDisks::new(&dir.path().join("kubelet"), &pods);
    let at = (pods.as_path(), &disks);
    let global = dir.path().join("kubelet/plugins/kubernetes.io/local-volume/mounts/d");
    let disk = claimed("d", json!({"local": {"path": device.0, "fsType": "ext4"}}), false);
    let (first, place) = set_up_claim(&claiming("u1", None), at, &disk);
    fs::write(place.unwrap().join("kept"), "1").unwrap();
    let (second, place) = set_up_claim(&claiming("u2", None), at, &disk);
    assert_eq!(fs::read_to_string(place.unwrap().join("kept")).unwrap(), "1");
    first.tear_down().unwrap();
    assert!(mounts::is_mount_point(&global).unwrap());
    second.tear_down().unwrap();
    assert!(!global.exists());
    // The files on the disk stay.
    let (third, place) = set_up_claim(&claiming("u3", None), at, &disk);
    assert_eq!(fs::read_to_string(place.unwrap().join("kept")).unwrap(), "1");
    third.tear_down().unwrap();
    assert!(mounts::below(dir.path()).unwrap().is_empty());
}

/// A file as a disk.
struct LoopDevice(String);

impl LoopDevice {
    /// Returns None if the machine has no free loop device, e.g. in a container.
    fn of(file: &Path) -> Option<Self> {
        let made =
            std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        made.status.success().then(|| Self(String::from_utf8_lossy(&made.stdout).trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// Returns a pod with a ConfigMap and an emptyDir that its container mounts, and another unmounted volume.
fn restorable() -> core::Pod {
    pod(json!({
        "containers": [{"name": "c", "volumeMounts": [
            {"name": "conf", "mountPath": "/conf"}, {"name": "scratch", "mountPath": "/scratch"},
        ]}],
        "volumes": [
            {"name": "conf", "configMap": {"name": "m"}}, {"name": "scratch", "emptyDir": {}},
            {"name": "unused", "emptyDir": {}},
        ],
    }))
}

#[test]
fn lost_volumes_are_restored_and_lost_data_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let pod = restorable();
    let map = json!({"metadata": {"name": "m", "namespace": "shop"}, "data": {"a": "1", "b": "2"}});
    let map = beelet_model::objects::Object::ConfigMap(Arc::new(serde_json::from_value(map).unwrap()));
    let mut objects = Objects::default();
    objects.add(Path::new("/m"), &map);
    let node = beelet_spec::fixtures::node();
    let prepared = Prepared::default();
    let sources = Sources { pod: &pod, objects: &objects, node: &node, prepared: &prepared };
    let volumes = PodVolumes::of(&pod, dir.path(), &Plugins::default());
    volumes.set_up(&sources, &|| false).unwrap();
    let restored = || {
        let all = volumes.restore(&sources).unwrap().into_iter();
        all.map(|one| (one.volume, one.loss)).collect::<Vec<_>>()
    };
    let read = |file: &str| fs::read_to_string(volumes.path("conf").join(file)).unwrap_or_default();
    assert!(restored().is_empty());
    fs::remove_dir_all(dir.path().join("u1")).unwrap();
    assert_eq!(restored(), [("conf".to_owned(), Loss::Folder), ("scratch".to_owned(), Loss::Data)]);
    assert_eq!((read("a"), volumes.path("scratch").is_dir()), ("1".to_owned(), true));
    assert!(restored().is_empty());
    // Removes all entries of the folder, but not the folder itself.
    for file in fs::read_dir(volumes.path("conf")).unwrap().flatten() {
        let path = file.path();
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
    assert_eq!(restored(), [("conf".to_owned(), Loss::Files)]);
    assert_eq!((read("a"), read("b")), ("1".to_owned(), "2".to_owned()));
    fs::remove_file(volumes.path("conf").join("b")).unwrap();
    assert_eq!((volumes.refresh(&sources).unwrap(), read("b")), (1, "2".to_owned()));
    assert_eq!(volumes.refresh(&sources).unwrap(), 0);
}

#[test]
fn work_that_is_stopped_ends_before_the_next_volume_and_the_next_mount() {
    let dir = tempfile::tempdir().unwrap();
    let volumes: Vec<_> = (0..100).map(|n| json!({"name": format!("v{n}"), "emptyDir": {}})).collect();
    let mounts: Vec<_> =
        (0..100).map(|n| json!({"name": format!("v{n}"), "mountPath": format!("/{n}")})).collect();
    let pod = pod(json!({"containers": [{"name": "c", "volumeMounts": mounts}], "volumes": volumes}));
    let (objects, node) = (Objects::default(), beelet_spec::fixtures::node());
    let sources = Sources { pod: &pod, objects: &objects, node: &node, prepared: &Prepared::default() };
    let made = |pods: &str| fs::read_dir(dir.path().join(pods).join("u1/volumes")).unwrap().count();
    let after = |looks: usize| {
        let left = std::cell::Cell::new(looks);
        move || left.replace(left.get().saturating_sub(1)) == 0
    };
    let of = |pods: &str| PodVolumes::of(&pod, &dir.path().join(pods), &Plugins::default());
    assert!(matches!(of("some").set_up(&sources, &after(3)), Err(Error::Stopped)));
    assert_eq!(made("some"), 3);
    of("all").set_up(&sources, &|| false).unwrap();
    assert_eq!(made("all"), 100);
    let container = &pod.spec.as_ref().unwrap().containers[0];
    assert!(matches!(of("all").mounts(container, &facts(), &after(99)), Err(Error::Stopped)));
    assert_eq!(of("all").mounts(container, &facts(), &after(100)).unwrap().len(), 100);
}
