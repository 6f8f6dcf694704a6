//! Corner cases that the golden data lacks: refusals with their messages, and rules of the contract
//! alone.

#![cfg(test)]

use beelet_plan::{Input, what};
use serde_json::{Value, json};

fn answer(name: &str, input: &Value) -> Result<Value, String> {
    let what = what(name).unwrap_or_else(|| panic!("{name} is nothing that can be planned"));
    let answer = what.answer(Input::Json(input.to_string().as_bytes())).map_err(|error| error.to_string())?;
    Ok(serde_json::from_str(&answer).unwrap())
}

/// Checks that the scenario is refused with a message that contains `expectation`.
fn refuse(name: &str, input: &Value, expectation: &str) {
    let error = answer(name, input).unwrap_err();
    assert!(error.contains(expectation), "{error}");
}

/// Returns the results of a row of device events.
fn devices(steps: &Value) -> Vec<Value> {
    let answer = answer("devices", &json!({"name": "n", "steps": steps})).unwrap();
    answer["results"].as_array().unwrap().clone()
}

const GPU: &str = "example.com/gpu";

fn register() -> Value {
    json!({"op": "register", "resource": GPU})
}

fn list(ids: &[&str]) -> Value {
    let devices: Vec<Value> = ids.iter().map(|id| json!({"id": id, "health": "Healthy"})).collect();
    json!({"op": "devices", "resource": GPU, "devices": devices})
}

fn admit(name: &str, count: usize) -> Value {
    json!({"op": "admit", "pod": {"metadata": {"name": name}, "spec": {"containers": [
        {"name": "c", "resources": {"limits": {GPU: count}}}]}}})
}

#[test]
fn while_sources_are_not_ready_running_pods_keep_their_devices_and_nothing_is_freed() {
    let results = devices(&json!([
        register(), list(&["a", "b"]), admit("p", 1), admit("q", 1), {"op": "remove", "pod": "default/q"},
        {"op": "restart", "running": ["default/p"]}, admit("p", 1), admit("r", 1),
        register(), list(&["a", "b"]), admit("r", 1),
        {"op": "restart"}, register(), list(&["a", "b"]), admit("r", 1),
    ]));
    let ok: Vec<bool> = results.iter().map(|result| result["ok"] == true).collect();
    assert_eq!(ok[6..8], [true, false], "p runs; r must wait for the plugin");
    assert_eq!(results[6]["allocations"]["c"][GPU], json!(["a"]));
    assert!(!ok[10], "whether q is still wanted is not known");
    assert_eq!(results[14]["allocations"]["c"][GPU], json!(["b"]));
}

#[test]
fn on_a_full_node_an_init_container_has_its_pods_devices_again_in_a_new_sandbox() {
    let limits = json!({"limits": {GPU: 1}});
    let train = json!({"op": "admit", "pod": {"metadata": {"name": "train"}, "spec": {
        "initContainers": [{"name": "check", "resources": limits}],
        "containers": [{"name": "train", "resources": limits}],
    }}});
    let results = devices(&json!([
        register(), list(&["a"]), train,
        {"op": "initEnds", "pod": "default/train", "container": "check"}, admit("other", 1),
        {"op": "restart"}, register(), list(&["a"]), train, admit("other", 1),
    ]));
    let both = json!({"check": {GPU: ["a"]}, "train": {GPU: ["a"]}});
    assert_eq!((&results[2]["allocations"], &results[8]["allocations"]), (&both, &both));
    assert_eq!((&results[4]["ok"], &results[9]["ok"]), (&json!(false), &json!(false)));
    refuse("devices", &json!({"name": "n", "steps": [{"op": "initEnds", "pod": "default/p"}]}), "container");
    refuse(
        "devices",
        &json!({"name": "n", "steps": [{"op": "remove", "container": "c"}]}),
        "does not belong",
    );
}

#[test]
fn a_pod_that_was_refused_is_not_taken_for_running_after_a_restart() {
    let results = devices(&json!([
        register(), list(&["a"]), admit("p", 1), admit("q", 1), admit("r", 1),
        {"op": "restart", "running": ["default/p", "default/q"]}, admit("p", 1), admit("q", 1),
        register(), list(&["a", "b"]), admit("q", 1),
        {"op": "restart", "running": ["default/q"]}, admit("q", 1),
    ]));
    assert_eq!(results[3]["ok"], false, "there is one device");
    assert_eq!(results[6]["allocations"]["c"][GPU], json!(["a"]));
    assert_eq!(results[7]["ok"], false, "nothing of q was ever given anything: {}", results[7]);
    assert_eq!(results[10]["allocations"]["c"][GPU], json!(["b"]));
    assert_eq!(results[12]["ok"], true, "since then it was admitted");
}

