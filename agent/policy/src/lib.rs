//! Every decision of the agent, as pure functions of data: no async, no I/O, no clock, no randomness.
#![forbid(unsafe_code)]

pub mod admission;
pub mod cgroups;
pub mod container_gc;
pub mod critical;
pub mod devices;
pub mod duration;
pub mod eviction;
pub mod expand;
pub mod field;
pub mod image_gc;
pub mod local_storage;
pub mod moment;
pub mod plan;
pub mod pod;
pub mod preemption;
pub mod probe;
pub mod qos;
pub mod quantity;
pub mod resources;
pub mod tuner;
