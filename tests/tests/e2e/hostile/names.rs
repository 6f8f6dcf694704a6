//! Names of files, mounts, processes and cgroups. The kernel accepts all bytes but two.

use beelet_tests::manifests;
use beelet_tests::pages::Format;
use beelet_tests::require;
use serde_json::json;

use super::scene::{Allowance, Scene, hostile, with_volumes};
use crate::node::container;

#[test]
fn binary_names_in_volumes_and_mounts_disturb_no_pod() {
    require!(containerd);
    let mut scene = Scene::start(|options| options);
    // The mounted parts are renamed, so that the machine's mount table shows the new names.
    let mut pod = with_volumes(
        hostile("names", "testapp hurt names /v"),
        json!([{ "name": "v", "emptyDir": { "sizeLimit": "64Mi" } }]),
        json!([
            { "name": "v", "mountPath": "/v" },
            { "name": "v", "mountPath": "/part", "subPath": "sub" },
            { "name": "v", "mountPath": "/word", "subPath": "file" },
        ]),
    );
    let mut init = container("init", "echo x > /v/file");
    init["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
    pod["spec"]["initContainers"] = json!([init]);
    pod["spec"]["securityContext"] = json!({ "fsGroup": 2000 });
    let view = scene.run(&pod);
    let table = std::fs::read("/proc/self/mountinfo").unwrap();
    assert!(std::str::from_utf8(&table).is_err(), "every mount has a name in UTF-8");
    scene.another_comes_and_goes();
    scene.restart_agent();
    scene.another_comes_and_goes();
    // The group's ownership of the volume's files is set once more.
    scene.lose_sandbox(&view);
    scene.end(&["names"], Allowance::default());
}

#[test]
fn processes_with_binary_names_are_shown_probed_and_ended() {
    require!(containerd);
    let scene = Scene::start(|options| options);
    let pod = hostile("processes", "exec testapp hurt processes");
    let probe = json!({
        "exec": { "command": ["/bin/testapp", "probe", "ok"] }, "periodSeconds": 1, "timeoutSeconds": 30,
    });
    scene.run(&manifests::with(pod, "livenessProbe", probe));
    for command in [&["top", "--once"][..], &["get", "pods"], &["describe", "pod", "processes"]] {
        let (code, out, error) = scene.node.cli(command);
        assert!(code == Some(0) && out.contains("processes"), "{command:?}: {out}{error}");
        assert!(!out.contains('\x1b'), "{command:?} passes on escape sequences: {out:?}");
    }
    let (status, body) = scene.node.agent.get_as("/metrics", Format::OpenMetrics.accept()).unwrap();
    assert!(status == 200 && body.trim_end().ends_with("# EOF"), "{body}");
    scene.end(&["processes"], Allowance::default());
}

#[test]
fn cgroups_that_a_privileged_container_made_go_with_it() {
    require!(containerd);
    let mut scene = Scene::start(|options| options);
    let pod = hostile("cgroups", "exec testapp hurt cgroups");
    scene.run(&manifests::with(pod, "securityContext", json!({ "privileged": true })));
    let (code, out, error) = scene.node.cli(&["top", "--once"]);
    assert!(code == Some(0) && out.contains("cgroups"), "{out}{error}");
    scene.restart_agent();
    scene.end(&["cgroups"], Allowance::default());
}
