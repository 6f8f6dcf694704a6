//! An author of pods who wants to hurt the node: every field of a v1.Pod at its worst
//! ([`beelet_testing::hostile_pods`]), derived from the API's schema, so that the fields of a newer API are
//! covered by themselves.
//!
//! `cluster`: pods of an API server, beside two pods that must not notice. `manifests`: static manifests.
//! The agents here get a sample of the cases that is always the same; more of them go through the decisions
//! and through the reader of manifests, in agent/spec/src/hostile.rs and agent/manifests/src/hostile.rs.
//! With `cargo xtask test --long` all of these get every case.

mod cluster;
mod manifests;

use beelet_testing::hostile_pods::{Case, Group, cases_of};

/// The cases of a group that agents get: some hundred pods. The steps have no divisor in common with the
/// numbers of values that are tried of a field, so that each value is tried of some.
fn sampled(group: Group) -> Vec<Case> {
    let one_of = match group {
        Group::Numbers => 19,
        Group::Texts => 301,
        Group::Counts => 23,
        Group::Types => 91,
    };
    cases_of(group, one_of)
}
