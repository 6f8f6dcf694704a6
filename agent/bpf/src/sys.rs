//! Thin wrappers of system calls that neither aya nor rustix has. Must never decide anything.

use aya_obj::generated::{
    BPF_F_LINK, BPF_F_SLEEPABLE, bpf_attach_type, bpf_attr, bpf_cmd, bpf_func_info, bpf_insn, bpf_link_info,
    bpf_link_type, bpf_map_type, bpf_prog_info, bpf_prog_type,
};
use std::ffi::{CStr, CString};
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tokio::io::{Interest, unix::AsyncFd};

/// Kind of a BPF object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectKind {
    Map,
    Program,
    Link,
}

/// State of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkState {
    /// Id of the program behind the link.
    pub(super) program_id: u32,
    /// For a link to a cgroup: that cgroup's id, 0 after the cgroup's removal. `None` for other links.
    pub(super) cgroup_id: Option<u64>,
}

fn bpf(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    // SAFETY: `attr` is a whole, initialised union of the size given, and outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, cmd as u32, &raw mut *attr, size_of::<bpf_attr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn empty_attr() -> bpf_attr {
    // SAFETY: all zero is a value of this union of plain integers, and the kernel requires zero for unused
    // members.
    unsafe { zeroed() }
}

/// Opens the object pinned at `path`.
pub(super) fn object_get(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = empty_attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    let fd = bpf(bpf_cmd::BPF_OBJ_GET, &mut attr)?;
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the kind of a BPF descriptor, which the kernel shows only in the name of the descriptor's inode.
pub(super) fn object_kind(fd: BorrowedFd<'_>) -> io::Result<ObjectKind> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let name = name.to_string_lossy();
    if name.contains("bpf-map") {
        Ok(ObjectKind::Map)
    } else if name.contains("bpf-prog") {
        Ok(ObjectKind::Program)
    } else if name.contains("bpf_link") || name.contains("bpf-link") {
        Ok(ObjectKind::Link)
    } else {
        Err(io::Error::other(format!("unknown kind of BPF object: {name}")))
    }
}

/// Queries the state of a link.
pub(super) fn link_state(link: BorrowedFd<'_>) -> io::Result<LinkState> {
    // SAFETY: all zero is a value of this struct of plain integers.
    let mut info: bpf_link_info = unsafe { zeroed() };
    let mut attr = empty_attr();
    attr.info.bpf_fd = link.as_raw_fd() as u32;
    attr.info.info_len = size_of::<bpf_link_info>() as u32;
    attr.info.info = &raw mut info as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    let of_cgroup = info.type_ == bpf_link_type::BPF_LINK_TYPE_CGROUP as u32;
    // SAFETY: plain integers, so any member may be read; for this type the kernel filled in `cgroup`.
    let cgroup = unsafe { info.__bindgen_anon_1.cgroup };
    let cgroup_id = of_cgroup.then_some(cgroup.cgroup_id);
    Ok(LinkState { program_id: info.prog_id, cgroup_id })
}

/// Queries the kernel's information about a program. Older kernels leave the last fields zero.
pub(super) fn program_info(id: u32) -> io::Result<bpf_prog_info> {
    let mut attr = empty_attr();
    attr.__bindgen_anon_6.__bindgen_anon_1.prog_id = id;
    let fd = bpf(bpf_cmd::BPF_PROG_GET_FD_BY_ID, &mut attr)?;
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zero is a value of this struct of plain integers, and asks for no arrays.
    let mut info: bpf_prog_info = unsafe { zeroed() };
    let mut attr = empty_attr();
    attr.info.bpf_fd = fd.as_raw_fd() as u32;
    attr.info.info_len = size_of::<bpf_prog_info>() as u32;
    attr.info.info = &raw mut info as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// Atomically replaces a link's program with `program`.
pub(super) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = empty_attr();
    attr.link_update.link_fd = link.as_raw_fd() as u32;
    attr.link_update.__bindgen_anon_1.new_prog_fd = program.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(|_| ())
}

/// Wraps the descriptor that a call returned.
fn made(fd: io::Result<i64>) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(fd?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Loads the types of programs and maps into the kernel.
pub(super) fn btf_load(types: &[u8]) -> io::Result<OwnedFd> {
    let mut attr = empty_attr();
    attr.__bindgen_anon_7.btf = types.as_ptr() as u64;
    attr.__bindgen_anon_7.btf_size = u32::try_from(types.len()).map_err(io::Error::other)?;
    made(bpf(bpf_cmd::BPF_BTF_LOAD, &mut attr))
}

/// A program that becomes a member of one of the kernel's structures.
pub(super) struct StructOpsProgram<'a> {
    /// Name shown by bpftool.
    pub(super) name: &'a str,
    pub(super) code: &'a [bpf_insn],
    pub(super) license: &'a CStr,
    /// Id of the structure among the kernel's types.
    pub(super) ops_type: u32,
    /// Index of the member in the structure.
    pub(super) member: u32,
    /// True if the kernel calls the program in a context that may sleep.
    pub(super) sleeps: bool,
    /// The object's own types.
    pub(super) btf: BorrowedFd<'a>,
    /// Types of the program's functions.
    pub(super) functions: &'a [bpf_func_info],
}

/// Loads a struct_ops program. If the kernel refuses, the error includes the verifier's log.
pub(super) fn struct_ops_program(program: &StructOpsProgram<'_>) -> Result<OwnedFd, (io::Error, String)> {
    let made = made(load_struct_ops(program, &mut []));
    made.or_else(|_| {
        let mut log = vec![0; 1 << 20];
        let refused = self::made(load_struct_ops(program, &mut log));
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(0);
        refused.map_err(|error| (error, String::from_utf8_lossy(&log[..end]).into_owned()))
    })
}

fn load_struct_ops(program: &StructOpsProgram<'_>, log: &mut [u8]) -> io::Result<i64> {
    let mut attr = empty_attr();
    let count = |length: usize| u32::try_from(length).map_err(io::Error::other);
    // SAFETY: plain integers, so any member of the union may be written; nothing else of it is in use.
    let load = unsafe { &mut attr.__bindgen_anon_3 };
    load.prog_type = bpf_prog_type::BPF_PROG_TYPE_STRUCT_OPS as u32;
    for (place, byte) in load.prog_name.iter_mut().take(15).zip(program.name.bytes()) {
        *place = byte as std::ffi::c_char;
    }
    load.insn_cnt = count(program.code.len())?;
    load.insns = program.code.as_ptr() as u64;
    load.license = program.license.as_ptr() as u64;
    load.attach_btf_id = program.ops_type;
    load.expected_attach_type = program.member;
    load.prog_flags = if program.sleeps { BPF_F_SLEEPABLE } else { 0 };
    load.prog_btf_fd = program.btf.as_raw_fd() as u32;
    load.func_info_rec_size = size_of::<bpf_func_info>() as u32;
    load.func_info = program.functions.as_ptr() as u64;
    load.func_info_cnt = count(program.functions.len())?;
    if !log.is_empty() {
        load.log_level = 1;
        load.log_buf = log.as_mut_ptr() as u64;
        load.log_size = count(log.len())?;
    }
    bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr)
}

