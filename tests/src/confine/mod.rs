//! Runs a program under the settings of its systemd unit, on a machine without systemd.
//!
//! The shipped unit file itself is parsed, so that tests and installations share the same settings. An
//! unknown setting is an error. A wrapper ([`enter`], `src/bin/confined.rs`) applies the settings and
//! executes the program; the test that started it answers the system calls that the filter refuses, and
//! reports them by name.

mod calls;
mod supervisor;
mod sys;

pub use supervisor::{Handover, Supervisor};

use anyhow::{Context as _, Result, bail};
use calls::{Argument, Calls};
use caps::{CapSet, Capability};
use rustix::fs::Mode;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{Resource, Rlimit};
use std::collections::HashSet;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr as _;
use syscalls::Sysno;

use crate::workdir;

/// Settings of a unit that only systemd can apply, or that have their own tests.
const LEFT_TO_SYSTEMD: &[&str] = &[
    "Type",
    "NotifyAccess",
    "ExecStart",
    "Restart",
    "RestartSec",
    "WatchdogSec",
    "TimeoutStopSec",
    "KillMode",
    // Settings of the unit's cgroup.
    "TasksMax",
    "MemoryHigh",
    "MemoryMax",
    "OOMPolicy",
    // Folders of the machine: a program under test has its own in the test's folder.
    "RuntimeDirectory",
    "RuntimeDirectoryMode",
    "RuntimeDirectoryPreserve",
    "StateDirectory",
    "StateDirectoryMode",
    // These would hide the test's folder, or a folder of the machine.
    "ProtectHome",
    "PrivateTmp",
    "PrivateDevices",
    "ProtectSystem",
    "ReadWritePaths",
    "ProtectControlGroups",
];

/// Attaches executable shared memory (uapi/linux/shm.h); not in libc for glibc.
const SHM_EXEC: libc::c_int = 0o100_000;

/// Settings of a unit file that a program can apply to itself.
#[derive(Debug, Clone)]
pub struct Unit {
    umask: Option<Mode>,
    oom_score: Option<i32>,
    limits: Vec<(Resource, Rlimit)>,
    capabilities: Option<HashSet<Capability>>,
    no_new_privileges: bool,
    deny_write_execute: bool,
    calls: Calls,
    /// Error number of refused calls.
    errno: i32,
}

impl Unit {
    /// Reads a unit file.
    ///
    /// # Errors
    /// The file cannot be read, or contains an unknown setting.
    pub fn read(path: &Path) -> Result<Unit> {
        Unit::parse(&workdir::read(path)?).with_context(|| format!("{}", path.display()))
    }

    fn parse(text: &str) -> Result<Unit> {
        let settings = settings(text);
        let mut unit = Unit {
            umask: None,
            oom_score: None,
            limits: Vec::new(),
            capabilities: None,
            no_new_privileges: false,
            deny_write_execute: false,
            calls: Calls::all(),
            errno: libc::EPERM,
        };
        // The list of calls is parsed first: other settings remove calls from it.
        let filters: Vec<&str> =
            settings.iter().filter(|(key, _)| key == "SystemCallFilter").map(|(_, value)| &**value).collect();
        if !filters.is_empty() {
            unit.calls = Calls::of(&filters.join(" "))?;
        }
        for (key, value) in &settings {
            unit.set(key, value).with_context(|| format!("{key}={value}"))?;
        }
        Ok(unit)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let yes = matches!(value, "yes" | "true" | "on" | "1");
        match key {
            "SystemCallFilter" => {}
            "SystemCallErrorNumber" if value == "EPERM" => self.errno = libc::EPERM,
            // The filter kills a process that makes a call of another architecture.
            "SystemCallArchitectures" if value == "native" => {}
            "UMask" => self.umask = Some(Mode::from_bits_retain(u32::from_str_radix(value, 8)?)),
            "OOMScoreAdjust" => self.oom_score = Some(value.parse()?),
            "CapabilityBoundingSet" => {
                let parsed: Result<HashSet<_>, _> =
                    value.split_whitespace().map(Capability::from_str).collect();
                self.capabilities.get_or_insert_default().extend(parsed?);
            }
            // An empty set: root does not get any of them.
            "AmbientCapabilities" if value.is_empty() => {}
            "NoNewPrivileges" => self.no_new_privileges = yes,
            "MemoryDenyWriteExecute" => self.deny_write_execute = yes,
            _ if LEFT_TO_SYSTEMD.contains(&key) => {}
            _ => match key.strip_prefix("Limit") {
                Some(name) => self.limits.push((resource(name)?, limit(value)?)),
                None => self.restrict(key, value, yes)?,
            },
        }
        Ok(())
    }

