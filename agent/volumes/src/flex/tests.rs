//! Drivers that record their arguments and mount nothing. `tests/tests/tier1/flex.rs` has the tests with
//! mounts.

use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::*;

/// A node with the driver `v/d` and the pods' folders.
struct Node {
    dir: tempfile::TempDir,
    in_use: VolumesInUse,
}

impl Node {
    /// Makes a node whose driver answers commands by `script` and does not support other commands.
    fn new(script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("drivers/v~d");
        fs::create_dir_all(&place).unwrap();
        let script = format!(
            "#!/bin/sh\nfor one in \"$@\"; do printf '%s\\t' \"$one\"; done >> {0}\necho >> {0}\n\
             case $1 in\n{script}\n*) echo '{{\"status\": \"Not supported\"}}'; exit 1;;\nesac\n",
            dir.path().join("calls").display()
        );
        fs::write(place.join("d"), script).unwrap();
        fs::set_permissions(place.join("d"), fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir, in_use: VolumesInUse::default() }
    }

    fn volumes(&self) -> FlexVolumes {
        let (kubelet, pods) = (self.dir.path().join("kubelet"), self.pods());
        FlexVolumes::open("n1", (&kubelet, &pods), &self.dir.path().join("drivers"), self.in_use.clone())
    }

    fn pods(&self) -> PathBuf {
        self.dir.path().join("pods")
    }

    /// Returns the arguments of the driver's calls since the last time.
    fn calls(&self) -> Vec<Vec<String>> {
        let text = fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default();
        fs::write(self.dir.path().join("calls"), "").unwrap();
        let words = |line: &str| line.trim_end_matches('\t').split('\t').map(str::to_owned).collect();
        text.lines().map(words).collect()
    }

    fn commands(&self) -> Vec<String> {
        self.calls().into_iter().map(|call| call[0].clone()).collect()
    }

    fn names_in_use(&self) -> Vec<String> {
        self.in_use.subscribe().borrow().keys().cloned().collect()
    }
}

const OK: &str = r#"echo '{"status": "Success"}'"#;
const FLAT: &str = r#"init) echo '{"status": "Success", "capabilities": {"attach": false}}';;"#;

fn pod(uid: &str) -> Pod {
    let spec = json!({"containers": [], "volumes": [{"name": "data", "flexVolume": {"driver": "v/d"}}]});
    serde_json::from_value(
        json!({"metadata": {"name": "web", "namespace": "shop", "uid": uid}, "spec": spec}),
    )
    .unwrap()
}

fn wanted(change: &Value) -> FlexWanted {
    let mut of = json!({"driver": "v/d", "options": {"size": "1m"}});
    of.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    let volume = serde_json::from_value(json!({"name": "data", "flexVolume": of})).unwrap();
    let secret = BTreeMap::from([("password".to_owned(), b"hush".to_vec())]);
    FlexWanted { volume: policy::of_pod(&volume, "shop").unwrap(), secret, device: None }
}

#[test]
fn a_mount_only_driver_gets_the_pod_and_unmounts() {
    let node = Node::new(&format!("{FLAT}\nmount) touch $2/made; {OK};;\nunmount) rm $2/made; {OK};;"));
    let (volumes, folder) = (node.volumes(), node.pods().join("u1"));
    assert!(!volumes.attaches("v/d").unwrap());
    let place = volumes.mount_for_pod(&folder, &pod("u1"), &wanted(&json!({})), None).unwrap();
    assert_eq!(place, folder.join("volumes/v~d/data"));
    assert!(place.join("made").exists() && volumes.name_of_place(&folder, &place).is_some());
    let calls = node.calls();
    assert_eq!((calls.len(), &*calls[0][0], &*calls[1][0]), (2, "init", "mount"));
    assert_eq!(calls[1][1], place.display().to_string());
    let passed: Value = serde_json::from_str(&calls[1][2]).unwrap();
    let expected = json!({
        "size": "1m", "kubernetes.io/fsType": "", "kubernetes.io/readwrite": "rw",
        "kubernetes.io/pvOrVolumeName": "data", "kubernetes.io/pod.name": "web",
        "kubernetes.io/pod.namespace": "shop", "kubernetes.io/pod.uid": "u1",
        "kubernetes.io/serviceAccount.name": "", "kubernetes.io/secret/password": "aHVzaA==",
    });
    assert_eq!(passed, expected);
    assert!(!volumes.is_measured(&folder, &place) && volumes.may_relabel(&folder, &place));
    // An agent without any other state releases the volume, and only once.
    let volumes = node.volumes();
    volumes.release(&folder).unwrap();
    volumes.release(&folder).unwrap();
    assert_eq!(node.commands(), ["init", "unmount"]);
    assert!(!place.exists() && records::all::<PodRecord>(&folder.join(OF_POD)).is_empty());
}

