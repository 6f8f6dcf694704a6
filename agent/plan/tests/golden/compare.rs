//! Comparison of an answer's fields with the kubelet's.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::{Case, devices, pinning};

/// Returns every difference between the answer and the expectation, one line each.
pub(crate) fn differences(case: &Case, answer: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    if answer["name"] != case.input["name"] {
        wrong.push(format!("name: {}", answer["name"]));
    }
    for (field, want) in &case.expect {
        let how = case.compare.get(field).and_then(Value::as_str).unwrap_or("equal");
        let got = answer.get(field);
        let same = match how {
            "ignore" => true,
            "presence" => says_something(Some(want)) == says_something(got),
            "set-if-present" if got.is_none() => true,
            "set" | "set-if-present" => got.is_some_and(|got| got.is_array() && sorted(got) == sorted(want)),
            "ordered" => got == Some(want) || (*want == json!([]) && got.is_none_or(Value::is_null)),
            "type,reason" => type_and_reason(got) == type_and_reason(Some(want)),
            "equal" => got == Some(want) || (want.is_null() && got.is_none()),
            "state" => {
                wrong.extend(state(case, want, got));
                true
            }
            "devices" => {
                let mode = case.compare.get("allocations").and_then(Value::as_str).unwrap_or("counts");
                wrong.extend(devices::differences(case, want, got, mode));
                true
            }
            "pinning" => {
                wrong.extend(pinning::differences(field, want, got));
                true
            }
            other => panic!("golden data: {field} is compared by {other:?}, which this runner doesn't know"),
        };
        if !same {
            let note = ["errorText", "note"].iter().find_map(|key| case.compare.get(*key));
            wrong.push(format!("{field}: expected {want}, got {got:?} ({note:?})"));
        }
    }
    wrong
}

/// Returns true for a value other than absent, null, false, "" and [].
pub(crate) fn says_something(value: Option<&Value>) -> bool {
    !matches!(value, None | Some(Value::Null | Value::Bool(false)))
        && value != Some(&json!(""))
        && value != Some(&json!([]))
}

fn sorted(list: &Value) -> Vec<String> {
    let mut items: Vec<String> = list.as_array().into_iter().flatten().map(Value::to_string).collect();
    items.sort();
    items
}

fn type_and_reason(events: Option<&Value>) -> Vec<(&Value, &Value)> {
    events
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|event| (&event["type"], &event["reason"]))
        .collect()
}

/// Returns the value of a fresh cgroup's file, which equals an absent one.
fn fresh(version: &str, file: &str) -> Option<&'static str> {
    Some(match (version, file) {
        ("v1", "cpu.shares") => "1024",
        ("v1", "cpu.cfs_quota_us" | "memory.limit_in_bytes") => "-1",
        ("v1", "cpu.cfs_period_us") => "100000",
        ("v2", "cpu.weight") => "100",
        ("v2", "cpu.max") => "max 100000",
        ("v2", "memory.max" | "memory.high") => "max",
        ("v2", "memory.min" | "memory.low") => "0",
        _ => return None,
    })
}

fn state(case: &Case, want: &Value, got: Option<&Value>) -> Vec<String> {
    let empty = Map::new();
    let version = case.input["cgroupVersion"].as_str().unwrap();
    let (want, got) = (want.as_object().unwrap(), got.and_then(Value::as_object).unwrap_or(&empty));
    let paths: BTreeSet<&String> = want.keys().chain(got.keys()).collect();
    let mut wrong = Vec::new();
    for path in paths {
        let files = |side: &Map<String, Value>| {
            side.get(path).and_then(Value::as_object).cloned().unwrap_or_default()
        };
        let (want, got) = (files(want), files(got));
        for file in want.keys().chain(got.keys()).collect::<BTreeSet<_>>() {
            let value = |side: &Map<String, Value>| match side.get(file) {
                Some(value) => value.as_str().map(str::to_owned),
                None => fresh(version, file).map(str::to_owned),
            };
            if value(&want) != value(&got) {
                wrong.push(format!("{path} {file}: expected {:?}, got {:?}", want.get(file), got.get(file)));
            }
        }
    }
    wrong
}
