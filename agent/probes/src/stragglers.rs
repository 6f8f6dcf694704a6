//! Finds and ends the processes of an exec probe that timed out.
//!
//! The runtime starts a probe's command as a sibling of the container's first process: with the same parent
//! (the shim), in the same cgroup, as the leader of a session of its own (runc's nsexec calls setsid). All
//! processes that the command starts are in its process tree. When a part of the tree ends, its children are
//! reparented to the container's first process, but stay in the session; a child with a session of its own
//! mostly still holds the pipe of the command's output. So this module finds the leader by parent, cgroup,
//! start time and command line, and then ends tree, session and holders of its pipes together, repeatedly
//! until none is left, because processes may fork in between.
//!
//! A script runs as its interpreter, and a command may have become another program (exec), so the command
//! line is only a sign: see [`Likeness`]. Processes that left the tree, the session and the pipes can't be
//! distinguished from the application's own processes, and stay.
//!
//! Must never touch the container's first process, its own children in other sessions, or processes outside
//! the container's cgroup.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use beelet_base::process::{Moment, Process, read};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Maximum rounds of listing and killing.
const ROUNDS: usize = 20;
/// Maximum wait for the end of a process before the next round.
const ROUND: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Failure to end the processes of a probe.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StragglersError {
    #[error("the container's process {0} has ended")]
    ContainerGone(u32),
    #[error("process {0} has no cgroup")]
    NoCgroup(u32),
    #[error("cannot list processes: {0}")]
    Proc(String),
    #[error("{count} commands run in the container and none looks like {command:?}, so none is killed")]
    NoneAlike { count: usize, command: Vec<String> },
    #[error("processes of the probe's session {0} are still running")]
    StillThere(u32),
}

/// Ends the command that was started after `since` in the container whose first process is `init`, with all
/// of its processes. Returns their number. Blocks for some milliseconds.
///
/// # Errors
/// The processes can't be distinguished from others, or did not end.
pub(super) fn end(init: u32, command: &[String], since: Moment) -> Result<usize, StragglersError> {
    let proc = Path::new("/proc");
    let first = read(proc, init).ok_or(StragglersError::ContainerGone(init))?;
    let cgroup = cgroup_of(proc, init).ok_or(StragglersError::NoCgroup(init))?;
    let all = processes(proc)?;
    let in_container = |process: &Process| cgroup_of(proc, process.pid).as_ref() == Some(&cgroup);
    let mut candidates = beside(&all, first, since);
    candidates.retain(in_container);
    let lines: Vec<Vec<String>> = candidates.iter().map(|process| command_of(proc, process.pid)).collect();
    let Some(leader) = choose(command, &lines)?.map(|index| candidates[index]) else {
        return Ok(0); // the command has just ended by itself
    };
    // Pipes that the application also writes to prove nothing.
    let pipes = &output_pipes(proc, leader.pid) - &output_pipes(proc, init);
    let inherited = |process: &Process| {
        process.started >= leader.started
            && in_container(process)
            && !output_pipes(proc, process.pid).is_disjoint(&pipes)
    };
    let mut ended = BTreeSet::new();
    for _ in 0..ROUNDS {
        let all = processes(proc)?;
        let mut members = members(&all, leader, inherited);
        members.retain(|process| process.pid != init && in_container(process));
        if members.is_empty() {
            return Ok(ended.len());
        }
        let killed: Vec<_> = members.iter().filter_map(|process| kill(proc, *process)).collect();
        ended.extend(members.iter().map(|process| process.pid));
        await_end(&killed);
    }
    Err(StragglersError::StillThere(leader.session))
}

/// Returns the processes that the runtime started after `since` as siblings of the container's first process,
/// in order.
fn beside(all: &[Process], first: Process, since: Moment) -> Vec<Process> {
    let is_beside = |process: &&Process| {
        process.parent == first.parent
            && process.pid != first.pid
            && process.session == process.pid
            && process.started >= since
    };
    let mut found: Vec<Process> = all.iter().filter(is_beside).copied().collect();
    found.sort_by_key(|process| (process.started, process.pid));
    found
}

