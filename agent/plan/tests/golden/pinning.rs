//! Compares the results of `cpus`, `memory` and `topology`: cpusets as sets, memory blocks as sets, and some
//! fields only if the answer has them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::compare::says_something;

/// Returns every difference between an object, or a list of objects, and the expected one.
pub(crate) fn differences(at: &str, want: &Value, got: Option<&Value>) -> Vec<String> {
    let mut wrong = Vec::new();
    match want.as_array() {
        Some(want) => list(at, want, got, &mut wrong),
        None => object(at, want, got, &mut wrong),
    };
    wrong
}

/// Returns false if the two states differ: later differences would only repeat the first.
fn list(at: &str, want: &[Value], got: Option<&Value>, wrong: &mut Vec<String>) -> bool {
    let empty = Vec::new();
    let got = got.and_then(Value::as_array).unwrap_or(&empty);
    if want.len() != got.len() {
        wrong.push(format!("{at}: expected {} results, got {}", want.len(), got.len()));
        return false;
    }
    let pairs = want.iter().zip(got).enumerate();
    pairs.into_iter().all(|(index, (want, got))| object(&format!("{at}[{index}]"), want, Some(got), wrong))
}

fn object(at: &str, want: &Value, got: Option<&Value>, wrong: &mut Vec<String>) -> bool {
    let (Some(want), Some(got)) = (want.as_object(), got.and_then(Value::as_object)) else {
        wrong.push(format!("{at}: expected {want}, got {got:?}"));
        return false;
    };
    let mut differ = |field: &str, want: Option<&Value>, got: Option<&Value>| {
        wrong.push(format!("{at}.{field}: expected {want:?}, got {got:?}"));
    };
    let ok = want.get("ok").is_some_and(|ok| *ok == true);
    if want.contains_key("ok") && got.get("ok") != want.get("ok") {
        differ("ok", want.get("ok"), Some(&Value::Object(got.clone())));
        return false;
    }
    if want.contains_key("error") && !says_something(got.get("error")) {
        differ("error", want.get("error"), got.get("error"));
    }
    for field in ["reason", "pod", "affinity"] {
        if want.contains_key(field) && want.get(field) != got.get(field) {
            differ(field, want.get(field), got.get(field));
        }
    }
    for field in ["shared", "allocatable", "podCpus"] {
        let counts = want.contains_key(field) || (field == "podCpus" && ok);
        if counts && cpus(want.get(field)) != cpus(got.get(field)) {
            differ(field, want.get(field), got.get(field));
        }
    }
    if ok && blocks(want.get("podMemory")) != blocks(got.get("podMemory")) {
        differ("podMemory", want.get("podMemory"), got.get("podMemory"));
    }
    #[expect(clippy::type_complexity, reason = "the table of a test")]
    let forms: [(&str, fn(Option<&Value>) -> String); 3] = [
        ("cpus", |set| format!("{:?}", cpus(set))),
        ("memory", |list| format!("{:?}", blocks(list))),
        ("devices", devices),
    ];
    for (field, form) in forms {
        if want.contains_key(field)
            && by_container(want.get(field), form) != by_container(got.get(field), form)
        {
            differ(field, want.get(field), got.get(field));
        }
    }
    if got.contains_key("hints")
        && want.contains_key("hints")
        && hints(want.get("hints")) != hints(got.get("hints"))
    {
        differ("hints", want.get("hints"), got.get("hints"));
    }
    if want.contains_key("nodes") && !same_nodes(&want["nodes"], got.get("nodes")) {
        differ("nodes", want.get("nodes"), got.get("nodes"));
    }
    if want.get("file").is_some_and(Value::is_string) && json_of(want.get("file")) != json_of(got.get("file"))
    {
        differ("file", want.get("file"), got.get("file"));
    }
    match want.get("pods").and_then(Value::as_array) {
        Some(pods) => list(&format!("{at}.pods"), pods, got.get("pods"), wrong),
        None => true,
    }
}

fn cpus(set: Option<&Value>) -> BTreeSet<u32> {
    let text = set.and_then(Value::as_str).unwrap_or_default();
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse::<u32>().unwrap()..=last.parse::<u32>().unwrap()
    };
    text.split(',').filter(|part| !part.is_empty()).flat_map(range).collect()
}

fn blocks(list: Option<&Value>) -> BTreeSet<String> {
    let block = |block: &Value| format!("{} {} {}", block["numa"], block["resource"], block["size"]);
    list.and_then(Value::as_array).into_iter().flatten().map(block).collect()
}

/// Returns the counts of each resource by nodes, sorted by name.
fn devices(counts: Option<&Value>) -> String {
    let sorted = |map: &Value| -> BTreeMap<String, String> {
        let entries = map.as_object().into_iter().flatten();
        entries.map(|(name, value)| (name.clone(), value.to_string())).collect()
    };
    let resources = counts.and_then(Value::as_object).into_iter().flatten();
    let resources: BTreeMap<&String, _> = resources.map(|(name, counts)| (name, sorted(counts))).collect();
    format!("{resources:?}")
}

/// Returns the resources of each container; a container without resources counts as absent.
fn by_container(map: Option<&Value>, form: fn(Option<&Value>) -> String) -> BTreeMap<String, String> {
    let empty = Map::new();
    let nothing = form(None);
    let map = map.and_then(Value::as_object).unwrap_or(&empty);
    let forms = map.iter().map(|(name, value)| (name.clone(), form(Some(value))));
    forms.filter(|(_, form)| *form != nothing).collect()
}

/// Returns the sets of nodes by container and resource; a container without hints counts as absent.
fn hints(map: Option<&Value>) -> BTreeMap<String, String> {
    let sorted = |sets: &Value| {
        let mut sets: Vec<String> = sets.as_array().into_iter().flatten().map(Value::to_string).collect();
        sets.sort();
        sets
    };
    let resource = |(name, hints): (&String, &Value)| match hints {
        Value::Null => format!("{name} any"),
        hints => format!("{name} {:?} {:?}", sorted(&hints["preferred"]), sorted(&hints["other"])),
    };
    let of_container = |(container, resources): (&String, &Value)| {
        let resources = resources.as_object().into_iter().flatten().map(resource);
        let resources: BTreeSet<String> = resources.collect();
        let resources: Vec<String> = resources.into_iter().collect();
        (container.clone(), resources.join("; "))
    };
    let map = map.and_then(Value::as_object).into_iter().flatten().map(of_container);
    map.filter(|(_, resources)| !resources.is_empty()).collect()
}

fn same_nodes(want: &Value, got: Option<&Value>) -> bool {
    let (Some(want), Some(got)) = (want.as_object(), got.and_then(Value::as_object)) else { return false };
    let same = |(number, want): (&String, &Value)| {
        got.get(number).is_some_and(|got| {
            let optional = ["assignments", "cells"];
            let mut optional = optional.iter().filter(|field| got.get(**field).is_some());
            want["free"] == got["free"] && optional.all(|field| want.get(*field) == got.get(*field))
        })
    };
    want.len() == got.len() && want.iter().all(same)
}

fn json_of(file: Option<&Value>) -> Option<Value> {
    serde_json::from_str(file?.as_str()?).ok()
}
