//! beelet, a node agent that runs a machine's pods and keeps them healthy at kernel speed.
//! ARCHITECTURE.md describes the structure; each module's head states its purpose and its prohibitions.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod cluster;
pub mod command;
mod handover;
mod kubelet;
pub mod node;
mod observe;
mod pod_cidr;
mod run;
mod spans;
mod threads;
