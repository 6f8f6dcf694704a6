//! Every decision of the agent, as pure functions of data: no async, no I/O, no clock, no randomness.
#![forbid(unsafe_code)]

pub mod duration;
pub mod pod;
pub mod probe;
