//! Finds out what happened to sandboxes and containers, and tells the pods' manager. It never acts on
//! a pod and never decides; what a change means is the worker's to see.

pub mod relist;
