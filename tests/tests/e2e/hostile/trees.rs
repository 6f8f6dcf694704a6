//! Trees of folders that are deeper, and have more in them, than anybody would make.

use std::time::{Duration, Instant};

use beelet_tests::guards::Mount;
use beelet_tests::require;
use serde_json::json;

use super::scene::{Allowance, Scene, hostile, scaled, with_volumes};
use crate::node::Node;

/// What one file may cost: to be made, counted, given to a group, removed. In memory that is the agent's own
/// time.
const IN_MEMORY: Duration = Duration::from_micros(50);
const ON_DISK: Duration = Duration::from_micros(400);

/// A node whose pods' folder is in memory: how fast a disk removes a hundred thousand folders says nothing
/// about the agent.
fn in_memory() -> Scene {
    Scene::on(Node::start(|options| {
        let pods = options.manifests().with_file_name("pods");
        // Unmounted with everything else of the instance.
        std::mem::forget(Mount::tmpfs(&pods, 4 << 30).unwrap());
        options.http().unwrap()
    }))
}

#[test]
fn a_tree_of_a_hundred_thousand_levels_is_walked_owned_and_removed() {
    require!(containerd);
    let levels = scaled("BEELET_HOSTILE_LEVELS", 100_000, 100_000);
    let scene = in_memory();
    let mut pod = with_volumes(
        hostile("deep", &format!("testapp hurt deep /v {levels}")),
        json!([{ "name": "v", "emptyDir": { "sizeLimit": "8Gi" } }]),
        json!([{ "name": "v", "mountPath": "/v" }]),
    );
    pod["spec"]["securityContext"] = json!({ "fsGroup": 2000 });
    // The volume is given to the group whenever a sandbox is made.
    let view = scene.run(&pod);
    scene.lose_sandbox(&view);
    scene.another_comes_and_goes();
    let work = IN_MEMORY * u32::try_from(levels).unwrap();
    scene.end(&["deep"], Allowance { time: work, cpu: work * 2 });
}

fn many_files(scene: &Scene, count: usize, per_file: Duration) {
    let pod = with_volumes(
        hostile("many", &format!("testapp hurt many /v {count}")),
        json!([{ "name": "v", "emptyDir": { "sizeLimit": "64Gi" } }]),
        json!([{ "name": "v", "mountPath": "/v" }]),
    );
    let started = Instant::now();
    scene.node.apply(&pod);
    // Millions take minutes to make.
    let work = per_file * u32::try_from(count).unwrap();
    let deadline = started + Duration::from_secs(120) + work;
    while !scene
        .node
        .agent
        .look(|watch| watch.pod("many").is_some_and(beelet_tests::pods::PodView::ready))
        .unwrap()
    {
        assert!(Instant::now() < deadline, "the files are not there yet");
        std::thread::sleep(Duration::from_millis(200));
    }
    // Another pod's limit is kept meanwhile: the walks take turns.
    let small = with_volumes(
        hostile("small", "dd if=/dev/zero of=/v/large bs=1M count=8"),
        json!([{ "name": "v", "emptyDir": { "sizeLimit": "4Mi" } }]),
        json!([{ "name": "v", "mountPath": "/v" }]),
    );
    scene.node.apply(&small);
    scene.node.wait("small", "to be evicted", |pod| pod.phase() == "Failed");
    scene.end(&["many", "small"], Allowance { time: work, cpu: work });
}

#[test]
fn a_volume_with_very_many_files_is_counted_and_removed_and_holds_nobody_up() {
    require!(containerd);
    many_files(&in_memory(), scaled("BEELET_HOSTILE_FILES", 200_000, 200_000), IN_MEMORY);
}

#[test]
fn a_volume_with_five_million_files_is_counted_and_removed_and_holds_nobody_up() {
    require!(long, containerd);
    // More than fits into memory.
    many_files(
        &Scene::start(|options| options),
        scaled("BEELET_HOSTILE_FILES", 5_000_000, 5_000_000),
        ON_DISK,
    );
}
