//! One owner per runtime: two agents on the same one would stop each other's pods.
//!
//! Against another beelet there is a lock, which the kernel gives back whatever happens to its holder. A
//! kubelet takes no such lock, so it is recognized by what it does: it has a connection to the runtime's
//! socket. This module only looks and refuses; it must never end another's process or touch another's
//! sandbox.

use std::collections::HashSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use netlink_packet_core::{
    Emitable, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::unix::nlas::{Nla, UnixDiagName, Vfs};
use netlink_packet_sock_diag::unix::{ShowFlags, StateFlags, UnixRequest, UnixResponse};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};
use sha2::{Digest, Sha256};

use beelet_base::lock::{Lock, LockError};

/// Where the locks of runtimes are, whatever folders an instance is given.
const LOCKS: &str = "/run/lock/beelet";
/// Programs that are a kubelet, or have one in them. The name may go on with a version.
const KUBELETS: [&str; 4] = ["kubelet", "kubelite", "hyperkube", "k3s"];

/// The right to drive a runtime, as long as the value lives.
#[derive(Debug)]
pub struct Ownership {
    lock: Lock,
    /// What it stands for.
    what: String,
}

/// Why a runtime may not be driven.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// Another beelet drives it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A kubelet drives it.
    #[error(
        "{} (process {}) drives the runtime at {}: each would stop the other's pods. Stop it (systemctl disable --now \
         kubelet), or give beelet a runtime of its own (containerRuntimeEndpoint)",
        .kubelet.program, .kubelet.pid, .socket.display()
    )]
    Kubelet {
        /// Which.
        kubelet: Kubelet,
        /// The runtime's socket.
        socket: PathBuf,
    },
    /// The folder of the locks cannot be used.
    #[error("cannot use {} for the lock of the runtime: {source}", .path.display())]
    Locks {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A process that is a kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubelet {
    /// Its id.
    pub pid: u32,
    /// Its program's name.
    pub program: String,
}

impl Ownership {
    /// Takes the runtime at `socket` (a path; the runtime need not be up). Blocks, but does not wait.
    ///
    /// # Errors
    /// Another beelet or a kubelet has it.
    pub fn take(socket: &Path) -> Result<Self, OwnershipError> {
        Self::take_in(Path::new(LOCKS), socket)
    }

    fn take_in(locks: &Path, socket: &Path) -> Result<Self, OwnershipError> {
        let fail = |source| OwnershipError::Locks { path: locks.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(locks).map_err(fail)?;
        // /run/lock is everybody's: a folder or link that another user put there would give him our lock.
        let metadata = fs::symlink_metadata(locks).map_err(fail)?;
        if !metadata.is_dir() || metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(fail(io::Error::other("it is not a folder of this user's; remove it")));
        }
        let what = format!("the runtime at {}", socket.display());
        let ownership = Self { lock: Lock::acquire(&locks.join(lock_name(socket)), &what)?, what };
        ownership.refuse_kubelet(socket)?;
        Ok(ownership)
    }

    /// Makes the lock again, if somebody has removed it. Returns true if it was gone.
    ///
    /// # Errors
    /// Another beelet has taken the runtime meanwhile, or the lock can't be made.
    pub fn renew(&self) -> Result<bool, LockError> {
        self.lock.renew(&self.what)
    }

    /// Looks again for a kubelet: one may have waited for the runtime to come up.
    ///
    /// # Errors
    /// A kubelet has the runtime.
    pub fn refuse_kubelet(&self, socket: &Path) -> Result<(), OwnershipError> {
        match kubelet_on(socket) {
            Ok(None) => Ok(()),
            Ok(Some(kubelet)) => Err(OwnershipError::Kubelet { kubelet, socket: socket.to_owned() }),
            Err(error) => {
                // A kernel without sock_diag is no reason to leave the pods alone; `doctor` names it too.
                tracing::warn!("cannot tell whether a kubelet drives {}: {error}", socket.display());
                Ok(())
            }
        }
    }
}

/// The same name for every path that leads to the socket. Not its inode: that is another one whenever the
/// runtime starts.
fn lock_name(socket: &Path) -> String {
    let resolved = fs::canonicalize(socket).unwrap_or_else(|_| socket.to_owned());
    let folder = resolved.parent().unwrap_or(Path::new("/"));
    let mut name = Sha256::new();
    match fs::metadata(folder) {
        Ok(metadata) => {
            name.update(metadata.dev().to_ne_bytes());
            name.update(metadata.ino().to_ne_bytes());
        }
        // The runtime was never started here: its folder is not there.
        Err(_) => name.update(folder.as_os_str().as_bytes()),
    }
    name.update(resolved.file_name().unwrap_or_default().as_bytes());
    let digest: String = name.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("runtime-{digest}.lock")
}

/// The kubelet that has a connection to the runtime's `socket`, if one has.
///
/// # Errors
/// The kernel does not tell who is connected to whom (CONFIG_UNIX_DIAG).
pub fn kubelet_on(socket: &Path) -> io::Result<Option<Kubelet>> {
    let kubelets = kubelets();
    if kubelets.is_empty() {
        return Ok(None);
    }
    let clients = clients_of(socket)?;
    Ok(kubelets.into_iter().find(|kubelet| !clients.is_disjoint(&sockets_of(kubelet.pid))))
}

/// The reason why a beelet could not take the runtime at `socket` now, because another one has it; None if it
/// could.
#[must_use]
pub fn beelet_on(socket: &Path) -> Option<String> {
    let path = Path::new(LOCKS).join(lock_name(socket));
    // One that nobody made is nobody's; taken here, it is given back at once.
    let taken = path.exists().then(|| Lock::acquire(&path, &format!("the runtime at {}", socket.display())));
    taken?.err().map(|error| error.to_string())
}

/// The process that listens at `socket`, the runtime as a rule; process 1 where systemd listens for it. None
/// if nobody listens, or it is in a PID namespace that is not seen from here.
pub async fn listener(socket: &Path) -> Option<u32> {
    let peer = tokio::net::UnixStream::connect(socket).await.ok()?.peer_cred().ok()?;
    u32::try_from(peer.pid()?).ok().filter(|pid| *pid != 0)
}

/// Every process but our own that is a kubelet.
fn kubelets() -> Vec<Kubelet> {
    let own = std::process::id();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own)
        .filter_map(|pid| Some(Kubelet { pid, program: kubelet_program(pid)? }))
        .collect()
}

