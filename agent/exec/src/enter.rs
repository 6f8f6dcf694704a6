//! The way of a process into a container (docs/decisions/0029-exec.md): two processes, which report a failure
//! over a pipe.
//!
//! The *entrant* is forked on the machine. The entrant joins the container's cgroups and namespaces and
//! takes the container's identity; the container cannot see this process, since its pid is in the machine's
//! namespace. Only then does the entrant fork the *command*, the first process that the container can see,
//! which has nothing that the container does not have.
//!
//! Must not read /proc in the container, or open any of its files before the identity is the container's.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::PathBuf,
};

use rustix::{
    fs::{Gid, Mode, Uid, fchown},
    process::{
        DumpableBehavior, Resource, Rlimit, Signal, chdir, getcwd, set_dumpable_behavior,
        set_parent_process_death_signal, setrlimit, setsid, umask,
    },
    thread::{
        CapabilitySet, CapabilitySets, ThreadNameSpaceType, clear_ambient_capability_set,
        configure_capability_in_ambient_set, move_into_thread_name_spaces,
        remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities, set_no_new_privs,
        set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    },
};
use seccompiler::BpfProgram;

use crate::{
    places,
    plan::{Capabilities, Limit, Plan},
    sys::{self, Fork, SingleThread},
};

/// Maximum length of the container's /etc/passwd, in bytes.
const MAX_PASSWD: u64 = 1 << 20;

/// Everything that the entrant needs, prepared before its fork.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The container's first process.
    pub first: OwnedFd,
    /// Cgroups of version 1 to join.
    pub joined: Vec<PathBuf>,
    /// Name of the container's session keyring.
    pub keyring: CString,
    pub plan: Plan,
    /// Limits of all resources.
    pub limits: Vec<Limit>,
    pub umask: u32,
    /// Signals that are ignored, as a mask.
    pub ignored: u64,
    pub filters: Vec<BpfProgram>,
    pub command: Vec<String>,
    /// `/dev/null` for the standard input, and the pipes of the outputs.
    pub streams: [OwnedFd; 3],
    /// Pipe for [`Message`]s.
    pub status: OwnedFd,
}

impl Entry {
    /// Closes everything but the container's first process: the rest is the entrant's.
    pub(crate) fn into_first(self) -> OwnedFd {
        self.first
    }
}

/// Step that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    Cgroup = 1,
    OomScore,
    Streams,
    Limits,
    Namespaces,
    Keyring,
    Descriptors,
    Seccomp,
    Capabilities,
    User,
    Fork,
    Session,
    WorkingDirectory,
    Program,
    AppArmor,
}

impl Stage {
    const ALL: [Self; 15] = [
        Self::Cgroup,
        Self::OomScore,
        Self::Streams,
        Self::Limits,
        Self::Namespaces,
        Self::Keyring,
        Self::Descriptors,
        Self::Seccomp,
        Self::Capabilities,
        Self::User,
        Self::Fork,
        Self::Session,
        Self::WorkingDirectory,
        Self::Program,
        Self::AppArmor,
    ];

    /// Describes the step, after "cannot".
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Cgroup => "join the container's cgroups",
            Self::OomScore => "set the OOM score",
            Self::Streams => "set up the streams",
            Self::Limits => "set the limits",
            Self::Namespaces => "join the container's namespaces",
            Self::Keyring => "join the container's keyring",
            Self::Descriptors => "close the descriptors",
            Self::Seccomp => "install the seccomp filters",
            Self::Capabilities => "set the capabilities",
            Self::User => "become the container's user",
            Self::Fork => "start the command's process",
            Self::Session => "start a session",
            Self::WorkingDirectory => "change to the container's working directory",
            Self::Program => "execute the command",
            Self::AppArmor => "request the AppArmor profile",
        }
    }

    /// Returns true if the runtime would fail at this step too.
    pub(crate) const fn is_the_commands(self) -> bool {
        matches!(self, Self::Fork | Self::WorkingDirectory | Self::Program)
    }
}