#[test]
fn a_failing_driver_keeps_its_pod_until_it_succeeds() {
    let fails = r#"echo '{"status": "Failure", "message": "busy"}'; exit 1"#;
    let node = Node::new(&format!(
        "{FLAT}\nmount) if [ -e {0} ]; then {OK}; else {fails}; fi;;\n\
         unmount) if [ -e {0} ]; then {OK}; else {fails}; fi;;",
        "$(dirname $0)/healed"
    ));
    let (volumes, folder) = (node.volumes(), node.pods().join("u1"));
    let set_up = || volumes.mount_for_pod(&folder, &pod("u1"), &wanted(&json!({})), None);
    let why = set_up().unwrap_err().to_string();
    assert!(why.contains("mount command failed, status: Failure, reason: busy"), "{why}");
    assert!(!folder.join("volumes/v~d/data").exists());
    // The release covers everything that the failed call may have done; without a mount, it calls no driver.
    volumes.release(&folder).unwrap();
    let healed = node.dir.path().join("drivers/v~d/healed");
    fs::write(&healed, "").unwrap();
    let place = set_up().unwrap();
    fs::remove_file(&healed).unwrap();
    let why = volumes.release(&folder).unwrap_err().to_string();
    assert!(why.contains("reason: busy") && place.exists(), "{why}");
    // The release fails without the driver.
    let driver = node.dir.path().join("drivers/v~d/d");
    let away = node.dir.path().join("away");
    fs::rename(&driver, &away).unwrap();
    assert!(volumes.release(&folder).unwrap_err().to_string().contains("no volume plugin matched"));
    fs::rename(&away, &driver).unwrap();
    fs::write(&healed, "").unwrap();
    volumes.release(&folder).unwrap();
    assert!(!place.exists());
}

#[test]
fn a_device_is_attached_for_the_first_pod_and_detached_with_the_last() {
    let node = Node::new(&format!(
        "init) {OK};;\nattach) echo '{{\"status\": \"Success\", \"device\": \"/dev/x\"}}';;\n\
         waitforattach) echo '{{\"status\": \"Success\", \"device\": \"/dev/y\"}}';;\n\
         mountdevice) {OK};;\nmount) {OK};;\nunmount) {OK};;\ndetach) {OK};;"
    ));
    let (volumes, wanted) = (node.volumes(), wanted(&json!({})));
    let folders = ["u1", "u2"].map(|uid| node.pods().join(uid));
    for (folder, uid) in folders.iter().zip(["u1", "u2"]) {
        volumes.mount_for_pod(folder, &pod(uid), &wanted, None).unwrap();
    }
    let calls = node.calls();
    let commands: Vec<&str> = calls.iter().map(|call| &*call[0]).collect();
    // The driver mounts nothing here, so the second pod calls it again.
    let once = ["attach", "waitforattach", "mountdevice", "mount"];
    assert_eq!(commands, [&["init"][..], &once, &once].concat());
    let device = node.dir.path().join("kubelet/plugins/kubernetes.io/flexvolume/v/d/mounts/data");
    assert_eq!((&*calls[1][2], &*calls[2][1]), ("n1", "/dev/x"));
    assert_eq!((&*calls[3][1], &*calls[3][2]), (&*device.display().to_string(), "/dev/y"));
    assert!(!calls[3][3].contains("password"), "the Secret is for mounts alone");
    // A device of the same name with other options is another volume.
    let mut other = wanted;
    other.volume.options.insert("size".to_owned(), "2m".to_owned());
    let third = node.pods().join("u3");
    let why = volumes.mount_for_pod(&third, &pod("u3"), &other, None).unwrap_err().to_string();
    assert!(why.contains("with other options"), "{why}");
    volumes.release(&third).unwrap();
    // Recorded volumes are in use after a restart, too.
    let volumes = node.volumes();
    assert_eq!(node.names_in_use(), ["v/d/data"]);
    drop(node.calls());
    volumes.release(&folders[0]).unwrap();
    assert_eq!(node.commands(), ["init", "unmount"]);
    assert!(device.exists());
    assert_eq!(node.names_in_use(), ["v/d/data"]);
    volumes.release(&folders[1]).unwrap();
    let calls = node.calls();
    assert_eq!(calls.iter().map(|call| &*call[0]).collect::<Vec<_>>(), ["unmount", "detach"]);
    assert_eq!(&calls[1][1..], ["data", "n1"]);
    assert!(!device.exists() && node.names_in_use().is_empty());
}

