//! Asks the kernel which socket would take a connection, and whether its application accepts the connections
//! in its queue: many addresses at a time, without sending a packet. The other half is `ebpf/src/check.rs`.
//!
//! The program is loaded from an object of its own and run on demand (`BPF_PROG_TEST_RUN`); it is not pinned
//! and ends with the agent. Docs: docs/decisions/0007-socket-check.md.

use super::btf::Btf;
use super::capability::{Capability, SOCKET_CHECK};
use super::loader::not_loaded;
use super::offsets::Offsets;
use super::{AcceptQueues, KernelError, NetnsHandle, nsid, sys};
use aya::EbpfLoader;
use aya::programs::SchedClassifier;
use beelet_ebpf_abi::check::{Answer, Asked, CURRENT_NETNS, Check, HEAD, MAX_CHECKS, found};
use beelet_ebpf_abi::fields::group;
use beelet_ebpf_abi::{FAMILY_IPV4, FAMILY_IPV6};
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// The object that `cargo xtask build-ebpf` made, aligned as an ELF parser requires.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../ebpf/prebuilt/beelet-check.bpf.o"
));

/// A network namespace in which lookups are possible while this value lives.
#[derive(Debug)]
pub struct CheckedNetns {
    handle: NetnsHandle,
    number: Option<i32>,
}

impl CheckedNetns {
    /// Opens the namespace that a file stands for. Without `checker`, only sock_diag can query it.
    ///
    /// # Errors
    /// The file is missing or not a network namespace, or the agent may not enter the namespace.
    pub fn open(path: &Path, checker: Option<&Checker>) -> Result<CheckedNetns, KernelError> {
        let handle = NetnsHandle::open(path)?;
        let Some(checker) = checker else { return Ok(CheckedNetns { handle, number: None }) };
        if handle.cookie() == checker.inner.own_netns {
            return Ok(CheckedNetns { handle, number: Some(CURRENT_NETNS) });
        }
        // After the handle: it keeps the namespace, and so its number, alive.
        let number = std::fs::File::open(path)
            .map_err(|error| KernelError::new(format!("could not open {}: {error}", path.display())))
            .and_then(|file| nsid::number_of(file.as_fd()));
        let number = match number {
            Ok(number) => Some(number),
            Err(error) => {
                tracing::warn!("{error}; sock_diag confirms the listeners of {}", path.display());
                None
            }
        };
        Ok(CheckedNetns { handle, number })
    }

    /// The namespace's handle for sock_diag.
    #[must_use]
    pub fn handle(&self) -> &NetnsHandle {
        &self.handle
    }

    /// Returns true if lookups in the namespace are possible.
    #[must_use]
    pub fn is_numbered(&self) -> bool {
        self.number.is_some()
    }

    /// Returns a lookup in the namespace, if it has a number: of the listener at `local`, or, with `remote`,
    /// of the connection between the two.
    #[must_use]
    pub fn target(&self, local: SocketAddr, remote: Option<SocketAddr>) -> Option<CheckTarget> {
        Some(CheckTarget { netns_id: self.number?, netns_cookie: self.handle.cookie(), local, remote })
    }
}

/// A lookup to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckTarget {
    netns_id: i32,
    netns_cookie: u64,
    local: SocketAddr,
    remote: Option<SocketAddr>,
}

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// No socket: the kernel would refuse a connection (or pass it to a listener bound to one device).
    Nothing,
    /// A listener.
    Listener(AcceptQueues),
    /// An established connection that the application has not accepted.
    Waiting,
    /// A connection that the application has accepted.
    Accepted,
    /// A connection whose handshake has not finished from the listener's view.
    HalfOpen,
    /// A closing connection.
    Closing,
}

/// Runs the program. Clones share it.
#[derive(Clone, Debug)]
pub struct Checker {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    program: OwnedFd,
    own_netns: u64,
}

impl Checker {
    /// Loads the program; the second value is the program's row in the table of capabilities.
    pub(super) fn start(kernel_btf: &Btf) -> (Option<Checker>, Capability) {
        let loaded = Checker::load(kernel_btf);
        let have = loaded.as_ref().map(|_| ()).map_err(Clone::clone);
        let row = Capability::new(&SOCKET_CHECK, None, have);
        (loaded.ok(), row)
    }

