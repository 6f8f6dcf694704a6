//! How much is in a folder, by walking it: within a budget of processor time, so that a volume with ten million files makes
//! its own measurement old, and not the node slow.

use std::{
    collections::HashSet,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};

use super::disk::Taken;

/// The part of a core that walking may take: one in so many.
const SHARE: u32 = 100;
/// What may be used at once after a pause: most folders are measured within it.
const BURST: Duration = Duration::from_millis(100);
/// Entries between two looks at the clock.
const BATCH: usize = 64;
/// The longest pause at a time, so that the end of the agent isn't missed.
const NAP: Duration = Duration::from_millis(500);

/// Processor time that may be used, over all walks together.
#[derive(Debug)]
pub(super) struct Budget {
    began: Instant,
    used: Duration,
    cancelled: Arc<AtomicBool>,
}

impl Budget {
    /// A budget that begins now; walks end early once `cancelled`.
    pub(super) fn new(cancelled: Arc<AtomicBool>) -> Self {
        Self { began: Instant::now(), used: Duration::ZERO, cancelled }
    }

    /// How long to wait before more may be used.
    fn due(&self, elapsed: Duration) -> Duration {
        let allowed = BURST + elapsed / SHARE;
        self.used.saturating_sub(allowed) * SHARE
    }

    /// Waits until more may be used. False once cancelled.
    fn wait(&mut self) -> bool {
        loop {
            if self.cancelled.load(Ordering::Relaxed) {
                return false;
            }
            let due = self.due(self.began.elapsed());
            if due.is_zero() {
                return true;
            }
            std::thread::sleep(due.min(NAP));
        }
    }

    fn spend(&mut self, time: Duration) {
        self.used += time;
        // A long idle time is no credit for a long burst.
        let elapsed = self.began.elapsed() / SHARE;
        if elapsed > self.used {
            self.began = Instant::now();
            self.used = Duration::ZERO;
        }
    }
}

/// What is in `folder`, itself included, on its own file system; hard links count once, symbolic links are not followed.
/// Blocks, for long if the budget is used up. Nothing if the folder is not there.
///
/// # Errors
/// The walk was cancelled.
pub(super) fn measure(folder: &Path, budget: &mut Budget) -> io::Result<Taken> {
    let mut taken = Taken::default();
    let Ok(top) = folder.symlink_metadata() else { return Ok(taken) };
    add(&mut taken, &top);
    let mut links = HashSet::new();
    let mut todo: Vec<PathBuf> = vec![folder.to_owned()];
    let mut clock = processor_time();
    let mut batch = 0;
    while let Some(dir) = todo.pop() {
        // Folders that go or are closed to us while we walk have nothing to say.
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            batch += 1;
            if batch % BATCH == 0 {
                let now = processor_time();
                budget.spend(now.saturating_sub(clock));
                clock = now;
                if !budget.wait() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
            }
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.dev() != top.dev()
                || (metadata.nlink() > 1 && !metadata.is_dir() && !links.insert(metadata.ino()))
            {
                continue;
            }
            add(&mut taken, &metadata);
            if metadata.is_dir() {
                todo.push(entry.path());
            }
        }
    }
    budget.spend(processor_time().saturating_sub(clock));
    Ok(taken)
}

fn add(taken: &mut Taken, metadata: &std::fs::Metadata) {
    taken.inodes += 1;
    taken.bytes += metadata.blocks() * 512;
}

/// What this thread has used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> Budget {
        Budget::new(Arc::default())
    }

    #[test]
    fn files_folders_and_links_are_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("big"), vec![1; 1 << 20]).unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/file"), vec![1; 100_000]).unwrap();
        std::fs::hard_link(dir.path().join("sub/file"), dir.path().join("same")).unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        let taken = measure(dir.path(), &mut budget()).unwrap();
        // The folder, sub, the file and the symbolic link.
        assert_eq!(taken.inodes, 4);
        assert!((100_000..200_000).contains(&taken.bytes), "{}", taken.bytes);
        assert_eq!(measure(&dir.path().join("missing"), &mut budget()).unwrap(), Taken::default());
    }

    #[test]
    fn what_is_used_beyond_the_burst_is_waited_for_a_hundredfold() {
        let mut budget = budget();
        assert_eq!(budget.due(Duration::ZERO), Duration::ZERO);
        budget.used = BURST + Duration::from_millis(10);
        assert_eq!(budget.due(Duration::ZERO), Duration::from_secs(1));
        assert_eq!(budget.due(Duration::from_millis(500)), Duration::from_millis(500));
        assert_eq!(budget.due(Duration::from_secs(1)), Duration::ZERO);
    }

    #[test]
    fn a_cancelled_walk_ends() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..BATCH {
            std::fs::write(dir.path().join(i.to_string()), "").unwrap();
        }
        let mut budget = Budget::new(Arc::new(AtomicBool::new(true)));
        assert!(measure(dir.path(), &mut budget).is_err());
    }
}
