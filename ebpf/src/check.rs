//! `socket_check`: finds the socket that would take a connection, and whether its application accepts the
//! connections in its queue.
//!
//! An object of its own, without maps: the agent runs the program on demand (`BPF_PROG_TEST_RUN`), once per
//! check in the packet, and reads the answers from the packet. Nothing is attached, pinned or kept. A check
//! costs the lookup in the kernel's own socket table that a SYN would make, and sends no packet.
//!
//! The lookup by itself answers existence: specific and wildcard addresses, IPv4 on IPv6 sockets,
//! `SO_REUSEPORT` groups, and redirections by a `BPF_PROG_TYPE_SK_LOOKUP` program in that namespace. The
//! lookup starts from the loopback device, so it misses a listener bound to another device
//! (`SO_BINDTODEVICE`); user space asks sock_diag then.
//!
//! Kernel structures are read with `bpf_probe_read_kernel`: a group's members and the head of an accept queue
//! are reached through pointers that may be stale by the time the program follows them. A read of the wrong
//! memory gives a wrong number for one check, never a fault. An unreadable value is 0, which the helper
//! itself writes. Testing the helper's result would add a branch, and the verifiers of older kernels (6.1)
//! follow every path through the members of a group: with two branches per member these exceed their limit.
#![no_std]
#![no_main]

use core::hint::black_box;

use aya_ebpf::{
    Global,
    bindings::{__sk_buff, bpf_sock},
    cty::c_void,
    helpers::{bpf_sk_release, bpf_skc_lookup_tcp, bpf_skc_to_tcp_sock, generated::bpf_probe_read_kernel},
    macros::classifier,
    programs::TcContext,
};
use beelet_ebpf_abi::{
    ABSENT, FAMILY_IPV4, FAMILY_IPV6,
    check::{Answer, Asked, Check, HEAD, MAX_CHECKS, MAX_MEMBERS, found},
    kernel_fields,
};

#[macro_use]
#[allow(unused_macros)] // only the other object asks for groups
mod fields;

mod object;

macro_rules! check {
    (both { $($both:tt)+ } attached { $($attached:tt)+ } check { $($check:tt)+ } scheduler { $($scheduler:tt)+ }) => {
        globals! { $($both)+ $($check)+ }
    };
}

kernel_fields!(check);

/// include/net/tcp_states.h
const TCP_ESTABLISHED: u8 = 1;
/// include/net/tcp_states.h: the connection's own socket has just been made, and isn't in the accept queue
/// yet.
const TCP_SYN_RECV: u8 = 3;
/// include/net/tcp_states.h
const TCP_LISTEN: u8 = 10;
/// include/net/tcp_states.h
const TCP_NEW_SYN_RECV: u32 = 12;

/// Runs once per check: `cb[0]` counts the checks, from 0, over the runs of one call.
#[classifier]
pub(crate) fn socket_check(ctx: TcContext) -> i32 {
    let skb = ctx.skb.skb;
    // SAFETY: the program's own context; the kernel lets the program use `cb` freely.
    let index = unsafe {
        let index = (*skb).cb[0];
        (*skb).cb[0] = index + 1;
        index as usize
    };
    if index >= MAX_CHECKS {
        return 0;
    }
    let at = HEAD + index * size_of::<Check>();
    let Ok(asked) = ctx.load::<Asked>(at) else { return 0 };
    let answer = look(skb, &asked);
    // Fails only if the agent passed a packet that is too short: then it has no room for an answer either.
    let _ = ctx.store(at + size_of::<Asked>(), &answer, 0);
    0
}

/// `struct bpf_sock_tuple` for IPv4, from the listener's view: the remote side is the source.
#[repr(C)]
struct Tuple4 {
    remote: [u8; 4],
    local: [u8; 4],
    remote_port: u16,
    local_port: u16,
}

/// `struct bpf_sock_tuple` for IPv6.
#[repr(C)]
struct Tuple6 {
    remote: [u8; 16],
    local: [u8; 16],
    remote_port: u16,
    local_port: u16,
}

#[inline(always)]
fn look(skb: *mut __sk_buff, asked: &Asked) -> Answer {
    let netns = i64::from(asked.netns_id) as u64;
    let (remote_port, local_port) = (asked.remote_port.to_be(), asked.local_port.to_be());
    let (a, b) = (&asked.local, &asked.remote);
    let sk = if asked.family == FAMILY_IPV4 {
        let mut tuple = Tuple4 {
            remote: [b[0], b[1], b[2], b[3]],
            local: [a[0], a[1], a[2], a[3]],
            remote_port,
            local_port,
        };
        let size = size_of::<Tuple4>() as u32;
        // SAFETY: the context is the program's own, and the tuple has the size that selects IPv4.
        unsafe { bpf_skc_lookup_tcp(skb.cast(), (&raw mut tuple).cast(), size, netns, 0) }
    } else if asked.family == FAMILY_IPV6 {
        let mut tuple = Tuple6 { remote: asked.remote, local: asked.local, remote_port, local_port };
        let size = size_of::<Tuple6>() as u32;
        // SAFETY: as above, with the size that selects IPv6.
        unsafe { bpf_skc_lookup_tcp(skb.cast(), (&raw mut tuple).cast(), size, netns, 0) }
    } else {
        return Answer::default();
    };
    if sk.is_null() {
        return Answer::default();
    }
    let answer = describe(sk);
    // SAFETY: the lookup returned this reference, and nothing uses it after this.
    unsafe { bpf_sk_release(sk.cast()) };
    answer
}

