//! Runs the desired pods, with one worker per pod. All other parts read the
//! [`beelet_model::table::PodTable`] and send [`beelet_model::request::Request`]s to this crate; no other
//! crate changes a pod.

// Tests pass literals by value.
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
mod resize_metrics;
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
