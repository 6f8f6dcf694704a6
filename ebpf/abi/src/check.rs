//! What the agent asks the program `socket_check`, and what it answers: a packet with a head and up to
//! [`MAX_CHECKS`] of [`Check`], in which the program fills in the answers. No map is involved.

use core::mem::{align_of, offset_of, size_of};

/// Bytes before the first [`Check`]: the kernel takes the first 14 of every test packet for an Ethernet
/// header.
pub const HEAD: usize = 16;
/// Checks in one packet. The kernel allows a test packet one page, less what it needs around it.
pub const MAX_CHECKS: usize = 32;
/// Members of a `SO_REUSEPORT` group that are looked at; of a larger one it is never said that all are full.
pub const MAX_MEMBERS: u32 = 64;

/// The namespace that the program runs in (`BPF_F_CURRENT_NETNS`).
pub const CURRENT_NETNS: i32 = -1;

/// What a lookup found. The number is in [`Answer::found`].
pub mod found {
    /// Nothing, or nothing was looked for.
    pub const NOTHING: u32 = 0;
    /// A socket that listens.
    pub const LISTENER: u32 = 1;
    /// A connection that is established, and that the application hasn't accepted.
    pub const WAITING: u32 = 2;
    /// A connection that the application has accepted.
    pub const ACCEPTED: u32 = 3;
    /// A connection whose handshake isn't over (or that waits for data, with `TCP_DEFER_ACCEPT`).
    pub const HALF_OPEN: u32 = 4;
    /// A connection in any other state: it is being closed.
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
    /// The port connected to, host order.
    pub local_port: u16,
    /// The port connected from, host order; 0 for a listener.
    pub remote_port: u16,
    /// Zero.
    pub reserved: [u16; 3],
    /// The address connected to, network order; IPv4 takes the first four bytes.
    pub local: [u8; 16],
    /// The address connected from; all zero for a listener.
    pub remote: [u8; 16],
}

/// What was found.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The cookie of the namespace it was found in.
    pub netns_cookie: u64,
    /// The cgroup2 id the socket was made in; 0 if unknown.
    pub cgroup_id: u64,
    /// The socket's cookie; 0 if it has none yet.
    pub cookie: u64,
    /// A number made of the connections at the heads of the accept queues; 0 if none waits.
    pub heads: u64,
    /// One of [`found`].
    pub found: u32,
    /// Listeners at the address: more than one in a `SO_REUSEPORT` group.
    pub listeners: u32,
    /// Those with a connection waiting.
    pub waiting: u32,
    /// Those whose accept queue is full.
    pub full: u32,
    /// Connections that wait, in all queues.
    pub backlog: u32,
    /// The most that the found listener's queue takes, less one.
    pub max_backlog: u32,
}

/// One check, as it lies in the packet.
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
