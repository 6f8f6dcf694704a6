//! Desired pods and the workers that make them real, one worker per pod. All other parts read the
//! [`beelet_model::table::PodTable`] and send [`beelet_model::request::Request`]s here; nobody else changes a
//! pod.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod deps;
pub mod error;
pub mod manager;
pub mod metrics;
pub mod orphans;
pub mod qos_tree;
pub mod records;
pub mod user_namespaces;

mod call_queue;
mod container;
mod container_images;
mod env_files;
mod hosts;
mod plan;
mod pod_table_metrics;
mod pod_users;
mod resource_claims;
mod runtime_abilities;
mod runtime_view;
mod sandbox;
mod sandbox_files;
mod services;
mod start_counters;
mod startup_latency;
mod status;
mod teardown;
mod termination;
mod worker;
