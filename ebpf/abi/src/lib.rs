//! The records, map keys and map values that the kernel programs and the agent share.
//!
//! This crate is the only thing both halves know. It holds data layouts, and the table of what is read of the
//! kernel's own types ([`fields`]): no logic, no I/O. Every type is `repr(C)`, has no implicit padding (the
//! kernel compares keys byte by byte and refuses to copy uninitialised bytes), and its size and offsets are
//! asserted when it is compiled, for the BPF target and for the host alike. A change of any of them needs a
//! new [`ABI_VERSION`].
#![no_std]

use core::mem::{align_of, offset_of, size_of};

pub mod check;
pub mod fields;
mod measures;
pub mod scheduler;
#[cfg(feature = "user")]
mod user;

pub use measures::{
    ANCESTRY_SLOTS, Ancestry, CONTAINER_BITS, CgroupKey, Counters, ExitEvent, ExitedKey, FIRST_BUCKET_BITS,
    HALF_LIFE_BITS, HOME_FACTOR, MAX_CONTAINERS, MAX_EXITED, MAX_PARTS, MAX_TASKS, NOBODY, OomEvent, OomKill,
    PRESSURE_FLOOR_NS, PRESSURE_WINDOW_NS, Part, Pressure, PressureEvent, Running, SLOT_TRIES, STRETCHES,
    Settings, Shares, Slot, Stretch, TaskKey, TaskState, WAIT_BUCKETS, pressure, qos, reclaim,
};

/// The version of everything in this crate. Pins live under `<bpffs>/<name>/v<ABI_VERSION>/`, so two versions
/// never read each other's maps.
pub const ABI_VERSION: u32 = 6;

/// Marks a [`Meta`] record as ours: `beelet` and two zero bytes, little endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"beelet\0\0");

/// `AF_INET`, as in [`Address::family`].
pub const FAMILY_IPV4: u16 = 2;
/// `AF_INET6`, as in [`Address::family`].
pub const FAMILY_IPV6: u16 = 10;

/// Entries of the `LISTENERS` map: listening sockets alive at once on one machine.
pub const MAX_LISTENERS: usize = 16_384;
/// Entries of the `ADDRESSES` map: addresses that are, or recently were, listened on.
pub const MAX_ADDRESSES: usize = 16_384;
/// Bytes of the ring buffer: some 10,000 listener events.
pub const RING_BYTES: usize = 1 << 20;

/// A field offset that the running kernel's BTF does not have.
pub const ABSENT: u32 = u32::MAX;

/// What happened. The number is in [`EventHeader::kind`].
pub mod kind {
    /// A socket began to listen: [`super::ListenerEvent`].
    pub const LISTENER_OPENED: u32 = 1;
    /// A socket listens no longer, whether closed, disconnected or killed with its process:
    /// [`super::ListenerEvent`].
    pub const LISTENER_CLOSED: u32 = 2;
    /// A process below the pods' root ended, with its last thread: [`super::ExitEvent`].
    pub const EXITED: u32 = 3;
    /// The kernel chose a process below the pods' root to be killed for want of memory: [`super::OomEvent`].
    pub const OOM_KILL: u32 = 4;
    /// A cgroup below the pods' root crossed a threshold: [`super::PressureEvent`].
    pub const PRESSURE: u32 = 5;
}

/// Which hook made a record: for people who look at the maps with bpftool.
pub mod seen_by {
    /// The sock_ops program on the pods' cgroup.
    pub const SOCK_OPS: u32 = 1;
    /// The tracepoint `inet_sock_set_state`.
    pub const TRACEPOINT: u32 = 2;
}

/// The head of every record in the ring buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventHeader {
    /// One of [`kind`].
    pub kind: u32,
    /// The CPU on which it happened.
    pub cpu: u32,
    /// When: `CLOCK_MONOTONIC`, nanoseconds.
    pub at_ns: u64,
    /// The cgroup2 id (the inode of its directory) of the process that it happened to; 0 if unknown.
    pub cgroup_id: u64,
}

/// Key of the `LISTENERS` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SocketCookie {
    /// The kernel's number for the socket, never used twice while the machine is up.
    pub cookie: u64,
}

/// An address in one network namespace. Key of the `ADDRESSES` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// The kernel's number for the network namespace (`SO_NETNS_COOKIE`).
    pub netns_cookie: u64,
    /// In network order. IPv4 takes the first four bytes, the rest is zero. All zero: any address.
    pub address: [u8; 16],
    /// In host order; 0 while the kernel hasn't chosen one (`listen` without `bind`).
    pub port: u16,
    /// [`FAMILY_IPV4`] or [`FAMILY_IPV6`].
    pub family: u16,
    /// 1: an IPv6 socket that takes IPv4 connections too (`IPV6_V6ONLY` is off).
    pub dual_stack: u32,
}

