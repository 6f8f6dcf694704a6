//! beelet, a node agent: it runs a machine's pods and keeps them healthy at kernel speed.
//! ARCHITECTURE.md draws the house; each module's head says what it is for and what it never does.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

mod cluster;
pub mod command;
mod kubelet;
pub mod node;
mod observe;
mod pod_cidr;
mod run;
mod spans;
mod threads;
