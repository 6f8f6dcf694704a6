//! The number of a network namespace as seen from ours, which a BPF socket lookup needs.
//!
//! The kernel numbers namespaces per observing namespace, on request (`RTM_NEWNSID`, rtnetlink). A number is
//! free again when its namespace ends, so it is valid only while the namespace is held: the owner of a number
//! keeps a [`super::NetnsHandle`] on the namespace.
//!
//! The two messages of two attributes each are built by hand, since the crates for them bring all of
//! rtnetlink.

use super::KernelError;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use std::os::fd::{AsRawFd, BorrowedFd};

const RTM_NEWNSID: u16 = 88; // include/uapi/linux/rtnetlink.h
const RTM_GETNSID: u16 = 90;
const NETNSA_NSID: u16 = 1; // include/uapi/linux/net_namespace.h
const NETNSA_FD: u16 = 3;
/// In an answer: the namespace has no number yet. In a request: any number.
const NSID_NOT_ASSIGNED: i32 = -1;
const NLMSG_ERROR: u16 = 2; // include/uapi/linux/netlink.h
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const HEADER: usize = 16; // struct nlmsghdr
const FAMILY: usize = 4; // struct rtgenmsg, padded

/// Returns the number of the namespace that the file `namespace` stands for, and assigns one if needed.
pub(super) fn number_of(namespace: BorrowedFd<'_>) -> Result<i32, KernelError> {
    let failed = |what: &dyn std::fmt::Display| {
        KernelError::new(format!("cannot get a number for a network namespace: {what}"))
    };
    let mut socket = Socket::new(NETLINK_ROUTE).map_err(|error| failed(&error))?;
    socket.bind_auto().map_err(|error| failed(&error))?;
    socket.connect(&SocketAddr::new(0, 0)).map_err(|error| failed(&error))?;
    let fd = namespace.as_raw_fd();
    let ask = || -> Result<i32, KernelError> {
        let answer = exchange(&socket, &request(RTM_GETNSID, NLM_F_REQUEST, &[(NETNSA_FD, fd)]))
            .map_err(|error| failed(&error))?;
        number_in(&answer).ok_or_else(|| failed(&"the kernel's answer has none"))
    };
    let known = ask()?;
    if known != NSID_NOT_ASSIGNED {
        return Ok(known);
    }
    let wish = [(NETNSA_FD, fd), (NETNSA_NSID, NSID_NOT_ASSIGNED)];
    match exchange(&socket, &request(RTM_NEWNSID, NLM_F_REQUEST | NLM_F_ACK, &wish)) {
        Ok(_) => {}
        // Another process was first: CNI plugins also number the namespaces of their veths.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(&error)),
    }
    match ask()? {
        NSID_NOT_ASSIGNED => Err(failed(&"the number vanished at once")),
        number => Ok(number),
    }
}

/// Builds a message about a namespace, with 32-bit attributes.
fn request(kind: u16, flags: u16, attributes: &[(u16, i32)]) -> Vec<u8> {
    let length = HEADER + FAMILY + attributes.len() * 8;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]); // sequence and sender: the socket has one request at a time
    bytes.extend([0; FAMILY]); // AF_UNSPEC
    for (attribute, value) in attributes {
        bytes.extend(8_u16.to_ne_bytes());
        bytes.extend(attribute.to_ne_bytes());
        bytes.extend(value.to_ne_bytes());
    }
    bytes
}

/// Sends one message and returns the answer; an error in the answer becomes this function's error.
fn exchange(socket: &Socket, request: &[u8]) -> std::io::Result<Vec<u8>> {
    socket.send(request, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map_or(0, u16::from_ne_bytes);
    if kind == NLMSG_ERROR {
        let code = answer.get(HEADER..HEADER + 4).and_then(|bytes| bytes.try_into().ok());
        match code.map_or(-libc::EPROTO, i32::from_ne_bytes) {
            0 => {}
            code => return Err(std::io::Error::from_raw_os_error(-code)),
        }
    }
    Ok(answer)
}

/// Returns the NETNSA_NSID attribute of an answer.
fn number_in(answer: &[u8]) -> Option<i32> {
    let mut rest = answer.get(HEADER + FAMILY..)?;
    while rest.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes(rest.get(..2)?.try_into().ok()?)).max(4);
        let kind = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?);
        if kind == NETNSA_NSID {
            return Some(i32::from_ne_bytes(rest.get(4..8)?.try_into().ok()?));
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_among_other_attributes() {
        let mut answer = request(RTM_NEWNSID, 0, &[(4, 9), (NETNSA_NSID, 7)]);
        assert_eq!(number_in(&answer), Some(7));
        answer.truncate(answer.len() - 4);
        assert_eq!(number_in(&answer), None);
        assert_eq!(number_in(&request(RTM_NEWNSID, 0, &[(4, 9)])), None);
        assert_eq!(number_in(&[]), None);
    }

    #[test]
    fn a_request_says_its_length() {
        let bytes = request(RTM_GETNSID, NLM_F_REQUEST, &[(NETNSA_FD, 3)]);
        assert_eq!(bytes.len(), 28);
        assert_eq!(bytes[..4], 28_u32.to_ne_bytes());
    }
}
