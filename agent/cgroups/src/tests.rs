//! Tests without a real cgroupfs: folders with the files that a kernel would make.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;

const NODES: [&str; 4] = ["kubepods", "kubepods/burstable", "kubepods/burstable/podx", "kubepods/podg"];

/// Makes a mount point with the given files in the root and in every cgroup of [`NODES`].
fn mount(dir: &TempDir, name: &str, files: &[(&str, &str)]) -> PathBuf {
    let mount = dir.path().join(name);
    for node in ["", "test"].map(str::to_owned).into_iter().chain(NODES.map(|node| format!("test/{node}"))) {
        fs::create_dir_all(mount.join(&node)).unwrap();
        for (file, content) in files {
            fs::write(mount.join(&node).join(file), content).unwrap();
        }
    }
    mount
}

fn fake_v2(dir: &TempDir) -> Cgroups {
    let files = [
        ("cgroup.controllers", "cpu memory pids misc\n"),
        ("cgroup.subtree_control", "cpu\n"),
        ("cgroup.procs", ""),
        ("cpu.weight", "100\n"),
        ("cpu.max", "max 100000\n"),
        ("memory.max", "max\n"),
        ("memory.current", "1048576\n"),
        ("pids.max", "max\n"),
    ];
    let mount = mount(dir, "unified", &files);
    let hierarchies = vec![Hierarchy { mount, is_v2: true, controllers: BTreeSet::new() }];
    Cgroups::with_layout(Layout { version: Version::V2, hierarchies }, "/test").unwrap()
}

