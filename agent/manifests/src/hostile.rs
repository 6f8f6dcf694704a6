//! Reads static manifests with hostile values in every field of a pod ([`beelet_testing::hostile_pods`]), and
//! checks that each refusal names the field.

use std::panic::{AssertUnwindSafe, catch_unwind};

use beelet_testing::hostile_pods::{Case, Group, Hostile, cases_of};
use beelet_testing::schema::Step;

/// Maximum length of a refusal, in bytes.
const REFUSAL_MAX: usize = 64 << 10;

/// Returns true if a refusal names the field or an object or list around it, or, for invalid YAML, the
/// position.
fn names_the_field(refusal: &str, case: &Case) -> bool {
    // The YAML parser rejects keys of more than 1024 characters and too many levels.
    if matches!(case.hostile, Hostile::Nested(_) | Hostile::Key(_, 1025..)) {
        return refusal.starts_with("pod.yaml:1:");
    }
    let names = case.field.path.iter().filter_map(|step| match step {
        Step::Field(name) => Some(*name),
        Step::Item | Step::Key => None,
    });
    let names: Vec<&str> = names.collect();
    // `spec` and `metadata` alone would be too vague.
    let names = if names.len() > 1 { &names[1..] } else { &names[..] };
    names.is_empty() || names.iter().any(|name| refusal.contains(name))
}

/// Reads every `one_of`-th case of a group and checks the results.
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
