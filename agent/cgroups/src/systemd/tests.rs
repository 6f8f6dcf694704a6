//! Tests over plain folders, with a systemd that only records its calls, and makes folders.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use beelet_systemd::manager::Value;
use beelet_units::cgroup_driver::CgroupDriver;
use tempfile::TempDir;

use super::super::{Cgroups, Hierarchy, Layout, Store, Version, names::Names};
use super::*;

/// Files in a slice's folder, as the kernel makes them.
const FILES: [(&str, &str); 8] = [
    ("cgroup.controllers", "cpu memory pids\n"),
    ("cgroup.subtree_control", "cpu memory pids\n"),
    ("cgroup.procs", ""),
    ("cpu.weight", "100\n"),
    ("cpu.max", "max 100000\n"),
    ("memory.max", "max\n"),
    ("memory.current", "1048576\n"),
    ("pids.max", "max\n"),
];

#[derive(Debug, Clone)]
struct Notes {
    mount: PathBuf,
    asked: Arc<Mutex<Vec<String>>>,
    is_away: Arc<Mutex<bool>>,
}

impl Notes {
    fn record(&self, action: &'static str, unit: &str, properties: &[Property]) -> Result<(), CgroupError> {
        if *self.is_away.lock().unwrap() {
            let (action, why) = (format!("{action} {unit}"), "no answer".to_owned());
            return Err(beelet_systemd::Error { service: "systemd", action, why }.into());
        }
        let values = properties.iter().filter_map(|property| match property.value {
            Value::Amount(amount) => Some(format!(" {}={amount}", property.name)),
            _ => None,
        });
        let line = format!("{action} {unit}{}", values.collect::<String>());
        self.asked.lock().unwrap().push(line);
        Ok(())
    }