fn fake_v1(dir: &TempDir) -> Cgroups {
    let v1 = |name: &str, files: &[(&str, &str)]| Hierarchy {
        mount: mount(dir, name, files),
        is_v2: false,
        controllers: [name.to_owned()].into(),
    };
    let cpu =
        v1("cpu", &[("cpu.shares", "1024"), ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")]);
    let memory = v1("memory", &[("memory.limit_in_bytes", "9223372036854771712")]);
    let cpuset = v1("cpuset", &[("cpuset.cpus", "\n"), ("cpuset.mems", "\n")]);
    fs::write(cpuset.mount.join("cpuset.cpus"), "0-3\n").unwrap();
    fs::write(cpuset.mount.join("cpuset.mems"), "0\n").unwrap();
    let hierarchies = vec![cpu, memory, cpuset];
    Cgroups::with_layout(Layout { version: Version::V1, hierarchies }, "/test/").unwrap()
}

fn files(values: &[(&str, &str)]) -> Files {
    values.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn v2_controllers_are_passed_down_and_values_written() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v2(&dir);
    let values = files(&[("cpu.weight", "39"), ("cpu.max", "50000 100000"), ("memory.max", "134217728")]);
    cgroups.ensure("/kubepods/burstable/podx", &values).unwrap();
    for (file, value) in &values {
        assert_eq!(cgroups.read("/kubepods/burstable/podx", file).as_deref(), Some(value.as_str()));
    }
    for parent in ["", "test", "test/kubepods", "test/kubepods/burstable"] {
        let file = dir.path().join("unified").join(parent).join("cgroup.subtree_control");
        assert_eq!(fs::read_to_string(file).unwrap(), "+memory +pids", "{parent}");
    }
}

/// Replaces a file by a directory, which even root can't write to.
fn refuse_controllers(cgroups: &Cgroups) {
    let unified = cgroups.paths.hierarchies().iter().find(|hierarchy| hierarchy.is_v2).unwrap();
    let file = unified.mount.join("cgroup.subtree_control");
    fs::write(unified.mount.join("cgroup.controllers"), "hugetlb\n").unwrap();
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
}

#[test]
fn on_a_hybrid_machine_the_controllers_of_cgroup2_are_not_needed() {
    let dir = TempDir::new().unwrap();
    let (v1, v2) = (fake_v1(&dir), fake_v2(&dir));
    let hierarchies = v1.paths.hierarchies().iter().chain(v2.paths.hierarchies()).cloned().collect();
    let layout = Layout { version: Version::Hybrid, hierarchies };
    let hybrid = Cgroups::with_layout(layout, "/test").unwrap();
    refuse_controllers(&hybrid);
    hybrid.ensure("/kubepods/podg", &Files::new()).unwrap();
    let error = v2.ensure("/kubepods/podg", &Files::new()).unwrap_err();
    assert!(error.to_string().contains("cgroup.subtree_control"), "{error}");
}

#[test]
fn a_root_that_is_missing_where_cpu_and_memory_are_is_refused_by_its_name() {
    let dir = TempDir::new().unwrap();
    for cgroups in [fake_v1(&dir), fake_v2(&dir)] {
        cgroups.paths.require_root().unwrap();
        let layout =
            Layout { version: cgroups.paths.version(), hierarchies: cgroups.paths.hierarchies().to_vec() };
        Cgroups::with_layout(layout.clone(), "/").unwrap().paths.require_root().unwrap();
        let error =
            Cgroups::with_layout(layout, "/tset").unwrap().paths.require_root().unwrap_err().to_string();
        assert!(
            error.starts_with("cgroupRoot: there is no cgroup /tset (") && error.contains("make the cgroup"),
            "{error}"
        );
    }
}

#[test]
fn a_trial_makes_no_root_and_leaves_none_of_its_cgroups() {
    let dir = TempDir::new().unwrap();
    let folders = |cgroups: &Cgroups, root: &str| {
        let mut hierarchies = cgroups.paths.hierarchies().to_vec();
        let mount = dir.path().join("pids");
        fs::create_dir_all(&mount).unwrap();
        hierarchies.push(Hierarchy { mount, is_v2: false, controllers: ["pids".to_owned()].into() });
        let layout = Layout { version: cgroups.paths.version(), hierarchies };
        Cgroups::over_folders(layout, root).unwrap()
    };
    let v1 = fake_v1(&dir);
    let misspelt = folders(&v1, "/tset");
    let error = Trial::make(&misspelt, "try").unwrap_err();
    assert!(matches!(error, CgroupError::NoRoot { .. }), "{error}");
    assert!(misspelt.paths.hierarchies().iter().all(|hierarchy| !hierarchy.mount.join("tset").exists()));
    // The root is missing in hierarchies without CPU and memory: the trial makes and removes it.
    let cgroups = folders(&v1, "/test/kubepods");
    let trial = Trial::make(&cgroups, "try").unwrap();
    let made = |folder: &str| {
        cgroups.paths.hierarchies().iter().filter(|one| one.mount.join(folder).exists()).count()
    };
    assert_eq!(made("test/kubepods/try"), 4);
    trial.remove().unwrap();
    assert_eq!((made("test/kubepods/try"), made("test/kubepods"), made("test")), (0, 3, 3));
    drop(Trial::make(&cgroups, "try").unwrap());
    assert_eq!((made("test/kubepods/try"), made("test")), (0, 3));
}

#[test]
fn v2_memory_below_what_is_in_use_is_refused() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v2(&dir);
    let error = cgroups.ensure("/kubepods/podg", &files(&[("memory.max", "4096")])).unwrap_err();
    assert!(matches!(error, CgroupError::WouldKill { limit: 4096, used: 1_048_576, .. }), "{error}");
    assert_eq!(cgroups.read("/kubepods/podg", "memory.max").as_deref(), Some("max"));
}

#[test]
fn v1_values_go_to_their_controllers_and_cpusets_are_inherited() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v1(&dir);
    let values = files(&[
        ("cpu.shares", "102"),
        ("cpu.cfs_quota_us", "5000"),
        ("cpu.cfs_period_us", "10000"),
        ("memory.limit_in_bytes", "134217728"),
    ]);
    cgroups.ensure("/kubepods/burstable/podx", &values).unwrap();
    for (file, value) in &values {
        assert_eq!(cgroups.read("/kubepods/burstable/podx", file).as_deref(), Some(value.as_str()));
    }
    assert_eq!(cgroups.read("/kubepods/burstable/podx", "cpuset.cpus").as_deref(), Some("0-3"));
    assert_eq!(cgroups.read("/kubepods/burstable", "cpuset.mems").as_deref(), Some("0"));
    assert_eq!(cgroups.read("/kubepods/podg", "cpuset.cpus").as_deref(), Some(""));
}

#[test]
fn a_file_with_its_value_is_not_written() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v1(&dir);
    let file = dir.path().join("memory/test/kubepods/podg/memory.limit_in_bytes");
    cgroups.ensure("/kubepods/podg", &files(&[("memory.limit_in_bytes", "-1")])).unwrap();
    assert_eq!(fs::read_to_string(file).unwrap(), "9223372036854771712");
}

