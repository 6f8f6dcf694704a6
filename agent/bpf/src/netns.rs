//! A handle on a pod's network namespace, and its listening sockets as listed by the kernel's sock_diag.
//!
//! sock_diag is the second source: it seeds the listeners from before the programs were attached, confirms a
//! verdict once per period, and is the only source without BPF. The queries open no connection and send no
//! packet.

use super::{KernelError, sys};
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A listener and the accept queues at its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptQueues {
    /// The kernel's number for the socket that was found.
    pub cookie: u64,
    /// Id of the cgroup2 in which the socket was made; 0 if unknown.
    pub cgroup_id: u64,
    /// Listeners at the address: more than one in a `SO_REUSEPORT` group.
    pub listeners: u32,
    /// Listeners with waiting connections.
    pub waiting: u32,
    /// Listeners with a full queue.
    pub full: u32,
    /// Fingerprint of the connections at the heads of the queues: any accept changes it. 0 if unknown.
    pub heads: u64,
    /// Waiting connections in all queues.
    pub backlog: u32,
    /// Backlog requested by the found listener.
    pub max_backlog: u32,
}

/// Timeout of an answer. The kernel answers a dump at once; a missing answer is a bug, and must not hang a
/// worker.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// A TCP socket in state LISTEN, as sock_diag reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListeningSocket {
    /// The kernel's number for the socket, the same as in [`super::Listener::cookie`].
    pub cookie: u64,
    /// Bound address; unspecified for every address.
    pub address: IpAddr,
    /// Bound port.
    pub port: u16,
    /// True for an IPv6 socket that also takes IPv4 connections.
    pub dual_stack: bool,
    /// Connections waiting to be accepted.
    pub backlog: u32,
    /// Requested backlog: with one connection more the queue is full.
    pub max_backlog: u32,
}

impl ListeningSocket {
    /// Returns true if the socket takes connections to `ip`.
    fn answers_at(&self, ip: IpAddr) -> bool {
        match (self.address, ip) {
            (IpAddr::V4(own), IpAddr::V4(ip)) => own.is_unspecified() || own == ip,
            (IpAddr::V6(own), IpAddr::V6(ip)) => own.is_unspecified() || own == ip,
            (IpAddr::V6(own), IpAddr::V4(ip)) => {
                own.to_ipv4_mapped() == Some(ip) || (own.is_unspecified() && self.dual_stack)
            }
            (IpAddr::V4(_), IpAddr::V6(_)) => false,
        }
    }
}

/// A network namespace, held by a socket inside it. Its calls block for some ten microseconds.
#[derive(Debug)]
pub struct NetnsHandle {
    cookie: u64,
    socket: Mutex<Socket>,
}

impl NetnsHandle {
    /// Opens the namespace that a file stands for (`/proc/<pid>/ns/net`, `/run/netns/<name>`).
    ///
    /// # Errors
    /// The file is missing or not a network namespace, or the agent may not enter the namespace.
    pub fn open(path: &Path) -> Result<NetnsHandle, KernelError> {
        let shown = path.display().to_string();
        let file = std::fs::File::open(path).map_err(|error| {
            KernelError::io(&format!("could not open the network namespace {shown}"), &error)
        })?;
        // A thread can change only its own namespace, and no worker thread may: this thread ends here.
        let opened = std::thread::Builder::new().name("netns".to_owned()).spawn(move || {
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&file),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .map_err(|error| KernelError::io("could not enter the namespace", &error.into()))?;
            open_socket()
        });
        let failed =
            |why: &str| KernelError::new(format!("the network namespace {shown} can't be watched: {why}"));
        let (cookie, socket) = opened
            .map_err(|error| failed(&format!("cannot start a thread: {error}")))?
            .join()
            .map_err(|_| failed("the thread that enters it panicked"))?
            .map_err(|why| failed(&why.to_string()))?;
        Ok(NetnsHandle { cookie, socket: Mutex::new(socket) })
    }

    /// Opens the namespace of a process.
    ///
    /// # Errors
    /// As [`NetnsHandle::open`].
    pub fn of_process(pid: u32) -> Result<NetnsHandle, KernelError> {
        NetnsHandle::open(Path::new(&format!("/proc/{pid}/ns/net")))
    }

    /// The kernel's number for the namespace, as in [`super::Listener::netns_cookie`].
    #[must_use]
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Returns every TCP socket that listens in the namespace, on `port` if given.
    ///
    /// # Errors
    /// The kernel refused, or its answer was invalid.
    pub fn listening(&self, port: Option<u16>) -> Result<Vec<ListeningSocket>, KernelError> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = dump(&socket, AF_INET, port)?;
        found.extend(dump(&socket, AF_INET6, port)?);
        Ok(found)
    }

    /// Returns the accept queues of the listeners that take connections to `ip:port` in the namespace; `None`
    /// without a listener. sock_diag does not report the heads of the queues.
    ///
    /// # Errors
    /// As [`NetnsHandle::listening`].
    pub fn accept_queues(&self, port: u16, ip: IpAddr) -> Result<Option<AcceptQueues>, KernelError> {
        let sockets = self.listening(Some(port))?;
        let mut found: Option<AcceptQueues> = None;
        for socket in sockets.iter().filter(|socket| socket.port == port && socket.answers_at(ip)) {
            let queues = found.get_or_insert_with(|| AcceptQueues {
                cookie: socket.cookie,
                max_backlog: socket.max_backlog,
                ..AcceptQueues::default()
            });
            queues.listeners += 1;
            queues.waiting += u32::from(socket.backlog > 0);
            queues.full += u32::from(socket.backlog > socket.max_backlog);
            queues.backlog = queues.backlog.saturating_add(socket.backlog);
        }
        Ok(found)
    }

    /// Returns true if a socket in the namespace takes connections to `port` at any of `ips`.
    ///
    /// # Errors
    /// As [`NetnsHandle::listening`].
    pub fn is_listening(&self, port: u16, ips: &[IpAddr]) -> Result<bool, KernelError> {
        let sockets = self.listening(Some(port))?;
        Ok(sockets.iter().any(|socket| socket.port == port && ips.iter().any(|ip| socket.answers_at(*ip))))
    }
}

