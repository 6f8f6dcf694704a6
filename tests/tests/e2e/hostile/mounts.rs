//! Mounts that a privileged container removes, and mounts that it makes on the machine.

use beelet_tests::manifests;
use beelet_tests::require;
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use serde_json::json;

use super::scene::{Allowance, Scene, hostile, with_volumes};
use crate::node::{Node, object};

/// Starts a node like most machines: mounts below the pods' folder propagate to the mount namespaces that
/// share it.
fn shared() -> Node {
    Node::start(|options| {
        let pods = options.manifests().with_file_name("pods");
        std::fs::create_dir_all(&pods).unwrap();
        mount_bind(&pods, &pods).unwrap();
        mount_change(&pods, MountPropagationFlags::SHARED).unwrap();
        options.http().unwrap()
    })
}

#[test]
fn a_volume_unmounted_from_inside_is_removed_with_its_pod() {
    require!(containerd);
    let scene = Scene::on(shared());
    scene.node.apply(&object("ConfigMap", "colors", &json!({ "color": "red" })));
    let harm = "umount /disk /memory /part /colors /etc/hosts /dev/termination-log; test ! -e /colors/color";
    let pod = with_volumes(
        hostile("unmounts", harm),
        json!([
            { "name": "disk", "emptyDir": {} }, { "name": "memory", "emptyDir": { "medium": "Memory" } },
            { "name": "colors", "configMap": { "name": "colors" } },
        ]),
        json!([
            { "name": "disk", "mountPath": "/disk", "mountPropagation": "Bidirectional" },
            { "name": "memory", "mountPath": "/memory", "mountPropagation": "Bidirectional" },
            { "name": "disk", "mountPath": "/part", "subPath": "part", "mountPropagation": "Bidirectional" },
            { "name": "colors", "mountPath": "/colors" },
        ]),
    );
    scene.run(&manifests::with(pod, "securityContext", json!({ "privileged": true })));
    // A volume that is unmounted inside the container is still kept up to date.
    scene.node.apply(&object("ConfigMap", "colors", &json!({ "color": "blue" })));
    scene.another_comes_and_goes();
    scene.node.agent.remove("configmap-colors.yaml").unwrap();
    scene.end(&["unmounts"], Allowance::default());
}

#[test]
fn a_containers_mounts_below_its_pods_folder_are_removed_with_the_pod() {
    require!(containerd);
    let node = shared();
    let pods = node.agent.dir().join("pods");
    let mut scene = Scene::on(node);
    let harm = "testapp hurt names /v; cd /v; \
        for d in * .*; do case $d in .|..) continue;; esac; test -d \"$d\" && mount -t tmpfs none \"$d\"; done; \
        mkdir stack root; i=0; while test $i -lt 20; do mount -t tmpfs none stack; i=$((i+1)); done; \
        mount --bind / root; mount --rbind /proc root/proc; mkdir -p stack/in/side; mount -t tmpfs none stack/in/side; \
        mount -t tmpfs none /pods/$ID/containers; cd /";
    let mut pod = with_volumes(
        hostile("mounts", harm),
        json!([{ "name": "v", "emptyDir": {} }, { "name": "pods", "hostPath": { "path": pods } }]),
        json!([
            { "name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional" },
            { "name": "pods", "mountPath": "/pods", "mountPropagation": "Bidirectional" },
        ]),
    );
    pod["spec"]["containers"][0]["env"] =
        json!([{ "name": "ID", "valueFrom": { "fieldRef": { "fieldPath": "metadata.uid" } } }]);
    let view = scene.run(&manifests::with(pod, "securityContext", json!({ "privileged": true })));
    let there = scene.node.mounts_below(&scene.node.folder(&view));
    assert!(there.len() > 25, "{there:?}");
    scene.another_comes_and_goes();
    scene.restart_agent();
    scene.end(&["mounts"], Allowance::default());
}
