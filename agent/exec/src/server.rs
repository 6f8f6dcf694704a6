//! The helper's main process: accepts the agent's connections, and gives each one to a copy of itself.

use std::{
    ffi::CString,
    fs,
    io::{self, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
};

use anyhow::{Context as _, Result, bail};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create},
    process::{DumpableBehavior, set_dumpable_behavior},
};

use crate::{
    places::Hierarchies,
    supervise,
    sys::{self, Fork, SingleThread},
};

/// Seals of a file whose content can't change any more.
const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);

/// Name of the process: the copy's own is the number of a descriptor.
const NAME: &std::ffi::CStr = c"beelet-exec";

/// Serves the agent's requests at `socket`, and returns only on an error.
///
/// # Errors
/// A preparation failed. A failure of one request only ends that request.
pub fn serve(socket: &Path) -> Result<()> {
    be_sealed()?;
    rustix::thread::set_name(NAME).context("cannot name this process")?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("cannot hide this process")?;
    let single = SingleThread::check().context("cannot count the helper's threads")?;
    let hierarchies = Hierarchies::read().context("cannot read the table of mounts")?;
    let listener = bind(socket)?;
    sys::ignore_children();
    loop {
        let agent = match listener.accept() {
            Ok((agent, _)) => agent,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("cannot accept connections"),
        };
        match sys::fork(single, None) {
            Ok(Fork::Child) => {
                drop(listener);
                sys::exit(i32::from(handle(single, agent, &hierarchies).is_err()));
            }
            Ok(Fork::Parent(_)) => {}
            Err(error) => eprintln!("beelet-exec: cannot start a process for a request: {error}"),
        }
    }
}

/// Serves one connection, of root only.
fn handle(single: SingleThread, agent: UnixStream, hierarchies: &Hierarchies) -> Result<()> {
    sys::reset_signals(0);
    let peer = rustix::net::sockopt::socket_peercred(&agent).context("cannot identify the peer")?;
    if !peer.uid.is_root() {
        bail!("a request of user {} is refused", peer.uid.as_raw());
    }
    supervise::serve(single, agent, hierarchies).context("cannot serve a request").inspect_err(|error| {
        let _ = writeln!(io::stderr(), "beelet-exec: {error:#}");
    })
}

fn bind(socket: &Path) -> Result<UnixListener> {
    if let Ok(UnixStream { .. }) = UnixStream::connect(socket) {
        bail!("another helper serves {}", socket.display());
    }
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", socket.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600)).context("cannot restrict the socket")?;
    Ok(listener)
}

/// Continues in a sealed copy of this program in memory. While a process enters a container, the container
/// can execute the process's own program (a script with the interpreter `/proc/self/exe`) and then overwrite
/// it: CVE-2019-5736. The copy can't be written, and is not the file on disk.
fn be_sealed() -> Result<()> {
    let own = fs::File::open("/proc/self/exe").context("cannot open this program")?;
    // A file on disk has no seals (EINVAL).
    if fcntl_get_seals(&own).is_ok_and(|seals| seals.contains(SEALS)) {
        return Ok(());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Linux before 6.3 does not know MFD_EXEC.
    let copy = memfd_create("beelet-exec", flags | MemfdFlags::EXEC)
        .or_else(|_| memfd_create("beelet-exec", flags))
        .context("cannot create a file in memory (see vm.memfd_noexec)")?;
    let mut copy = fs::File::from(copy);
    io::copy(&mut io::BufReader::new(own), &mut copy).context("cannot copy this program to memory")?;
    fs::set_permissions(format!("/proc/self/fd/{}", copy.as_raw_fd()), fs::Permissions::from_mode(0o500))
        .context("cannot make the copy executable")?;
    fcntl_add_seals(copy.as_fd(), SEALS).context("cannot seal the copy")?;
    let path = CString::new(format!("/proc/self/fd/{}", copy.as_raw_fd()))?;
    let arguments: Vec<CString> =
        std::env::args_os().map(|word| CString::new(word.into_encoded_bytes())).collect::<Result<_, _>>()?;
    // Without an environment: a container that may trace an entering process could read it.
    Err(sys::exec(&path, &arguments, &[])).context("cannot execute the sealed copy")
}
