//! Golden data: compares the decisions of the kubelet's own code (v1.36.2) with those of `plan`.
//!
//! The test runs every `tests/data/WHAT.jsonl` (also `WHAT-anything.jsonl`); a line is `{"input", "expect",
//! "compare"}`, and `compare` selects the comparison of a field. To add data, add a file.

#![cfg(test)]

mod compare;
mod devices;
mod pinning;

use std::{collections::BTreeSet, fs, path::PathBuf};

use beelet_plan::{Input, WHATS, What};
use beelet_policy::resources::cgroups::{shares_to_weight_linear, shares_to_weight_quadratic};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Unit values of the two weight formulas, no scenarios.
const WEIGHTS: &str = "cgroups-weights";

/// Decisions for which the kubelet's code has not been run; their own tests cover them.
const WITHOUT_GOLDEN_DATA: &[&str] = &["admission"];

/// A line of a file.
#[derive(Deserialize)]
pub(crate) struct Case {
    input: Value,
    expect: Map<String, Value>,
    #[serde(default)]
    compare: Map<String, Value>,
}

fn files() -> Vec<(String, Vec<Case>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut paths: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let cases = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (path.file_stem().unwrap().to_string_lossy().into_owned(), cases)
    };
    paths.into_iter().map(read).collect()
}

/// Returns the kind of a file: `cgroups-podlevel` belongs to `cgroups`, `image-gc` to itself.
fn what_of(file: &str) -> Option<&'static What> {
    WHATS.iter().find(|what| {
        file == what.name || file.strip_prefix(what.name).is_some_and(|rest| rest.starts_with('-'))
    })
}

#[test]
fn plan_decides_as_the_kubelet_did() {
    let mut failures = Vec::new();
    let mut run = 0;
    for (file, cases) in files().iter().filter(|(file, _)| file != WEIGHTS) {
        let what =
            what_of(file).unwrap_or_else(|| panic!("tests/data/{file}.jsonl belongs to no WHAT of plan"));
        for case in cases {
            run += 1;
            let text = serde_json::to_vec(&case.input).unwrap();
            let wrong = match what.answer(Input::Json(&text)) {
                Err(error) => vec![error.to_string()],
                Ok(answer) => compare::differences(case, &serde_json::from_str(&answer).unwrap()),
            };
            failures
                .extend(wrong.into_iter().map(|wrong| format!("{file}: {}: {wrong}", case.input["name"])));
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {run} cases differ:\n{}",
        failures.len(),
        failures[..failures.len().min(20)].join("\n")
    );
    assert!(run > 0, "no golden data found");
}

#[test]
fn every_decision_has_golden_data() {
    let with_data: BTreeSet<&str> =
        files().iter().filter_map(|(file, _)| what_of(file)).map(|what| what.name).collect();
    for what in WHATS.iter().filter(|what| !WITHOUT_GOLDEN_DATA.contains(&what.name)) {
        assert!(with_data.contains(what.name), "tests/data/{}.jsonl is missing", what.name);
    }
}

#[test]
fn a_tree_is_decided_as_the_text_is() {
    for (file, cases) in files().iter().filter(|(file, _)| file != WEIGHTS) {
        let Some(what) = what_of(file) else { continue };
        for case in cases {
            let text = serde_json::to_vec(&case.input).unwrap();
            assert_eq!(what.answer(Input::Tree(case.input.clone())), what.answer(Input::Json(&text)));
        }
    }
}

#[test]
fn weights_are_those_of_the_kubelet_and_of_runc() {
    let files = files();
    let (_, cases) = files.iter().find(|(file, _)| file == WEIGHTS).unwrap();
    for case in cases {
        let shares = case.input["shares"].as_u64().unwrap();
        assert_eq!(
            Some(shares_to_weight_linear(shares)),
            case.expect["kubeletLinearWeight"].as_u64(),
            "{shares}"
        );
        assert_eq!(
            Some(shares_to_weight_quadratic(shares)),
            case.expect["runcQuadraticWeight"].as_u64(),
            "{shares}"
        );
    }
}
