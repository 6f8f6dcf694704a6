//! A machine of folders and files, with programs that change them like the real ones: `iscsiadm` logs in to
//! listening portals, `multipath` flushes.

use std::{
    os::unix::fs::{PermissionsExt, symlink},
    time::Duration,
};

use beelet_policy::volumes::remote_disk as policy;
use beelet_testing::again;
use serde_json::{Value, json};

use super::*;

const TARGET: &str = "iqn.2001-04.com.example:shelf";

/// Logs in to portals whose name is a file in `listening`: each portal gets a session with the number in that
/// file, and a disk for unit 1, `sd<number>`.
const ISCSIADM: &str = r#"
echo "$@" >> $top/calls
portal=; login=; logout=; show=
while [ $# -gt 0 ]; do
  case $1 in
  -p) portal=$2; shift;;
  --login) login=1;;
  --logout) logout=1;;
  show) show=1;;
  refuse) echo "refused"; exit 6;;
  esac
  shift
done
[ -n "$show" ] && printf 'iface.iscsi_ifacename = default\niface.transport_name = tcp\niface.initiatorname = <empty>\n'
number=$(cat $top/listening/$portal 2>/dev/null)
host=$top/sys/class/iscsi_host/host$number
if [ -n "$login" ]; then
  [ -n "$number" ] || { echo "no portal answers"; exit 8; }
  session=$host/device/session$number
  connection=$session/connection$number:0/iscsi_connection/connection$number:0
  mkdir -p $session/iscsi_session/session$number $connection
  echo TARGET > $session/iscsi_session/session$number/targetname
  echo ${portal%:*} > $connection/address; echo ${portal##*:} > $connection/port
  mkdir -p $session/target$number:0:0/$number:0:0:1/block/sd$number
  mkdir -p $top/sys/class/scsi_host/host$number $top/sys/block/sd$number/device
  : > $top/sys/class/scsi_host/host$number/scan; : > $top/sys/block/sd$number/device/delete
  [ -e $top/dev/sd$number ] || : > $top/dev/sd$number
  ln -sfn ../../sd$number $top/dev/disk/by-path/ip-$portal-iscsi-TARGET-lun-1
fi
if [ -n "$logout" ]; then
  [ -d "$host" ] || exit 21
  rm -r $host $top/dev/disk/by-path/ip-$portal-iscsi-TARGET-lun-1
fi
exit 0
"#;

struct Fake {
    dir: tempfile::TempDir,
    in_use: VolumesInUse,
}

impl Fake {
    fn new() -> Self {
        let fake = Self { dir: tempfile::tempdir().unwrap(), in_use: VolumesInUse::default() };
        for folder in
            ["sys/class/scsi_host", "sys/block", "dev/disk/by-path", "dev/disk/by-id", "bin", "listening"]
        {
            fs::create_dir_all(fake.path(folder)).unwrap();
        }
        fake.program("iscsiadm", &ISCSIADM.replace("TARGET", TARGET));
        for name in ["multipath", "blockdev"] {
            fake.program(name, &format!("echo {name} \"$@\" >> $top/calls"));
        }
        fake
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn program(&self, name: &str, script: &str) {
        let path = self.path("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\ntop={}\n{script}", self.dir.path().display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn listens(&self, portal: &str, number: u32) {
        fs::write(self.path("listening").join(portal), number.to_string()).unwrap();
    }

    fn machine(&self) -> Machine {
        Machine {
            sys: self.path("sys"),
            dev: self.path("dev"),
            programs: Some(self.path("bin")),
            patience: Duration::ZERO,
        }
    }

    fn disks(&self) -> RemoteDisks {
        let (kubelet, pods) = (self.path("kubelet"), self.path("pods"));
        RemoteDisks::on(self.machine(), (&kubelet, &pods), self.in_use.clone())
    }

    fn pod(&self, uid: &str) -> PathBuf {
        self.path("pods").join(uid)
    }

    /// Returns the calls of the programs since the last time.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        fs::write(self.path("calls"), "").unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn says(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap_or_default()
    }

    fn names_in_use(&self) -> Vec<String> {
        self.in_use.subscribe().borrow().keys().cloned().collect()
    }

    /// Makes a multipath device of this name over these disks.
    fn multipath(&self, name: &str, over: &[&str]) {
        for one in over {
            fs::create_dir_all(self.path("sys/block").join(name).join("slaves").join(one)).unwrap();
        }
        fs::write(self.path("dev").join(name), "").unwrap();
    }
}

/// Returns the disk of a claim.
fn claimed(spec: &Value) -> RemoteWanted {
    let found = json!({"metadata": {"name": "pv-1"}, "spec": spec});
    let volume = policy::of_claim(&serde_json::from_value(found).unwrap(), false, "shop").unwrap().unwrap();
    RemoteWanted { volume, secret: BTreeMap::new() }
}

fn iscsi(more: &Value) -> RemoteWanted {
    let mut of = json!({"targetPortal": "10.0.0.1", "iqn": TARGET, "lun": 1});
    of.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    claimed(&json!({"iscsi": of, "volumeMode": "Block"}))
}

#[test]
fn a_disk_is_logged_in_to_once_scanned_for_alone_and_logged_out_from_with_the_last() {
    let fake = Fake::new();
    fake.listens("10.0.0.1:3260", 3);
    let disks = fake.disks();
    let mut wanted = iscsi(&json!({"chapAuthSession": true, "secretRef": {"name": "chap"}}));
    wanted.secret = BTreeMap::from([("node.session.auth.password".to_owned(), "hush".to_owned())]);
    disks.use_by(&wanted.volume, "u1");
    let device = disks.mount_for_pod(&fake.pod("u1"), &wanted, None).unwrap();
    assert_eq!(device.canonicalize().unwrap(), fake.path("dev/sd3").canonicalize().unwrap());
    let node = format!("-m node -p 10.0.0.1:3260 -T {TARGET}");
    let discovery = "-m discoverydb -t sendtargets -p 10.0.0.1:3260 -I default";
    let expected = [
        "-m iface -I default -o show".to_owned(),
        format!("{discovery} -o new"),
        format!("{discovery} --discover"),
        format!("{node} -I default -o update -n node.session.scan -v manual"),
        format!("{node} -I default -o update -n node.session.auth.authmethod -v CHAP"),
        format!("{node} -I default -o update -n node.session.auth.password -v hush"),
        format!("{node} -I default --login"),
        format!("{node} -o update -n node.startup -v manual"),
    ];
    assert_eq!(fake.calls(), expected);
    assert_eq!(fake.says("sys/class/scsi_host/host3/scan"), "0 0 1");
    // A second pod and an agent without state do not log in again.
    let disks = fake.disks();
    assert_eq!(fake.names_in_use(), [format!("kubernetes.io/iscsi/10.0.0.1:{TARGET}:1")]);
    disks.mount_for_pod(&fake.pod("u2"), &wanted, None).unwrap();
    assert_eq!(fake.calls(), ["-m iface -I default -o show"]);
    disks.release(&fake.pod("u1")).unwrap();
    assert!(fake.calls().is_empty() && !fake.names_in_use().is_empty());
    disks.release(&fake.pod("u2")).unwrap();
    let expected = [
        format!("blockdev --flushbufs {}", fake.path("dev/sd3").display()),
        format!("{node} -I default --logout"),
        format!("{node} -I default -o delete"),
    ];
    assert_eq!(fake.calls(), expected);
    assert_eq!(fake.says("sys/block/sd3/device/delete"), "1");
    assert!(fake.names_in_use().is_empty());
    disks.release(&fake.pod("u2")).unwrap();
    assert!(fake.calls().is_empty(), "there is nothing left to give back");
}

#[test]
fn another_disk_of_a_target_keeps_its_session() {
    let fake = Fake::new();
    fake.listens("10.0.0.1:3260", 3);
    let disks = fake.disks();
    disks.mount_for_pod(&fake.pod("u1"), &iscsi(&json!({})), None).unwrap();
    let mut other = iscsi(&json!({"lun": 2}));
    other.volume.name = "pv-2".to_owned();
    // The disk has not appeared yet: the agent releases everything that the attempt may have done.
    let why = disks.mount_for_pod(&fake.pod("u2"), &other, None).unwrap_err().to_string();
    assert!(why.contains("Timed out waiting"), "{why}");
    drop(fake.calls());
    disks.release(&fake.pod("u1")).unwrap();
    assert!(!fake.calls().iter().any(|call| call.contains("--logout")));
    disks.release(&fake.pod("u2")).unwrap();
    assert_eq!(fake.calls().iter().filter(|call| call.contains("--logout")).count(), 1);
}

#[test]
fn all_answering_portals_are_used_by_multipath() {
    let fake = Fake::new();
    fake.listens("10.0.0.2:3260", 4);
    fake.listens("10.0.0.3:3260", 5);
    let disks = fake.disks();
    let wanted = iscsi(&json!({"portals": ["10.0.0.2:3260", "10.0.0.3"]}));
    let device = disks.mount_for_pod(&fake.pod("u1"), &wanted, None).unwrap();
    assert!(device.ends_with(format!("ip-10.0.0.2:3260-iscsi-{TARGET}-lun-1")), "{device:?}");
    let logins = fake.calls().iter().filter(|call| call.ends_with("--login")).count();
    assert_eq!(logins, 2 + ROUNDS_OF_ONE_THAT_IS_AWAY);
    disks.release(&fake.pod("u1")).unwrap();
    fake.multipath("dm-0", &["sd4", "sd5"]);
    let device = disks.mount_for_pod(&fake.pod("u1"), &wanted, None).unwrap();
    assert_eq!(device, fake.path("dev/dm-0"));
    drop(fake.calls());
    disks.release(&fake.pod("u1")).unwrap();
    let calls = fake.calls();
    assert_eq!(calls[0], format!("multipath -f {}", fake.path("dev/dm-0").display()));
    assert_eq!(calls.iter().filter(|call| call.contains("--logout")).count(), 3);
}

/// With two portals that answer, the third is tried twice.
const ROUNDS_OF_ONE_THAT_IS_AWAY: usize = 2;

#[test]
fn an_unreachable_target_is_an_error_and_leaves_no_interface() {
    let fake = Fake::new();
    let disks = fake.disks();
    let wanted = iscsi(&json!({"initiatorName": "iqn.2001-04.com.example:node"}));
    let why = disks.mount_for_pod(&fake.pod("u1"), &wanted, None).unwrap_err().to_string();
    assert!(why.contains("failed to get any path") && why.contains("no portal answers"), "{why}");
    let calls = fake.calls();
    let interface = "-m iface -I 10.0.0.1:3260:pv-1";
    assert_eq!(calls[1], format!("{interface} -o new"));
    let initiator = "iface.initiatorname -v iqn.2001-04.com.example:node";
    assert!(calls.contains(&format!("{interface} -o update -n {initiator}")), "{calls:?}");
    assert_eq!(calls.last().unwrap(), &format!("{interface} -o delete"));
    // A pod that never had its disk can be released, even on a node without iscsiadm.
    fs::rename(fake.path("bin/iscsiadm"), fake.path("bin/away")).unwrap();
    disks.release(&fake.pod("u1")).unwrap();
    fs::rename(fake.path("bin/away"), fake.path("bin/iscsiadm")).unwrap();
    // The error does not contain the value of a Secret that iscsiadm refuses.
    let mut wanted = iscsi(&json!({"chapAuthDiscovery": true, "secretRef": {"name": "chap"}}));
    wanted.secret = BTreeMap::from([("discovery.sendtargets.auth.password".to_owned(), "refuse".to_owned())]);
    let why = disks.mount_for_pod(&fake.pod("u1"), &wanted, None).unwrap_err().to_string();
    assert!(why.contains("auth.password") && !why.contains("refuse"), "{why}");
}

fn fc(of: &Value) -> RemoteWanted {
    claimed(&json!({"fc": of, "volumeMode": "Block"}))
}

#[test]
fn a_disk_on_fibre_channel_is_found_by_its_links_and_forgotten_with_the_last_pod() {
    let fake = Fake::new();
    fs::create_dir_all(fake.path("sys/class/scsi_host/host0")).unwrap();
    fs::write(fake.path("sys/class/scsi_host/host0/scan"), "").unwrap();
    for name in ["sda", "sdb", "sdc"] {
        fs::write(fake.path("dev").join(name), "").unwrap();
        fs::create_dir_all(fake.path("sys/block").join(name).join("device")).unwrap();
        fs::write(fake.path("sys/block").join(name).join("device/delete"), "").unwrap();
    }
    let by_path = fake.path("dev/disk/by-path");
    symlink("../../sda", by_path.join("pci-0000:41:00.0-fc-0x5006-lun-0")).unwrap();
    symlink("../../sdb", by_path.join("fc-0x5006-lun-01")).unwrap();
    symlink("../../sdc", fake.path("dev/disk/by-id/scsi-VENDOR_1")).unwrap();
    let disks = fake.disks();
    let unit = fc(&json!({"targetWWNs": ["5006"], "lun": 0}));
    assert_eq!(disks.mount_for_pod(&fake.pod("u1"), &unit, None).unwrap(), fake.path("dev/sda"));
    assert_eq!(fake.says("sys/class/scsi_host/host0/scan"), "- - -");
    let named = fc(&json!({"wwids": ["VENDOR 1"]}));
    assert_eq!(disks.mount_for_pod(&fake.pod("u2"), &named, None).unwrap(), fake.path("dev/sdc"));
    let none = fc(&json!({"targetWWNs": ["5007"], "lun": 0}));
    assert_eq!(
        disks.mount_for_pod(&fake.pod("u3"), &none, None).unwrap_err().to_string(),
        "no fc disk found"
    );
    disks.release(&fake.pod("u3")).unwrap();
    disks.release(&fake.pod("u1")).unwrap();
    let deleted = |name: &str| fake.says(&format!("sys/block/{name}/device/delete"));
    assert_eq!((&*deleted("sda"), &*deleted("sdb"), &*deleted("sdc")), ("1", "", ""));
    // Several paths are one disk.
    fake.multipath("dm-1", &["sdb", "sdc"]);
    drop(fake.calls());
    assert_eq!(disks.mount_for_pod(&fake.pod("u4"), &named, None).unwrap(), fake.path("dev/dm-1"));
    disks.release(&fake.pod("u2")).unwrap();
    assert_eq!(deleted("sdc"), "", "another pod has it");
    disks.release(&fake.pod("u4")).unwrap();
    assert_eq!((&*deleted("sdb"), &*deleted("sdc")), ("1", "1"));
    assert_eq!(fake.calls()[0], format!("multipath -f {}", fake.path("dev/dm-1").display()));
}

#[test]
fn a_disk_for_one_pod_is_refused_to_a_second() {
    let fake = Fake::new();
    fs::write(fake.path("dev/sdc"), "").unwrap();
    symlink("../../sdc", fake.path("dev/disk/by-id/scsi-w1")).unwrap();
    let spec = json!({"fc": {"wwids": ["w1"]}, "volumeMode": "Block", "accessModes": ["ReadWriteOncePod"]});
    let (disks, wanted) = (fake.disks(), claimed(&spec));
    disks.mount_for_pod(&fake.pod("u1"), &wanted, None).unwrap();
    disks.mount_for_pod(&fake.pod("u1"), &wanted, None).unwrap();
    let why = disks.mount_for_pod(&fake.pod("u2"), &wanted, None).unwrap_err().to_string();
    assert!(why.contains("ReadWriteOncePod"), "{why}");
    disks.release(&fake.pod("u1")).unwrap();
    disks.mount_for_pod(&fake.pod("u2"), &wanted, None).unwrap();
}

#[test]
fn a_disk_is_formatted_and_mounted_once_for_all_pods_and_comes_off_with_the_last() {
    let own_mounts = ["unshare", "--mount", "--propagation", "private"];
    let name = "a_disk_is_formatted_and_mounted_once_for_all_pods_and_comes_off_with_the_last";
    let loops = Path::new("/dev/loop-control").exists();
    if !rustix::process::geteuid().is_root() || !loops || !again::in_child(module_path!(), name, &own_mounts)
    {
        return;
    }
    let fake = Fake::new();
    fake.listens("10.0.0.1:3260", 3);
    fs::File::create(fake.path("dev/sd3")).unwrap().set_len(16 << 20).unwrap();
    let mut wanted = iscsi(&json!({"fsType": "ext4"}));
    wanted.volume.is_block = false;
    let disks = fake.disks();
    let places = ["u1", "u2"].map(|uid| disks.mount_for_pod(&fake.pod(uid), &wanted, None).unwrap());
    assert!(places[0].ends_with("u1/volumes/kubernetes.io~iscsi/pv-1"), "{places:?}");
    fs::write(places[0].join("written"), "1").unwrap();
    assert!(places[1].join("written").exists());
    let folder = format!("kubelet/plugins/kubernetes.io/iscsi/iface-default/10.0.0.1:3260-{TARGET}-lun-1");
    let mounted = fake.path(&folder);
    assert!(mounts::is_mount_point(&mounted).unwrap());
    let disks = fake.disks();
    disks.release(&fake.pod("u1")).unwrap();
    assert!(!mounts::is_mount_point(&places[0]).unwrap() && mounts::is_mount_point(&mounted).unwrap());
    disks.release(&fake.pod("u2")).unwrap();
    assert!(!mounted.exists() && !mounts::is_mount_point(&places[1]).unwrap());
    assert!(fake.calls().iter().any(|call| call.contains("--logout")));
    // The second mount shows the written file: the disk is formatted only once.
    let place = disks.mount_for_pod(&fake.pod("u3"), &wanted, None).unwrap();
    assert!(place.join("written").exists());
    disks.release(&fake.pod("u3")).unwrap();
}
