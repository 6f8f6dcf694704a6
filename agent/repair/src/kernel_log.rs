//! Reads the kernel's log without waiting: `/dev/kmsg` returns one record per read, from the oldest that the
//! kernel still has.

use std::{io, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    time::{ClockId, clock_gettime},
};

/// Maximum length of a record, in bytes (`CONSOLE_EXT_LOG_MAX` in kernel/printk/internal.h).
const RECORD: usize = 8192;
/// Maximum number of records in one look: a log that grows faster is read further at the next.
const MOST: usize = 10_000;

/// Position in the log.
pub(crate) struct Reader(OwnedFd);

impl Reader {
    /// Opens the log at its oldest record. Blocking.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open(path, flags, Mode::empty())?))
    }

    /// Passes the new records to `each`.
    pub(crate) fn read(&mut self, mut each: impl FnMut(&str)) -> io::Result<()> {
        let mut buffer = vec![0; RECORD];
        for _ in 0..MOST {
            match rustix::io::read(&self.0, &mut buffer[..]) {
                // The end of the log.
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Ok(length) => {
                    let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
                    text.lines().for_each(&mut each);
                }
                // The kernel overwrote the next record, or the record is too long; the position moved on.
                Err(Errno::PIPE | Errno::INVAL | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Returns true if a thread waits in the kernel without a way to interrupt it (state D of proc_pid_stat(5)).
pub(crate) fn hangs(tid: u32) -> bool {
    let stat = std::fs::read(format!("/proc/{tid}/stat")).unwrap_or_default();
    // The name before the state is in parentheses and may contain any byte.
    let after = stat.iter().rposition(|byte| *byte == b')').and_then(|end| stat.get(end..));
    after.is_some_and(|rest| rest.starts_with(b") D"))
}

/// Returns true if the kernel has had an oops or BUG since boot, by the number in `tainted`
/// (`TAINT_DIE`, Documentation/admin-guide/tainted-kernels.rst).
pub(crate) fn has_oopsed(tainted: &Path) -> bool {
    const DIE: u64 = 1 << 7;
    let number = std::fs::read_to_string(tainted).ok().and_then(|text| text.trim().parse::<u64>().ok());
    number.is_some_and(|taints| taints & DIE != 0)
}

/// Returns the time since boot by the clock of the log's records.
pub(crate) fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_once_and_invalid_text_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kmsg");
        std::fs::write(&path, b"6,1,1,-;a\n SUBSYSTEM=x\n6,2,2,-;\xff\n").unwrap();
        let mut reader = Reader::open(&path).unwrap();
        let mut seen = Vec::new();
        reader.read(|record| seen.push(record.to_owned())).unwrap();
        reader.read(|record| seen.push(record.to_owned())).unwrap();
        assert_eq!(seen, ["6,1,1,-;a", " SUBSYSTEM=x", "6,2,2,-;\u{fffd}"]);
        assert!(Reader::open(&dir.path().join("none")).is_err());
        assert!(Reader::open(dir.path()).unwrap().read(|_| {}).is_err());
    }

    #[test]
    fn only_the_kernels_mark_of_an_oops_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tainted");
        for (text, expected) in
            [("128\n", true), ("4224", true), ("4096\n", false), ("x", false), ("", false)]
        {
            std::fs::write(&path, text).unwrap();
            assert_eq!(has_oopsed(&path), expected, "{text:?}");
        }
        assert!(!has_oopsed(&dir.path().join("none")));
    }

    #[test]
    fn a_running_thread_does_not_hang() {
        assert!(!hangs(std::process::id()));
        assert!(!hangs(u32::MAX));
    }
}