#[test]
fn a_plugin_that_fails_to_allocate_takes_nothing() {
    let failing = json!({"op": "register", "resource": GPU, "failAllocate": true});
    let results = devices(&json!([failing, list(&["a"]), admit("p", 1), register(), admit("q", 1)]));
    assert_eq!(results[2]["ok"], false);
    assert_eq!(results[4]["allocations"]["c"][GPU], json!(["a"]));
}

#[test]
fn a_checkpoint_brings_back_who_holds_what() {
    let results = devices(
        &json!([register(), list(&["a", "b"]), admit("p", 1), {"op": "restart"}, register(), list(&["a", "b"]), admit("q", 1), admit("p", 1)]),
    );
    assert_eq!(results[6]["allocations"]["c"][GPU], json!(["b"]));
    assert_eq!(results[7]["allocations"]["c"][GPU], json!(["a"]));
}

#[test]
fn steps_that_make_no_sense_are_refused_by_their_path() {
    let refuse =
        |steps: Value, expectation| refuse("devices", &json!({"name": "n", "steps": steps}), expectation);
    refuse(
        json!([{"op": "register", "resource": GPU, "pod": "a/b"}]),
        "steps[0].pod: does not belong to this op",
    );
    refuse(json!([{"op": "capacity", "at": 5}, {"op": "capacity", "at": 4}]), "steps[1].at: 4 is before");
    refuse(
        json!([{"op": "devices", "resource": GPU, "devices": [{"id": "a", "health": "Sick"}]}]),
        "steps[0].devices[0].health",
    );
    refuse(json!([{"op": "admit", "pod": "a/b"}]), "steps[0].pod: must be the Pod to admit");
    refuse(json!([{"op": "explode"}]), "steps[0].op");
    let mut pod = admit("p", 1);
    pod["pod"]["spec"]["containers"][0]["resources"]["limits"][GPU] = json!("one");
    refuse(json!([pod]), "steps[0].pod.spec.containers[0].resources.limits");
}

#[test]
fn senseless_image_policies_decide_nothing() {
    let scenario = |high: Value, low: Value| {
        json!({"name": "n", "now": "2026-11-21T12:00:00Z", "fs": {"capacityBytes": "100", "availableBytes": 1}, "inUse": [],
            "policy": {"imageGCHighThresholdPercent": high, "imageGCLowThresholdPercent": low, "imageMinimumGCAge": "0s"},
            "images": [{"id": "a", "sizeBytes": 1, "firstDetected": "0001-01-01T00:00:00Z"}]})
    };
    for (high, low) in [(json!(101), json!(80)), (json!(85), json!(-1)), (json!(80), json!(85))] {
        let answer = answer("image-gc", &scenario(high, low)).unwrap();
        assert!(answer["error"].is_string() && answer["removed"] == json!([]), "{answer}");
    }
    assert_eq!(answer("image-gc", &scenario(json!("85"), json!(80))).unwrap()["removed"], json!(["a"]));
    refuse("image-gc", &scenario(json!("high"), json!(80)), "policy.imageGCHighThresholdPercent");
}

