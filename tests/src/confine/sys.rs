//! System calls without a safe wrapper: seccomp with a listener, and the ban on executable memory.

use anyhow::{Context as _, Result};
use rustix::ioctl::{Updater, ioctl};
use seccompiler::BpfProgram;
use std::os::fd::{AsFd, FromRawFd as _, OwnedFd};

/// Call that waits for its verdict.
pub(super) type Notification = libc::seccomp_notif;
/// Verdict on a call.
pub(super) type Verdict = libc::seccomp_notif_resp;

/// Forbids this process and its children memory that is both writable and executable, or made executable
/// later. Returns false if the kernel does not support this (before 6.3).
pub(super) fn deny_write_execute() -> Result<bool> {
    let option = libc::c_ulong::from(libc::PR_MDWE_REFUSE_EXEC_GAIN);
    // SAFETY: all arguments are numbers.
    let set = unsafe { libc::prctl(libc::PR_SET_MDWE, option, 0, 0, 0) };
    match std::io::Error::last_os_error() {
        _ if set == 0 => Ok(true),
        error if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        error => Err(error).context("prctl(PR_SET_MDWE) failed"),
    }
}

/// Filters the system calls of this process and the program it executes. The returned descriptor receives the
/// calls that the filter passes to user space.
pub(super) fn filter(program: &BpfProgram) -> Result<OwnedFd> {
    let fprog = libc::sock_fprog {
        len: u16::try_from(program.len()).context("the filter is too long")?,
        // seccompiler's instruction is the kernel's `struct sock_filter`, which the kernel only reads.
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: `fprog` and the program that it points to live until the call has returned.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const fprog,
        )
    };
    if fd < 0 {
        return Err(std::io::Error::last_os_error()).context("seccomp(2) refused the filter");
    }
    // SAFETY: the kernel has just created this descriptor for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
}

/// Returns the next waiting call.
pub(super) fn receive(listener: impl AsFd) -> rustix::io::Result<Notification> {
    // SAFETY: plain numbers, for which all zeroes is a valid value; the kernel requires zeroes.
    let mut notification: Notification = unsafe { std::mem::zeroed() };
    // SAFETY: the opcode reads and writes a `struct seccomp_notif`, which this is.
    unsafe {
        let request =
            Updater::<{ libc::SECCOMP_IOCTL_NOTIF_RECV as _ }, Notification>::new(&mut notification);
        ioctl(listener, request)?;
    }
    Ok(notification)
}

/// Lets a waiting call proceed, or fail.
pub(super) fn answer(listener: impl AsFd, mut verdict: Verdict) -> rustix::io::Result<()> {
    // SAFETY: the opcode reads a `struct seccomp_notif_resp`, which this is.
    unsafe { ioctl(listener, Updater::<{ libc::SECCOMP_IOCTL_NOTIF_SEND as _ }, Verdict>::new(&mut verdict)) }
}
