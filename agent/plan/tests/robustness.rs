//! Tests that `plan` answers or refuses every input: it never panics, and the same input always gets the same
//! answer.

#![cfg(test)]

use std::{fs, path::PathBuf, sync::OnceLock};

use beelet_plan::{Input, WHATS, What};
use proptest::prelude::*;
use serde_json::Value;

/// Returns a few scenarios of every kind with golden data, as text.
fn seeds() -> &'static Vec<(&'static What, Vec<String>)> {
    static SEEDS: OnceLock<Vec<(&'static What, Vec<String>)>> = OnceLock::new();
    SEEDS.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let inputs = |what: &What| {
            let text = fs::read_to_string(folder.join(format!("{}.jsonl", what.name))).ok()?;
            let input = |line: &str| serde_json::from_str::<Value>(line).unwrap()["input"].to_string();
            let mut inputs: Vec<String> = text.lines().map(input).collect();
            inputs.sort_by_key(String::len);
            inputs.truncate(30);
            Some(inputs)
        };
        WHATS.iter().filter_map(|what| Some((what, inputs(what)?))).collect()
    })
}

/// Answers twice; both answers must be equal.
fn answer(what: &What, text: &[u8]) -> Result<(), TestCaseError> {
    prop_assert_eq!(what.answer(Input::Json(text)), what.answer(Input::Json(text)));
    Ok(())
}

/// Replaces the `at`th leaf or container of a tree.
fn replace(tree: &mut Value, at: &mut usize, with: &Value) -> bool {
    if *at == 0 {
        *tree = with.clone();
        return true;
    }
    *at -= 1;
    match tree {
        Value::Array(items) => items.iter_mut().any(|item| replace(item, at, with)),
        Value::Object(fields) => fields.values_mut().any(|field| replace(field, at, with)),
        _ => false,
    }
}

fn odd_value() -> impl Strategy<Value = Value> {
    let odd = [
        "null",
        "true",
        "-1",
        "0",
        "1",
        "18446744073709551615",
        "-9223372036854775808",
        "1e300",
        "0.5",
        "\"\"",
        "\"x\"",
        "[]",
        "{}",
        "[null]",
        "{\"a\":{}}",
        "\"9Ei\"",
        "\"-1\"",
        "\"1e-30\"",
        "\"100%\"",
        "\"-5m\"",
        "\"292y\"",
        "\"999999h\"",
        "\"-009999-01-02T01:59:59Z\"",
        "\"9999-12-30T22:00:00.999999999Z\"",
        "\"0001-01-01T00:00:00Z\"",
    ];
    prop::sample::select(odd.to_vec()).prop_map(|text| serde_json::from_str(text).unwrap())
}

proptest! {
    #[test]
    fn any_bytes_are_answered_or_refused(bytes: Vec<u8>) {
        for what in WHATS {
            answer(what, &bytes)?;
        }
    }

    #[test]
    fn damaged_scenarios_are_answered_or_refused(which: prop::sample::Index, case: prop::sample::Index, at: prop::sample::Index, with: Vec<u8>, cut in 0..8_usize) {
        let (what, inputs) = &seeds()[which.index(seeds().len())];
        let mut text = inputs[case.index(inputs.len())].clone().into_bytes();
        let at = at.index(text.len());
        let end = (at + cut).min(text.len());
        text.splice(at..end, with);
        answer(what, &text)?;
    }

    #[test]
    fn scenarios_with_odd_values_are_answered_or_refused(
        which: prop::sample::Index, case: prop::sample::Index, places in prop::collection::vec((any::<prop::sample::Index>(), odd_value()), 1..3),
    ) {
        let (what, inputs) = &seeds()[which.index(seeds().len())];
        let mut tree: Value = serde_json::from_str(&inputs[case.index(inputs.len())]).unwrap();
        for (at, value) in places {
            replace(&mut tree, &mut (1 + at.index(60)), &value);
        }
        answer(what, tree.to_string().as_bytes())?;
    }
}
