//! The ownership of a runtime: a runtime has one owner only, because two agents on it would stop each other's
//! pods.
//!
//! A lock keeps out another beelet; the kernel releases the lock whenever its holder ends. A kubelet does not
//! take the lock, so this module recognizes a kubelet by its connection to the runtime's socket. This module
//! only reads and refuses; it must never end the process of another program or touch its sandboxes.

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

/// The folder of the locks of runtimes, the same for all instances, independent of their configured folders.
const LOCKS: &str = "/run/lock/beelet";
/// The names of programs that are or contain a kubelet. A version may follow the name.
const KUBELETS: [&str; 4] = ["kubelet", "kubelite", "hyperkube", "k3s"];

/// The right to drive a runtime while the value lives.
#[derive(Debug)]
pub struct Ownership {
    lock: Lock,
    /// The name of the locked object in messages.
    what: String,
}

/// The reason why the agent may not drive a runtime.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// Another beelet drives it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A kubelet drives it.
    #[error(
        "{} (process {}) drives the runtime at {}, and each would stop the other's pods; stop the kubelet \
         (systemctl disable --now kubelet), or configure another runtime for beelet (containerRuntimeEndpoint)",
        .kubelet.program, .kubelet.pid, .socket.display()
    )]
    Kubelet {
        /// The kubelet.
        kubelet: Kubelet,
        /// The runtime's socket.
        socket: PathBuf,
    },
    /// The folder of the locks cannot be used.
    #[error("cannot use {} for the lock of the runtime: {source}", .path.display())]
    Locks {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A process that is a kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubelet {
    /// Its process id.
    pub pid: u32,
    /// Its program's name.
    pub program: String,
}

impl Ownership {
    /// Acquires the runtime at `socket` (a path; the runtime need not be up). Blocks, but does not wait.
    ///
    /// # Errors
    /// Another beelet or a kubelet owns the runtime.
    pub fn acquire(socket: &Path) -> Result<Self, OwnershipError> {
        Self::acquire_in(Path::new(LOCKS), socket)
    }

    fn acquire_in(locks: &Path, socket: &Path) -> Result<Self, OwnershipError> {
        let fail = |source| OwnershipError::Locks { path: locks.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(locks).map_err(fail)?;
        // All users may write to /run/lock: a folder or link of another user would let that user hold our
        // lock.
        let metadata = fs::symlink_metadata(locks).map_err(fail)?;
        if !metadata.is_dir() || metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(fail(io::Error::other("the path is not a folder of this user; remove it")));
        }
        let what = format!("the runtime at {}", socket.display());
        let ownership = Self { lock: Lock::acquire(&locks.join(lock_name(socket)), &what)?, what };
        ownership.refuse_kubelet(socket)?;
        Ok(ownership)
    }

    /// Recreates the lock's file if another program has removed it. Returns true if the file was missing.
    ///
    /// # Errors
    /// Another beelet has acquired the runtime meanwhile, or the lock can't be recreated.
    pub fn renew(&self) -> Result<bool, LockError> {
        self.lock.renew(&self.what)
    }

    /// Searches again for a kubelet, because one may have waited for the runtime to come up.
    ///
    /// # Errors
    /// A kubelet owns the runtime.
    pub fn refuse_kubelet(&self, socket: &Path) -> Result<(), OwnershipError> {
        match kubelet_on(socket) {
            Ok(None) => Ok(()),
            Ok(Some(kubelet)) => Err(OwnershipError::Kubelet { kubelet, socket: socket.to_owned() }),
            Err(error) => {
                // On a kernel without sock_diag the agent must still run the pods; `doctor` reports it too.
                tracing::warn!("cannot check whether a kubelet drives {}: {error}", socket.display());
                Ok(())
            }
        }
    }
}

/// Returns a name that is the same for every path that leads to the socket. The name does not contain the
/// socket's inode, which changes whenever the runtime starts.
fn lock_name(socket: &Path) -> String {
    let resolved = fs::canonicalize(socket).unwrap_or_else(|_| socket.to_owned());
    let folder = resolved.parent().unwrap_or(Path::new("/"));
    let mut name = Sha256::new();
    match fs::metadata(folder) {
        Ok(metadata) => {
            name.update(metadata.dev().to_ne_bytes());
            name.update(metadata.ino().to_ne_bytes());
        }
        // Without the folder, the runtime has never run on this node.
        Err(_) => name.update(folder.as_os_str().as_bytes()),
    }
    name.update(resolved.file_name().unwrap_or_default().as_bytes());
    let digest: String = name.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("runtime-{digest}.lock")
}

/// Returns the kubelet that has a connection to the runtime's `socket`; None if no kubelet has one.
///
/// # Errors
/// The kernel does not list the peers of connections (CONFIG_UNIX_DIAG).
pub fn kubelet_on(socket: &Path) -> io::Result<Option<Kubelet>> {
    let kubelets = kubelets();
    if kubelets.is_empty() {
        return Ok(None);
    }
    let clients = clients_of(socket)?;
    Ok(kubelets.into_iter().find(|kubelet| !clients.is_disjoint(&sockets_of(kubelet.pid))))
}

/// Returns the reason why a beelet could not acquire the runtime at `socket` now because another beelet owns
/// it; None if it could.
#[must_use]
pub fn beelet_on(socket: &Path) -> Option<String> {
    let path = Path::new(LOCKS).join(lock_name(socket));
    // Without a lock file no beelet owns the runtime. A lock that is acquired here is released at once.
    let taken = path.exists().then(|| Lock::acquire(&path, &format!("the runtime at {}", socket.display())));
    taken?.err().map(|error| error.to_string())
}

/// Returns the process that listens at `socket`: usually the runtime, or process 1 where systemd listens for
/// it. Returns None if no process listens, or if the process is in a PID namespace that is not visible from
/// here.
pub async fn listener(socket: &Path) -> Option<u32> {
    let peer = tokio::net::UnixStream::connect(socket).await.ok()?.peer_cred().ok()?;
    u32::try_from(peer.pid()?).ok().filter(|pid| *pid != 0)
}

/// Returns all processes that are kubelets, except the own process.
fn kubelets() -> Vec<Kubelet> {
    let own = std::process::id();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own)
        .filter_map(|pid| Some(Kubelet { pid, program: kubelet_program(pid)? }))
        .collect()
}

