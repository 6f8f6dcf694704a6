//! Tier 1: the agent against a scriptable runtime. Needs no containerd and no BPF; what needs root says so.
//!
//! One program for the whole tier, one module per subject: `-E 'binary(tier1) and test(/^pods::/)'` chooses.

mod cluster;
mod daemon;
mod flex;
mod hostile;
mod image_gc;
mod manifest_source;
mod node_shutdown;
mod observe;
mod operator;
mod pods;
mod runtime_client;
mod server;
mod spans;
mod state_full_disk;
mod trouble;