#[test]
fn an_image_that_is_there_twice_is_refused() {
    let image = json!({"id": "a", "sizeBytes": 1, "firstDetected": "2026-11-21T12:00:00Z"});
    let scenario = json!({"name": "n", "now": "2026-11-21T12:00:00Z", "fs": {"capacityBytes": 100, "availableBytes": 1}, "inUse": [],
        "policy": {"imageGCHighThresholdPercent": 85, "imageGCLowThresholdPercent": 80}, "images": [image, image]});
    refuse("image-gc", &scenario, r#"images[1].id: "a" is there twice"#);
}

#[test]
fn eviction_refuses_what_is_no_threshold() {
    let scenario = |threshold: Value| json!({"name": "n", "now": "2026-11-21T12:00:00Z", "thresholds": [threshold], "observations": {}, "pods": []});
    refuse(
        "eviction",
        &scenario(json!({"signal": "memory.available", "value": "ten"})),
        "thresholds[0].value: \"ten\" is neither",
    );
    refuse(
        "eviction",
        &scenario(json!({"signal": "memory.available", "value": "5%", "minReclaim": "0%"})),
        "thresholds[0].minReclaim",
    );
    refuse(
        "eviction",
        &scenario(json!({"signal": "disk.full", "value": "5%"})),
        "thresholds[0].signal: unknown variant `disk.full`",
    );
    refuse(
        "eviction",
        &scenario(json!({"signal": "memory.available", "value": 5, "grace": "1m"})),
        "thresholds[0]",
    );
    assert!(answer("eviction", &scenario(json!({"signal": "memory.available", "value": 5}))).is_ok());
}

#[test]
fn cache_that_is_not_read_again_evicts_no_pod_by_the_reclaimable_signal() {
    const GIB: u64 = 1 << 30;
    let scenario = |signal: &str, refaulted: [u64; 2]| {
        let reading = |at: &str, refaulted: u64| {
            json!({"at": at, "workingSetBytes": 15 * GIB + GIB / 2, "activeFileBytes": 8 * GIB,
                "refaultedBytes": refaulted, "kernelsEstimateBytes": 9 * GIB})
        };
        json!({"name": "n", "now": "2026-11-21T12:10:00Z",
            "thresholds": [{"signal": "memory.available", "value": "1Gi"}], "observations": {},
            "memory": {"signal": signal, "capacity": "16Gi", "readings":
                [reading("2026-11-21T11:00:00Z", refaulted[0]), reading("2026-11-21T12:10:00Z", refaulted[1])]},
            "pods": [{"pod": {"metadata": {"name": "web"}, "spec": {"containers": []}},
                "usage": {"memoryWorkingSetBytes": 9 * GIB, "swapBytes": 0}}]})
    };
    let check = |signal: &str, refaulted: [u64; 2], available: &str, evict: Value| {
        let answer = answer("eviction", &scenario(signal, refaulted)).unwrap();
        assert_eq!((&answer["memoryAvailable"], &answer["evict"]), (&json!(available), &evict), "{signal}");
    };
    check("workingSet", [0, 0], "512Mi", json!("default/web"));
    check("reclaimable", [0, 0], "8704Mi", Value::Null);
    check("reclaimable", [0, 8 * GIB], "512Mi", json!("default/web"));
    let mut back = scenario("reclaimable", [0, 0]);
    back["memory"]["readings"][0]["at"] = json!("2026-11-21T13:00:00Z");
    refuse("eviction", &back, "memory.readings[1].at: is before the previous reading");
}

#[test]
fn the_containers_filesystem_follows_the_one_that_it_is_part_of() {
    let scenario = json!({"name": "n", "now": "2026-11-21T12:00:00Z", "pods": [],
        "thresholds": [{"signal": "nodefs.available", "value": "10%"}, {"signal": "containerfs.available", "value": "1%"}],
        "observations": {"containerfs.available": {"available": 5, "capacity": 100}}});
    let answer = answer("eviction", &scenario).unwrap();
    assert_eq!(
        (&answer["met"], answer["why"].as_array().map(Vec::len)),
        (&json!(["containerfs.available"]), Some(1))
    );
}

#[test]
fn a_gate_that_never_opens_and_none_at_all_are_different() {
    let scenario = |gate: Option<Value>| {
        let mut scenario = json!({"name": "n", "kind": "readiness", "probe": {}, "startedAt": "0",
            "ticks": [{"at": 1, "outcome": "success"}, {"at": "2", "outcome": "success"}]});
        if let Some(gate) = gate {
            scenario["startupSucceededAt"] = gate;
        }
        answer("probe", &scenario).unwrap()["transitions"].as_array().unwrap().len()
    };
    assert_eq!((scenario(None), scenario(Some(json!(2))), scenario(Some(Value::Null))), (2, 2, 1));
}

#[test]
fn ticks_that_go_back_are_refused() {
    let scenario = json!({"name": "n", "kind": "liveness", "probe": {}, "startedAt": 0,
        "ticks": [{"at": 2, "outcome": "success"}, {"at": 1, "outcome": "success"}]});
    refuse("probe", &scenario, "ticks[1].at: 1 is before the previous tick (2)");
}