/// Likelihood that a process with some command line was started with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Likeness {
    /// No match: the process may have become another program.
    None,
    /// The command's arguments match: another program precedes them, or replaces the first word.
    Arguments,
    /// A script: its interpreter, the script's path, the arguments (execve(2)).
    Script,
    /// The same command line.
    Same,
}

impl Likeness {
    fn of(command: &[String], line: &[String]) -> Self {
        if line == command {
            return Self::Same;
        }
        let Some((program, arguments)) = command.split_first() else { return Self::None };
        let Some(before) = line.strip_suffix(arguments) else { return Self::None };
        let name = |path: &String| Path::new(path).file_name().map(ToOwned::to_owned);
        match before {
            [_, .., script] if name(script) == name(program) => Self::Script,
            [_, ..] if !arguments.is_empty() => Self::Arguments,
            _ => Self::None,
        }
    }
}

/// Chooses the command line in `lines` that belongs to `command`: the first of the most similar ones. A line
/// without any match is chosen only if it is the only one.
fn choose(command: &[String], lines: &[Vec<String>]) -> Result<Option<usize>, StragglersError> {
    let likeness: Vec<Likeness> = lines.iter().map(|line| Likeness::of(command, line)).collect();
    match likeness.iter().max() {
        None => Ok(None),
        Some(Likeness::None) if lines.len() > 1 => {
            Err(StragglersError::NoneAlike { count: lines.len(), command: command.to_vec() })
        }
        Some(most) => Ok(likeness.iter().position(|one| one == most)),
    }
}

/// Returns the pipes of a process's output. Another process that holds one of them has inherited it.
fn output_pipes(proc: &Path, pid: u32) -> BTreeSet<PathBuf> {
    let fd = proc.join(pid.to_string()).join("fd");
    let targets = ["1", "2"].into_iter().filter_map(|number| fs::read_link(fd.join(number)).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("pipe:[")).collect()
}

/// Returns the processes in the leader's tree and session, and those that `inherited` its output.
fn members(all: &[Process], leader: Process, inherited: impl Fn(&Process) -> bool) -> Vec<Process> {
    let mut found: BTreeSet<u32> = BTreeSet::new();
    let mut members = Vec::new();
    let heirs: BTreeSet<u32> = all.iter().filter(|process| inherited(process)).map(|p| p.pid).collect();
    loop {
        let before = members.len();
        for process in all {
            let belongs = process.session == leader.session && process.started >= leader.started
                || found.contains(&process.parent)
                || heirs.contains(&process.pid);
            if belongs && found.insert(process.pid) {
                members.push(*process);
            }
        }
        if members.len() == before {
            return members;
        }
    }
}

/// Kills a process, unless its pid was reused.
fn kill(proc: &Path, process: Process) -> Option<OwnedFd> {
    let handle = pidfd_open(Pid::from_raw(i32::try_from(process.pid).ok()?)?, PidfdFlags::empty()).ok()?;
    let same = read(proc, process.pid).is_some_and(|now| now.started == process.started);
    (same && pidfd_send_signal(&handle, Signal::KILL).is_ok()).then_some(handle)
}

/// Waits until all processes have ended, up to [`ROUND`] for each: one in uninterruptible sleep may take
/// longer.
fn await_end(killed: &[OwnedFd]) {
    for process in killed {
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        let _ = poll(&mut ended, Some(&ROUND));
    }
}

/// Returns all processes but zombies.
fn processes(proc: &Path) -> Result<Vec<Process>, StragglersError> {
    let entries = fs::read_dir(proc).map_err(|error| StragglersError::Proc(error.to_string()))?;
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(numbers.filter_map(|pid| read(proc, pid)).collect())
}

