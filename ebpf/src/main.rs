//! The kernel half of beelet: one object, one file per hook family.
//!
//! The programs only observe. They never change a verdict, a socket or a packet, and they count each failure
//! (a full map, a missing field), so that user space learns of it. They share `beelet_ebpf_abi` with the
//! agent and nothing else. Built by `cargo xtask build-ebpf`; see `ebpf/prebuilt/`.
#![no_std]
#![no_main]
// The `bpf` target has no stable atomics: `core::sync::atomic` needs compare-and-swap, the kernel's atomic
// add is an intrinsic.
#![feature(core_intrinsics)]
#![allow(internal_features)] // the only way to say "atomic add" for this target
#![feature(asm_experimental_arch)] // loads that the compiler must not merge (args.rs)

#[macro_use]
mod fields;

mod args;
mod atomic;
mod containers;
mod events;
mod exits;
mod holders;
mod kernel;
mod listeners;
mod maps;
mod object;
mod oom;
mod pressure;
mod reclaim;
mod sched;
mod shares;
mod sockets;
mod tasks;
mod traffic;
