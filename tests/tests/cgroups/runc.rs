//! The cgroup that a real runc creates for a container, compared with the agent's plan: the values that
//! runc's own formula changes, setting them through runc, a resize that keeps the container, and the pod's
//! end, which leaves nothing.
//!
//! The tests run on this machine and in the guests of `cargo xtask vm`. A guest's root is the kernel's
//! initial one, from which pivot_root(2) is impossible; so runc is started in a tmpfs with everything of the
//! root in it.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use beelet_cgroups::{Adjust, Cgroups, Files, Version, search};
use beelet_policy::resources::cgroups::{
    CgroupConfig, CgroupVersion, ContainerResources, NodeAmounts, container_cgroup, container_resources,
    pod_cgroup,
};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::{images, require, requires, workdir};
use beelet_units::cgroup_driver::CgroupDriver;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

const ID: &str = "main";
const PATIENCE: Duration = Duration::from_secs(60);

/// Script that makes a tmpfs with everything of the root in it, and runs its other arguments there.
const IN_TMPFS: &str = r#"
new=$1; shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$new"
for path in /*; do
  if [ -L "$path" ]; then ln -s "$(readlink "$path")" "$new$path"
  elif [ -d "$path" ]; then mkdir "$new$path"; mount -o rbind "$path" "$new$path"
  fi
done
exec chroot "$new" "$@"
"#;

/// Values for one pod with one container, as the agent would request them.
struct Wanted {
    pod: String,
    pod_files: Files,
    files: Files,
    resources: ContainerResources,
}

fn wanted(version: Version, cpu: &str, memory: &str) -> Wanted {
    let amounts = json!({"cpu": cpu, "memory": memory});
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "runc", "uid": "runc"},
        "spec": {"containers": [{"name": ID, "resources": {"requests": amounts, "limits": amounts}}]},
    }))
    .unwrap();
    let version = if version == Version::V2 { CgroupVersion::V2 } else { CgroupVersion::V1 };
    let node =
        NodeAmounts { memory_capacity: 1 << 33, allocatable_millis: 8000, allocatable_memory: 1 << 33 };
    let config = CgroupConfig::new(version, node);
    let container = &pod.spec.as_ref().unwrap().containers[0];
    let of_pod = pod_cgroup(&pod, &config).unwrap();
    Wanted {
        pod: of_pod.path,
        pod_files: of_pod.files,
        files: container_cgroup(&pod, container, &config).unwrap().files,
        resources: container_resources(&pod, container, &config).unwrap(),
    }
}

/// Returns the resources in the form of OCI's runtime specification, with `unified` only if not empty: runc
/// refuses that field on version 1.
fn oci(resources: &ContainerResources, unified: &Files) -> Value {
    let mut oci = json!({
        "cpu": {"shares": resources.cpu_shares, "quota": resources.cpu_quota, "period": resources.cpu_period},
        "memory": {"limit": resources.memory_limit_bytes},
    });
    if !unified.is_empty() {
        oci["unified"] = json!(unified);
    }
    oci
}

/// A container that runc runs alone.
struct Runc {
    dir: tempfile::TempDir,
}

impl Runc {
    /// Creates a bundle with busybox, which sleeps.
    fn bundle(cgroup: &str, resources: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let rootfs = dir.path().join("bundle/rootfs");
        for folder in ["bin", "dev", "proc"] {
            fs::create_dir_all(rootfs.join(folder)).unwrap();
        }
        fs::create_dir(dir.path().join("root")).unwrap();
        fs::copy(images::busybox().unwrap(), rootfs.join("bin/busybox")).unwrap();
        let mount = |target: &str, kind: &str| json!({"destination": target, "type": kind, "source": kind});
        let config = json!({
            "ociVersion": "1.0.2",
            "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/busybox", "sleep", "1000"]},
            "root": {"path": "rootfs"},
            "mounts": [mount("/proc", "proc"), mount("/dev", "tmpfs")],
            "linux": {
                "cgroupsPath": cgroup,
                "namespaces": [{"type": "pid"}, {"type": "mount"}],
                "resources": resources,
            },
        });
        fs::write(dir.path().join("bundle/config.json"), config.to_string()).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command line of `runc` with its state in a folder of its own.
    fn arguments(&self) -> Vec<String> {
        let runc = requires::find_program("runc").unwrap();
        [runc, "--root".into(), self.path("state")].map(|part| part.display().to_string()).into()
    }

    /// Starts the container and returns its first process.
    fn start(&self) -> u32 {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-ec", IN_TMPFS, "sh"]).arg(self.path("root")).args(self.arguments());
        command.args(["run", "--detach", "--no-new-keyring", "--pid-file"]).arg(self.path("pid"));
        command.arg("--bundle").arg(self.path("bundle")).arg(ID);
        // The container keeps the descriptors open, so a pipe would never reach its end.
        let output = fs::File::create(self.path("output")).unwrap();
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        let status = command.status().unwrap();
        let text = fs::read_to_string(self.path("output")).unwrap();
        assert!(status.success(), "runc ended with {status}: {text}");
        fs::read_to_string(self.path("pid")).unwrap().trim().parse().unwrap()
    }

    fn update(&self, resources: &Value) {
        let arguments = self.arguments();
        let mut command = Command::new(&arguments[0]);
        command.args(&arguments[1..]).args(["update", "--resources", "-", ID]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(resources.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Returns the files of a container that differ from `files`, with their contents.
fn differing(cgroups: &Cgroups, path: &str, files: &Files) -> BTreeMap<String, String> {
    let (changes, failed) = cgroups.differences(path, files);
    assert!(failed.is_empty(), "{failed:?}");
    changes.into_iter().map(|change| (change.file, change.from)).collect()
}

fn unified(wanted: &Wanted) -> Files {
    let weight = wanted.files.get("cpu.weight");
    weight.map(|weight| ("cpu.weight".to_owned(), weight.clone())).into_iter().collect()
}

fn runs(pid: u32) -> bool {
    // The link of a zombie's program is missing.
    fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

#[test]
fn a_container_that_runc_made_is_set_as_planned_resized_in_place_and_ended_with_its_pod() {
    require!(runc);
    let root = CgroupRoot::new(&workdir::unique("beelet-cgroup-runc")).unwrap();
    let cgroups = Cgroups::discover(root.path(), CgroupDriver::Cgroupfs).unwrap();
    let small = wanted(cgroups.paths.version(), "1", "64Mi");
    let path = format!("{}/{ID}", small.pod);
    cgroups.ensure(&small.pod, &small.pod_files).unwrap();

    // The runtime creates the cgroup by its own formula: only the weight may differ from the plan.
    let runc = Runc::bundle(&cgroups.paths.cri_parent(&path), &oci(&small.resources, &Files::new()));
    let pid = runc.start();
    assert!(cgroups.pids(&path).unwrap().contains(&pid));
    assert_eq!(search::container(&cgroups, &small.pod, ID).as_deref(), Some(path.as_str()));
    let differs = differing(&cgroups, &path, &small.files);
    eprintln!("runc's values that differ from the plan: {differs:?}");
    assert!(differs.keys().all(|file| file == "cpu.weight"), "{differs:?}");
    runc.update(&oci(&small.resources, &unified(&small)));
    assert_eq!(differing(&cgroups, &path, &small.files), BTreeMap::new());
    let expected = match cgroups.paths.version() {
        Version::V2 => [("cpu.weight", "100"), ("cpu.max", "100000 100000"), ("memory.max", "67108864")],
        _ => [("cpu.shares", "1024"), ("cpu.cfs_quota_us", "100000"), ("memory.limit_in_bytes", "67108864")],
    };
    for (file, value) in expected {
        assert_eq!(cgroups.read(&path, file).as_deref(), Some(value), "{file}");
    }

    // The container grows, with the pod first, and then shrinks, with the pod last: its process continues.
    let large = wanted(cgroups.paths.version(), "2500m", "128Mi");
    let pod = |wanted: &Wanted| BTreeMap::from([(wanted.pod.clone(), wanted.pod_files.clone())]);
    for (wanted, pod_first) in [(&large, true), (&small, false)] {
        let adjust = || {
            let report = cgroups.adjust(&pod(wanted), Adjust::All);
            assert!(report.failed.is_empty() && !report.changed.is_empty(), "{report:?}");
        };
        if pod_first {
            adjust();
        }
        runc.update(&oci(&wanted.resources, &unified(wanted)));
        if !pod_first {
            adjust();
        }
        assert_eq!(differing(&cgroups, &path, &wanted.files), BTreeMap::new());
        assert_eq!(differing(&cgroups, &wanted.pod, &wanted.pod_files), BTreeMap::new());
        assert!(runs(pid) && cgroups.pids(&path).unwrap() == [pid]);
    }

    ends(&cgroups, &root, &small.pod, pid);
}

/// Checks that the remaining process is killed with the pod, and that nothing of the pod is left.
fn ends(cgroups: &Cgroups, root: &CgroupRoot, pod: &str, pid: u32) {
    // Only the machine's first process reaps the killed one.
    let killed = crate::destroyed(cgroups, pod, PATIENCE);
    assert!(!runs(pid), "the container's process runs on; killed: {killed:?}");
    assert!(root.dirs().iter().all(|dir| !dir.join(&pod[1..]).exists()));
}
