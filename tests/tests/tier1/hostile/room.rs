//! Tests with folders whose file system has no free bytes or inodes. Each is a small tmpfs of the test.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use beelet_tests::guards::Mount;
use beelet_tests::{require, workdir};
use serde_json::{Value, json};

use super::scene::{Scene, config_map, files_below, names_in, pod, with_volumes};

const BYTES: u64 = 4 << 20;
const INODES: u64 = 400;

/// Exhausted resource of a file system.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lack {
    Bytes,
    Inodes,
}

const LACKS: [Lack; 2] = [Lack::Bytes, Lack::Inodes];

/// Files that fill a file system; removed on drop.
struct Filler(Vec<PathBuf>);

impl Filler {
    fn fill(dir: &Path, lack: Lack) -> Filler {
        let mut filler = Filler(Vec::new());
        let full = |error: std::io::Error| {
            assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
        };
        for number in 0.. {
            let path = dir.join(format!(".filler-{number}"));
            let mut file = match File::create(&path) {
                Ok(file) => file,
                Err(error) => {
                    full(error);
                    return filler;
                }
            };
            filler.0.push(path);
            if lack != Lack::Bytes {
                continue;
            }
            loop {
                if let Err(error) = file.write_all(&[1; 4096]) {
                    full(error);
                    return filler;
                }
            }
        }
        filler
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        for path in &self.0 {
            fs::remove_file(path).unwrap();
        }
    }
}

/// Mounts a small file system at the agent's folder of this name.
fn small(dir: &Path, folder: &str) -> Mount {
    Mount::tmpfs_with_inodes(&dir.join("agent").join(folder), BYTES, INODES).unwrap()
}