/// Value of the `LISTENERS` map: one socket that listens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerRecord {
    /// Where it listens.
    pub address: Address,
    /// The cgroup2 id the socket was made in; 0 if unknown.
    pub cgroup_id: u64,
    /// Since when: `CLOCK_MONOTONIC`, nanoseconds.
    pub since_ns: u64,
    /// 1 if [`AddressCount::listeners`] counts this socket.
    pub counted: u32,
    /// One of [`seen_by`].
    pub seen_by: u32,
}

/// Value of the `ADDRESSES` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressCount {
    /// How many sockets listen there now: more than one with `SO_REUSEPORT`.
    pub listeners: u64,
    /// The socket that began to listen there last. It may be gone; its siblings may not.
    pub last_cookie: u64,
    /// When the count last changed: `CLOCK_MONOTONIC`, nanoseconds.
    pub changed_ns: u64,
}

/// [`kind::LISTENER_OPENED`] and [`kind::LISTENER_CLOSED`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerEvent {
    /// Kind, CPU, time, cgroup.
    pub header: EventHeader,
    /// The socket.
    pub cookie: u64,
    /// Since when it has listened; 0 if its beginning was not seen.
    pub since_ns: u64,
    /// Where it listens, or did.
    pub address: Address,
}

/// Value of the per-CPU `DROPS` map: what was lost, so that user space knows when to read everything again.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Events that found the ring buffer full.
    pub ring_full: u64,
    /// Listeners that found the `LISTENERS` map full.
    pub listeners_full: u64,
    /// Listeners that found the `ADDRESSES` map full: recorded, but not counted.
    pub addresses_full: u64,
    /// Times that something could not be counted because the `CONTAINERS` map was full.
    pub containers_full: u64,
    /// Threads that could not be followed from their fork on: their waits are not counted.
    pub tasks_full: u64,
}

/// Value of the `META` map: the mark of our pins, and what the agent sets for all programs.
///
/// `magic` and `abi_version` stay first in every version: they tell our pins from a stranger's.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`ABI_VERSION`].
    pub abi_version: u32,
    /// 1 once every pin is in place; 0: the agent that began died half way.
    pub complete: u32,
    /// 1 while the tracepoint program is attached. It sees every close, so the sock_ops program leaves closes
    /// to it.
    pub tracepoint: u32,
    /// The instance of the programs that counts. One that carries another number stays idle: while new
    /// programs take the place of old ones, both are attached, and each event is sent once.
    pub instance: u32,
    /// SHA-256 of the object that the programs came from.
    pub digest: [u8; 32],
}

const _: () = {
    assert!(size_of::<EventHeader>() == 24 && align_of::<EventHeader>() == 8);
    assert!(offset_of!(EventHeader, cpu) == 4);
    assert!(offset_of!(EventHeader, at_ns) == 8);
    assert!(offset_of!(EventHeader, cgroup_id) == 16);

    assert!(size_of::<SocketCookie>() == 8);

    assert!(size_of::<Address>() == 32 && align_of::<Address>() == 8);
    assert!(offset_of!(Address, address) == 8);
    assert!(offset_of!(Address, port) == 24);
    assert!(offset_of!(Address, family) == 26);
    assert!(offset_of!(Address, dual_stack) == 28);

    assert!(size_of::<ListenerRecord>() == 56);
    assert!(offset_of!(ListenerRecord, cgroup_id) == 32);
    assert!(offset_of!(ListenerRecord, since_ns) == 40);
    assert!(offset_of!(ListenerRecord, counted) == 48);
    assert!(offset_of!(ListenerRecord, seen_by) == 52);

    assert!(size_of::<AddressCount>() == 24);
    assert!(offset_of!(AddressCount, last_cookie) == 8);
    assert!(offset_of!(AddressCount, changed_ns) == 16);

    assert!(size_of::<ListenerEvent>() == 72 && align_of::<ListenerEvent>() == 8);
    assert!(offset_of!(ListenerEvent, header) == 0);
    assert!(offset_of!(ListenerEvent, cookie) == 24);
    assert!(offset_of!(ListenerEvent, since_ns) == 32);
    assert!(offset_of!(ListenerEvent, address) == 40);

    assert!(size_of::<Drops>() == 40);

    assert!(size_of::<Meta>() == 56);
    assert!(offset_of!(Meta, abi_version) == 8);
    assert!(offset_of!(Meta, complete) == 12);
    assert!(offset_of!(Meta, tracepoint) == 16);
    assert!(offset_of!(Meta, instance) == 20);
    assert!(offset_of!(Meta, digest) == 24);

    // The kernel takes only whole pages, and only a power of two.
    assert!(RING_BYTES.is_power_of_two() && RING_BYTES >= 4096);
};
