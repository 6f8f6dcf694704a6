//! Every map of the object. They are BTF-defined, so bpftool shows each key and value with its field names, and they
//! are pinned under these names.

use aya_ebpf::{
    btf_maps::{Array, HashMap, PerCpuArray, RingBuf},
    macros::btf_map,
};
use beelet_ebpf_abi::{
    Address, AddressCount, Drops, ListenerRecord, MAX_ADDRESSES, MAX_LISTENERS, Meta, RING_BYTES,
    SocketCookie,
};

/// The sockets that listen now.
#[btf_map]
pub(crate) static LISTENERS: HashMap<SocketCookie, ListenerRecord, MAX_LISTENERS> = HashMap::new();

/// How many sockets listen at each address.
///
/// An entry whose count fell to zero stays: deleting it here would race with an `open` on another CPU that has just
/// looked it up, and that listener's count would be lost. The agent sweeps old zero entries and verifies the counts
/// afterwards (agent/src/kernel/sweep.rs).
#[btf_map]
pub(crate) static ADDRESSES: HashMap<Address, AddressCount, MAX_ADDRESSES> = HashMap::new();

/// The one way to user space. Untyped: records of several kinds go through it, and libbpf refuses a value type here.
#[btf_map]
pub(crate) static EVENTS: RingBuf<(), RING_BYTES> = RingBuf::new();

/// What was lost.
#[btf_map]
pub(crate) static DROPS: PerCpuArray<Drops, 1> = PerCpuArray::new();

/// Whose pins these are, and the agent's word to the programs.
#[btf_map]
pub(crate) static META: Array<Meta, 1> = Array::new();
