//! Every decision of the agent, as pure functions of data: no async, no I/O, no clock, no randomness.
#![forbid(unsafe_code)]
// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod admission;
pub mod api_status;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod bounds;
pub mod cgroups;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod claims;
pub mod container_gc;
pub mod cpu_list;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod critical;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod csi;
pub mod devices;
pub mod dra;
pub mod duration;
pub mod env_file;
pub mod event_correlation;
pub mod eviction;
pub mod expand;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod expansion;
pub mod field;
pub mod file_system;
pub mod flex_volume;
pub mod huge_pages;
pub mod image_credentials;
pub mod image_gc;
pub mod kernel_half;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod local_storage;
pub mod log_query;
pub mod migration;
pub mod mirror;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod moment;
pub mod mount_points;
pub mod node_access;
pub mod node_addresses;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod node_fit;
pub mod node_labels;
pub mod node_shutdown;
pub mod node_status;
pub mod peers;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod pod;
pub mod preemption;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod probe;
pub mod propagation;
pub mod qos;
pub mod quantity;
pub mod reclaim;
pub mod references;
pub mod remote_disk;
pub mod removed_volumes;
pub mod resize_order;
pub mod resources;
pub mod scheduler;
pub mod selector;
pub mod start_limit;
pub mod token;
pub mod trust_bundles;
pub mod tuner;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod user_namespaces;
pub mod volume_content;
pub mod why;
