//! Listening TCP sockets of the whole machine, with their address and start time.
//!
//! Two hooks feed the same two idempotent functions, [`open`] and [`close`]: the first call wins and the
//! other changes nothing.
//!
//! - `pod_socket`, sock_ops on the pods' cgroup (sockets.rs). `LISTEN_CB` runs after `listen` has succeeded,
//!   so the port is known and the socket takes connections. `STATE_CB` sees the end of a listener if the
//!   tracepoint is not allowed.
//! - `listener_state`, on the tracepoint `inet_sock_set_state`, which sees every socket of the machine:
//!   sockets made before the attach, passed in from another cgroup, or closed by the end of their process.
//!
//! The tracepoint's quirks (net/ipv4/inet_connection_sock.c):
//!
//! - `inet_csk_listen_start` sets the state *before* it has the port. A socket that listens without `bind`
//!   has port 0 then: it is recorded, but neither counted nor reported until `LISTEN_CB` fills in the port.
//!   If getting the port fails, the state returns to CLOSE and [`close`] removes the record again.
//! - `inet_csk_clone_lock` makes an accepted connection by copying the listener, *cookie and state included*,
//!   and sets the copy to SYN_RECV: a transition from LISTEN that is not the listener's. Only LISTEN to CLOSE
//!   is an end.
//! - On the way to CLOSE the kernel releases an autobound port first, so [`close`] trusts the record, not the
//!   socket.

use aya_ebpf::{
    EbpfContext,
    bindings::BPF_NOEXIST,
    helpers::{bpf_get_socket_cookie, bpf_ktime_get_ns},
    macros::btf_tracepoint,
    programs::{BtfTracePointContext, SockOpsContext},
};
use beelet_ebpf_abi::{
    Address, AddressCount, ListenerEvent, ListenerRecord, SocketCookie, fields::group, kind, seen_by,
};

use crate::{
    atomic::atomic_add,
    events::{dropped, header, is_current, send},
    kernel::{Sock, known},
    maps::{ADDRESSES, LISTENERS, META},
    sockets::sock_of,
};

/// Requests `STATE_CB` on this socket. The connections that it accepts inherit the flag and its cost, so it
/// is set only if no other hook sees the end.
const BPF_SOCK_OPS_STATE_CB_FLAG: u32 = 4;

/// include/net/tcp_states.h
const TCP_CLOSE: u32 = 7;
/// include/net/tcp_states.h
const TCP_LISTEN: u32 = 10;
const IPPROTO_TCP: u16 = 6;

/// Handles a sock_ops event of a listener in the pods' cgroup: the socket began to listen, or its state
/// changed.
#[inline(always)]
pub(crate) fn by_sock_ops(ctx: &SockOpsContext, listens: bool) {
    if !listens && (ctx.arg(0) != TCP_LISTEN || ctx.arg(1) != TCP_CLOSE) || !known::<{ group::LISTENER }>() {
        return;
    }
    if !tracepoint_attached() {
        if listens {
            // OR-ed onto the existing flags: another program on this cgroup may have requested callbacks.
            let _ = ctx.set_cb_flags((ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG) as i32);
        }
    } else if !listens {
        return;
    }
    let Some(sock) = sock_of(ctx) else { return };
    // SAFETY: the helper takes this program type's context.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    if listens { open(cookie, sock, seen_by::SOCK_OPS) } else { close(cookie, sock) }
}

/// Handles every TCP socket of the machine that begins or stops listening.
#[btf_tracepoint(function = "inet_sock_set_state")]
pub(crate) fn listener_state(ctx: BtfTracePointContext) -> i32 {
    // The arguments have been (sk, oldstate, newstate) since the tracepoint's introduction in 4.16; the agent
    // checks that they still are before it loads this program (`check_set_state` in
    // agent/bpf/src/offsets.rs).
    let (old, new): (i32, i32) = (ctx.arg(1), ctx.arg(2));
    let (old, new) = (old as u32, new as u32);
    let opens = new == TCP_LISTEN;
    let closes = old == TCP_LISTEN && new == TCP_CLOSE;
    if !(opens || closes) || !known::<{ group::LISTENER }>() || !is_current() {
        return 0;
    }
    let pointer: *const u8 = ctx.arg(0);
    // SAFETY: the tracepoint's first argument is a `struct sock *`, never null.
    let sock = unsafe { Sock::new(pointer) };
    if sock.protocol() != IPPROTO_TCP {
        return 0;
    }
    // SAFETY: for a tracing program the helper takes a typed socket pointer.
    let cookie = unsafe { bpf_get_socket_cookie(pointer.cast_mut().cast()) };
    if opens {
        open(cookie, sock, seen_by::TRACEPOINT)
    } else {
        close(cookie, sock)
    }
    0
}

