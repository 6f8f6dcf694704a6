//! Desired pods and the workers that make them real, one worker a pod. Everyone else reads the
//! [`table::PodTable`] and sends requests here; nobody else changes a pod.

pub mod manifest;
pub mod table;
