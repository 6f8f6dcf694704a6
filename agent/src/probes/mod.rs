//! Probes: when to look, how, and what it means for a container's state. The meaning is
//! `policy::probe`'s; this module keeps the timetable and looks, and sends what changed to the pods'
//! manager. It never restarts anything itself.
//!
//! One task owns all probes. A timer wheel holds their due times; a probe that waits for somebody's
//! answer (HTTP, connect) runs beside it, a kernel verdict is read on the spot. A listener that comes or
//! goes reaches the task as an edge, between two due times.

mod http;
mod manager;
mod metrics;
mod target;
mod tcp;

pub use manager::{Parts, Probes, Settings};
pub use metrics::Metrics;
