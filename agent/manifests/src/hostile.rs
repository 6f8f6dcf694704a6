//! Every field of a pod at its worst ([`beelet_testing::hostile_pods`]), as a static manifest: what is no
//! pod of this node is refused by the name of the field.

use std::panic::{AssertUnwindSafe, catch_unwind};

use beelet_testing::hostile_pods::{Case, Group, Hostile, cases_of};
use beelet_testing::schema::Step;

/// Bytes that a refusal may have.
const REFUSAL_MAX: usize = 64 << 10;

/// Returns true if a refusal names the field, or an object or a list that it is in; of what is no YAML, the
/// place.
fn names_the_field(refusal: &str, case: &Case) -> bool {
    // A reader of YAML takes no key beyond 1024 characters, and no text beyond so many levels.
    if matches!(case.hostile, Hostile::Nested(_) | Hostile::Key(_, 1025..)) {
        return refusal.starts_with("pod.yaml:1:");
    }
    let names = case.field.path.iter().filter_map(|step| match step {
        Step::Field(name) => Some(*name),
        Step::Item | Step::Key => None,
    });
    let names: Vec<&str> = names.collect();
    // `spec` and `metadata` alone would say little of what is in them.
    let names = if names.len() > 1 { &names[1..] } else { &names[..] };
    names.is_empty() || names.iter().any(|name| refusal.contains(name))
}

/// Reads one of so many cases of a group; the sentence says what is wrong with what came of it.
fn check(group: Group, one_of: usize) {
    let (cases, mut refused, mut wrong) = (cases_of(group, one_of), 0, Vec::new());
    for case in &cases {
        let text = case.manifest().to_string();
        match catch_unwind(AssertUnwindSafe(|| crate::read(&text, "pod.yaml"))) {
            Err(_) => wrong.push(format!("{case}: a panic")),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                refused += 1;
                let said = error.to_string();
                if said.len() > REFUSAL_MAX || !names_the_field(&said, case) {
                    let begin: String = said.chars().take(300).collect();
                    wrong.push(format!("{case}: {} bytes: {begin}", said.len()));
                }
            }
        }
    }
    println!("{} manifests with hostile {group:?}, of which {refused} are refused", cases.len());
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), cases.len());
}

#[test]
fn a_manifest_with_a_hostile_number_is_refused_by_the_name_of_its_field() {
    check(Group::Numbers, 1);
}

#[test]
fn a_manifest_with_a_hostile_text_is_refused_by_the_name_of_its_field() {
    check(Group::Texts, 8);
}

#[test]
fn a_manifest_with_very_many_elements_is_refused_by_the_name_of_its_field() {
    check(Group::Counts, 1);
}

#[test]
fn a_manifest_with_json_of_another_type_is_refused_by_the_name_of_its_field() {
    check(Group::Types, 16);
}