/// The name of `pid`'s program, if it is a kubelet's.
fn kubelet_program(pid: u32) -> Option<String> {
    let comm = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let comm = String::from_utf8_lossy(&comm).trim().to_owned();
    let exe = fs::read_link(format!("/proc/{pid}/exe")).ok();
    let file = exe.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()).map(str::to_owned);
    [file, Some(comm)].into_iter().flatten().find(|name| is_kubelet(name))
}

fn is_kubelet(name: &str) -> bool {
    // A replaced program's link says so.
    let name = name.strip_suffix(" (deleted)").unwrap_or(name);
    KUBELETS.iter().any(|kubelet| {
        name.strip_prefix(kubelet).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.', '_']))
    })
}

/// The inodes of all sockets that `pid` has open; none if it is gone.
fn sockets_of(pid: u32) -> HashSet<u32> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    descriptors
        .filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
        })
        .collect()
}

/// The inodes of the sockets at the other end of every connection to `socket` (sock_diag(7)).
fn clients_of(socket: &Path) -> io::Result<HashSet<u32>> {
    // An accepted connection keeps the listener's name and file (net/unix/af_unix.c, unix_stream_connect).
    let Ok(metadata) = fs::metadata(socket) else { return Ok(HashSet::new()) };
    #[allow(clippy::cast_possible_truncation)] // the kernel gives the inode's lower half
    let inode = metadata.ino() as u32;
    let is_ours = |response: &UnixResponse| {
        let named = matches!(response.name(), Some(UnixDiagName::Pathname(name))
            if Path::new(name).file_name() == socket.file_name());
        named && response.nlas.iter().any(|nla| matches!(nla, Nla::Vfs(vfs) if inode_of(vfs) == inode))
    };
    let peers = unix_connections()?.into_iter().filter(is_ours).filter_map(|response| response.peer());
    // 0: the client has closed its end.
    Ok(peers.filter(|inode| *inode != 0).collect())
}

