//! Questions of the agent to the program `socket_check`, and its answers: a packet with a head and up to
//! [`MAX_CHECKS`] of [`Check`], in which the program fills in the answers. No map is involved.

use core::mem::{align_of, offset_of, size_of};

/// Bytes before the first [`Check`]: the kernel takes the first 14 of every test packet for an Ethernet
/// header.
pub const HEAD: usize = 16;
/// Checks in one packet. The kernel allows a test packet one page, less what it needs around it.
pub const MAX_CHECKS: usize = 32;
/// Members of a `SO_REUSEPORT` group that are checked; a larger group is never reported as completely full.
pub const MAX_MEMBERS: u32 = 64;

/// The program's own namespace (`BPF_F_CURRENT_NETNS`).
pub const CURRENT_NETNS: i32 = -1;

/// Results of a lookup: the values of [`Answer::found`].
pub mod found {
    /// No socket, or no lookup.
    pub const NOTHING: u32 = 0;
    /// A listening socket.
    pub const LISTENER: u32 = 1;
    /// An established connection that the application hasn't accepted.
    pub const WAITING: u32 = 2;
    /// A connection that the application has accepted.
    pub const ACCEPTED: u32 = 3;
    /// A connection whose handshake hasn't finished (or that waits for data, with `TCP_DEFER_ACCEPT`).
    pub const HALF_OPEN: u32 = 4;
    /// A connection in any other state: a closing one.
    pub const CLOSING: u32 = 5;
}

/// A socket to look up.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The network namespace's number as seen from the agent's (`RTM_GETNSID`), or [`CURRENT_NETNS`].
    pub netns_id: i32,
    /// [`crate::FAMILY_IPV4`] or [`crate::FAMILY_IPV6`].
    pub family: u16,
    /// Destination port, host order.
    pub local_port: u16,
    /// Source port, host order; 0 for a listener.
    pub remote_port: u16,
    /// Zero.
    pub reserved: [u16; 3],
    /// Destination address, network order; IPv4 uses the first four bytes.
    pub local: [u8; 16],
    /// Source address; all zero for a listener.
    pub remote: [u8; 16],
}

/// Result of a lookup.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Cookie of the socket's namespace.
    pub netns_cookie: u64,
    /// Id of the cgroup2 in which the socket was made; 0 if unknown.
    pub cgroup_id: u64,
    /// The socket's cookie; 0 if it has none yet.
    pub cookie: u64,
    /// Fingerprint of the connections at the heads of the accept queues; 0 if none waits.
    pub heads: u64,
    /// One of [`found`].
    pub found: u32,
    /// Listeners at the address: more than one in a `SO_REUSEPORT` group.
    pub listeners: u32,
    /// Listeners with a waiting connection.
    pub waiting: u32,
    /// Listeners with a full accept queue.
    pub full: u32,
    /// Waiting connections in all queues.
    pub backlog: u32,
    /// Capacity of the found listener's queue, less one.
    pub max_backlog: u32,
}

/// A check in the packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// Written by the agent.
    pub asked: Asked,
    /// Written by the program.
    pub answer: Answer,
}

const _: () = {
    assert!(size_of::<Asked>() == 48 && align_of::<Asked>() == 4);
    assert!(offset_of!(Asked, family) == 4);
    assert!(offset_of!(Asked, local_port) == 6);
    assert!(offset_of!(Asked, remote_port) == 8);
    assert!(offset_of!(Asked, local) == 16);
    assert!(offset_of!(Asked, remote) == 32);

    assert!(size_of::<Answer>() == 56 && align_of::<Answer>() == 8);
    assert!(offset_of!(Answer, found) == 32);
    assert!(offset_of!(Answer, listeners) == 36);
    assert!(offset_of!(Answer, max_backlog) == 52);

    assert!(size_of::<Check>() == 104);
    assert!(offset_of!(Check, answer) == 48);
    // 4096 less the room that the kernel needs before (at most 256 bytes) and behind (at most 448).
    assert!(HEAD + MAX_CHECKS * size_of::<Check>() <= 4096 - 256 - 448);
};