/// Makes the map that passes a structure of programs to the kernel; `value_type` is the id of the map value's
/// type among the kernel's types.
pub(super) fn struct_ops_map(value_type: u32, size: usize, btf: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = empty_attr();
    // SAFETY: plain integers, so any member of the union may be written; nothing else of it is in use.
    let map = unsafe { &mut attr.__bindgen_anon_1 };
    map.map_type = bpf_map_type::BPF_MAP_TYPE_STRUCT_OPS as u32;
    map.key_size = size_of::<u32>() as u32;
    map.value_size = u32::try_from(size).map_err(io::Error::other)?;
    map.max_entries = 1;
    map.map_flags = BPF_F_LINK;
    map.btf_fd = btf.as_raw_fd() as u32;
    map.btf_vmlinux_value_type_id = value_type;
    made(bpf(bpf_cmd::BPF_MAP_CREATE, &mut attr))
}

/// Writes an element of a map, whose values have the size of `value`.
pub(super) fn map_update(map: BorrowedFd<'_>, key: u32, value: &[u8]) -> io::Result<()> {
    let mut attr = empty_attr();
    // SAFETY: plain integers, so any member of the union may be written; nothing else of it is in use.
    let element = unsafe { &mut attr.__bindgen_anon_2 };
    element.map_fd = map.as_raw_fd() as u32;
    element.key = (&raw const key) as u64;
    element.__bindgen_anon_1.value = value.as_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr).map(|_| ())
}

/// Registers the structure in a map with the kernel, which uses it until the descriptor is closed.
pub(super) fn struct_ops_link(map: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = empty_attr();
    attr.link_create.__bindgen_anon_1.map_fd = map.as_raw_fd() as u32;
    attr.link_create.attach_type = bpf_attach_type::BPF_STRUCT_OPS as u32;
    made(bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr))
}

/// Waits until every running BPF program has ended (programs run inside RCU read-side sections).
pub(super) fn wait_for_running_programs() -> io::Result<()> {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1; // synchronize_rcu(), kernel/sched/membarrier.c
    // SAFETY: takes three integers, touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the cookie of a socket's network namespace (since Linux 5.14).
pub(super) fn netns_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71; // include/uapi/asm-generic/socket.h
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: both pointers are to locals of the size given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

/// Runs a program `runs` times on `packet`, which the program may change. After a signal the call starts
/// over.
pub(super) fn program_test_run(program: BorrowedFd<'_>, packet: &mut [u8], runs: u32) -> io::Result<()> {
    let question = packet.to_vec();
    let size = u32::try_from(packet.len()).map_err(io::Error::other)?;
    let mut attr = empty_attr();
    attr.test.prog_fd = program.as_raw_fd() as u32;
    attr.test.data_in = question.as_ptr() as u64;
    attr.test.data_size_in = size;
    attr.test.data_out = packet.as_mut_ptr() as u64;
    attr.test.data_size_out = size;
    attr.test.repeat = runs;
    loop {
        // Both buffers are of the size given, and outlive the call.
        match bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Registers a descriptor with the async runtime, which reports its readiness: for timers, PSI triggers and
/// event counters. Must be called in a runtime with I/O enabled.
///
/// # Errors
/// The runtime can't watch the descriptor.
pub fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and names the same file for as long as it lives, and the value returned
    // owns it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
