//! Answers the system calls that a unit's filter refuses, and records them.

use super::{Unit, sys};
use crate::workdir::{PATIENCE, stretched};
use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use syscalls::Sysno;

/// Environment variable with a file name. If it is set, no call is refused, and all calls are written there
/// with the process id: input for deriving a unit's filter.
pub(super) const RECORD: &str = "BEELET_CALLS";

/// Program with an applied unit, before it has a supervisor.
#[derive(Debug)]
pub struct Handover {
    pub(super) unit: PathBuf,
    pub(super) socket: UnixStream,
}

impl Handover {
    /// Waits until the wrapper has sent the listener of its filter over the socket.
    ///
    /// # Errors
    /// The wrapper failed; its messages are on its standard error.
    pub fn supervise(self, pid: u32) -> Result<Supervisor> {
        let unit = Unit::read(&self.unit)?;
        let listener = listener(&self.socket)?;
        let refused = Arc::<Mutex<Vec<String>>>::default();
        let recorded = Arc::clone(&refused);
        let record = std::env::var_os(RECORD).map(PathBuf::from);
        let thread = std::thread::Builder::new().name("supervisor".into()).spawn(move || match record {
            Some(file) => record_calls(&listener, pid, &file),
            None => refuse(&listener, &unit, &recorded),
        })?;
        Ok(Supervisor { refused, thread: Some(thread) })
    }
}

/// Supervisor of one program until it ends. Drop it after the program: it waits until all processes of the
/// program have ended too, and fails the test with the names of the refused calls, if any.
#[derive(Debug)]
pub struct Supervisor {
    refused: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Supervisor {
    #[allow(clippy::panic)] // fails the test
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its records are kept even if it panicked
        }
        let refused = std::mem::take(&mut *self.refused.lock().unwrap_or_else(PoisonError::into_inner));
        if refused.is_empty() {
            return;
        }
        let message = format!("the unit refused system calls:\n{}", refused.join("\n"));
        if std::thread::panicking() {
            eprintln!("{message}");
        } else {
            panic!("{message}");
        }
    }
}

fn listener(socket: &UnixStream) -> Result<OwnedFd> {
    socket.set_read_timeout(Some(stretched(PATIENCE)))?;
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut buffer = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut into = [std::io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut into, &mut buffer, RecvFlags::CMSG_CLOEXEC)
        .context("cannot receive the listener from the wrapper")?;
    for message in buffer.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message
            && let Some(descriptor) = descriptors.next()
        {
            return Ok(descriptor);
        }
    }
    bail!("the wrapper ended before it had applied the unit's settings")
}

/// Returns the next call that waits for a verdict, or None when all filtered processes have ended.
fn next(listener: &OwnedFd) -> Option<sys::Notification> {
    loop {
        let mut wanted = [PollFd::new(listener, PollFlags::IN)];
        if rustix::event::poll(&mut wanted, None).is_err() {
            continue; // a signal
        }
        let seen = wanted[0].revents();
        if seen.contains(PollFlags::IN) {
            // The caller may have been killed in the meantime.
            if let Ok(notification) = sys::receive(listener) {
                return Some(notification);
            }
        } else if seen.intersects(PollFlags::HUP | PollFlags::ERR) {
            return None;
        }
    }
}

fn call(notification: &sys::Notification) -> Option<Sysno> {
    Sysno::new(usize::try_from(notification.data.nr).ok()?)
}

fn refuse(listener: &OwnedFd, unit: &Unit, refused: &Mutex<Vec<String>>) {
    while let Some(notification) = next(listener) {
        let call = call(&notification);
        let errno = call.map_or(libc::ENOSYS, |call| unit.errno_of(call));
        // The C library falls back to clone.
        let harmless = call == Some(Sysno::clone3) && errno == libc::ENOSYS;
        if !harmless {
            let name = call.map_or_else(|| notification.data.nr.to_string(), |call| call.name().to_owned());
            let arguments: Vec<String> =
                notification.data.args.iter().map(|value| format!("{value:#x}")).collect();
            let who = std::fs::read_to_string(format!("/proc/{}/comm", notification.pid)).unwrap_or_default();
            let mut refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
            // Repeated calls have a single line.
            let line = format!("{name}({}) by {}", arguments.join(", "), who.trim());
            if refused.len() < 100 && !refused.contains(&line) {
                refused.push(line);
            }
        }
        let verdict = sys::Verdict { id: notification.id, val: 0, error: -errno, flags: 0 };
        let _ = sys::answer(listener, verdict); // the caller may have been killed in the meantime
    }
}

fn record_calls(listener: &OwnedFd, pid: u32, file: &Path) {
    let mut made = BTreeSet::new();
    while let Some(notification) = next(listener) {
        if let Some(call) = call(&notification) {
            made.insert(call.name());
        }
        let flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE.try_into().unwrap_or_default();
        let verdict = sys::Verdict { id: notification.id, val: 0, error: 0, flags };
        let _ = sys::answer(listener, verdict); // the caller may have been killed in the meantime
    }
    let line = format!("{pid} {}\n", made.into_iter().collect::<Vec<_>>().join(" "));
    let written = std::fs::OpenOptions::new().append(true).create(true).open(file);
    if let Err(error) = written.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("cannot write {}: {error}", file.display());
    }
}