    /// Applies the settings that filter system calls by their arguments (systemd's
    /// src/shared/seccomp-util.c).
    fn restrict(&mut self, key: &str, value: &str, yes: bool) -> Result<()> {
        let calls = &mut self.calls;
        match key {
            "RestrictAddressFamilies" => {
                let families: Result<Vec<_>> = value.split_whitespace().map(family).collect();
                calls.only("socket", &families?);
            }
            _ if !yes => bail!("only `yes` is supported"),
            "LockPersonality" => calls.only("personality", &[vec![(0, u32::MAX, 0)]]),
            "RestrictRealtime" => {
                let policies = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE];
                let ways = policies.map(|policy| vec![(1, u32::MAX, policy.cast_unsigned())]);
                calls.only("sched_setscheduler", &ways);
            }
            "RestrictNamespaces" => {
                // CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
                let none = vec![(0, 0x7E02_0000, 0)];
                calls.only("unshare", std::slice::from_ref(&none));
                calls.only("clone", &[none]);
                calls.deny("setns");
                calls.make_absent("clone3");
            }
            "RestrictSUIDSGID" => restrict_modes(calls),
            "ProtectClock" => calls.deny_group("@clock")?,
            "ProtectKernelModules" => calls.deny_group("@module")?,
            "ProtectKernelLogs" => calls.deny("syslog"),
            "ProtectHostname" => ["sethostname", "setdomainname"].iter().for_each(|call| calls.deny(call)),
            _ => bail!("unknown setting: implement it here, or add it to LEFT_TO_SYSTEMD"),
        }
        Ok(())
    }

    /// Returns the error number for a refused call.
    fn errno_of(&self, call: Sysno) -> i32 {
        match call {
            Sysno::socket => libc::EAFNOSUPPORT,
            _ if self.calls.absent.contains(&call) => libc::ENOSYS,
            _ => self.errno,
        }
    }

    /// Applies the settings to this process and the program it executes. The filter is last: the descriptor
    /// of its listener is sent over standard input, which is a socket.
    fn apply(&self, record: bool) -> Result<()> {
        if let Some(umask) = self.umask {
            rustix::process::umask(umask);
        }
        for (resource, limit) in &self.limits {
            set_limit(*resource, *limit).with_context(|| format!("cannot set the limit {resource:?}"))?;
        }
        if let Some(score) = self.oom_score {
            // Needs CAP_SYS_RESOURCE, which root in a container may lack.
            match std::fs::write("/proc/self/oom_score_adj", score.to_string()) {
                Err(error) if error.kind() != std::io::ErrorKind::PermissionDenied => {
                    return Err(error).with_context(|| format!("cannot set the OOM score {score}"));
                }
                _ => {}
            }
        }
        if let Some(kept) = &self.capabilities {
            // Only capabilities that this kernel has and that are still in the set.
            let known = caps::read(None, CapSet::Bounding)?;
            for capability in known.into_iter().filter(|one| !kept.contains(one)) {
                caps::drop(None, CapSet::Bounding, capability)?;
            }
        }
        let mut calls = if record { Calls::of("sendmsg")? } else { self.calls.clone() };
        if self.deny_write_execute && !sys::deny_write_execute()? {
            deny_by_filter(&mut calls);
        }
        // Every filter needs this.
        rustix::thread::set_no_new_privs(true)?;
        let listener = sys::filter(&calls.program()?)?;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut buffer = SendAncillaryBuffer::new(&mut space);
        let descriptors = [listener.as_fd()];
        buffer.push(SendAncillaryMessage::ScmRights(&descriptors));
        let stdin = rustix::stdio::stdin();
        rustix::net::sendmsg(stdin, &[std::io::IoSlice::new(&[0])], &mut buffer, SendFlags::empty())
            .context("cannot send the filter's listener")?;
        Ok(())
    }
}

/// Sets a limit. Without CAP_SYS_RESOURCE, which root in a container may lack, a limit can only be raised up
/// to the current maximum.
fn set_limit(resource: Resource, limit: Rlimit) -> rustix::io::Result<()> {
    match rustix::process::setrlimit(resource, limit) {
        Err(rustix::io::Errno::PERM) => {
            let most = rustix::process::getrlimit(resource).maximum;
            let lower = |wanted: Option<u64>| wanted.into_iter().chain(most).min();
            let allowed = Rlimit { current: lower(limit.current), maximum: lower(limit.maximum) };
            rustix::process::setrlimit(resource, allowed)
        }
        done => done,
    }
}

