//! Finds and ends the processes of an exec probe that is out of time.
//!
//! The runtime starts a probe's command beside the container's first process: with the same parent (the shim), in the
//! same cgroup, as the leader of a session of its own (runc's nsexec calls setsid). All that the command starts is in
//! its process tree; what it leaves behind when a part of the tree ends goes to the container's first process, but
//! stays in the session. So the leader is found by parent, cgroup, command line and start time, and then the tree and
//! the session are ended together, again and again until nothing is found any more: something may fork meanwhile.
//!
//! Never touched: the container's first process, its own children in other sessions, and anything outside the
//! container's cgroup.

use std::{collections::BTreeSet, fs, os::fd::OwnedFd, path::Path};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Rounds of looking and killing before it gives up.
const ROUNDS: usize = 20;
/// How long one process may take to die before the next round.
const ROUND: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A time since boot in the clock ticks that /proc counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(u64);

impl Moment {
    /// The current one, rounded down.
    pub(super) fn now() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let hz = rustix::param::clock_ticks_per_second();
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        Self(seconds * hz + nanos * hz / 1_000_000_000)
    }
}

/// A process, as `/proc/<pid>/stat` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: u32,
    parent: u32,
    session: u32,
    started: Moment,
}

/// Ends the command that was started after `since` in the container whose first process is `init`, and all that it has
/// started. How many processes that were. Blocks for some milliseconds.
///
/// # Errors
/// The processes can't be told from others, or did not end: a sentence.
pub(super) fn end(init: u32, command: &[String], since: Moment) -> Result<usize, String> {
    let proc = Path::new("/proc");
    let first = read(proc, init).ok_or_else(|| format!("the container's process {init} is gone"))?;
    let cgroup = cgroup_of(proc, init).ok_or_else(|| format!("process {init} has no cgroup"))?;
    let all = processes(proc)?;
    let Some(leader) = leader(&all, first, since, |process| {
        cgroup_of(proc, process.pid).as_ref() == Some(&cgroup) && command_of(proc, process.pid) == command
    }) else {
        return Ok(0); // it ended by itself just now
    };
    let mut ended = BTreeSet::new();
    for _ in 0..ROUNDS {
        let all = processes(proc)?;
        let mut members = members(&all, leader);
        members
            .retain(|process| process.pid != init && cgroup_of(proc, process.pid).as_ref() == Some(&cgroup));
        if members.is_empty() {
            return Ok(ended.len());
        }
        let killed: Vec<_> = members.iter().filter_map(|process| kill(proc, *process)).collect();
        ended.extend(members.iter().map(|process| process.pid));
        await_end(&killed);
    }
    Err(format!("processes of the probe's session {} are still there", leader.session))
}

/// The first process that the runtime started after `since` beside the container's own, and that `fits`.
fn leader(
    all: &[Process],
    first: Process,
    since: Moment,
    fits: impl Fn(&Process) -> bool,
) -> Option<Process> {
    let beside = |process: &&Process| {
        process.parent == first.parent
            && process.pid != first.pid
            && process.session == process.pid
            && process.started >= since
    };
    let mut candidates: Vec<Process> = all.iter().filter(beside).copied().collect();
    candidates.sort_by_key(|process| (process.started, process.pid));
    candidates.into_iter().find(fits)
}

/// Everything in the leader's tree and in its session.
fn members(all: &[Process], leader: Process) -> Vec<Process> {
    let mut found: BTreeSet<u32> = BTreeSet::new();
    let mut members = Vec::new();
    loop {
        let before = members.len();
        for process in all {
            let belongs = process.session == leader.session && process.started >= leader.started
                || found.contains(&process.parent);
            if belongs && found.insert(process.pid) {
                members.push(*process);
            }
        }
        if members.len() == before {
            return members;
        }
    }
}

/// Kills a process, unless its number belongs to another one by now.
fn kill(proc: &Path, process: Process) -> Option<OwnedFd> {
    let handle = pidfd_open(Pid::from_raw(i32::try_from(process.pid).ok()?)?, PidfdFlags::empty()).ok()?;
    let same = read(proc, process.pid).is_some_and(|now| now.started == process.started);
    (same && pidfd_send_signal(&handle, Signal::KILL).is_ok()).then_some(handle)
}

/// Waits until all of them are dead, or too long: one in an uninterruptible sleep dies when it likes.
fn await_end(killed: &[OwnedFd]) {
    for process in killed {
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        let _ = poll(&mut ended, Some(&ROUND));
    }
}

/// All processes but those that are dead and not yet taken notice of.
fn processes(proc: &Path) -> Result<Vec<Process>, String> {
    let entries = fs::read_dir(proc).map_err(|error| format!("{} can't be read: {error}", proc.display()))?;
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(numbers.filter_map(|pid| read(proc, pid)).collect())
}