/// Returns true if the tracepoint sees the closes, so that sock_ops may ignore them.
///
/// Otherwise a `close` by sock_ops would be followed, in the same `tcp_set_state`, by one by the tracepoint,
/// which would find no record and report the end of an unknown listener.
#[inline(always)]
fn tracepoint_attached() -> bool {
    // SAFETY: the element lives as long as the array; the agent changes this field as one aligned word.
    META.get_ptr(0)
        .is_some_and(|meta| unsafe { core::ptr::read_volatile(&raw const (*meta).tracepoint) } != 0)
}

/// Records a listening socket. Both hooks run under the socket's lock, so a cookie is never opened twice at
/// the same time.
#[inline(always)]
fn open(cookie: u64, sock: Sock, by: u32) {
    let Some(address) = sock.address() else { return };
    // SAFETY: takes nothing.
    let now = unsafe { bpf_ktime_get_ns() };
    let key = SocketCookie { cookie };
    let mut record =
        ListenerRecord { address, cgroup_id: sock.cgroup_id(), since_ns: now, counted: 0, seen_by: by };
    if let Some(known) = LISTENERS.get_ptr_mut(key) {
        // SAFETY: a live element of the map; only this socket's own hooks, under its lock, write it.
        let known = unsafe { &mut *known };
        if known.address.port != 0 || address.port == 0 {
            return;
        }
        known.address.port = address.port;
        known.since_ns = now;
        known.counted = count(&address, cookie, now);
    } else {
        if address.port != 0 {
            record.counted = count(&address, cookie, now);
        }
        if LISTENERS.insert(key, record, u64::from(BPF_NOEXIST)).is_err() {
            if record.counted != 0 {
                uncount(&address, now);
            }
            dropped(|drops| &raw mut drops.listeners_full);
        }
    }
    if address.port != 0 {
        log(&address, cookie, true);
        send(ListenerEvent {
            header: header(kind::LISTENER_OPENED, record.cgroup_id),
            cookie,
            since_ns: now,
            address,
        });
    }
}

/// Removes the record of a socket that stopped listening.
///
/// A listener without a record (older than the attach, or the map was full) is reported as well, with
/// `since_ns` 0: user space may know it from another source. Its address was never counted, so no count
/// changes.
#[inline(always)]
fn close(cookie: u64, sock: Sock) {
    // SAFETY: takes nothing.
    let now = unsafe { bpf_ktime_get_ns() };
    let key = SocketCookie { cookie };
    let (address, cgroup_id, since_ns) = match LISTENERS.get_ptr(key) {
        Some(known) => {
            // SAFETY: a live element; copied before it is removed.
            let known = unsafe { *known };
            if LISTENERS.remove(key).is_err() {
                return;
            }
            if known.counted != 0 {
                uncount(&known.address, now);
            }
            if known.address.port == 0 {
                // A `listen` without `bind` that never succeeded (or was never reported): no subscriber knows
                // the socket.
                return;
            }
            (known.address, known.cgroup_id, known.since_ns)
        }
        None => match sock.address() {
            Some(address) => (address, sock.cgroup_id(), 0),
            None => return,
        },
    };
    log(&address, cookie, false);
    send(ListenerEvent { header: header(kind::LISTENER_CLOSED, cgroup_id), cookie, since_ns, address });
}

/// Counts a listener at its address; returns 1 on success, 0 if the map is full.
#[inline(always)]
fn count(address: &Address, cookie: u64, now: u64) -> u32 {
    if ADDRESSES.get_ptr(address).is_none() {
        let none = AddressCount { listeners: 0, last_cookie: cookie, changed_ns: now };
        // Another CPU may insert first: then its entry serves.
        let _ = ADDRESSES.insert(address, none, u64::from(BPF_NOEXIST));
    }
    match ADDRESSES.get_ptr_mut(address) {
        Some(entry) => {
            // SAFETY: a live element; the count is changed atomically, the other fields are whole words, and
            // the last writer wins.
            unsafe {
                atomic_add(&raw mut (*entry).listeners, 1);
                (*entry).last_cookie = cookie;
                (*entry).changed_ns = now;
            }
            1
        }
        None => {
            dropped(|drops| &raw mut drops.addresses_full);
            0
        }
    }
}

/// Reverses [`count`], for a listener that was counted.
#[inline(always)]
fn uncount(address: &Address, now: u64) {
    if let Some(entry) = ADDRESSES.get_ptr_mut(address) {
        // SAFETY: as in `count`.
        unsafe {
            atomic_add(&raw mut (*entry).listeners, u64::MAX);
            (*entry).changed_ns = now;
        }
    }
}

#[cfg(feature = "log")]
#[inline(always)]
fn log(address: &Address, cookie: u64, opened: bool) {
    let what = if opened { "opened" } else { "closed" };
    aya_log_ebpf::info!(
        (), // the macro requires a context and ignores it
        "listener {}: netns {} port {} cookie {}",
        what,
        address.netns_cookie,
        address.port,
        cookie
    );
}

#[cfg(not(feature = "log"))]
#[inline(always)]
fn log(_address: &Address, _cookie: u64, _opened: bool) {}