    fn load(kernel_btf: &Btf) -> Result<Checker, KernelError> {
        const NAME: &str = SOCKET_CHECK.name;
        let offsets = Offsets::of_check(kernel_btf);
        offsets.require(group::CHECK)?;
        for missing in offsets.missing() {
            tracing::debug!("{NAME} does without: {missing}");
        }
        let mut loader = EbpfLoader::new();
        for (global, offset) in &offsets.globals {
            loader.override_global(global, offset, true);
        }
        let refused = KernelError::refused;
        let mut ebpf = loader.load(OBJECT).map_err(|error| not_loaded(&error))?;
        let program: &mut SchedClassifier = ebpf
            .program_mut(NAME)
            .ok_or_else(|| KernelError::new(format!("the BPF object has no program {NAME}")))?
            .try_into()
            .map_err(|error| refused("the object's program is of another kind", &error))?;
        program.load().map_err(|error| refused("the kernel refused the program", &error))?;
        let fd = program.fd().map_err(|error| refused("the program has no descriptor", &error))?;
        let program = fd
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| KernelError::new(format!("no second descriptor for {NAME}: {error}")))?;
        let own_netns = own_netns()?;
        let checker = Checker { inner: Arc::new(Inner { program, own_netns }) };
        // A loaded program may still be forbidden to run: better to learn that now than at the first probe.
        let nobody = CheckTarget {
            netns_id: CURRENT_NETNS,
            netns_cookie: own_netns,
            local: SocketAddr::from(([127, 0, 0, 1], 1)),
            remote: Some(SocketAddr::from(([127, 0, 0, 1], 1))),
        };
        checker.lookup(&[nobody])?;
        Ok(checker)
    }

    /// Looks up all `targets`, in order. Each takes some tenths of a microsecond, and each batch of 32 a few
    /// microseconds.
    ///
    /// # Errors
    /// The kernel refused to run the program.
    pub fn lookup(&self, targets: &[CheckTarget]) -> Result<Vec<Found>, KernelError> {
        let mut all = Vec::with_capacity(targets.len());
        for some in targets.chunks(MAX_CHECKS) {
            let mut packet = vec![0; HEAD + some.len() * size_of::<Check>()];
            for (target, place) in some.iter().zip(packet[HEAD..].chunks_exact_mut(size_of::<Check>())) {
                write_asked(&target.asked(), place);
            }
            let runs = u32::try_from(some.len()).unwrap_or(u32::MAX);
            sys::program_test_run(self.inner.program.as_fd(), &mut packet, runs).map_err(|error| {
                KernelError::io(&format!("the kernel would not run {}", SOCKET_CHECK.name), &error)
            })?;
            let answers = packet[HEAD..].chunks_exact(size_of::<Check>()).map(read_answer);
            all.extend(some.iter().zip(answers).map(|(target, answer)| target.found(&answer)));
        }
        Ok(all)
    }
}

impl CheckTarget {
    fn asked(&self) -> Asked {
        let (family, local) = bytes(self.local.ip());
        let remote = self.remote.map_or([0; 16], |remote| bytes(remote.ip()).1);
        Asked {
            netns_id: self.netns_id,
            family,
            local_port: self.local.port(),
            remote_port: self.remote.map_or(0, |remote| remote.port()),
            reserved: [0; 3],
            local,
            remote,
        }
    }

    fn found(&self, answer: &Answer) -> Found {
        // A socket of another namespace means that our number is stale: the answer is worthless then. Sockets
        // without a namespace's cookie are requests and those in TIME_WAIT.
        if answer.netns_cookie != 0 && answer.netns_cookie != self.netns_cookie {
            return Found::Nothing;
        }
        match answer.found {
            found::LISTENER => Found::Listener(AcceptQueues {
                cookie: answer.cookie,
                cgroup_id: answer.cgroup_id,
                listeners: answer.listeners,
                waiting: answer.waiting,
                full: answer.full,
                heads: answer.heads,
                backlog: answer.backlog,
                max_backlog: answer.max_backlog,
            }),
            found::WAITING => Found::Waiting,
            found::ACCEPTED => Found::Accepted,
            found::HALF_OPEN => Found::HalfOpen,
            found::CLOSING => Found::Closing,
            _ => Found::Nothing,
        }
    }
}

