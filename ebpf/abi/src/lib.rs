//! The records, map keys and map values that the kernel programs and the agent share.
//!
//! This crate is the only one that both halves share. It holds data layouts, and the table of the fields that
//! programs read of the kernel's own types ([`fields`]). Must never contain logic or I/O. Every type is
//! `repr(C)` and has no implicit padding (the kernel compares keys byte by byte and refuses to copy
//! uninitialised bytes). Compile-time assertions check its size and offsets, for the BPF target and for the
//! host. Any change of them needs a new [`ABI_VERSION`].
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

/// Version of all layouts in this crate. Pins are under `<bpffs>/<name>/v<ABI_VERSION>/`, so two versions
/// never read each other's maps.
pub const ABI_VERSION: u32 = 6;

/// Mark of our [`Meta`] records: `beelet` and two zero bytes, little endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"beelet\0\0");

/// `AF_INET`, as in [`Address::family`].
pub const FAMILY_IPV4: u16 = 2;
/// `AF_INET6`, as in [`Address::family`].
pub const FAMILY_IPV6: u16 = 10;

/// Entries of the `LISTENERS` map: listening sockets alive at once on one machine.
pub const MAX_LISTENERS: usize = 16_384;
/// Entries of the `ADDRESSES` map: addresses that have, or recently had, a listener.
pub const MAX_ADDRESSES: usize = 16_384;
/// Bytes of the ring buffer: some 10,000 listener events.
pub const RING_BYTES: usize = 1 << 20;

/// Value of a field offset that the running kernel's BTF lacks.
pub const ABSENT: u32 = u32::MAX;

/// Kinds of events: the values of [`EventHeader::kind`].
pub mod kind {
    /// A socket began to listen: [`super::ListenerEvent`].
    pub const LISTENER_OPENED: u32 = 1;
    /// A socket stopped listening because it was closed or disconnected, or its process was killed:
    /// [`super::ListenerEvent`].
    pub const LISTENER_CLOSED: u32 = 2;
    /// A process below the pods' root ended, with its last thread: [`super::ExitEvent`].
    pub const EXITED: u32 = 3;
    /// The OOM killer chose a process below the pods' root: [`super::OomEvent`].
    pub const OOM_KILL: u32 = 4;
    /// A cgroup below the pods' root crossed a threshold: [`super::PressureEvent`].
    pub const PRESSURE: u32 = 5;
}

/// Hooks that make listener records, for the reader of a bpftool dump.
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
    /// CPU of the event.
    pub cpu: u32,
    /// Time of the event: `CLOCK_MONOTONIC`, nanoseconds.
    pub at_ns: u64,
    /// Cgroup2 id (the inode of the directory) of the affected process; 0 if unknown.
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
    /// IP address in network order. IPv4 uses the first four bytes, the rest is zero. All zero: any address.
    pub address: [u8; 16],
    /// Port in host order; 0 while the kernel hasn't chosen one (`listen` without `bind`).
    pub port: u16,
    /// [`FAMILY_IPV4`] or [`FAMILY_IPV6`].
    pub family: u16,
    /// 1 for an IPv6 socket that also takes IPv4 connections (`IPV6_V6ONLY` is off).
    pub dual_stack: u32,
}

/// Value of the `LISTENERS` map: a listening socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerRecord {
    /// Bound address.
    pub address: Address,
    /// Id of the cgroup2 in which the socket was made; 0 if unknown.
    pub cgroup_id: u64,
    /// Time at which the socket began to listen: `CLOCK_MONOTONIC`, nanoseconds.
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
    /// Number of listening sockets: more than one with `SO_REUSEPORT`.
    pub listeners: u64,
    /// Cookie of the socket that last began to listen, which may have closed before its siblings.
    pub last_cookie: u64,
    /// Time of the count's last change: `CLOCK_MONOTONIC`, nanoseconds.
    pub changed_ns: u64,
}

/// Event of [`kind::LISTENER_OPENED`] and [`kind::LISTENER_CLOSED`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerEvent {
    /// Kind, CPU, time, cgroup.
    pub header: EventHeader,
    /// Cookie of the socket.
    pub cookie: u64,
    /// Time at which the socket began to listen; 0 if not seen.
    pub since_ns: u64,
    /// Current or former address.
    pub address: Address,
}

/// Value of the per-CPU `DROPS` map: counts of losses, after which user space must read the maps again.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Events that found the ring buffer full.
    pub ring_full: u64,
    /// Listeners that found the `LISTENERS` map full.
    pub listeners_full: u64,
    /// Listeners that found the `ADDRESSES` map full: recorded, but not counted.
    pub addresses_full: u64,
    /// Events that could not be counted because the `CONTAINERS` map was full.
    pub containers_full: u64,
    /// Threads that could not be followed from their fork on: their waits are not counted.
    pub tasks_full: u64,
}

/// Value of the `META` map: the mark of our pins, and the agent's settings for all programs.
///
/// `magic` and `abi_version` stay first in every version: they distinguish our pins from foreign ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`ABI_VERSION`].
    pub abi_version: u32,
    /// 1 once every pin is in place; 0 if the agent died before that.
    pub complete: u32,
    /// 1 while the tracepoint program is attached. That program sees every close, so the sock_ops program
    /// ignores closes.
    pub tracepoint: u32,
    /// Number of the active instance of the programs. Programs with another number stay idle: during a
    /// replacement the old and the new ones are attached, and each event is sent once.
    pub instance: u32,
    /// SHA-256 of the programs' object.
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

    // The kernel accepts only whole pages, and only a power of two.
    assert!(RING_BYTES.is_power_of_two() && RING_BYTES >= 4096);
};
