//! Processes as shown by `/proc/<pid>/stat` (proc(5)).

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::clock;

/// A time since boot in clock ticks, the unit of /proc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(pub u64);

impl Moment {
    /// Returns the current moment, rounded down.
    #[must_use]
    pub fn now() -> Self {
        let (now, hz) = (clock::since_boot(), rustix::param::clock_ticks_per_second());
        Self(now.as_secs() * hz + u64::from(now.subsec_nanos()) * hz / 1_000_000_000)
    }
}

/// A running process. The kernel reuses a pid after the process's end, but not the pair of pid and start
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Pid of the process.
    pub pid: u32,
    /// Pid of the parent.
    pub parent: u32,
    /// Pid of the session's leader.
    pub session: u32,
    /// Start time.
    pub started: Moment,
}

/// The first process of a container or a sandbox, recognizable after a restart of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstProcess {
    /// Pid on the host.
    pub pid: u32,
    /// Start time; `None` if the process had ended before the agent read it.
    pub started: Option<Moment>,
}

impl FirstProcess {
    /// Returns the process that has this pid now.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self { pid, started: read(Path::new("/proc"), pid).map(|process| process.started) }
    }

    /// Returns true if the process still runs, and its pid has not been reused.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.started.is_some() && Self::of(self.pid) == *self
    }
}

/// Returns the process with this pid below the procfs `proc`; `None` if it is missing or a zombie.
#[must_use]
pub fn read(proc: &Path, pid: u32) -> Option<Process> {
    parse(&fs::read(proc.join(pid.to_string()).join("stat")).ok()?)
}

/// Parses `/proc/<pid>/stat`. The name in it may have any bytes, also parentheses. `None` for a zombie.
#[must_use]
pub fn parse(stat: &[u8]) -> Option<Process> {
    let stat = String::from_utf8_lossy(stat);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_parsed_with_any_process_name() {
        let expected = Process { pid: 41, parent: 40, session: 42, started: Moment(12345) };
        let rest = "S 40 41 42 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 12345 100 200";
        for name in [&b"sh"[..], b"a b", b"x) R 1 1 1", b"", b"\xff\xfe) S"] {
            let line = [b"41 (", name, b") ", rest.as_bytes()].concat();
            assert_eq!(parse(&line), Some(expected), "{name:?}");
        }
        assert_eq!(parse(format!("41 (sh) {}", rest.replacen('S', "Z", 1)).as_bytes()), None);
        assert_eq!(parse(b"41"), None);
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn a_first_process_is_known_until_it_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = FirstProcess::of(child.id());
        assert!(process.runs());
        let another = FirstProcess { started: process.started.map(|Moment(at)| Moment(at + 1)), ..process };
        assert!(!another.runs(), "a reused pid");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.runs());
        assert!(!FirstProcess::of(process.pid).runs(), "the process ended before it was read");
    }
}