#[test]
fn a_missing_controller_matters_only_if_a_value_needs_it() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v1(&dir);
    cgroups.ensure("/kubepods/podg", &files(&[("pids.max", "max")])).unwrap();
    let error = cgroups.ensure("/kubepods/podg", &files(&[("pids.max", "100")])).unwrap_err();
    assert!(error.to_string().starts_with("/kubepods/podg: pids.max cannot be set to \"100\""), "{error}");
}

#[test]
fn paths_lead_nowhere_but_down() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v2(&dir);
    for path in ["", "kubepods", "/..", "/kubepods/../..", "/kubepods//x", "/./x", "/kubepods/", "/x\n"] {
        assert!(matches!(cgroups.ensure(path, &Files::new()), Err(CgroupError::Path(_))), "{path:?}");
        assert!(matches!(cgroups.remove(path), Err(CgroupError::Path(_))), "{path:?}");
        assert!(
            matches!(kill::remaining(&cgroups, path), Err(CgroupError::NotAPod(_) | CgroupError::Path(_))),
            "{path:?}"
        );
        assert_eq!(cgroups.read(path, "cpu.max"), None, "{path:?}");
    }
    let error = cgroups.ensure("/kubepods/podg", &files(&[("memory/../../x", "1")])).unwrap_err();
    assert!(matches!(error, CgroupError::Path(_)), "{error}");
    assert!(Cgroups::with_layout(cgroups.paths.layout.clone(), "/a/../b").is_err());
}

#[test]
fn a_machine_without_the_memory_controller_gets_a_remedy() {
    let dir = TempDir::new().unwrap();
    let mut layout = fake_v1(&dir).paths.layout;
    layout.hierarchies.remove(1);
    let error = Cgroups::with_layout(layout, "/").unwrap_err().to_string();
    assert!(error.contains("cgroup_enable=memory"), "{error}");
}

#[test]
fn the_runtime_is_given_the_whole_path() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v2(&dir);
    assert_eq!(cgroups.paths.cri_parent("/kubepods/podg"), "/test/kubepods/podg");
    assert_eq!(
        Cgroups::with_layout(cgroups.paths.layout, "/").unwrap().paths.cri_parent("/kubepods/podg"),
        "/kubepods/podg"
    );
}

#[test]
fn pods_on_disk_are_listed() {
    let dir = TempDir::new().unwrap();
    assert_eq!(search::pods(&fake_v2(&dir)).unwrap(), ["/kubepods/burstable/podx", "/kubepods/podg"]);
}

#[test]
fn a_cgroup_is_known_by_its_inode() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v2(&dir);
    let inode = fs::metadata(dir.path().join("unified/test/kubepods/podg")).unwrap().ino();
    assert_eq!(cgroups.paths.cgroup_id("/kubepods/podg"), Some(inode));
    assert_eq!(cgroups.paths.cgroup_id("/kubepods/none"), None);
    let dir = TempDir::new().unwrap();
    assert_eq!(fake_v1(&dir).paths.cgroup_id("/kubepods/podg"), None);
}

#[test]
fn processes_are_named_when_a_cgroup_is_not_empty() {
    let dir = TempDir::new().unwrap();
    let cgroups = fake_v2(&dir);
    fs::write(dir.path().join("unified/test/kubepods/burstable/podx/cgroup.procs"), "12\n34\n0\n").unwrap();
    let error = cgroups.remove("/kubepods").unwrap_err().to_string();
    assert_eq!(error, "/kubepods still has processes: 12, 34");
}

#[test]
fn plain_folders_come_and_go_with_their_files() {
    let dir = TempDir::new().unwrap();
    let cgroups = Cgroups::over_folders(fake_v1(&dir).paths.layout, "/test").unwrap();
    let pod = "/kubepods/burstable/pody";
    cgroups.ensure(pod, &files(&[("cpu.shares", "102")])).unwrap();
    assert_eq!(cgroups.read(pod, "cpu.shares").as_deref(), Some("102"));
    assert_eq!(cgroups.read(pod, "cpuset.cpus").as_deref(), Some("0-3"));
    cgroups.remove(pod).unwrap();
    assert!(!cgroups.paths.exists(pod));
    assert!(cgroups.paths.exists("/kubepods/burstable/podx"));
}
