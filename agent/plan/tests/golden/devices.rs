//! Comparison of the steps of a devices scenario: decisions and numbers exactly, ids as far as
//! determined.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::{Case, compare::says_something};

type Ids = BTreeMap<String, BTreeSet<String>>;

/// Returns every difference up to the first step with a different outcome: later ones would only repeat it.
pub(crate) fn differences(case: &Case, want: &Value, got: Option<&Value>, mode: &str) -> Vec<String> {
    let empty = Vec::new();
    let want = want.as_array().unwrap();
    let got = got.and_then(Value::as_array).unwrap_or(&empty);
    if want.len() != got.len() {
        return vec![format!("results: expected {} of them, got {}", want.len(), got.len())];
    }
    let mut walk = Walk { mode, declared: Ids::new(), active: BTreeMap::new(), wrong: Vec::new() };
    let steps = case.input["steps"].as_array().unwrap();
    for (index, ((step, want), got)) in steps.iter().zip(want).zip(got).enumerate() {
        if !walk.step(&format!("results[{index}] {}", step["op"]), step, want, got) {
            break;
        }
    }
    walk.wrong
}

struct Walk<'a> {
    /// `exact`: the same ids; `counts`: as many, declared, distinct, and not in use.
    mode: &'a str,
    declared: Ids,
    /// Ids by pod and resource.
    active: BTreeMap<String, Ids>,
    wrong: Vec<String>,
}

impl Walk<'_> {
    fn step(&mut self, at: &str, step: &Value, want: &Value, got: &Value) -> bool {
        let op = step["op"].as_str().unwrap();
        let mut pod = String::new();
        match op {
            "devices" => {
                let ids = step["devices"].as_array().unwrap().iter().map(|device| text(&device["id"]));
                self.declared.entry(text(&step["resource"])).or_default().extend(ids);
            }
            "admit" => {
                let meta = &step["pod"]["metadata"];
                pod = format!("{}/{}", meta["namespace"].as_str().unwrap_or("default"), text(&meta["name"]));
            }
            "remove" => drop(self.active.remove(&text(&step["pod"]))),
            _ => {}
        }
        if got["ok"] != want["ok"] {
            self.wrong.push(format!("{at}.ok: expected {}, got {got}", want["ok"]));
            return false;
        }
        if want["ok"] == false {
            if !says_something(got.get("error")) {
                self.wrong.push(format!("{at}.error is missing"));
            }
            self.active.remove(&pod);
            return true;
        }
        match op {
            "capacity" => self.capacity(at, want, got),
            "admit" => self.admit(at, pod, want, got),
            _ => {}
        }
        true
    }

    fn capacity(&mut self, at: &str, want: &Value, got: &Value) {
        for key in ["capacity", "allocatable"] {
            if integers(&want[key]) != integers(&got[key]) {
                self.wrong.push(format!("{at}.{key}: expected {}, got {}", want[key], got[key]));
            }
        }
        let set = |value: &Value| value.as_array().into_iter().flatten().map(text).collect::<BTreeSet<_>>();
        if set(&want["removed"]) != set(&got["removed"]) {
            self.wrong.push(format!("{at}.removed: expected {}, got {}", want["removed"], got["removed"]));
        }
    }

    fn admit(&mut self, at: &str, pod: String, want: &Value, got: &Value) {
        let (want_all, got_all) = (by_container(&want["allocations"]), by_container(&got["allocations"]));
        let mut mine = Ids::new();
        for key in want_all.keys().chain(got_all.keys()).collect::<BTreeSet<_>>() {
            let ids =
                |side: &BTreeMap<(String, String), Vec<String>>| side.get(key).cloned().unwrap_or_default();
            let (want, got) = (ids(&want_all), ids(&got_all));
            let distinct: BTreeSet<String> = got.iter().cloned().collect();
            let known = self.declared.get(&key.1).cloned().unwrap_or_default();
            let wrong = match self.mode {
                "exact" => want.iter().collect::<BTreeSet<_>>() != got.iter().collect(),
                _ => false,
            };
            if wrong || want.len() != got.len() || distinct.len() != got.len() || !distinct.is_subset(&known)
            {
                self.wrong
                    .push(format!("{at}.allocations.{}.{}: expected {want:?}, got {got:?}", key.0, key.1));
            }
            mine.entry(key.1.clone()).or_default().extend(distinct);
        }
        for (resource, count) in want["distinct"].as_object().into_iter().flatten() {
            let ids = mine.get(resource).map_or(0, BTreeSet::len);
            if count.as_u64() != Some(ids as u64) {
                self.wrong
                    .push(format!("{at}: {resource}: expected {count} distinct ids over the pod, got {ids}"));
            }
        }
        for (resource, ids) in &mine {
            let held = |other: &Ids| other.get(resource).is_some_and(|theirs| !theirs.is_disjoint(ids));
            if self.active.iter().any(|(name, other)| *name != pod && held(other)) {
                self.wrong.push(format!("{at}: {resource}: {ids:?} overlaps what another pod holds"));
            }
        }
        self.active.insert(pod, mine);
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Reads numbers and numbers in strings.
fn integers(map: &Value) -> BTreeMap<String, Option<i64>> {
    let number = |value: &Value| value.as_i64().or_else(|| value.as_str()?.parse().ok());
    map.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), number(value))).collect()
}

fn by_container(allocations: &Value) -> BTreeMap<(String, String), Vec<String>> {
    let empty = Map::new();
    let mut all = BTreeMap::new();
    for (container, resources) in allocations.as_object().unwrap_or(&empty) {
        for (resource, ids) in resources.as_object().into_iter().flatten() {
            let ids = ids.as_array().into_iter().flatten().map(text).collect();
            all.insert((container.clone(), resource.clone()), ids);
        }
    }
    all
}