#[test]
fn a_volume_never_gets_the_device_of_another_of_its_name() {
    let node = Node::new(&format!(
        "init) {OK};;\nattach) {OK};;\nmountdevice) {OK};;\nmount) {OK};;\nunmount) {OK};;\ndetach) {OK};;"
    ));
    let volumes = node.volumes();
    let folders = ["u1", "u2", "u3", "u4"].map(|uid| node.pods().join(uid));
    let set_up = |at: usize, size: &str| {
        let wanted = wanted(&json!({"options": {"size": size}}));
        volumes.mount_for_pod(&folders[at], &pod(&format!("u{}", at + 1)), &wanted, None)
    };
    let record = |at: usize| record_of(&folders[at], "v~d", "data");
    let known = || {
        let place = volumes.device_record("v~d", "data");
        records::read::<DeviceRecord>(&place).unwrap().map(|record| record.asked.0["size"].clone())
    };
    set_up(0, "1m").unwrap();
    assert!(set_up(1, "2m").unwrap_err().to_string().contains("with other options"));
    assert!(!records::exists(&record(1)), "a refused pod has no record");
    drop(node.calls());
    volumes.release(&folders[0]).unwrap();
    assert_eq!((node.commands(), known()), (vec!["unmount".to_owned(), "detach".to_owned()], None));
    set_up(1, "2m").unwrap();
    assert_eq!(known().as_deref(), Some("2m"));
    // A pod whose folder was removed without its driver leaves the device behind.
    fs::remove_dir_all(&folders[1]).unwrap();
    drop(node.calls());
    set_up(2, "1m").unwrap();
    assert_eq!(node.commands(), ["detach", "attach", "mountdevice", "mount"]);
    assert_eq!(known().as_deref(), Some("1m"));
    // A folder without a record holds nothing.
    fs::create_dir_all(record(3)).unwrap();
    volumes.release(&folders[2]).unwrap();
    assert_eq!((node.commands(), known()), (vec!["unmount".to_owned(), "detach".to_owned()], None));
}

#[test]
fn a_driver_that_prints_its_arguments_fails_without_the_secret() {
    let node = Node::new(&format!("{FLAT}\nmount) echo \"+ $3\"; exit 1;;"));
    let folder = node.pods().join("u1");
    let why =
        node.volumes().mount_for_pod(&folder, &pod("u1"), &wanted(&json!({})), None).unwrap_err().to_string();
    assert!(why.contains("answer to mount cannot be read"), "{why}");
    assert!(!why.contains("aHVzaA==") && !why.contains("hush") && !why.contains("size"), "{why}");
}