/// Replaces the kernel's own refusal of memory that is both writable and executable by a filter, like systemd
/// (seccomp_memory_deny_write_execute).
fn deny_by_filter(calls: &mut Calls) {
    let without = |index: u8, flag: libc::c_int| vec![(index, flag.cast_unsigned(), 0)];
    calls.only("mmap", &[without(2, libc::PROT_EXEC), without(2, libc::PROT_WRITE)]);
    calls.only("mprotect", &[without(2, libc::PROT_EXEC)]);
    calls.only("pkey_mprotect", &[without(2, libc::PROT_EXEC)]);
    calls.only("shmat", &[without(2, SHM_EXEC)]);
}

/// Forbids to create or change files with the mode bits set-user-ID and set-group-ID.
fn restrict_modes(calls: &mut Calls) {
    let plain = |index: u8| vec![(index, libc::S_ISUID | libc::S_ISGID, 0)];
    let by_mode = [
        ("chmod", 1),
        ("fchmod", 1),
        ("fchmodat", 2),
        ("fchmodat2", 2),
        ("mkdir", 1),
        ("mkdirat", 2),
        ("mknod", 1),
        ("mknodat", 2),
        ("creat", 1),
    ];
    for (call, index) in by_mode {
        calls.only(call, &[plain(index)]);
    }
    // The mode counts only if the call creates a file. O_TMPFILE includes the bit of O_DIRECTORY.
    let makes = (libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY)).cast_unsigned();
    for (call, flags) in [("open", 1), ("openat", 2)] {
        calls.only(call, &[vec![(flags, makes, 0)], plain(flags + 1)]);
    }
    calls.make_absent("openat2");
}

/// Returns the settings of the section [Service], in order. A backslash at the end of a line continues it on
/// the next.
fn settings(text: &str) -> Vec<(String, String)> {
    let joined = text.replace("\\\n", " ");
    let mut in_service = false;
    let mut found = Vec::new();
    for line in joined.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';']))
    {
        if line.starts_with('[') {
            in_service = line == "[Service]";
        } else if let Some((key, value)) = line.split_once('=').filter(|_| in_service) {
            found.push((key.trim().to_owned(), value.trim().to_owned()));
        }
    }
    found
}

fn resource(name: &str) -> Result<Resource> {
    Ok(match name {
        "NOFILE" => Resource::Nofile,
        "MEMLOCK" => Resource::Memlock,
        "NPROC" => Resource::Nproc,
        "CORE" => Resource::Core,
        "STACK" => Resource::Stack,
        "AS" => Resource::As,
        _ => bail!("unknown limit"),
    })
}

/// Parses `soft:hard`, or one value for both.
fn limit(value: &str) -> Result<Rlimit> {
    let one = |text: &str| match text {
        "infinity" => Ok(None),
        number => number.parse().map(Some).with_context(|| format!("{number} is not a number")),
    };
    let (soft, hard) = value.split_once(':').unwrap_or((value, value));
    Ok(Rlimit { current: one(soft)?, maximum: one(hard)? })
}

fn family(name: &str) -> Result<Vec<Argument>> {
    let number = match name {
        "AF_UNIX" => libc::AF_UNIX,
        "AF_INET" => libc::AF_INET,
        "AF_INET6" => libc::AF_INET6,
        "AF_NETLINK" => libc::AF_NETLINK,
        _ => bail!("unknown address family {name}"),
    };
    Ok(vec![(0, u32::MAX, number.cast_unsigned())])
}

/// Unit that a program is installed with, and the wrapper that applies it.
#[derive(Debug, Clone)]
pub struct Installed {
    /// Path of the wrapper.
    pub wrapper: PathBuf,
    /// Path of the unit file.
    pub unit: PathBuf,
}

impl Installed {
    /// Uses the unit of this name in packaging/.
    pub fn new(wrapper: impl Into<PathBuf>, unit: &str) -> Installed {
        Installed { wrapper: wrapper.into(), unit: workdir::repository().join("packaging").join(unit) }
    }

    /// Returns a command that starts a program under the unit. After it was started and dropped, a supervisor
    /// is needed.
    ///
    /// # Errors
    /// No socket pair can be created.
    pub fn command(&self, program: &Path) -> Result<(Command, Handover)> {
        let (socket, theirs) = UnixStream::pair().context("cannot create a socket pair")?;
        let mut command = Command::new(&self.wrapper);
        command.arg(&self.unit).arg(program).stdin(Stdio::from(OwnedFd::from(theirs)));
        Ok((command, Handover { unit: self.unit.clone(), socket }))
    }
}

