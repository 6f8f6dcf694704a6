//! Desired pods and the workers that make them real, one worker a pod. Everyone else reads the
//! [`table::PodTable`] and sends [`manager::Request`]s here; nobody else changes a pod.

pub mod cri_config;
mod env;
pub mod failure;
pub mod garbage;
pub mod labels;
pub mod launch;
pub mod manager;
pub mod manifest;
pub mod metrics;
pub mod observe;
pub mod processes;
pub mod qos_tree;
pub mod records;
mod resize;
pub mod status;
pub mod table;
mod volumes;
mod worker;
