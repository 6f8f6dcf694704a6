//! Types that all parts of the node share: pods, the pod table, requests, objects, failures. No I/O, no
//! tasks.
// Sums in this crate are of numbers from outside.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

pub mod accounts;
pub mod desired;
pub mod disk;
pub mod ended;
pub mod failure;
pub mod labels;
pub mod objects;
pub mod origin;
pub mod plugins;
pub mod pod;
pub mod pressure;
pub mod processes;
pub mod request;
pub mod review;
pub mod status;
pub mod storage;
pub mod table;
