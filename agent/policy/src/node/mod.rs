//! The node as the API server sees it: its object, addresses, labels and conditions, the pods that fit on it,
//! access to its server, its events, its drain, and the order in which a shutdown terminates its pods.

pub mod access;
pub mod addresses;
pub mod drain;
pub mod events;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod fit;
pub mod labels;
pub mod log_query;
pub mod repair;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod reservations;
pub mod shutdown;
pub mod status;
pub mod token;