/// A report over the status pipe: 5 bytes, written in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The command's process, on the machine.
    Started(i32),
    /// Failure of a step, with the system's error number.
    Failed(Stage, i32),
}

impl Message {
    pub(crate) const LENGTH: usize = 5;

    fn encode(self) -> [u8; Self::LENGTH] {
        let (kind, number) = match self {
            Self::Started(pid) => (0, pid),
            Self::Failed(stage, errno) => (stage as u8, errno),
        };
        let [a, b, c, d] = number.to_le_bytes();
        [kind, a, b, c, d]
    }

    pub(crate) fn decode([kind, a, b, c, d]: [u8; Self::LENGTH]) -> Option<Self> {
        let number = i32::from_le_bytes([a, b, c, d]);
        if kind == 0 {
            return Some(Self::Started(number));
        }
        Stage::ALL.into_iter().find(|stage| *stage as u8 == kind).map(|stage| Self::Failed(stage, number))
    }
}

type Step<T> = Result<T, (Stage, io::Error)>;

/// Adds the step to its error.
fn at<T, E: Into<io::Error>>(stage: Stage, result: Result<T, E>) -> Step<T> {
    result.map_err(|error| (stage, error.into()))
}

/// Runs the entrant, and the command. Never returns.
pub(crate) fn run(single: SingleThread, entry: &Entry) -> ! {
    let Ok(status) = entry.status.try_clone() else { sys::exit(1) };
    let mut status = File::from(status);
    let report = |status: &mut File, message: Message| drop(status.write_all(&message.encode()));
    let forked = become_container(entry, &status).and_then(|()| at(Stage::Fork, sys::fork_sibling(single)));
    let failed = match forked {
        Ok(Fork::Parent(pid)) => {
            report(&mut status, Message::Started(pid.as_raw_nonzero().get()));
            sys::exit(0);
        }
        Ok(Fork::Child) => become_command(entry),
        Err(failed) => failed,
    };
    let errno = failed.1.raw_os_error().unwrap_or(libc::EIO);
    report(&mut status, Message::Failed(failed.0, errno));
    sys::exit(1);
}

/// Takes the container's cgroups, namespaces and identity.
fn become_container(entry: &Entry, status: &File) -> Step<()> {
    let plan = &entry.plan;
    // On the machine, with its /proc and its cgroups.
    at(Stage::Session, set_dumpable_behavior(DumpableBehavior::NotDumpable))?;
    for dir in &entry.joined {
        at(Stage::Cgroup, places::join(dir))?;
    }
    at(Stage::OomScore, fs::write("/proc/self/oom_score_adj", plan.oom_score_adj.to_string()))?;
    at(Stage::AppArmor, confine_on_exec(&plan.apparmor))?;
    at(Stage::Streams, streams(entry))?;
    at(Stage::Limits, entry.limits.iter().try_for_each(set_limit))?;
    sys::reset_signals(entry.ignored);
    umask(Mode::from_raw_mode(entry.umask & 0o777));
    at(Stage::Keyring, sys::join_session_keyring(&entry.keyring))?;
    let namespaces = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::CONTROL_GROUP
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::PROCESS_ID;
    at(Stage::Namespaces, move_into_thread_name_spaces(entry.first.as_fd(), namespaces))?;
    // In the container's files, but nothing of them is open or has been read. The root and the working
    // directory are the container's root (kernel: fs/namespace.c, mntns_install).
    at(Stage::Descriptors, sys::close_all_but(status.as_fd()))?;
    if !plan.no_new_privileges {
        // Needs CAP_SYS_ADMIN, so the profile must allow the calls from here on, as under runc.
        at(Stage::Seccomp, entry.filters.iter().try_for_each(|filter| sys::filter(filter)))?;
    }
    at(Stage::Capabilities, bound(&plan.capabilities))?;
    at(Stage::User, become_user(plan))?;
    at(Stage::Capabilities, limit_to(&plan.capabilities))?;
    if plan.no_new_privileges {
        at(Stage::Capabilities, set_no_new_privs(true))?;
    }
    // A change of the user resets this (kernel: commit_creds).
    at(Stage::Session, set_dumpable_behavior(DumpableBehavior::NotDumpable))
}

