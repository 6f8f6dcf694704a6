//! Desired pods and the workers that make them real, one worker per pod. All other parts read the
//! [`beelet_model::table::PodTable`] and send [`beelet_model::request::Request`]s here; nobody else changes a
//! pod.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod error;
mod in_table;
pub mod launch;
pub mod manager;
pub mod metrics;
pub mod orphans;
pub mod qos_tree;
pub mod records;
pub mod user_namespaces;

mod env_files;
mod hosts;
mod launches;
mod plan;
mod runtime_view;
mod sandbox_files;
mod starts;
mod status;
mod termination;
pub mod turns;
mod worker;
