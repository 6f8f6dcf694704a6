//! Desired pods and the workers that make them real, one worker a pod. Everyone else reads the
//! [`table::PodTable`] and sends [`manager::Request`]s here; nobody else changes a pod.

pub mod cri_config;
mod downward;
mod env;
pub mod failure;
pub mod garbage;
mod hosts;
pub mod labels;
pub mod launch;
pub mod logs;
pub mod manager;
pub mod manifest;
pub mod metrics;
pub mod objects;
pub mod observe;
mod own_file;
pub mod processes;
pub mod qos_tree;
pub mod records;
pub mod resize;
pub mod status;
pub mod table;
mod termination;
pub mod volumes;
mod worker;