/// Maximum bytes to read of another process's file: the maximum length of an argument (`MAX_ARG_STRLEN`).
const MOST: u64 = 128 << 10;

/// Reads the beginning of a process's file. A container's process controls the length of its command line,
/// which may be all of its memory (`PR_SET_MM_ARG_END`), and of a file that it has mapped.
fn beginning(proc: &Path, pid: u32, name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(proc.join(pid.to_string()).join(name))?.take(MOST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the cgroups of a process as the kernel's bytes: containers may choose any names for their cgroups.
fn cgroup_of(proc: &Path, pid: u32) -> Option<Vec<u8>> {
    beginning(proc, pid, "cgroup").ok()
}

fn command_of(proc: &Path, pid: u32) -> Vec<String> {
    let bytes = beginning(proc, pid, "cmdline").unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    text.strip_suffix('\0').unwrap_or(&text).split('\0').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Lock of the tests that act as a shim with its children: only one may run at a time in this process.
    static SHIM: Mutex<()> = Mutex::new(());

    fn process(pid: u32, parent: u32, session: u32, started: u64) -> Process {
        Process { pid, parent, session, started: Moment(started) }
    }

    #[test]
    fn siblings_of_the_containers_own_process_are_found_in_order() {
        let first = process(10, 5, 10, 100);
        let all = [
            first,
            process(20, 5, 20, 150),  // before the probe
            process(21, 5, 7, 210),   // not a session leader
            process(22, 10, 22, 210), // started by the container itself
            process(24, 5, 24, 230),
            process(23, 5, 23, 220),
        ];
        let found: Vec<u32> = beside(&all, first, Moment(200)).iter().map(|p| p.pid).collect();
        assert_eq!(found, [23, 24]);
    }

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_command_is_known_by_its_line_as_a_script_and_by_its_arguments() {
        use Likeness::{Arguments, None, Same, Script};
        let check = |command: &str, line: &str, expected| {
            assert_eq!(Likeness::of(&words(command), &words(line)), expected, "{command} as {line}");
        };
        check("/probe a b", "/probe a b", Same);
        check("/probe a b", "/bin/sh /probe a b", Script);
        check("probe a b", "/usr/bin/python3 -u /usr/local/bin/probe a b", Script);
        check("/probe", "/bin/sh /probe", Script);
        check("/probe a b", "/bin/real a b", Arguments);
        check("/probe a b", "busybox probe-2 a b", Arguments);
        check("/probe a b", "/probe a", None);
        check("/probe", "/bin/real", None);
        check("sh -c work", "work", None);
        check("/probe a b", "", None);
    }

    #[test]
    fn the_most_alike_is_taken_and_a_stranger_only_if_it_is_alone() {
        let check = |lines: &[&str], expected: Option<usize>| {
            let lines: Vec<_> = lines.iter().copied().map(words).collect();
            assert_eq!(choose(&words("/probe a"), &lines), Ok(expected), "{lines:?}");
        };
        check(&[], None);
        check(&["other", "sh /probe a", "/probe a", "/probe a"], Some(2));
        check(&["other", "real a", "sh /probe a"], Some(2));
        check(&["other", "real a"], Some(1));
        check(&["other"], Some(0));
        let strangers = choose(&words("/probe a"), &[words("one"), words("two")]);
        assert!(strangers.unwrap_err().to_string().starts_with("2 commands run"));
    }

    #[test]
    fn tree_session_and_heirs_of_the_output_belong_together() {
        let leader = process(23, 5, 23, 220);
        let all = [
            process(10, 5, 10, 100),
            leader,
            process(31, 32, 23, 222),
            process(32, 23, 23, 221),
            process(33, 10, 23, 223), // its parent has ended
            process(34, 32, 34, 224), // made a session of its own
            process(35, 10, 35, 225),
            process(36, 10, 36, 226), // both, and has the output
            process(37, 36, 37, 227),
        ];
        let mut found: Vec<u32> = members(&all, leader, |p| p.pid == 36).iter().map(|p| p.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [23, 31, 32, 33, 34, 36, 37]);
    }

    #[test]
    fn a_command_line_of_any_length_is_read_up_to_the_limit() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("7")).unwrap();
        let file = fs::File::create(proc.path().join("7/cmdline")).unwrap();
        file.set_len(1 << 40).unwrap(); // a hole
        let found = command_of(proc.path(), 7);
        assert_eq!(found.iter().map(|word| word.len() + 1).sum::<usize>(), 128 << 10);
    }

    /// Starts a child of this process as a shim does: in a session of its own, with its output in a pipe.
    fn start(command: &[String]) -> Child {
        let mut setsid = Command::new("setsid");
        setsid.args(command).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
    }

    /// Starts a probe's command next to a container, ends it, and checks that no process of `sleepers` (by
    /// their seconds) is left. The command has started all of them when it prints a line, and then runs as
    /// `runs_as`.
    fn check(command: &[&str], runs_as: &[&str], at_least: usize, sleepers: std::ops::RangeInclusive<u32>) {
        let _alone = SHIM.lock().unwrap_or_else(PoisonError::into_inner);
        // This process stands for the shim: both the container's first process and the probe are its
        // children.
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let mut first = start(&owned(&["sh", "-c", "sleep 600 & wait"]));
        let since = Moment::now();
        let mut probe = start(&owned(command));
        let mut output = io::BufReader::new(probe.stdout.take().unwrap());
        io::BufRead::read_line(&mut output, &mut String::new()).unwrap();
        let proc = Path::new("/proc");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while command_of(proc, probe.id()) != owned(runs_as) {
            assert!(std::time::Instant::now() < deadline, "{:?}", command_of(proc, probe.id()));
            std::thread::yield_now();
        }
        let count = end(first.id(), &owned(command), since).unwrap();
        assert!(count >= at_least, "{command:?}: {count}");
        assert!(!probe.wait().unwrap().success());
        let left: Vec<String> = processes(proc)
            .unwrap()
            .iter()
            .map(|p| command_of(proc, p.pid).join(" "))
            .filter(|line| sleepers.clone().any(|n| line == &format!("sleep {n}")))
            .collect();
        assert_eq!(left, Vec::<String>::new(), "{command:?}");
        assert_eq!(first.try_wait().unwrap(), None, "the container's own process was ended");
        let own = owned(&["sh", "-c", "sleep 600 & wait"]);
        assert_eq!(end(first.id(), &own, Moment(0)), Ok(0), "the first process is never a probe");
        // With its children.
        rustix::process::kill_process_group(Pid::from_child(&first), Signal::KILL).unwrap();
        first.wait().unwrap();
    }

    #[test]
    fn a_tree_of_processes_is_ended_and_its_neighbours_are_not() {
        let script = "sleep 601 & (sleep 602 & sleep 603) & setsid sleep 604 & echo; wait";
        check(&["sh", "-c", script], &["sh", "-c", script], 4, 601..=604);
    }

    #[test]
    fn a_process_outside_tree_and_session_is_known_by_its_inherited_output() {
        // The line is printed from the new session, while the session's parent is exiting.
        let script = "sleep 611 & sh -c 'setsid sh -c \"echo; exec sleep 612\" &'; wait";
        check(&["sh", "-c", script], &["sh", "-c", script], 3, 611..=612);
    }

    #[test]
    fn a_command_that_becomes_another_program_is_ended_too() {
        let script = "sleep 621 & echo; exec sleep 622";
        check(&["sh", "-c", script], &["sleep", "622"], 2, 621..=622);
    }

    #[test]
    fn a_script_is_ended_although_it_runs_as_its_interpreter() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("probe");
        fs::write(&path, "#!/bin/sh\nsleep 631 & echo\nwait\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let path = path.to_str().unwrap();
        check(&[path, "word"], &["/bin/sh", path, "word"], 2, 631..=631);
    }
}
