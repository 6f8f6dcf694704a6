//! How much is in a folder, by walking it: a little at a time, so that a volume with ten million files makes
//! its own measurement old, and neither the node slow nor anybody else's measurement late.
//!
//! What is in the folder is a container's, and changes while it is looked at: [`Walk`] goes through it by
//! descriptors, with little memory. What can't be reached, or is moved away while the walk is in it, is left
//! out, and said to be: then there is *at least* so much.

use std::{ffi::CStr, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, open, statat},
    io::Errno,
};
use tokio::time::Instant;

use beelet_base::walk::{Walk, WalkStep};
use beelet_model::disk::Taken;

/// What may be used at once after a pause: most folders are measured within it.
const BURST: Duration = Duration::from_millis(100);
/// What a walk may remember, in bytes: some five to ten thousand levels of folders, by the length of their
/// names. Of names that wait there is never much, however many a folder has. Nobody can name a folder that is
/// below more than 2048 others in one path (`PATH_MAX`): only a program that goes down one by one gets
/// deeper.
const MEMORY: usize = 1 << 20;
/// Names that are counted before the time is looked at again.
const NAMES: u32 = 64;
/// Amounts are counted in parts, so that each of a file's names can have its share.
const PARTS: u128 = 1 << 32;

/// Processor time that may be used, over all walks together.
#[derive(Debug)]
pub(super) struct Budget {
    /// The part of a core that walking may take: one in so many.
    share: u32,
    began: Instant,
    used: Duration,
}

impl Budget {
    /// A budget of one part in `share` of a core, which begins now.
    pub(super) fn new(share: u32) -> Self {
        Self { share, began: Instant::now(), used: Duration::ZERO }
    }

    /// Time to wait before more may be used.
    pub(super) fn due(&self) -> Duration {
        let allowed = BURST + self.began.elapsed() / self.share;
        self.used.saturating_sub(allowed) * self.share
    }

    pub(super) fn spend(&mut self, time: Duration) {
        self.used += time;
        // A long idle time is no credit for a long burst.
        if self.began.elapsed() / self.share > self.used {
            (self.began, self.used) = (Instant::now(), Duration::ZERO);
        }
    }
}

/// Counts what is in a folder, itself included, on its own file system.
#[derive(Debug)]
pub(super) struct Measure {
    /// None once it has ended.
    walk: Option<Walk>,
    device: u64,
    bytes: u128,
    inodes: u128,
    is_whole: bool,
    is_too_deep: bool,
}

impl Measure {
    /// A measurement that has counted the folder alone. One that isn't there is empty.
    pub(super) fn new(folder: &Path) -> Self {
        let mut measure =
            Self { walk: None, device: 0, bytes: 0, inodes: 0, is_whole: true, is_too_deep: false };
        match open(folder, flags(), Mode::empty()).and_then(|top| measure.begin(top)) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(_) => measure.is_whole = false,
        }
        measure
    }

    fn begin(&mut self, top: OwnedFd) -> Result<(), Errno> {
        let stat = fstat(&top)?;
        self.device = stat.st_dev;
        self.count(&stat);
        self.walk = Some(Walk::within(top, MEMORY)?);
        Ok(())
    }

    /// Goes on until all is counted, or `enough` says so; whether all is. Blocks for as long.
    pub(super) fn go_on(&mut self, mut enough: impl FnMut() -> bool) -> bool {
        let mut names = 0_u32;
        while let Some(mut walk) = self.walk.take() {
            let step = self.step(&mut walk);
            if step != Gone::Ended {
                self.walk = Some(walk);
            }
            names += 1;
            // Asking for the time costs as much as a name does.
            if (step == Gone::Far || names.is_multiple_of(NAMES)) && enough() {
                break;
            }
        }
        self.walk.is_none()
    }

    /// One step; how far it went.
    fn step(&mut self, walk: &mut Walk) -> Gone {
        match walk.step() {
            Ok(Some(WalkStep::Entry(name, _))) => return self.look_at(walk, &name),
            Ok(Some(WalkStep::End | WalkStep::Left(_))) => {}
            Ok(Some(WalkStep::Lost)) => self.is_whole = false,
            Ok(None) => return Gone::Ended,
            Err(_) => {
                self.is_whole = false;
                if !walk.skip() {
                    return Gone::Ended;
                }
            }
        }
        Gone::Far
    }

    fn look_at(&mut self, walk: &mut Walk, name: &CStr) -> Gone {
        match statat(walk.here(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_dev == self.device => {
                self.count(&stat);
                if is_folder(&stat) {
                    match walk.enter(name) {
                        // It is gone, or something else by now; or something is mounted there.
                        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {}
                        Err(error) => {
                            self.is_whole = false;
                            self.is_too_deep |= error == Errno::NAMETOOLONG;
                        }
                    }
                    return Gone::Far;
                }
            }
            // Something is mounted there, or it is gone.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(_) => self.is_whole = false,
        }
        Gone::Near
    }

    /// What was counted until now.
    pub(super) fn taken(&self) -> Taken {
        let whole = |parts: u128| u64::try_from(parts.div_ceil(PARTS)).unwrap_or(u64::MAX);
        Taken { bytes: whole(self.bytes), inodes: whole(self.inodes) }
    }

    /// Returns true if nothing had to be left out so far.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Returns true if a folder was left out so far as it is deeper than the walk's memory lets it go. There
    /// may be any amount in there, and names of files that were counted by a part for each name.
    pub(super) fn is_too_deep(&self) -> bool {
        self.is_too_deep
    }

    /// A file with several names is counted by each of them for its share: nothing needs to be remembered of
    /// it.
    fn count(&mut self, stat: &Stat) {
        let names = if is_folder(stat) { 1 } else { u128::from(stat.st_nlink).max(1) };
        let blocks = u128::from(u64::try_from(stat.st_blocks).unwrap_or(0));
        self.bytes += blocks * 512 * PARTS / names;
        self.inodes += PARTS / names;
    }
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// A name was counted.
    Near,
    /// Another folder was opened.
    Far,
    /// There is nothing more.
    Ended,
}

