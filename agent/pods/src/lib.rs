//! Desired pods and the workers that make them real, one worker a pod. Everyone else reads the
//! [`table::PodTable`] and sends [`manager::Request`]s here; nobody else changes a pod.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod orphans;
pub mod refresh;

mod hosts;
pub mod launch;
pub mod manager;
pub mod metrics;
pub mod observe;
pub mod qos_tree;
pub mod records;
pub mod status;
mod termination;
mod worker;
