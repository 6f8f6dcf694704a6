//! Tests with durable files that are empty, truncated, overwritten, or not regular files.

use std::fs;
use std::path::{Path, PathBuf};

use beelet_state::State;
use beelet_tests::require;

use super::scene::{Scene, config_map, names_in, pod, with_volumes};

/// The records in the state folder.
const RECORDS: [&str; 4] = ["pods", "events", "images", "tuner"];

/// Kinds of damage to a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Damage {
    Empty,
    Half,
    Noise,
    /// Content of a file that was never flushed to its disk.
    Zeros,
    /// Well-formed content with another schema.
    OtherForm,
    Huge,
}

const ALL: [Damage; 6] =
    [Damage::Empty, Damage::Half, Damage::Noise, Damage::Zeros, Damage::OtherForm, Damage::Huge];

impl Damage {
    fn of(self, whole: &[u8]) -> Vec<u8> {
        match self {
            Damage::Empty => Vec::new(),
            Damage::Half => whole[..whole.len() / 2].to_vec(),
            Damage::Noise => (0..5000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect(),
            Damage::Zeros => vec![0; whole.len().max(4096)],
            Damage::OtherForm => b"[{\"a\": [1, 2, {}]}, null, 1e400]".to_vec(),
            Damage::Huge => vec![b' '; (64 << 20) + 1],
        }
    }
}

fn checkpoint(scene: &Scene) -> PathBuf {
    scene.path("kubelet/device-plugins/kubelet_internal_checkpoint")
}

/// Returns a node with several kinds of pods, whose agent has written its records and was killed.
fn killed_agent() -> Scene {
    let mut scene = Scene::start(|_, options| options);
    scene.apply(&config_map());
    scene.apply(&with_volumes("web"));
    scene.apply(&pod("crashed"));
    let web = scene.until_ready("web");
    scene.until_ready("crashed");
    scene.exit("crashed", 3);
    scene.until_pod("crashed", "to run again", |pod| pod.ready() && pod.restarts() == 1);
    scene.poll_until("the records", || {
        let known = scene.agent.record("pods").is_some_and(|pods| pods.get(web.uid()).is_some());
        if known && scene.agent.record("events").is_some() { Ok(()) } else { Err("not yet".to_owned()) }
    });
    scene.agent.kill9();
    scene
}

/// Starts the agent on the current files, and checks that the same pods run on.
fn starts_well(scene: &mut Scene, what: &str) {
    let changes = scene.changes();
    scene.agent.resume().unwrap();
    scene.until_ready("web");
    let crashed = scene.until_ready("crashed");
    scene.until_relisted();
    scene.is_well();
    // The runtime has the restart count as well.
    assert_eq!(crashed.restarts(), 1, "{what}");
    assert_eq!(scene.changes(), changes, "{what}");
}

/// Returns the number of kept copies of a damaged file.
fn set_aside(dir: &Path, name: &str) -> usize {
    let prefix = format!("{name}.corrupt-");
    names_in(dir).iter().filter(|found| found.to_string_lossy().starts_with(&prefix)).count()
}

#[test]
fn damaged_records_are_set_aside_reported_and_rewritten() {
    require!(root);
    for damage in ALL {
        let what = format!("{damage:?}");
        let mut scene = killed_agent();
        let state = scene.path("state");
        for name in RECORDS {
            let path = state.join(format!("{name}.json"));
            let whole = fs::read(&path).unwrap_or_default();
            fs::write(&path, damage.of(&whole)).unwrap();
        }
        // The content of the lock file is only for users.
        fs::write(state.join("lock"), damage.of(b"12345\n")).unwrap();
        starts_well(&mut scene, &what);
        for name in RECORDS {
            scene.poll_until(&format!("{what}: {name} to be set aside"), || {
                let count = set_aside(&state, name);
                if count == 1 { Ok(()) } else { Err(format!("{count} copies: {:?}", names_in(&state))) }
            });
            scene.until_logged(&format!("{name}.corrupt-"));
        }
        scene.exit("crashed", 0); // causes new records
        for name in ["pods", "events"] {
            scene.poll_until(&format!("{what}: {name} to be rewritten"), || {
                scene.agent.record(name).map(drop).ok_or_else(|| "the record is missing".to_owned())
            });
        }
    }
}

#[test]
fn well_formed_records_with_wrong_content_are_harmless() {
    require!(root);
    let mut scene = killed_agent();
    let dir = scene.path("state");
    let records = || RECORDS.map(|name| scene.agent.record(name));
    let [pods, ..] = records();
    let mut pods = pods.unwrap();
    // Each UID gets another pod's status, times in the far future, and the maximum restart count.
    let text = serde_json::to_string(&pods).unwrap();
    let text = text.replace("\"restartCount\":1", "\"restartCount\":2147483647");
    pods = serde_json::from_str(&text).unwrap();
    let all = pods.as_object_mut().unwrap();
    let values: Vec<_> = all.values().cloned().collect();
    for (n, value) in all.values_mut().enumerate() {
        value["status"] = values[(n + 1) % values.len()]["status"].clone();
        value["status"]["startTime"] = "9999-12-30T00:00:00Z".into();
    }
    let one = values[0].clone();
    all.insert("../../../etc".to_owned(), one.clone());
    all.insert(String::new(), one);
    // The killed agent holds no lock.
    State::open(&dir).unwrap().store("pods", &pods).unwrap();
    let known = names_in(&scene.path("pods"));
    scene.agent.resume().unwrap();
    scene.until_ready("web");
    scene.until_ready("crashed");
    scene.until_relisted();
    scene.is_well();
    // The agent treats invented pods as removed, and touches no file outside the pods' folder.
    assert!(Path::new("/etc/passwd").exists());
    assert_eq!(names_in(&scene.path("pods")), known);
    for name in ["web", "crashed"] {
        let running = scene.containers(name).matches('+').count();
        assert_eq!(running, 1);
    }
}

#[test]
fn a_damaged_device_checkpoint_is_set_aside_and_reported() {
    require!(root);
    let mut scene = killed_agent();
    let path = checkpoint(&scene);
    let folder = path.parent().unwrap().to_path_buf();
    fs::create_dir_all(&folder).unwrap();
    for damage in ALL {
        let whole = fs::read(&path).unwrap_or_default();
        for copy in names_in(&folder).iter().filter(|found| found.to_string_lossy().contains(".corrupt-")) {
            fs::remove_file(folder.join(copy)).unwrap();
        }
        fs::write(&path, damage.of(&whole)).unwrap();
        let what = format!("{damage:?}");
        starts_well(&mut scene, &what);
        scene.poll_until(&format!("{what}: the checkpoint to be set aside"), || {
            let count = set_aside(&folder, "kubelet_internal_checkpoint");
            if count == 1 { Ok(()) } else { Err(format!("{count} copies: {:?}", names_in(&folder))) }
        });
        scene.poll_until("the event about the checkpoint", || {
            let events = scene.stdout_of(&["events"]);
            if events.contains("DeviceCheckpointCorrupt") { Ok(()) } else { Err(events) }
        });
        scene.agent.kill9();
    }
}

#[test]
fn a_checkpoint_that_a_plugin_replaced_is_set_aside_and_never_followed() {
    require!(root);
    let mut scene = killed_agent();
    let path = checkpoint(&scene);
    let folder = path.parent().unwrap().to_path_buf();
    fs::create_dir_all(&folder).unwrap();
    let victim = scene.path("victim");
    fs::write(&victim, "hush").unwrap();
    for what in ["link", "FIFO", "folder"] {
        for copy in names_in(&folder).iter().filter(|found| found.to_string_lossy().contains("checkpoint")) {
            let copy = folder.join(copy);
            fs::remove_file(&copy).or_else(|_| fs::remove_dir(&copy)).unwrap();
        }
        match what {
            "link" => std::os::unix::fs::symlink(&victim, &path).unwrap(),
            // Opening the FIFO would block the agent's start forever.
            "FIFO" => rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap(),
            _ => fs::create_dir(&path).unwrap(),
        }
        std::os::unix::fs::symlink(&victim, folder.join("kubelet_internal_checkpoint.tmp")).unwrap();
        starts_well(&mut scene, what);
        scene.poll_until(&format!("the {what} to be set aside"), || {
            let count = set_aside(&folder, "kubelet_internal_checkpoint");
            if count == 1 { Ok(()) } else { Err(format!("{count} copies: {:?}", names_in(&folder))) }
        });
        scene.agent.kill9();
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "hush");
}

#[test]
fn a_record_that_is_not_a_file_is_reported_and_the_agent_runs_without() {
    require!(root);
    let mut scene = killed_agent();
    let state = scene.path("state");
    for name in RECORDS {
        let path = state.join(format!("{name}.json"));
        let _ = fs::remove_file(&path);
        if name == "events" {
            std::os::unix::fs::symlink(&path, &path).unwrap(); // a loop
        } else {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("inside"), "").unwrap();
        }
    }
    starts_well(&mut scene, "folders instead of files");
    scene.until_logged("pods.json");
    scene.apply(&pod("new"));
    scene.until_ready("new");
    scene.is_well();
}

#[test]
fn a_state_folder_removed_while_the_agent_runs_costs_only_the_records() {
    require!(root);
    let mut scene = Scene::start(|_, options| options);
    scene.apply(&pod("web"));
    scene.until_ready("web");
    fs::remove_dir_all(scene.path("state")).unwrap();
    scene.apply(&pod("new"));
    scene.until_ready("new");
    scene.until_logged("cannot write the records of pods");
    scene.is_well();
    let changes = scene.changes();
    scene.agent.kill9();
    scene.agent.resume().unwrap();
    scene.until_ready("web");
    scene.until_ready("new");
    scene.until_relisted();
    assert_eq!(scene.changes(), changes);
}
