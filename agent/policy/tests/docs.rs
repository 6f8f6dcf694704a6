//! The examples of docs/plan.md: what they say comes out does come out.

#![cfg(test)]

use std::{fs, path::PathBuf};

use beelet_policy::plan::{Input, what};
use serde_json::Value;

/// The examples: WHAT, input, output.
fn examples(text: &str) -> Vec<(&str, &str, &str)> {
    let mut examples = Vec::new();
    for block in text.split("```sh\nbeelet plan ").skip(1) {
        let example = || {
            let (what, rest) = block.split_once(" <<'EOF'\n")?;
            let (input, rest) = rest.split_once("\nEOF\n```\n\n```json\n")?;
            let (output, _) = rest.split_once("```")?;
            Some((what, input, output))
        };
        examples.push(example().unwrap_or_else(|| panic!("not an example with its output: {block}")));
    }
    examples
}

fn check((name, input, output): (&str, &str, &str)) {
    let what = what(name).unwrap_or_else(|| panic!("{name} is nothing that can be planned"));
    let answer = |document: &str| {
        let tree: Value = serde_saphyr::from_str(document).unwrap_or_else(|error| panic!("{name}: {error}"));
        let answer = what.answer(Input::Tree(tree)).unwrap_or_else(|error| panic!("{name}: {error}"));
        serde_json::from_str::<Value>(&answer).unwrap()
    };
    let answers: Vec<Value> = input.split("\n---\n").map(answer).collect();
    let said: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers, said, "the example of {name}");
}

#[test]
fn the_examples_give_what_they_say() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/plan.md");
    let text = fs::read_to_string(path).unwrap();
    let examples = examples(&text);
    assert!(examples.len() >= 5, "only {} examples found", examples.len());
    examples.into_iter().for_each(check);
}
