//! Tier 1: the agent against a scriptable runtime, without containerd and BPF; tests that need root require
//! it.
//!
//! The whole tier is one program with one module per subject: `-E 'binary(tier1) and test(/^pods::/)'`
//! selects one.

mod cluster;
mod daemon;
mod flex;
mod handover;
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