/// Returns the name of `pid`'s program if the program is a kubelet.
fn kubelet_program(pid: u32) -> Option<String> {
    let comm = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let comm = String::from_utf8_lossy(&comm).trim().to_owned();
    let exe = fs::read_link(format!("/proc/{pid}/exe")).ok();
    let file = exe.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()).map(str::to_owned);
    [file, Some(comm)].into_iter().flatten().find(|name| is_kubelet(name))
}

fn is_kubelet(name: &str) -> bool {
    // The link of a replaced program has this suffix.
    let name = name.strip_suffix(" (deleted)").unwrap_or(name);
    KUBELETS.iter().any(|kubelet| {
        name.strip_prefix(kubelet).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.', '_']))
    })
}

/// Returns the inodes of all sockets that `pid` has open; empty if the process has ended.
fn sockets_of(pid: u32) -> HashSet<u32> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    descriptors
        .filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
        })
        .collect()
}

/// Returns the inodes of the client sockets of all connections to `socket` (sock_diag(7)).
fn clients_of(socket: &Path) -> io::Result<HashSet<u32>> {
    // An accepted connection keeps the listener's name and file (net/unix/af_unix.c, unix_stream_connect).
    let Ok(metadata) = fs::metadata(socket) else { return Ok(HashSet::new()) };
    #[allow(clippy::cast_possible_truncation)] // the kernel reports the inode's lower half
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

/// Returns the inode of a socket's file. The field is private, but it comes first in the serialized form
/// (linux/unix_diag.h, unix_diag_vfs).
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
    fn only_names_of_kubelets_are_recognized() {
        for name in ["kubelet", "kubelet-1.36.2", "kubelet (deleted)", "kubelite", "k3s-server", "k3s"] {
            assert!(is_kubelet(name), "{name}");
        }
        for name in ["kubectl", "kubelets", "beelet", "containerd", "my-kubelet", ""] {
            assert!(!is_kubelet(name), "{name}");
        }
    }

    #[test]
    fn the_clients_of_a_socket_are_found_and_no_others() {
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
        // Another path leads to the same socket.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert_eq!(clients_of(&link.join("runtime.sock")).unwrap(), found);

        drop(client);
        assert_eq!(clients_of(&path).unwrap(), HashSet::new());
        assert_eq!(clients_of(&dir.path().join("none")).unwrap(), HashSet::new());
    }

    #[test]
    fn a_runtime_is_acquired_once_by_any_path() {
        let dir = TempDir::new().unwrap();
        let locks = dir.path().join("locks");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        let (socket, alias, another) =
            (dir.path().join("a.sock"), link.join("a.sock"), dir.path().join("b.sock"));

        let first = Ownership::acquire_in(&locks, &socket).unwrap();
        // A restarted runtime has a new socket but is the same runtime.
        let _listener = UnixListener::bind(&socket).unwrap();
        for path in [&socket, &alias] {
            let error = Ownership::acquire_in(&locks, path).unwrap_err().to_string();
            assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        }
        let _another = Ownership::acquire_in(&locks, &another).unwrap();
        drop(first);
        Ownership::acquire_in(&locks, &alias).unwrap();
    }

    #[test]
    fn a_folder_of_locks_that_another_could_have_put_there_is_refused() {
        let dir = TempDir::new().unwrap();
        let locks = dir.path().join("locks");
        std::os::unix::fs::symlink(dir.path(), &locks).unwrap();
        let error = Ownership::acquire_in(&locks, &dir.path().join("a.sock")).unwrap_err();
        assert!(matches!(error, OwnershipError::Locks { .. }), "{error}");
    }
}