fn open_socket() -> Result<(u64, Socket), KernelError> {
    let failed = KernelError::io;
    let mut socket =
        Socket::new(NETLINK_SOCK_DIAG).map_err(|error| failed("cannot make a sock_diag socket", &error))?;
    socket.bind_auto().map_err(|error| failed("cannot bind the sock_diag socket", &error))?;
    socket.connect(&SocketAddr::new(0, 0)).map_err(|error| failed("cannot connect to sock_diag", &error))?;
    // SAFETY: `socket` owns the descriptor and outlives the borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) };
    rustix::net::sockopt::set_socket_timeout(fd, rustix::net::sockopt::Timeout::Recv, Some(ANSWER_WITHIN))
        .map_err(|error| failed("cannot set a timeout for sock_diag", &error.into()))?;
    let cookie = sys::netns_cookie(fd).map_err(|error| failed("cannot read its cookie", &error))?;
    Ok((cookie, socket))
}

/// Queries all listeners of one address family.
fn dump(socket: &Socket, family: u8, port: Option<u16>) -> Result<Vec<ListeningSocket>, KernelError> {
    let failed = |what: &dyn std::fmt::Display| {
        KernelError::new(format!("sock_diag could not list listeners: {what}"))
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut socket_id = if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() };
    socket_id.source_port = port.unwrap_or(0); // 0: any
    let request = InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::LISTEN,
        socket_id,
    };
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0).map_err(|error| failed(&error))?;
    let mut found = Vec::new();
    loop {
        let (datagram, _) = socket.recv_from_full().map_err(|error| failed(&error))?;
        let mut rest = datagram.as_slice();
        while !rest.is_empty() {
            let message =
                NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(|error| failed(&error))?;
            match message.payload {
                NetlinkPayload::Done(_) => return Ok(found),
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    found.push(listening_socket(&response));
                }
                NetlinkPayload::Error(error) => return Err(failed(&refusal(&error.to_io()))),
                _ => {}
            }
            // Messages are aligned to 4 bytes.
            let length = (message.header.length as usize).next_multiple_of(4).max(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

/// Explains the kernel's refusal. Requests about TCP have a handler of their own, which may be a module that
/// the kernel can't find (net/core/sock_diag.c, `sock_diag_lock_handler`).
fn refusal(error: &std::io::Error) -> String {
    if error.kind() == std::io::ErrorKind::NotFound {
        "this kernel has no tcp_diag: load that module (modprobe tcp_diag), or use a kernel built with \
         CONFIG_INET_TCP_DIAG"
            .to_owned()
    } else {
        error.to_string()
    }
}

fn listening_socket(response: &InetResponse) -> ListeningSocket {
    let id = &response.header.socket_id;
    let v6_only = response.nlas.iter().any(|nla| matches!(nla, Nla::SkV6Only(true)));
    ListeningSocket {
        cookie: u64::from_ne_bytes(id.cookie),
        address: id.source_address,
        port: id.source_port,
        dual_stack: response.header.family == AF_INET6 && !v6_only,
        // inet_diag of a listener (tcp_diag_get_info, net/ipv4/tcp_diag.c): sk_ack_backlog and
        // sk_max_ack_backlog.
        backlog: response.header.recv_queue,
        max_backlog: response.header.send_queue,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_module_is_named() {
        let text = refusal(&std::io::Error::from(std::io::ErrorKind::NotFound));
        assert!(text.contains("modprobe tcp_diag"), "{text}");
        let text = refusal(&std::io::Error::from(std::io::ErrorKind::PermissionDenied));
        assert!(!text.contains("tcp_diag"), "{text}");
    }
}