#[inline(always)]
fn describe(sk: *mut bpf_sock) -> Answer {
    let mut answer = Answer::default();
    // SAFETY: a socket that the lookup holds for us.
    let tcp = unsafe { bpf_skc_to_tcp_sock(sk.cast()) }.cast::<u8>().cast_const();
    if tcp.is_null() {
        // A request or a socket in TIME_WAIT, which has little more than an address.
        // SAFETY: as above; the verifier knows this field of every kind of socket.
        let state = unsafe { core::ptr::read_volatile(&raw const (*sk).state) };
        answer.found = if state == TCP_NEW_SYN_RECV { found::HALF_OPEN } else { found::CLOSING };
        return answer;
    }
    answer.netns_cookie = follow(tcp, &OFF_SKC_NET, &OFF_NET_COOKIE);
    answer.cookie = read(tcp, &OFF_SKC_COOKIE);
    answer.cgroup_id = cgroup_id(tcp);
    let state: u8 = read(tcp, &OFF_SKC_STATE);
    if state == TCP_LISTEN {
        answer.found = found::LISTENER;
        queues(tcp, &mut answer);
    } else if state == TCP_ESTABLISHED {
        // accept() attaches a `struct socket` to the connection (sock_graft, include/net/sock.h).
        let socket: u64 = read(tcp, &OFF_SK_SOCKET);
        answer.found = if socket == 0 { found::WAITING } else { found::ACCEPTED };
    } else if state == TCP_SYN_RECV {
        answer.found = found::HALF_OPEN;
    } else {
        answer.found = found::CLOSING;
    }
    answer
}

/// Adds the accept queues of a listener, or of all members of its group, to the answer.
#[inline(always)]
fn queues(listener: *const u8, answer: &mut Answer) {
    answer.max_backlog = read(listener, &OFF_MAX_ACK_BACKLOG);
    let group: u64 = read(listener, &OFF_REUSEPORT);
    if group == 0 || OFF_NUM_SOCKS.load() == ABSENT || OFF_SOCKS.load() == ABSENT {
        answer.listeners = 1;
        queue(listener, answer);
        return;
    }
    let group = group as *const u8;
    let members: u16 = read(group, &OFF_NUM_SOCKS);
    answer.listeners = u32::from(members);
    let socks = group.wrapping_add(OFF_SOCKS.load() as usize);
    for index in 0..MAX_MEMBERS {
        if index >= u32::from(members) {
            break;
        }
        let member: u64 = read_at(socks.wrapping_add(index as usize * size_of::<u64>()));
        // All reads of a freed member return 0.
        queue(member as *const u8, answer);
    }
}

/// Adds the accept queue of a single listener to the answer. Without branches, which older verifiers would
/// follow for each member of a group.
#[inline(always)]
fn queue(listener: *const u8, answer: &mut Answer) {
    let backlog: u32 = read(listener, &OFF_ACK_BACKLOG);
    let max_backlog: u32 = read(listener, &OFF_MAX_ACK_BACKLOG);
    let waits = exceeds(backlog, 0);
    answer.backlog = answer.backlog.wrapping_add(backlog);
    answer.waiting += waits as u32;
    // sk_acceptq_is_full, include/net/sock.h.
    answer.full += (waits & exceeds(backlog, max_backlog)) as u32;
    if OFF_ACCEPT_HEAD.load() == ABSENT || OFF_SENT_ISN.load() == ABSENT {
        return;
    }
    let head: u64 = read(listener, &OFF_ACCEPT_HEAD);
    // The kernel reuses a request's memory; the random number in the request identifies it.
    let isn: u32 = read(head as *const u8, &OFF_SENT_ISN);
    let name = (u64::from(isn) << 32) ^ head;
    answer.heads =
        answer.heads.wrapping_add(name.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_mul(waits)) | waits;
}

/// Returns 1 if `a > b`, otherwise 0: the sign of a difference, which the compiler can't turn into a branch.
#[inline(always)]
fn exceeds(a: u32, b: u32) -> u64 {
    black_box(u64::from(b).wrapping_sub(u64::from(a))) >> 63
}

#[inline(always)]
fn cgroup_id(tcp: *const u8) -> u64 {
    if OFF_SOCK_CGROUP.load() == ABSENT || OFF_CGROUP_KN.load() == ABSENT || OFF_KERNFS_ID.load() == ABSENT {
        return 0;
    }
    let cgroup: u64 = read(tcp, &OFF_SOCK_CGROUP);
    if cgroup == 0 { 0 } else { follow(cgroup as *const u8, &OFF_CGROUP_KN, &OFF_KERNFS_ID) }
}

/// Reads a 64-bit field through a pointer field.
#[inline(always)]
fn follow(base: *const u8, pointer: &Global<u32>, field: &Global<u32>) -> u64 {
    let inner: u64 = read(base, pointer);
    if inner == 0 { 0 } else { read(inner as *const u8, field) }
}

/// Reads a field; returns 0 if this kernel lacks the field or the memory is unmapped.
#[inline(always)]
fn read<T: Copy + Default>(base: *const u8, offset: &Global<u32>) -> T {
    let offset = offset.load();
    if offset == ABSENT { T::default() } else { read_at(base.wrapping_add(offset as usize)) }
}

#[inline(always)]
fn read_at<T: Copy + Default>(at: *const u8) -> T {
    let mut value = T::default();
    // SAFETY: the helper checks the address, and copies or writes zeros.
    unsafe {
        bpf_probe_read_kernel((&raw mut value).cast::<c_void>(), size_of::<T>() as u32, at.cast::<c_void>());
    }
    value
}