#[test]
fn devices_of_a_controller_are_not_attached_or_detached_here() {
    let node = Node::new(&format!("init) {OK};;\nmountdevice) {OK};;\nmount) {OK};;\nunmount) {OK};;"));
    let (volumes, folder) = (node.volumes(), node.pods().join("u1"));
    let wanted = FlexWanted { device: Some("/dev/z".to_owned()), ..wanted(&json!({})) };
    volumes.use_by(&wanted.volume, "u1");
    volumes.use_by(&wanted.volume, "u2");
    volumes.mount_for_pod(&folder, &pod("u1"), &wanted, None).unwrap();
    let calls = node.calls();
    let commands: Vec<&str> = calls.iter().map(|call| &*call[0]).collect();
    assert_eq!(commands, ["init", "waitforattach", "mountdevice", "mount"]);
    assert_eq!(calls[2][2], "/dev/z", "a driver without waitforattach gets the controller's device");
    volumes.release(&folder).unwrap();
    assert_eq!(node.commands(), ["unmount"]);
    assert_eq!(node.names_in_use(), ["v/d/data"], "another pod waits for it");
    volumes.release(&node.pods().join("u2")).unwrap();
    assert!(node.names_in_use().is_empty());
}

#[test]
fn no_program_is_started_for_a_file_system_that_needs_a_helper() {
    let name = "no_program_is_started_for_a_file_system_that_needs_a_helper";
    let dir = tempfile::tempdir().unwrap();
    for tool in ["mount", "blkid", "fsck", "mkfs.ext4", "mkfs.fuse.sh"] {
        let script = format!("#!/bin/sh\necho {tool} >> {}; exit 1\n", dir.path().join("calls").display());
        fs::write(dir.path().join(tool), script).unwrap();
        fs::set_permissions(dir.path().join(tool), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("PATH={}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    if !beelet_testing::again::in_child(module_path!(), name, &["env", &path]) {
        // The call for the ext4 volume.
        assert_eq!(fs::read_to_string(dir.path().join("calls")).unwrap(), "blkid\n");
        return;
    }
    let fails = |kind: &str| {
        // Neither the driver nor the volume may choose a helper by the device or the type.
        let node = Node::new("init|attach) echo '{\"status\": \"Success\", \"device\": \"/no/disk\"}';;");
        let wanted = wanted(&json!({ "fsType": kind }));
        let failed = node.volumes().mount_for_pod(&node.pods().join("u1"), &pod("u1"), &wanted, None);
        assert!(node.calls().iter().any(|call| call[0] == "mountdevice"), "the driver does not mount");
        failed.unwrap_err().to_string()
    };
    for kind in ["fuse.sh", "nfs", "ext4,fuse.sh", "-o", "a/b", "auto"] {
        let why = fails(kind);
        assert!(why.contains(&format!("fsType {kind:?} is refused")), "{why}");
    }
    let why = fails("ext4");
    assert!(why.starts_with("blkid failed"), "{why}");
}

#[test]
fn hostile_names_are_refused() {
    let node = Node::new(&format!("{FLAT}\nmount) {OK};;"));
    let (volumes, folder) = (node.volumes(), node.pods().join("u1"));
    let refused = |change: &dyn Fn(&mut FlexVolume), pod: &Pod, words: &str| {
        let mut wanted = wanted(&json!({}));
        change(&mut wanted.volume);
        let why = volumes.mount_for_pod(&folder, pod, &wanted, None).unwrap_err().to_string();
        assert!(why.contains(words), "{why}");
    };
    refused(&|volume| volume.name = "../x".to_owned(), &pod("u1"), "is not the name");
    refused(&|volume| volume.driver = "../v/d".to_owned(), &pod("u1"), "no volume plugin matched");
    refused(&|volume| volume.driver = "kubernetes.io/csi".to_owned(), &pod("u1"), "no volume plugin matched");
    let mut namesake = pod("u1");
    namesake.spec.as_mut().unwrap().volumes.as_mut().unwrap()[0].name = "v~d".to_owned();
    refused(&|_| {}, &namesake, "rename the volume");
    assert!(!folder.exists());
    let failed = |device: &str| mount_disk(device, Path::new("/nowhere"), &wanted(&json!({})).volume);
    assert!(failed("-o").unwrap_err().to_string().contains("is not the path of a device"));
}