    /// Returns the calls since the last time.
    fn drain(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    fn dir(&self, unit: &str) -> PathBuf {
        let (mut dir, mut end) = (self.mount.clone(), 0);
        while let Some(dash) = unit[end..].find('-') {
            dir.push(format!("{}.slice", &unit[..end + dash]));
            end += dash + 1;
        }
        dir.join(unit)
    }
}

impl Units for Notes {
    fn start(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError> {
        self.record("start", unit, properties)?;
        let dir = self.dir(unit);
        fs::create_dir_all(&dir).unwrap();
        for (file, content) in FILES {
            fs::write(dir.join(file), content).unwrap();
        }
        Ok(())
    }

    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError> {
        self.record("set", unit, properties)
    }

    fn rewrites(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    fn stop(&self, unit: &str) -> Result<(), CgroupError> {
        self.record("stop", unit, &[])?;
        let _ = fs::remove_dir_all(self.dir(unit));
        Ok(())
    }
}

fn machine(root: &str) -> (TempDir, Cgroups, Notes) {
    let dir = tempfile::tempdir().unwrap();
    for (file, content) in FILES {
        fs::write(dir.path().join(file), content).unwrap();
    }
    let notes = Notes { mount: dir.path().to_owned(), asked: Arc::default(), is_away: Arc::default() };
    let hierarchy = Hierarchy { mount: dir.path().to_owned(), is_v2: true, controllers: BTreeSet::new() };
    let layout = Layout { version: Version::V2, hierarchies: vec![hierarchy] };
    let mut cgroups = Cgroups::with_layout(layout, root).unwrap();
    cgroups.paths.names = Names::new(CgroupDriver::Systemd, root);
    cgroups.store = Store::Systemd(Arc::new(Slices::new(Box::new(notes.clone()))));
    (dir, cgroups, notes)
}

fn files(values: &[(&str, &str)]) -> Files {
    values.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
}

const POD: &str = "/kubepods/burstable/poda-b";
const SLICE: &str = "kubepods-burstable-poda_b.slice";

#[test]
fn a_pods_slices_are_started_from_the_top_once_and_its_values_are_properties() {
    let (_dir, cgroups, notes) = machine("");
    let values = files(&[("cpu.weight", "39"), ("cpu.max", "50000 100000"), ("memory.max", "134217728")]);
    cgroups.ensure(POD, &values).unwrap();
    let asked = notes.drain();
    let set = "CPUQuotaPerSecUSec=500000 CPUQuotaPeriodUSec=100000 CPUWeight=39 MemoryMax=134217728";
    assert_eq!(
        asked[..3],
        [
            "start kubepods.slice".to_owned(),
            "start kubepods-burstable.slice".to_owned(),
            format!("start {SLICE} {set}"),
        ]
    );
    for (file, value) in &values {
        assert_eq!(cgroups.read(POD, file).as_deref(), Some(value.as_str()));
    }
    cgroups.ensure(POD, &values).unwrap();
    assert!(notes.drain().is_empty());
    assert_eq!(super::super::search::pods(&cgroups).unwrap(), [POD]);
    assert_eq!(cgroups.paths.cri_parent(POD), format!("/kubepods.slice/kubepods-burstable.slice/{SLICE}"));
}

#[test]
fn a_change_is_a_property_before_it_is_in_the_file_and_neither_while_the_bus_is_away() {
    let (_dir, cgroups, notes) = machine("");
    cgroups.ensure(POD, &Files::new()).unwrap();
    notes.drain();
    let wanted = [(POD.to_owned(), files(&[("pids.max", "100")]))].into();
    *notes.is_away.lock().unwrap() = true;
    let report = cgroups.adjust(&wanted, super::super::Adjust::All);
    assert_eq!(report.failed[0].to_string(), format!("systemd did not set {SLICE}: no answer"));
    assert_eq!(cgroups.read(POD, "pids.max").as_deref(), Some("max"));
    *notes.is_away.lock().unwrap() = false;
    assert_eq!(cgroups.adjust(&wanted, super::super::Adjust::All).changed.len(), 1);
    assert_eq!(notes.drain(), [format!("set {SLICE} TasksMax=100")]);
    assert_eq!(cgroups.read(POD, "pids.max").as_deref(), Some("100"));
}

#[test]
fn a_memory_limit_that_would_kill_does_not_become_a_property() {
    let (_dir, cgroups, notes) = machine("");
    cgroups.ensure(POD, &Files::new()).unwrap();
    notes.drain();
    let report = cgroups
        .adjust(&[(POD.to_owned(), files(&[("memory.max", "4096")]))].into(), super::super::Adjust::All);
    assert!(matches!(report.failed[0], CgroupError::WouldKill { .. }), "{report:?}");
    assert!(notes.drain().is_empty());
}

#[test]
fn a_containers_scope_is_found_and_given_properties_but_never_stopped() {
    let (dir, cgroups, notes) = machine("");
    cgroups.ensure(POD, &Files::new()).unwrap();
    let id = "c".repeat(64);
    let scope = format!("cri-containerd-{id}.scope");
    let folder = dir.path().join(cgroups.paths.relative(POD).unwrap()).join(&scope);
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("cpu.weight"), "100\n").unwrap();
    fs::write(folder.join("cpu.max.burst"), "0\n").unwrap();
    notes.drain();
    let path = super::super::search::container(&cgroups, POD, &id).unwrap();
    assert_eq!(path, format!("{POD}/{scope}"));
    super::super::held::hold(&cgroups, &path, "cpu.weight", "100", Some("7")).unwrap();
    super::super::held::hold(&cgroups, &path, "cpu.max.burst", "0", Some("1000")).unwrap();
    assert_eq!(notes.drain(), [format!("set {scope} CPUWeight=7")]);
    assert_eq!(cgroups.read(&path, "cpu.max.burst").as_deref(), Some("1000"));
    let found = super::super::search::containers(&cgroups, &[id.as_str()].into());
    assert!(super::super::read::CgroupDirs::open(&cgroups, &found[&id]).is_ok());
}

#[test]
fn a_removed_pods_slice_is_stopped_and_may_come_again() {
    let (dir, cgroups, notes) = machine("");
    cgroups.ensure(POD, &Files::new()).unwrap();
    notes.drain();
    super::super::kill::destroy(&cgroups, POD).unwrap();
    assert_eq!(notes.drain(), [format!("stop {SLICE}")]);
    assert!(!cgroups.paths.exists(POD) && super::super::search::pods(&cgroups).unwrap().is_empty());
    assert!(dir.path().join("kubepods.slice/kubepods-burstable.slice").is_dir());
    cgroups.ensure(POD, &Files::new()).unwrap();
    assert_eq!(notes.drain(), [format!("start {SLICE}")]);
}

#[test]
fn the_root_slice_is_never_started() {
    let (dir, cgroups, notes) = machine("/my-root");
    assert!(cgroups.paths.require_root().is_err());
    fs::create_dir(dir.path().join("my_root.slice")).unwrap();
    for (file, content) in FILES {
        fs::write(dir.path().join("my_root.slice").join(file), content).unwrap();
    }
    cgroups.paths.require_root().unwrap();
    cgroups.ensure("/kubepods", &Files::new()).unwrap();
    assert_eq!(notes.drain(), ["start my_root-kubepods.slice"]);
    assert_eq!(super::super::search::pods_roots(&cgroups), ["/my_root-kubepods.slice"]);
    assert!(super::super::read::CgroupDirs::open(&cgroups, "/my_root-kubepods.slice").is_ok());
}