fn read(proc: &Path, pid: u32) -> Option<Process> {
    parse(&fs::read_to_string(proc.join(pid.to_string()).join("stat")).ok()?)
}

/// Reads `/proc/<pid>/stat` (proc(5)). The name in it may hold anything, parentheses too. `None` for a zombie.
fn parse(stat: &str) -> Option<Process> {
    let pid = stat.split_once(' ')?.0.parse().ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    if matches!(*fields.first()?, "Z" | "X" | "x") {
        return None;
    }
    Some(Process {
        pid,
        parent: u32::try_from(number(1)?).ok()?,
        session: u32::try_from(number(3)?).ok()?,
        started: Moment(number(19)?),
    })
}

fn cgroup_of(proc: &Path, pid: u32) -> Option<String> {
    fs::read_to_string(proc.join(pid.to_string()).join("cgroup")).ok()
}

fn command_of(proc: &Path, pid: u32) -> Vec<String> {
    let bytes = fs::read(proc.join(pid.to_string()).join("cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    text.strip_suffix('\0').unwrap_or(&text).split('\0').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn process(pid: u32, parent: u32, session: u32, started: u64) -> Process {
        Process { pid, parent, session, started: Moment(started) }
    }

    #[test]
    fn a_stat_line_is_read_whatever_the_process_is_called() {
        let rest = "S 40 41 42 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 12345 100 200";
        for name in ["sh", "a b", "x) R 1 1 1", ""] {
            assert_eq!(parse(&format!("41 ({name}) {rest}")), Some(process(41, 40, 42, 12345)), "{name}");
        }
        assert_eq!(parse(&format!("41 (sh) {}", rest.replacen('S', "Z", 1))), None);
        assert_eq!(parse("41"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn the_leader_is_the_first_fitting_process_beside_the_containers_own() {
        let first = process(10, 5, 10, 100);
        let all = [
            first,
            process(20, 5, 20, 150),  // before the probe
            process(21, 5, 7, 210),   // no leader of a session
            process(22, 10, 22, 210), // started by the container itself
            process(24, 5, 24, 230),  // a later probe
            process(23, 5, 23, 220),
        ];
        let found = |fits: fn(&Process) -> bool| leader(&all, first, Moment(200), fits).map(|p| p.pid);
        assert_eq!(found(|_| true), Some(23));
        assert_eq!(found(|p| p.pid != 23), Some(24));
        assert_eq!(found(|_| false), None);
    }

    #[test]
    fn tree_and_session_belong_together() {
        let leader = process(23, 5, 23, 220);
        let all = [
            process(10, 5, 10, 100),
            leader,
            process(31, 32, 23, 222),
            process(32, 23, 23, 221),
            process(33, 10, 23, 223), // its parent has ended
            process(34, 32, 34, 224), // made a session of its own
            process(35, 10, 35, 225),
        ];
        let mut found: Vec<u32> = members(&all, leader).iter().map(|p| p.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [23, 31, 32, 33, 34]);
    }

    #[test]
    fn a_tree_of_processes_is_ended_and_its_neighbours_are_not() {
        // This process stands for the shim: both the container's first process and the probe are its children.
        let sh = |script: &str| {
            let mut command = Command::new("setsid");
            command.args(["sh", "-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
            command.spawn().unwrap()
        };
        let mut first = sh("sleep 600 & wait");
        let since = Moment::now();
        let script = "sleep 601 & (sleep 602 & sleep 603) & setsid sleep 604 & echo; wait";
        let mut probe = sh(script);
        // It has started all of them when it says so.
        let mut output = std::io::BufReader::new(probe.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut String::new()).unwrap();
        let argv = ["sh", "-c", script].map(str::to_owned);
        let count = end(first.id(), &argv, since).unwrap();
        assert!(count >= 4, "{count}");
        assert!(!probe.wait().unwrap().success());
        let left: Vec<String> = processes(Path::new("/proc"))
            .unwrap()
            .iter()
            .map(|p| command_of(Path::new("/proc"), p.pid).join(" "))
            .filter(|line| (601..=604).any(|n| line == &format!("sleep {n}")))
            .collect();
        assert_eq!(left, Vec::<String>::new());
        assert_eq!(first.try_wait().unwrap(), None, "the container's own process was ended");
        let since = Moment(0);
        let own = ["sh", "-c", "sleep 600 & wait"].map(str::to_owned);
        assert_eq!(end(first.id(), &own, since), Ok(0), "the first process is never a probe");
        first.kill().unwrap();
        first.wait().unwrap();
    }
}