/// Requests an AppArmor profile for the next program that is executed. A child inherits the request (kernel:
/// security/apparmor/lsm.c, `apparmor_task_alloc`), so the command has the profile from its program on. The
/// file belongs to this process on the machine.
fn confine_on_exec(profile: &str) -> io::Result<()> {
    if profile.is_empty() {
        return Ok(());
    }
    let request = format!("exec {profile}");
    match fs::write("/proc/self/attr/apparmor/exec", &request) {
        // Before Linux 5.8 one file serves all security modules.
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::write("/proc/self/attr/exec", request),
        written => written,
    }
}

/// Puts the streams in place. The pipes belong to the container's user, who may open them again by name
/// (runc: `fixStdioPermissions`).
fn streams(entry: &Entry) -> io::Result<()> {
    for (stream, number) in entry.streams.iter().zip(0..) {
        if number > 0 {
            fchown(stream, Some(Uid::from_raw(entry.plan.uid)), None)?;
        }
        sys::replace_stream(stream.as_fd(), number)?;
    }
    Ok(())
}

fn set_limit(limit: &Limit) -> io::Result<()> {
    const RESOURCES: [Resource; 16] = [
        Resource::Cpu,
        Resource::Fsize,
        Resource::Data,
        Resource::Stack,
        Resource::Core,
        Resource::Rss,
        Resource::Nproc,
        Resource::Nofile,
        Resource::Memlock,
        Resource::As,
        Resource::Locks,
        Resource::Sigpending,
        Resource::Msgqueue,
        Resource::Nice,
        Resource::Rtprio,
        Resource::Rttime,
    ];
    let Some(resource) = RESOURCES.get(usize::from(limit.resource)) else { return Ok(()) };
    let value = |value: u64| (value != u64::MAX).then_some(value);
    let wanted = Rlimit { current: value(limit.soft), maximum: value(limit.hard) };
    if rustix::process::getrlimit(*resource) == wanted {
        return Ok(());
    }
    Ok(setrlimit(*resource, wanted)?)
}

/// Drops capabilities from the bounding set.
fn bound(capabilities: &Capabilities) -> io::Result<()> {
    for number in 0..u64::BITS {
        let bit = 1_u64 << number;
        if capabilities.bounding & bit != 0 {
            continue;
        }
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(bit)) {
            // No capability of this kernel has the number.
            Err(rustix::io::Errno::INVAL) => break,
            dropped => dropped?,
        }
    }
    Ok(())
}

fn become_user(plan: &Plan) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(plan.uid), Gid::from_raw(plan.gid));
    let groups: Vec<Gid> = plan.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    // The change of the user must keep the capabilities that the next step chooses from.
    set_keep_capabilities(true)?;
    set_thread_groups(&groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    Ok(set_keep_capabilities(false)?)
}

/// Sets the other four sets of capabilities.
fn limit_to(capabilities: &Capabilities) -> io::Result<()> {
    let set = |bits: u64| CapabilitySet::from_bits_retain(bits);
    let sets = CapabilitySets {
        effective: set(capabilities.effective),
        permitted: set(capabilities.permitted),
        inheritable: set(capabilities.inheritable),
    };
    clear_ambient_capability_set()?;
    set_capabilities(None, sets)?;
    for number in (0..u64::BITS).filter(|number| capabilities.ambient & 1 << number != 0) {
        configure_capability_in_ambient_set(set(1 << number), true)?;
    }
    Ok(())
}

