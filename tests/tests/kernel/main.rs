//! Tier 2: the kernel programs on this machine's kernel. The tests also run in the guests of `cargo xtask
//! vm`.

mod bpftool;
mod check;
mod listeners;
mod measures;
mod pins;
mod place;
mod probes;
mod quota;
mod scheduler;
mod stress;