/// Main function of the wrapper, `confined UNIT PROGRAM ARGUMENTS…`: applies the settings of the unit and
/// executes the program.
///
/// # Errors
/// A setting cannot be applied, or the program cannot be started.
pub fn enter(arguments: &[String]) -> Result<()> {
    use std::os::unix::process::CommandExt as _;
    let [unit, program, arguments @ ..] = arguments else {
        bail!("usage: confined UNIT PROGRAM ARGUMENTS…")
    };
    let record = std::env::var_os(supervisor::RECORD).is_some();
    let unit = Unit::read(Path::new(unit))?;
    let mut command = Command::new(program);
    command.args(arguments).env_remove(supervisor::RECORD);
    let nothing = std::fs::File::open("/dev/null").context("cannot open /dev/null")?;
    unit.apply(record)?;
    rustix::stdio::dup2_stdin(nothing)?;
    Err(command.exec()).with_context(|| format!("cannot start {program}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_the_shipped_units_is_known() {
        for name in ["beelet.service", "beelet-observe.service"] {
            let unit = Unit::read(&Installed::new("", name).unit).unwrap();
            assert!(unit.no_new_privileges && unit.deny_write_execute, "{name}");
            assert!(unit.calls.allows(Sysno::bpf) && !unit.calls.allows(Sysno::init_module), "{name}");
        }
    }

    /// Returns the settings of a shipped unit by name.
    fn shipped(unit: &str, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(Installed::new("", unit).unit).unwrap();
        let of_name = settings(&text).into_iter().filter(|(key, _)| key == name);
        of_name.map(|(_, value)| value).collect()
    }

    #[test]
    fn the_shipped_units_and_pods_have_bounds_of_memory_with_room_before_the_last() {
        let share = |text: &str| text.strip_suffix('%').unwrap().parse::<u32>().unwrap();
        let bounds = ["MemoryHigh", "MemoryMax"].map(|name| shipped("beelet.service", name));
        let [high, max] = bounds.map(|values| <[String; 1]>::try_from(values).map(|[value]| share(&value)));
        let (high, max) = (high.unwrap(), max.unwrap());
        // A node with 1 GiB runs 110 pods within the lower one; one with 8 GiB runs 5,000 pods.
        assert!((15..max).contains(&high) && max <= 50, "{high} % and {max} %");
        // A program of the unit killed by the OOM killer must not stop the agent.
        assert_eq!(shipped("beelet.service", "OOMPolicy"), ["continue"]);
        assert_eq!(shipped("beelet-observe.service", "MemoryHigh"), ["192M"]);
        assert_eq!(shipped("beelet-observe.service", "MemoryMax"), ["256M"]);
        let manifest = Installed::new("", "kubernetes/observe.yaml").unit;
        let manifest = std::fs::read_to_string(manifest).unwrap();
        assert!(manifest.contains("limits: {memory: 256Mi}"), "the DaemonSet has no memory limit");
    }

    #[test]
    fn a_filter_stands_in_where_the_kernel_refuses_no_executable_memory() {
        let mut calls = Calls::all();
        deny_by_filter(&mut calls);
        assert!(calls.program().is_ok());
        assert!([Sysno::mmap, Sysno::mprotect, Sysno::shmat].into_iter().all(|call| calls.allows(call)));
    }

    #[test]
    fn a_setting_that_is_not_known_is_an_error() {
        let error = |text: &str| format!("{:#}", Unit::parse(&format!("[Service]\n{text}\n")).unwrap_err());
        for text in [
            "ProtectProc=invisible",
            "LimitFOO=1",
            "RestrictNamespaces=net",
            "RestrictAddressFamilies=AF_CAN",
            "SystemCallErrorNumber=EACCES",
            "CapabilityBoundingSet=CAP_NONE",
        ] {
            assert!(error(text).contains(text), "{}", error(text));
        }
    }

    #[test]
    fn settings_are_those_of_the_service_alone() {
        let text = "[Unit]\nUMask=0\n[Service]\n# UMask=1\nUMask = 0077\nLimitNOFILE=1:2 \nA=b \\\n  c\n[Install]\nD=e\n";
        let expected = [("UMask", "0077"), ("LimitNOFILE", "1:2"), ("A", "b    c")];
        assert_eq!(settings(text), expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    }
}