/// Becomes the command; returns the failure. Everything here happens with the container's identity.
fn become_command(entry: &Entry) -> (Stage, io::Error) {
    let step = || -> Step<()> {
        at(Stage::Session, setsid())?;
        // If the helper is killed, the command must not stay without a deadline.
        at(Stage::Session, set_parent_process_death_signal(Some(Signal::KILL)))?;
        at(Stage::WorkingDirectory, change_directory(&entry.plan.cwd))?;
        let environment = environment(&entry.plan);
        let program = at(Stage::Program, find_program(&entry.command, &environment))?;
        let texts = |list: &[String]| list.iter().map(|text| CString::new(text.as_str())).collect();
        let arguments: Result<Vec<CString>, _> = texts(&entry.command);
        let environment: Result<Vec<CString>, _> = texts(&environment);
        let (arguments, environment) = (at(Stage::Program, arguments)?, at(Stage::Program, environment)?);
        if entry.plan.no_new_privileges {
            at(Stage::Seccomp, entry.filters.iter().try_for_each(|filter| sys::filter(filter)))?;
        }
        Err((Stage::Program, sys::exec(&program, &arguments, &environment)))
    };
    step().err().unwrap_or_else(|| (Stage::Program, io::Error::from_raw_os_error(libc::EIO)))
}

/// Changes to the container's working directory, which must be below the container's root (runc:
/// `verifyCwd`, CVE-2024-21626).
fn change_directory(path: &str) -> io::Result<()> {
    let path = if path.is_empty() { "/" } else { path };
    chdir(path)?;
    let reached = getcwd(Vec::new())?;
    if reached.as_bytes().starts_with(b"/") {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ENOENT))
    }
}

/// Returns the container's environment, with `HOME` from the container's /etc/passwd if it is missing (runc:
/// `setupUser`). Of equal names the last counts.
fn environment(plan: &Plan) -> Vec<String> {
    let name = |text: &str| text.split('=').next().unwrap_or_default().to_owned();
    let mut environment: Vec<String> = Vec::new();
    for text in &plan.env {
        match environment.iter_mut().find(|known| name(known) == name(text)) {
            Some(known) => known.clone_from(text),
            None => environment.push(text.clone()),
        }
    }
    if !environment.iter().any(|text| text.starts_with("HOME=") && text.len() > "HOME=".len()) {
        environment.retain(|text| !text.starts_with("HOME="));
        environment.push(format!("HOME={}", home(plan.uid).unwrap_or_else(|| "/".to_owned())));
    }
    environment
}

/// Reads the home directory of a user. The file is the container's, and may be anything.
fn home(uid: u32) -> Option<String> {
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open("/etc/passwd").ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut content = Vec::new();
    file.take(MAX_PASSWD).read_to_end(&mut content).ok()?;
    let content = String::from_utf8_lossy(&content);
    let fields = content.lines().map(|line| line.split(':').collect::<Vec<&str>>());
    let mut of_user = fields.filter(|fields| fields.get(2).and_then(|id| id.parse().ok()) == Some(uid));
    let home = of_user.find_map(|fields| fields.get(5).map(|home| (*home).to_owned()))?;
    Some(home).filter(|home| !home.contains('\0'))
}

/// Finds the program in the container's `PATH` (Go: `exec.LookPath`).
fn find_program(command: &[String], environment: &[String]) -> io::Result<CString> {
    let missing = || io::Error::from_raw_os_error(libc::ENOENT);
    let name = command.first().filter(|name| !name.is_empty()).ok_or_else(missing)?;
    if name.contains('/') {
        return CString::new(name.as_str()).map_err(io::Error::other);
    }
    let path = environment.iter().find_map(|text| text.strip_prefix("PATH=")).unwrap_or_default();
    for dir in path.split(':') {
        let program = if dir.is_empty() { format!("./{name}") } else { format!("{dir}/{name}") };
        let can_run = |found: &fs::Metadata| found.is_file() && found.mode() & 0o111 != 0;
        if fs::metadata(&program).is_ok_and(|found| can_run(&found)) {
            return CString::new(program).map_err(io::Error::other);
        }
    }
    Err(missing())
}
