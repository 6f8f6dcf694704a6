//! System calls without a safe wrapper. The only file of this crate that may use `unsafe`; must not decide
//! anything.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    ptr,
};

use rustix::process::Pid;
use seccompiler::sock_filter;

/// clone3(2): the child starts in the cgroup of `clone_args.cgroup` (kernel: include/uapi/linux/sched.h).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Proof that the process has a single thread, so that a copy of it may call any function. No code of the
/// helper starts a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SingleThread(());

impl SingleThread {
    /// Counts the threads of this process.
    ///
    /// # Errors
    /// `/proc` can't be read, or the process has several threads.
    pub(crate) fn check() -> io::Result<Self> {
        match std::fs::read_dir("/proc/self/task")?.count() {
            1 => Ok(Self(())),
            count => Err(io::Error::other(format!("the helper has {count} threads and needs one"))),
        }
    }
}

/// Result of a fork.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fork {
    /// In the new process.
    Child,
    /// In the caller, with the new process's pid.
    Parent(Pid),
}

fn forked(result: libc::c_long) -> io::Result<Fork> {
    match i32::try_from(result) {
        Ok(0) => Ok(Fork::Child),
        Ok(pid) => {
            Pid::from_raw(pid).filter(|_| pid > 0).map(Fork::Parent).ok_or_else(io::Error::last_os_error)
        }
        Err(_) => Err(io::Error::other("a pid is out of range")),
    }
}

/// Copies this process; the copy starts in `cgroup`, a folder of cgroup2, if one is given.
pub(crate) fn fork(_: SingleThread, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Fork> {
    // SAFETY: plain numbers, for which all zeroes is a valid value.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = u64::try_from(libc::SIGCHLD).unwrap_or_default();
    if let Some(cgroup) = cgroup {
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.cgroup = u64::try_from(cgroup.as_raw_fd()).unwrap_or_default();
    }
    // SAFETY: without CLONE_VM the child has its own copy of the memory and continues on its own copy of the
    // stack. The process has a single thread, so no lock is held by a thread that the copy lacks.
    forked(unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) })
}

/// Copies this process; the copy has the caller's parent as its own. Uses clone(2), which seccomp profiles of
/// containers allow, instead of clone3(2), which they refuse.
pub(crate) fn fork_sibling(_: SingleThread) -> io::Result<Fork> {
    let flags = libc::c_long::from(libc::CLONE_PARENT | libc::SIGCHLD);
    // SAFETY: as in `fork`. A stack of 0 is the copy of the caller's; the other arguments are unused.
    forked(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })
}

/// Puts `file` in the place of a standard stream: 0, 1 or 2.
pub(crate) fn replace_stream(file: BorrowedFd<'_>, stream: i32) -> io::Result<()> {
    // SAFETY: both arguments are numbers. No Rust object owns the standard streams.
    if unsafe { libc::dup2(file.as_raw_fd(), stream) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Closes all descriptors from 3 on except `keep`.
pub(crate) fn close_all_but(keep: BorrowedFd<'_>) -> io::Result<()> {
    let keep = u32::try_from(keep.as_raw_fd()).map_err(io::Error::other)?;
    let ranges = [(3, keep.saturating_sub(1)), (keep.saturating_add(1), u32::MAX)];
    for (first, last) in ranges.into_iter().filter(|(first, last)| first <= last) {
        // SAFETY: all arguments are numbers. The owners of the closed descriptors never run again: this
        // process ends with execve(2) or _exit(2).
        if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Ends this process at once, without running the exit handlers of the process that it is a copy of.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code) }
}

/// The kernel's `struct sigaction` (include/uapi/asm-generic/signal.h); the last three fields have no meaning
/// for the effects that are set here.
#[repr(C)]
struct Action {
    handler: libc::sighandler_t,
    rest: [usize; 3],
}

/// Sets the effect of every signal to the default, or to "ignored" for those in the mask `ignored`, and
/// unblocks all. Not by the C library, which refuses two signals.
pub(crate) fn reset_signals(ignored: u64) {
    for signal in 1..=64_u32 {
        let ignore = ignored >> signal.saturating_sub(1) & 1 == 1;
        let action = Action { handler: if ignore { libc::SIG_IGN } else { libc::SIG_DFL }, rest: [0; 3] };
        let old: *mut Action = ptr::null_mut();
        // SAFETY: `action` lives until the call has returned, and the old effect is not requested. The kernel
        // refuses SIGKILL and SIGSTOP. The mask of a signal set has 8 bytes.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, old, size_of::<u64>()) };
    }
    // SAFETY: the set is initialized by sigemptyset before its use, and the old set is not requested.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// Lets the kernel reap ended children by itself.
pub(crate) fn ignore_children() {
    // SAFETY: `SIG_IGN` is a valid effect.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Joins the session keyring of this name, or creates it.
pub(crate) fn join_session_keyring(name: &CStr) -> io::Result<()> {
    // SAFETY: the kernel only reads the name, which ends with a zero.
    let keyring = unsafe {
        libc::syscall(libc::SYS_keyctl, libc::c_ulong::from(libc::KEYCTL_JOIN_SESSION_KEYRING), name.as_ptr())
    };
    if keyring < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Filters the system calls of this process from now on.
pub(crate) fn filter(program: &[sock_filter]) -> io::Result<()> {
    let fprog = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        // seccompiler's instruction is the kernel's `struct sock_filter`, which the kernel only reads.
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: `fprog` and the program that it points to live until the call has returned.
    let set = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const fprog) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Becomes the program at `path`. Returns only on an error.
pub(crate) fn exec(path: &CStr, arguments: &[CString], environment: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: both lists end with a null pointer, and all texts end with a zero and outlive the call.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}
