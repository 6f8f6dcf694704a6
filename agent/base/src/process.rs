//! Processes as `/proc/<pid>/stat` has them (proc(5)).

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

/// A time since boot in the clock ticks that /proc counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(pub u64);

impl Moment {
    /// The current one, rounded down.
    #[must_use]
    pub fn now() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let hz = rustix::param::clock_ticks_per_second();
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        Self(seconds * hz + nanos * hz / 1_000_000_000)
    }
}

/// A process that has not ended. Its number is given again once it has; number and start together are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its parent's number.
    pub parent: u32,
    /// The number of its session's leader.
    pub session: u32,
    /// When it was started.
    pub started: Moment,
}

/// The first process of a container or a sandbox, as it is known again after a restart of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstProcess {
    /// Its number on the host.
    pub pid: u32,
    /// When it was started; `None` if it had ended before anybody looked.
    pub started: Option<Moment>,
}

impl FirstProcess {
    /// The process that has this number now.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self { pid, started: read(Path::new("/proc"), pid).map(|process| process.started) }
    }

    /// Returns true if it still runs: its number has not been given to another one.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.started.is_some() && Self::of(self.pid) == *self
    }
}

/// The process with this number, below the procfs `proc`; `None` if there is none or it is a zombie.
#[must_use]
pub fn read(proc: &Path, pid: u32) -> Option<Process> {
    parse(&fs::read(proc.join(pid.to_string()).join("stat")).ok()?)
}

/// Reads `/proc/<pid>/stat`. The name in it may hold any bytes, parentheses too. `None` for a zombie.
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
    fn a_stat_line_is_read_whatever_the_process_is_called() {
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
        assert!(!another.runs(), "a number that was given again");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.runs());
        assert!(!FirstProcess::of(process.pid).runs(), "nobody saw it while it ran");
    }
}
