//! The change of agents under running pods, with the kubelet that `KUBELET` names: kubelet, beelet, kubelet,
//! beelet. `beelet handover` stops and starts both. No process of a pod may end, no restart count may grow,
//! and no pod may lose its readiness under beelet.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

mod agents;
mod asserts;
mod faults;
mod kinds;
mod objects;
mod scene;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use beelet_tests::cluster::{Cluster, condition};
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{kubelet, require, requires};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use self::kinds::{CLAIMS, Kind, Then};
use self::scene::{Scene, Task, tasks};

/// First minor version whose kubelets keep the readiness of running containers at their start.
const KEEPS_READINESS: u32 = 35;

/// Returns the kubelet that `KUBELET` names; records the skipped test if there is none.
fn given() -> Option<PathBuf> {
    kubelet::given().map_err(|missing| requires::skip(&missing)).ok()
}

/// Returns the UIDs of these pods.
fn uids(scene: &Scene, names: &[String]) -> Vec<Value> {
    let uid = |name: &String| scene.cluster.get(&Cluster::pod(name)).unwrap()["metadata"]["uid"].clone();
    names.iter().map(uid).collect()
}

/// Starts all pods under the kubelet. Returns the names of the static pods' mirrors.
fn populate(scene: &mut Scene) -> Vec<String> {
    objects::create(scene);
    scene.start_plugin();
    for kind in scene.facts.pods() {
        scene.run(kind);
    }
    let mirrors: Vec<String> =
        ["static0", "static1", "static2"].map(|name| objects::write_static(scene, name)).into();
    asserts::until_settled(scene);
    mirrors.iter().for_each(|mirror| scene.until_ready(mirror));
    scene.cluster.delete(&Cluster::pod("leaving"), None).unwrap();
    mirrors
}

/// Asserts that a running container sees its volumes, and that the agent keeps them up to date.
fn assert_volumes(scene: &Scene, color: &str) {
    let says =
        |pod: &str, path: &str| scene.inside(pod, path).unwrap_or_else(|| panic!("{pod} lacks {path}"));
    assert_eq!(says("web0", "/data/file"), "made\n");
    assert_eq!(says("web0", "/word/pass"), "sesame");
    assert_eq!(says("web1", "/all/pass"), "sesame");
    assert_eq!(says("web0", "/about/name"), "web0");
    assert!(says("web1", "/all/token").len() > 100);
    let change = json!({"data": {"color": color}});
    scene.cluster.patch("/api/v1/namespaces/default/configmaps/settings", &change).unwrap();
    for (pod, path) in [("web0", "/settings/color"), ("web1", "/all/color")] {
        let is_new = || {
            let text = scene.inside(pod, path);
            if text.as_deref() == Some(color) { Ok(()) } else { Err(format!("{text:?}")) }
        };
        wait_for(&format!("{pod} to see the new color"), PATIENCE, is_new).unwrap();
    }
}

/// Asserts that the pod whose deletion is pending runs on.
fn assert_leaving(scene: &Scene) {
    let pod = scene.cluster.get(&Cluster::pod("leaving")).unwrap();
    assert!(pod["metadata"]["deletionTimestamp"].is_string(), "{pod:#}");
}

#[test]
fn pods_run_on_from_a_kubelet_to_beelet_and_back() {
    require!(containerd, bpf, apiserver);
    let Some(binary) = given() else { return };
    let mut scene = Scene::start(&binary);
    let mirrors = populate(&mut scene);
    let before = tasks(&scene.containerd);
    let pods = scene.pods.len() + mirrors.len();
    println!("{pods} pods, {} running containers", before.len());
    assert!(pods >= 40, "{pods}");
    let mirror_uids = uids(&scene, &mirrors);
    let watchers = asserts::watch(&scene);

    let check = scene.agents.handover(&["--check"]).unwrap();
    assert!(check.contains("default/web0: is taken over"), "{check}");
    assert!(check.contains(&format!("default/{}: is taken over", mirrors[0])), "{check}");
    assert!(check.contains("default/leaving: is being deleted"), "{check}");
    scene.agents.must_handover(&["--from-kubelet"]);
    scene.start_plugin();
    asserts::same(&scene, &before, "under beelet");
    assert_volumes(&scene, "blue");
    // SIGKILL at any moment changes nothing: the next start knows its pods.
    scene.agents.beelet.kill9();
    scene.agents.must_handover(&["--from-kubelet"]);
    scene.start_plugin();
    asserts::same(&scene, &before, "under beelet again");
    assert_eq!(uids(&scene, &mirrors), mirror_uids, "a mirror was replaced");
    asserts::ready_throughout(&scene, &watchers, "first");
    assert_leaving(&scene);

    scene.agents.must_handover(&scene.agents.to_kubelet());
    scene.start_plugin();
    // A pod that the kubelet starts now proves that it has looked at all others.
    let last = Kind { pod: scene.facts.serving(1000), then: Then::Serves };
    scene.cluster.run(kubelet::NODE, &last.pod).unwrap();
    scene.until_ready(last.name());
    scene.cluster.delete(&Cluster::pod(last.name()), None).unwrap();
    scene.until("the new pod to be gone", &Cluster::pod(last.name()), |pod| pod.is_null().then_some(()));
    asserts::until_settled(&scene);
    asserts::same(&scene, &before, "under the kubelet again");
    assert_eq!(uids(&scene, &mirrors), mirror_uids, "a mirror was replaced");
    if scene.facts.minor >= KEEPS_READINESS {
        asserts::ready_throughout(&scene, &watchers, "back");
    }
    let watchers = asserts::watch(&scene);
    scene.agents.must_handover(&["--from-kubelet"]);
    scene.start_plugin();
    asserts::same(&scene, &before, "under beelet at the end");
    asserts::ready_throughout(&scene, &watchers, "second");
    assert_volumes(&scene, "green");
    assert_leaving(&scene);
    assert_hooks(&scene);
    assert_digests(&scene, &before);
    assert_own_volumes(&mut scene);
    assert_end(&scene);
}

