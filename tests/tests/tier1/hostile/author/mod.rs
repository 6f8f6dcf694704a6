//! Hostile pods: every field of a v1.Pod with its worst values ([`beelet_testing::hostile_pods`]), derived
//! from the API's schema, so that fields of a newer API are covered automatically.
//!
//! `cluster`: pods of an API server, together with two pods that must stay unaffected. `manifests`: static
//! manifests. The agents here get a fixed sample of the cases; agent/spec/src/hostile.rs and
//! agent/manifests/src/hostile.rs run more cases through the decisions and the manifest parser. With
//! `cargo xtask test --long` all of these tests get every case.

mod cluster;
mod manifests;

use beelet_testing::hostile_pods::{Case, Group, cases_of};

/// Returns the cases of a group for these agents: some hundred pods. The steps and the numbers of values per
/// field are coprime, so that each value is tried in some field.
fn sampled(group: Group) -> Vec<Case> {
    let one_of = match group {
        Group::Numbers => 19,
        Group::Texts => 301,
        Group::Counts => 23,
        Group::Types => 91,
    };
    cases_of(group, one_of)
}