fn bytes(ip: IpAddr) -> (u16, [u8; 16]) {
    match ip {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            (FAMILY_IPV4, bytes)
        }
        IpAddr::V6(ip) => (FAMILY_IPV6, ip.octets()),
    }
}

/// Writes a question into its place in the packet, field by field in the record's layout.
fn write_asked(asked: &Asked, place: &mut [u8]) {
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = place.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(offset_of!(Asked, netns_id), &asked.netns_id.to_ne_bytes());
    put(offset_of!(Asked, family), &asked.family.to_ne_bytes());
    put(offset_of!(Asked, local_port), &asked.local_port.to_ne_bytes());
    put(offset_of!(Asked, remote_port), &asked.remote_port.to_ne_bytes());
    put(offset_of!(Asked, local), &asked.local);
    put(offset_of!(Asked, remote), &asked.remote);
}

/// Reads an answer from its place.
fn read_answer(place: &[u8]) -> Answer {
    let base = offset_of!(Check, answer);
    let u64_at = |at: usize| {
        let bytes = place.get(base + at..base + at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    };
    let u32_at = |at: usize| {
        let bytes = place.get(base + at..base + at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_ne_bytes)
    };
    Answer {
        netns_cookie: u64_at(offset_of!(Answer, netns_cookie)),
        cgroup_id: u64_at(offset_of!(Answer, cgroup_id)),
        cookie: u64_at(offset_of!(Answer, cookie)),
        heads: u64_at(offset_of!(Answer, heads)),
        found: u32_at(offset_of!(Answer, found)),
        listeners: u32_at(offset_of!(Answer, listeners)),
        waiting: u32_at(offset_of!(Answer, waiting)),
        full: u32_at(offset_of!(Answer, full)),
        backlog: u32_at(offset_of!(Answer, backlog)),
        max_backlog: u32_at(offset_of!(Answer, max_backlog)),
    }
}

/// Returns the cookie of this process's network namespace.
fn own_netns() -> Result<u64, KernelError> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None)
        .map_err(|error| KernelError::new(format!("no socket: {error}")))?;
    sys::netns_cookie(socket.as_fd())
        .map_err(|error| KernelError::io("cannot read the cookie of our network namespace", &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(local: &str, remote: Option<&str>) -> CheckTarget {
        CheckTarget {
            netns_id: 5,
            netns_cookie: 77,
            local: local.parse().unwrap(),
            remote: remote.map(|remote| remote.parse().unwrap()),
        }
    }

    #[test]
    fn a_question_lies_in_the_packet_as_the_program_reads_it() {
        let mut place = [0xff; size_of::<Check>()];
        place[10..16].fill(0);
        write_asked(&target("10.0.0.7:80", Some("10.0.0.1:4000")).asked(), &mut place);
        let mut expected = Vec::new();
        expected.extend(5_i32.to_ne_bytes());
        expected.extend(2_u16.to_ne_bytes());
        expected.extend(80_u16.to_ne_bytes());
        expected.extend(4000_u16.to_ne_bytes());
        expected.extend([0; 6]);
        expected.extend([10, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(place[..size_of::<Asked>()], expected);
        assert_eq!(target("[fd00::1]:80", None).asked().family, FAMILY_IPV6);
        assert_eq!(target("[fd00::1]:80", None).asked().remote_port, 0);
    }

    #[test]
    fn an_answer_of_another_namespace_is_none() {
        let answer = Answer { netns_cookie: 77, found: found::ACCEPTED, ..Answer::default() };
        assert_eq!(target("10.0.0.7:80", None).found(&answer), Found::Accepted);
        let other = Answer { netns_cookie: 78, ..answer };
        assert_eq!(target("10.0.0.7:80", None).found(&other), Found::Nothing);
        let request = Answer { found: found::HALF_OPEN, ..Answer::default() };
        assert_eq!(target("10.0.0.7:80", None).found(&request), Found::HalfOpen);
    }

    #[test]
    fn an_answer_is_read_from_its_place() {
        let mut place = [0; size_of::<Check>()];
        place[48..56].copy_from_slice(&77_u64.to_ne_bytes());
        place[80..84].copy_from_slice(&found::LISTENER.to_ne_bytes());
        place[100..104].copy_from_slice(&16_u32.to_ne_bytes());
        let answer = read_answer(&place);
        assert_eq!((answer.netns_cookie, answer.found, answer.max_backlog), (77, found::LISTENER, 16));
    }
}