/// Asserts that no hook ran again.
fn assert_hooks(scene: &Scene) {
    for name in scene.serving().iter().filter(|name| name.starts_with("web")) {
        assert_eq!(scene.inside(name, "/data/hooks").as_deref(), Some("x\n"), "the hook of {name} ran again");
    }
}

/// Asserts that the check names a container that beelet started: it has a digest of newer kubelets.
fn assert_digests(scene: &Scene, before: &BTreeMap<String, Task>) {
    let (pid, _) = before.iter().find(|(container, _)| container.starts_with("web0/")).unwrap().1;
    kill_process(Pid::from_raw((*pid).try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    let again = |pod: &Value| {
        let is_again = pod["status"]["containerStatuses"][0]["restartCount"] == 1;
        (is_again && condition(pod, "Ready")).then_some(())
    };
    scene.until("web0 to run again", &Cluster::pod("web0"), again);
    let check = |version| {
        let checked = scene.agents.handover(&["--check", "--to-kubelet", "--kubelet-version", version]);
        checked.unwrap_or_else(|refused| refused)
    };
    let old = check("1.20");
    assert!(old.contains("default/web0: would restart: beelet created container main"), "{old}");
    assert!(old.contains("default/web1: is taken over"), "{old}");
    assert!(check("1.36").contains("default/web0: is taken over"));
}

/// Asserts that the way back is refused while beelet has volumes of a pod in folders that a kubelet does not
/// use.
fn assert_own_volumes(scene: &mut Scene) {
    scene.run(Kind { pod: scene.facts.serving(1001), then: Then::Serves });
    scene.until_ready("web1001");
    let before = tasks(&scene.containerd);
    for arguments in
        [&["--check", "--to-kubelet", "--kubelet-version", "1.36"][..], &scene.agents.to_kubelet()]
    {
        let refused = scene.agents.handover(arguments).unwrap_err();
        let line = refused.lines().find(|line| line.starts_with("default/web1001: would ")).unwrap();
        assert!(line.contains("the next agent has the emptyDir volumes data in other folders"), "{line}");
        assert!(
            line.contains("the next agent has the volumes settings, about, all in other folders"),
            "{line}"
        );
        // beelet restarted a container of this pod, and kept the kubelet's folders.
        let adopted = refused.lines().find(|line| line.starts_with("default/web0: ")).unwrap();
        assert!(!adopted.contains("other folders"), "{adopted}");
    }
    assert_eq!(tasks(&scene.containerd), before, "a refused hand-over changed pods");
}

/// Asserts that the last agent ends the pods with all of their volumes.
fn assert_end(scene: &Scene) {
    fs::write(scene.facts.host.join("go"), "").unwrap();
    scene.until("leaving to be gone", &Cluster::pod("leaving"), |pod| pod.is_null().then_some(()));
    for kind in scene.pods.iter().filter(|kind| kind.then != Then::Leaves) {
        scene.cluster.delete(&Cluster::pod(kind.name()), None).unwrap();
    }
    for kind in &scene.pods {
        let what = format!("{} to be gone", kind.name());
        scene.until(&what, &Cluster::pod(kind.name()), |pod| pod.is_null().then_some(()));
    }
    // The static pods, which stay, have no volumes.
    let is_given_back = || {
        let mounts = scene.mounts();
        if mounts.is_empty() { Ok(()) } else { Err(format!("{mounts:?}")) }
    };
    wait_for("the volumes to be given back", PATIENCE, is_given_back).unwrap();
    let staged = if scene.facts.has_claims() { CLAIMS.len() } else { 0 };
    let unpublished = scene.driver.calls("NodeUnpublishVolume").len();
    assert_eq!(unpublished > staged, scene.facts.has_csi, "{:?}", scene.driver.order());
    if staged > 0 {
        // Each volume was staged once, by the first agent, or again in the same place.
        assert_eq!(scene.driver.calls("NodeUnstageVolume").len(), staged, "{:?}", scene.driver.order());
    }
    println!("CSI calls: {:?}", scene.driver.order());
}
