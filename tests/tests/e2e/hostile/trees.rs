//! Trees of folders that are deeper and larger than real ones.

use std::time::{Duration, Instant};

use beelet_tests::guards::Mount;
use beelet_tests::require;
use serde_json::json;

use super::scene::{Allowance, Scene, hostile, scaled, with_volumes};
use crate::node::Node;

/// Time to create, count, chown and remove one file. In memory this is the agent's own time.
const IN_MEMORY: Duration = Duration::from_micros(50);
const ON_DISK: Duration = Duration::from_micros(400);

/// Starts a node whose pods' folder is in memory: the removal of a hundred thousand folders from a disk would
/// measure the disk, not the agent.
fn in_memory() -> Scene {
    Scene::on(Node::start(|options| {
        let pods = options.manifests().with_file_name("pods");
        // The harness unmounts this together with the instance's other mounts.
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
    // The group's ownership is set whenever a sandbox is created.
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
    // Creating millions of files takes minutes.
    let work = per_file * u32::try_from(count).unwrap();
    let deadline = started + Duration::from_secs(120) + work;
    while !scene
        .node
        .agent
        .inspect(|watch| watch.pod("many").is_some_and(beelet_tests::pods::PodView::ready))
        .unwrap()
    {
        assert!(Instant::now() < deadline, "the files are incomplete");
        std::thread::sleep(Duration::from_millis(200));
    }
    // Another pod's limit is enforced at the same time: the walks alternate.
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
fn a_volume_with_very_many_files_delays_no_pod() {
    require!(containerd);
    many_files(&in_memory(), scaled("BEELET_HOSTILE_FILES", 200_000, 200_000), IN_MEMORY);
}

#[test]
fn a_volume_with_five_million_files_delays_no_pod() {
    require!(long, containerd);
    // The files exceed the memory.
    many_files(
        &Scene::start(|options| options),
        scaled("BEELET_HOSTILE_FILES", 5_000_000, 5_000_000),
        ON_DISK,
    );
}
