//! Processes that can't be killed for a while, like those that wait for a dead disk.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use beelet_tests::guards::hierarchies;
use beelet_tests::manifests;
use beelet_tests::pods::PodView;
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use serde_json::json;

use super::scene::{Allowance, Scene, hostile, scaled};

/// A pod's cgroup, frozen until the drop. The cgroup is above the containers' own ones, which the runtime
/// could thaw.
struct Frozen {
    file: PathBuf,
    thawed: &'static str,
}

impl Frozen {
    fn new(scene: &Scene, pod: &PodView) -> Frozen {
        let root = scene.node.containerd.cgroup();
        let path = beelet_tests::cgroup_values::pod_path(pod.qos(), pod.uid());
        let dir = root.folder("freezer", &path).unwrap();
        let v1 = dir.join("freezer.state");
        let (file, frozen, thawed) =
            if v1.exists() { (v1, "FROZEN", "THAWED") } else { (dir.join("cgroup.freeze"), "1", "0") };
        std::fs::write(&file, frozen).unwrap();
        let state = Frozen { file, thawed };
        wait_for("the pod to freeze", PATIENCE, || {
            let now = std::fs::read_to_string(&state.file).map_err(|error| error.to_string())?;
            if now.trim() == frozen { Ok(()) } else { Err(now) }
        })
        .unwrap();
        state
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.file, self.thawed); // on version 2 the file may be missing: frozen processes can be killed there
    }
}

#[test]
fn processes_that_cannot_be_killed_hold_up_their_own_pod_alone_and_go_when_they_can() {
    require!(containerd);
    let seconds = scaled("BEELET_HOSTILE_FROZEN", 20, 60);
    let scene = Scene::start(|options| options);
    let probe = json!({
        "exec": { "command": ["/bin/testapp", "probe", "ok"] }, "periodSeconds": 1, "timeoutSeconds": 1,
        "failureThreshold": 1000,
    });
    let view = scene.run(&manifests::with(hostile("frozen", "true"), "livenessProbe", probe));
    let frozen = Frozen::new(&scene, &view);
    let started = Instant::now();
    // The pod's probes hang too, for a while, before the pod is removed.
    std::thread::sleep(Duration::from_secs(5));
    scene.node.remove("frozen");
    scene.another_comes_and_goes();
    while started.elapsed() < Duration::from_secs(u64::try_from(seconds).unwrap()) {
        let (code, _, error) = scene.node.cli(&["get", "pods"]);
        assert_eq!(code, Some(0), "{error}");
        std::thread::sleep(Duration::from_millis(500));
    }
    let holds = hierarchies().unwrap().iter().any(|one| one.controllers.iter().any(|name| name == "freezer"));
    let there = scene.node.agent.inspect(|watch| watch.pod("frozen").is_some()).unwrap();
    assert!(there || !holds, "a pod with running processes was reported as removed");
    drop(frozen);
    scene.gone(Instant::now(), &["frozen"], Allowance::default());
}