/// Checks that the agent copes with a folder that becomes full while pods run, and is freed again. The log
/// and the events must contain all of `reports`.
fn fills_and_frees(folder: &str, lack: Lack, reports: &[&str]) {
    let what = format!("{folder}, {lack:?}");
    let mut mount = None;
    let mut scene = Scene::start(|dir, options| {
        mount = Some(small(dir, folder));
        options
    });
    scene.apply(&config_map());
    scene.apply(&with_volumes("web"));
    scene.apply(&pod("old"));
    let before = scene.until_ready("web");
    scene.until_ready("old");
    let filler = Filler::fill(mount.as_ref().unwrap().path(), lack);

    // Add a pod, crash another, and remove a third.
    scene.apply(&with_volumes("late"));
    scene.exit("web", 1);
    scene.remove("old");
    scene.until_gone("old");
    scene.poll_until(&format!("{what}: the reports of the trouble"), || {
        let text = scene.agent.log() + &scene.stdout_of(&["events"]);
        let missing = reports.iter().find(|report| !text.contains(**report));
        missing.map_or(Ok(()), |report| Err(format!("neither log nor events contain {report:?}")))
    });
    scene.until_relisted();
    scene.is_well();

    drop(filler);
    let late = scene.until_ready("late");
    let web = scene.until_pod("web", "to run again", |pod| pod.ready() && pod.restarts() == 1);
    assert_eq!(web.uid(), before.uid(), "{what}");
    for name in ["web", "late"] {
        let running = scene.containers(name).matches('+').count();
        assert_eq!(running, 1, "{what}: {}", scene.containers(name));
    }
    scene.is_well();

    // The records of the current state are complete on disk.
    scene.poll_until(&format!("{what}: the pods' records"), || {
        let records = scene.agent.record("pods").unwrap_or(Value::Null);
        let of_web = &records[web.uid()]["status"]["containerStatuses"][0];
        let well =
            of_web["restartCount"] == 1 && of_web["ready"] == true && records.get(late.uid()).is_some();
        if well { Ok(()) } else { Err(records.to_string()) }
    });
    let changes = scene.changes();
    scene.agent.kill9();
    scene.agent.resume().unwrap();
    let again = scene.until_ready("web");
    assert_eq!((again.uid(), again.restarts()), (web.uid(), 1), "{what}");
    scene.until_ready("late");
    scene.until_relisted();
    assert_eq!(scene.changes(), changes, "{what}");
    let odd = |name: &std::ffi::OsString| {
        let name = name.to_string_lossy();
        name.contains("corrupt") || name.ends_with(".tmp")
    };
    let names = names_in(&scene.path("state"));
    assert!(!names.iter().any(odd), "{what}: {names:?}");
    for name in ["web", "late"] {
        scene.remove(name);
        scene.until_gone(name);
    }
    scene.poll_until(&format!("{what}: the removal of the pods' files"), || {
        let left = files_below(&scene.path("pods"));
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
    scene.is_well();
}

#[test]
fn without_room_for_records_pods_start_and_end_and_records_follow_later() {
    require!(root);
    for lack in LACKS {
        fills_and_frees("state", lack, &["cannot write the records of pods"]);
    }
}

#[test]
fn without_room_for_volumes_pods_wait_and_say_so() {
    require!(root);
    for lack in LACKS {
        fills_and_frees("pods", lack, &["FailedCreatePodSandBox", "o space left"]);
    }
}

#[test]
fn without_room_for_logs_pods_come_up_when_there_is_room() {
    require!(root);
    // A folder of a tmpfs uses no bytes, only an inode.
    fills_and_frees("logs", Lack::Bytes, &[]);
    fills_and_frees("logs", Lack::Inodes, &["o space left"]);
}

#[test]
fn without_room_for_its_socket_a_running_agent_misses_nothing() {
    require!(root);
    for lack in LACKS {
        fills_and_frees("run", lack, &[]);
    }
}

#[test]
fn an_agent_that_starts_without_room_runs_or_names_the_full_folder() {
    require!(root);
    for folder in ["state", "pods", "logs", "run", "kubelet"] {
        for lack in LACKS {
            let what = format!("{folder}, {lack:?}");
            let mut held = None;
            let mut scene = Scene::spawn(|dir, options| {
                let mount = small(dir, folder);
                let filler = Filler::fill(mount.path(), lack);
                held = Some((filler, mount));
                options
            });
            scene.apply(&config_map());
            scene.apply(&with_volumes("web"));
            let up = scene.agent.wait_until_up();
            let log = scene.agent.log();
            assert!(!log.contains("panicked at"), "{what}: {log}");
            match up {
                Ok(()) => scene.until_called("a relist", 0, 1, super::scene::is_relist),
                Err(_) => {
                    // The test restarts the agent later, as a service manager would.
                    let status = scene.agent.wait_for_exit().unwrap();
                    let path = scene.path(folder).display().to_string();
                    assert!(!status.success() && log.contains(&path), "{what}: {status}: {log}");
                    assert!(log.contains("o space left"), "{what}: {log}");
                }
            }
            let (filler, _mount) = held.unwrap();
            drop(filler);
            scene.agent.resume().unwrap();
            scene.until_ready("web");
            scene.is_well();
        }
    }
}

#[test]
fn without_room_for_a_manifest_apply_fails_and_the_old_manifest_stays() {
    require!(root);
    let mut held = None;
    let scene = Scene::start(|dir, options| {
        held = Some(small(dir, "manifests"));
        options
    });
    let file = scene.dir.path().join("web.yaml");
    workdir::write(&file, pod("web").to_string()).unwrap();
    let apply = ["apply", "-f", file.to_str().unwrap()];
    scene.stdout_of(&apply);
    let before = scene.until_ready("web");
    let mount = held.unwrap();
    for lack in LACKS {
        let filler = Filler::fill(mount.path(), lack);
        let mut changed = pod("web");
        changed["spec"]["hostname"] = json!("other");
        workdir::write(&file, changed.to_string()).unwrap();
        let output = scene.cli(&apply);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("o space left"), "{lack:?}: {error}");
        scene.until_relisted();
        assert_eq!(scene.until_ready("web").uid(), before.uid(), "{lack:?}");
        drop(filler);
        // The attempt leaves no file behind.
        assert_eq!(names_in(mount.path()), ["web.yaml"], "{lack:?}");
    }
    scene.stdout_of(&apply);
    scene.until_pod("web", "to be the changed one", |pod| pod.uid() != before.uid() && pod.ready());
    scene.is_well();
}
