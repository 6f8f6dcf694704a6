//! Hostile pods as static manifests: the agent accepts or rejects each, and another pod stays unaffected.

use std::path::Path;

use beelet_testing::hostile_pods::{Case, Group};
use beelet_tests::{machine, require};
use serde_json::Value;

use super::sampled;
use crate::hostile::scene::{Scene, pod};

/// Allowed growth of the agent's memory, in KiB.
const MEMORY_KIB: u64 = 400 << 10;

#[test]
fn an_agent_runs_valid_hostile_manifests_and_names_the_others() {
    require!(root);
    let scene = Scene::start(|_, options| options.kubelet("maxPods", 1000));
    scene.apply(&pod("bystander"));
    scene.until_ready("bystander");
    let pid = scene.agent.pid().unwrap();
    let before = machine::resident_kib(pid).unwrap();
    let groups = [Group::Numbers, Group::Texts, Group::Counts, Group::Types];
    let sample = groups.into_iter().flat_map(|group| sampled(group).into_iter().step_by(7));
    let cases: Vec<Case> = sample.collect();
    for (number, case) in cases.iter().enumerate() {
        let mut text = case.manifest();
        if let Some(name) = text.pointer_mut("/metadata/name").filter(|name| name.is_string()) {
            *name = format!("tried-{number:05}").into();
        }
        for field in ["uid", "namespace"] {
            text.get_mut("metadata").and_then(Value::as_object_mut).map(|metadata| metadata.remove(field));
        }
        scene.agent.apply(&format!("tried-{number:05}.yaml"), text.to_string()).unwrap();
    }
    let expected = |number: usize| format!("tried-{number:05}.yaml");
    let refused = scene.until("each manifest to be accepted or rejected", |watch| {
        let refused: Vec<String> = watch.rejected.iter().map(|one| one.file.clone()).collect();
        let is_known = |number: usize| {
            let is_refused = refused.iter().any(|file| Path::new(file).ends_with(expected(number)));
            is_refused || watch.pod(&format!("tried-{number:05}")).is_some()
        };
        (0..cases.len()).all(is_known).then_some(refused.len())
    });
    println!("{} manifests, {refused} of them rejected", cases.len());
    assert!(refused > cases.len() / 4, "{refused} of {} are rejected", cases.len());
    let found = scene.until_ready("bystander");
    assert_eq!(found.restarts(), 0);
    scene.is_well();
    let peak = machine::peak_kib(pid).unwrap();
    assert!(peak <= before + MEMORY_KIB, "{peak} KiB at most, {before} KiB before");
    println!("memory: {before} KiB before, at most {peak} KiB");
}