/// The inode of a socket's file. Its field is private; on the wire (linux/unix_diag.h, unix_diag_vfs) it
/// comes first.
fn inode_of(vfs: &Vfs) -> u32 {
    let mut bytes = [0; 8];
    vfs.emit(&mut bytes);
    let [a, b, c, d, ..] = bytes;
    u32::from_ne_bytes([a, b, c, d])
}

fn unix_connections() -> io::Result<Vec<UnixResponse>> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let request = UnixRequest {
        state_flags: StateFlags::ESTABLISHED,
        inode: 0,
        show_flags: ShowFlags::NAME | ShowFlags::VFS | ShowFlags::PEER,
        cookie: [0xff; 8],
    };
    let mut message = NetlinkMessage::new(header, SockDiagMessage::UnixRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut connections = Vec::new();
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = datagram.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
            match message.payload {
                NetlinkPayload::Done(_) => return Ok(connections),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                NetlinkPayload::InnerMessage(SockDiagMessage::UnixResponse(response)) => {
                    connections.push(*response);
                }
                _ => {}
            }
            // Messages are aligned to 4 bytes.
            let length = (message.header.length as usize).next_multiple_of(4).max(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use tempfile::TempDir;

    use super::*;

    #[test]
    fn only_a_kubelets_name_is_one() {
        for name in ["kubelet", "kubelet-1.36.2", "kubelet (deleted)", "kubelite", "k3s-server", "k3s"] {
            assert!(is_kubelet(name), "{name}");
        }
        for name in ["kubectl", "kubelets", "beelet", "containerd", "my-kubelet", ""] {
            assert!(!is_kubelet(name), "{name}");
        }
    }

    #[test]
    fn the_other_ends_of_a_sockets_connections_are_found_and_no_others() {
        let dir = TempDir::new().unwrap();
        let (path, other) = (dir.path().join("runtime.sock"), dir.path().join("other.sock"));
        let (listener, other_listener) =
            (UnixListener::bind(&path).unwrap(), UnixListener::bind(&other).unwrap());
        assert_eq!(clients_of(&path).unwrap(), HashSet::new());
        let before = sockets_of(std::process::id());

        let client = UnixStream::connect(&path).unwrap();
        let _accepted = listener.accept().unwrap();
        let _elsewhere = (UnixStream::connect(&other).unwrap(), other_listener.accept().unwrap());
        let found = clients_of(&path).unwrap();
        assert_eq!(found.len(), 1);
        assert!(found.is_subset(&sockets_of(std::process::id())) && found.is_disjoint(&before));
        // By another path it is the same socket.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert_eq!(clients_of(&link.join("runtime.sock")).unwrap(), found);

        drop(client);
        assert_eq!(clients_of(&path).unwrap(), HashSet::new());
        assert_eq!(clients_of(&dir.path().join("none")).unwrap(), HashSet::new());
    }

    #[test]
    fn a_runtime_is_taken_once_by_whatever_path() {
        let dir = TempDir::new().unwrap();
        let locks = dir.path().join("locks");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        let (socket, alias, another) =
            (dir.path().join("a.sock"), link.join("a.sock"), dir.path().join("b.sock"));

        let first = Ownership::take_in(&locks, &socket).unwrap();
        // A runtime that restarts has a new socket, and is the same runtime.
        let _listener = UnixListener::bind(&socket).unwrap();
        for path in [&socket, &alias] {
            let error = Ownership::take_in(&locks, path).unwrap_err().to_string();
            assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        }
        let _another = Ownership::take_in(&locks, &another).unwrap();
        drop(first);
        Ownership::take_in(&locks, &alias).unwrap();
    }

    #[test]
    fn a_folder_of_locks_that_another_could_have_put_there_is_refused() {
        let dir = TempDir::new().unwrap();
        let locks = dir.path().join("locks");
        std::os::unix::fs::symlink(dir.path(), &locks).unwrap();
        let error = Ownership::take_in(&locks, &dir.path().join("a.sock")).unwrap_err();
        assert!(matches!(error, OwnershipError::Locks { .. }), "{error}");
    }
}