fn is_folder(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

#[cfg(test)]
mod tests {
    use rustix::fs::{mkdirat, openat};

    use super::*;

    fn all(folder: &Path) -> (Taken, bool) {
        let mut measure = Measure::new(folder);
        assert!(measure.go_on(|| false));
        (measure.taken(), measure.is_whole())
    }

    #[test]
    fn files_folders_and_links_are_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("big"), vec![1; 1 << 20]).unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/file"), vec![1; 100_000]).unwrap();
        std::fs::hard_link(dir.path().join("sub/file"), dir.path().join("same")).unwrap();
        std::fs::hard_link(dir.path().join("sub/file"), dir.path().join("again")).unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("sub/loop")).unwrap();
        let (taken, whole) = all(dir.path());
        // The folder, sub, the file and the symbolic links.
        assert_eq!((taken.inodes, whole), (5, true));
        assert!((100_000..200_000).contains(&taken.bytes), "{}", taken.bytes);
        assert_eq!(all(&dir.path().join("missing")), (Taken::default(), true));
        assert_eq!(all(&dir.path().join("same")), (Taken::default(), false), "it is no folder");
    }

    /// Folders in folders, `depth` of them, each with a file beside the next; and the last of them.
    fn deep(top: &Path, depth: usize) -> OwnedFd {
        let mut folder = open(top, flags(), Mode::empty()).unwrap();
        for _ in 0..depth {
            openat(&folder, "file", OFlags::CREATE | OFlags::WRONLY, 0o600.into()).unwrap();
            mkdirat(&folder, "folder", 0o700.into()).unwrap();
            folder = openat(&folder, "folder", flags(), Mode::empty()).unwrap();
        }
        folder
    }

    /// By a program that gets as deep as needed.
    fn remove(folder: &Path) {
        assert!(std::process::Command::new("rm").arg("-rf").arg(folder).status().unwrap().success());
    }

    /// The folders of this process that are open.
    fn open_folders(below: &Path) -> usize {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).filter(|to| to.starts_with(below)).count()
    }

    fn depth(measure: &Measure) -> usize {
        measure.walk.as_ref().map_or(0, Walk::depth)
    }

    #[test]
    fn no_folder_is_too_deep_and_two_are_open_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let (top, depth) = (dir.path().join("top"), 3000);
        std::fs::create_dir(&top).unwrap();
        drop(deep(&top, depth));
        let (mut measure, mut pauses) = (Measure::new(&top), 0);
        // A step at a time, so that it goes on as often as can be.
        while !measure.go_on(|| true) {
            pauses += 1;
            if pauses % 100 == 1 {
                assert!(open_folders(&top) <= 2);
            }
        }
        // Longer than any path may be.
        assert_eq!((measure.taken().inodes, measure.is_whole()), (2 * depth as u64 + 1, true));
        assert!(pauses > depth);
        remove(&top);
    }

    #[test]
    fn folders_that_are_moved_hide_nothing_and_add_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        std::fs::create_dir(dir.path().join("elsewhere")).unwrap();
        for i in 0..100 {
            std::fs::write(dir.path().join(format!("elsewhere/{i}")), "").unwrap();
        }
        let levels = 26;
        drop(deep(&top, levels));
        let mut measure = Measure::new(&top);
        while depth(&measure) < levels {
            assert!(!measure.go_on(|| true));
        }
        // A folder on its way back is somewhere else now; and what is new beside it was not counted yet.
        let above = (0..3).fold(top.clone(), |path, _| path.join("folder"));
        std::fs::rename(above.join("folder"), dir.path().join("elsewhere/moved")).unwrap();
        assert!(measure.go_on(|| false));
        assert_eq!((measure.taken().inodes, measure.is_whole()), (2 * levels as u64 + 1, true));
    }

    #[test]
    fn a_measurement_that_loses_its_way_says_so_and_counts_nothing_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let (top, elsewhere) = (dir.path().join("top"), dir.path().join("elsewhere"));
        std::fs::create_dir(&top).unwrap();
        std::fs::create_dir(&elsewhere).unwrap();
        for i in 0..100 {
            std::fs::write(elsewhere.join(i.to_string()), "").unwrap();
        }
        let levels = 26;
        drop(deep(&top, levels));
        let mut measure = Measure::new(&top);
        while depth(&measure) < levels {
            assert!(!measure.go_on(|| true));
        }
        let last = (0..levels).fold(top.clone(), |path, _| path.join("folder"));
        let (above, inner) = (last.parent().unwrap().to_owned(), elsewhere.join("inner"));
        std::fs::rename(&last, inner).unwrap();
        std::fs::rename(above, elsewhere.join("moved")).unwrap();
        assert!(measure.go_on(|| false));
        assert!(!measure.is_whole());
        assert!((levels as u64..=2 * levels as u64 + 1).contains(&measure.taken().inodes), "{measure:?}");
    }

    #[test]
    fn what_goes_while_it_is_looked_at_ends_no_measurement() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        drop(deep(&top, 3));
        let mut measure = Measure::new(&top);
        assert!(!measure.go_on(|| true));
        remove(&top);
        assert!(measure.go_on(|| false));
    }

    #[test]
    fn a_tree_as_deep_as_a_path_can_name_is_measured_whole_however_wide_it_is() {
        let dir = beelet_testing::folders::in_memory();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let (levels, files) = (2048, 20);
        let mut folder = open(&top, flags(), Mode::empty()).unwrap();
        for _ in 0..levels {
            for file in 0..files {
                let name = format!("{file:0200}");
                openat(&folder, name, OFlags::CREATE | OFlags::WRONLY, 0o600.into()).unwrap();
            }
            mkdirat(&folder, "d", 0o700.into()).unwrap();
            folder = openat(&folder, "d", flags(), Mode::empty()).unwrap();
        }
        let mut measure = Measure::new(&top);
        assert!(measure.go_on(|| false));
        assert!(measure.is_whole() && !measure.is_too_deep());
        assert_eq!(measure.taken().inodes, levels * (files + 1) + 1);
        beelet_base::walk::remove_folder(&top).unwrap();
    }

    #[test]
    fn a_measurement_remembers_no_more_than_it_may() {
        let dir = beelet_testing::folders::in_memory();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        // More levels than fit.
        drop(beelet_testing::folders::make_deep(&top, 2 * MEMORY / 100));
        let mut measure = Measure::new(&top);
        assert!(measure.go_on(|| false));
        assert!(!measure.is_whole() && measure.is_too_deep() && measure.taken().inodes > 5000, "{measure:?}");
        beelet_base::walk::remove_folder(&top).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_used_beyond_the_burst_is_waited_for_by_its_share() {
        let mut budget = Budget::new(100);
        assert_eq!(budget.due(), Duration::ZERO);
        budget.spend(BURST + Duration::from_millis(10));
        assert_eq!(budget.due(), Duration::from_secs(1));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(budget.due(), Duration::from_millis(500));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(budget.due(), Duration::ZERO);
        // A long idle time gives no more than another burst.
        tokio::time::sleep(Duration::from_secs(10_000)).await;
        budget.spend(Duration::ZERO);
        budget.spend(BURST + Duration::from_millis(10));
        assert_eq!(budget.due(), Duration::from_secs(1));
    }
}
