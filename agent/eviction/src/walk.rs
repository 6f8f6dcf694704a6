//! Measures a folder's content by walking it: a little at a time, so that a volume with ten million files
//! makes only its own measurement old, and neither slows the node down nor delays other measurements.
//!
//! The folder's content belongs to a container, and changes during the walk: [`Walk`] uses descriptors and
//! little memory. Folders that cannot be reached, or that are moved away while the walk is inside, are
//! skipped, and the result is marked as *a lower bound*.

use std::{ffi::CStr, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, open, statat},
    io::Errno,
};
use tokio::time::Instant;

use beelet_base::walk::{Walk, WalkStep};
use beelet_model::disk::Taken;

/// Processor time available at once after a pause: enough for most folders.
const BURST: Duration = Duration::from_millis(100);
/// Maximum memory of a walk, in bytes: some five to ten thousand levels of folders, depending on the length
/// of their names. Pending names need little of it, for any number in a folder. A path cannot name a folder
/// below more than 2048 others (`PATH_MAX`): only a program that descends step by step gets deeper.
const MEMORY: usize = 1 << 20;
/// Number of names counted between two looks at the clock.
const NAMES: u32 = 64;
/// Units per byte or inode, so that each of a file's names can get its share.
const PARTS: u128 = 1 << 32;

/// The processor time available to all walks together.
#[derive(Debug)]
pub(super) struct Budget {
    /// Share of a core for walking, as one part in N.
    share: u32,
    began: Instant,
    used: Duration,
}

impl Budget {
    /// Creates a budget of one part in `share` of a core, starting now.
    pub(super) fn new(share: u32) -> Self {
        Self { share, began: Instant::now(), used: Duration::ZERO }
    }

    /// Returns the time to wait before more may be used.
    pub(super) fn due(&self) -> Duration {
        let allowed = BURST + self.began.elapsed() / self.share;
        self.used.saturating_sub(allowed) * self.share
    }

    pub(super) fn spend(&mut self, time: Duration) {
        self.used += time;
        // A long idle time does not allow a longer burst.
        if self.began.elapsed() / self.share > self.used {
            (self.began, self.used) = (Instant::now(), Duration::ZERO);
        }
    }
}

/// A count of a folder's content, itself included, on its own file system.
#[derive(Debug)]
pub(super) struct Measure {
    /// The walk; `None` once it has ended.
    walk: Option<Walk>,
    device: u64,
    bytes: u128,
    inodes: u128,
    is_whole: bool,
    is_too_deep: bool,
}

impl Measure {
    /// Starts a measurement with only the folder itself counted. A missing folder is empty.
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

    /// Continues until the end or until `enough` returns true; returns true at the end. Blocks until then.
    pub(super) fn go_on(&mut self, mut enough: impl FnMut() -> bool) -> bool {
        let mut names = 0_u32;
        while let Some(mut walk) = self.walk.take() {
            let step = self.step(&mut walk);
            if step != Gone::Ended {
                self.walk = Some(walk);
            }
            names += 1;
            // Reading the clock costs as much as counting a name.
            if (step == Gone::Far || names.is_multiple_of(NAMES)) && enough() {
                break;
            }
        }
        self.walk.is_none()
    }

    /// Takes one step; returns its extent.
    fn step(&mut self, walk: &mut Walk) -> Gone {
        match walk.step() {
            Ok(Some(WalkStep::Entry(name, _))) => return self.inspect(walk, &name),
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

    fn inspect(&mut self, walk: &mut Walk, name: &CStr) -> Gone {
        match statat(walk.here(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_dev == self.device => {
                self.count(&stat);
                if is_folder(&stat) {
                    match walk.enter(name) {
                        // The folder has been removed or replaced; or it is a mount point.
                        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {}
                        Err(error) => {
                            self.is_whole = false;
                            self.is_too_deep |= error == Errno::NAMETOOLONG;
                        }
                    }
                    return Gone::Far;
                }
            }
            // The file is a mount point, or has been removed.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(_) => self.is_whole = false,
        }
        Gone::Near
    }

    /// Returns the amounts counted so far.
    pub(super) fn taken(&self) -> Taken {
        let whole = |parts: u128| u64::try_from(parts.div_ceil(PARTS)).unwrap_or(u64::MAX);
        Taken { bytes: whole(self.bytes), inodes: whole(self.inodes) }
    }

    /// Returns true if nothing has been skipped so far.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Returns true if a folder was skipped because it is deeper than the walk's memory allows. Such a folder
    /// may hold any amount, and names of files of which only a share was counted.
    pub(super) fn is_too_deep(&self) -> bool {
        self.is_too_deep
    }

    /// Counts a name's share of its file: a file with several names needs no record.
    fn count(&mut self, stat: &Stat) {
        let names = if is_folder(stat) { 1 } else { u128::from(stat.st_nlink).max(1) };
        let blocks = u128::from(u64::try_from(stat.st_blocks).unwrap_or(0));
        self.bytes += blocks * 512 * PARTS / names;
        self.inodes += PARTS / names;
    }
}

/// The extent of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// A name was counted.
    Near,
    /// Another folder was opened.
    Far,
    /// The walk has ended.
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
        // Counts the folder, sub, the file and the symbolic links.
        assert_eq!((taken.inodes, whole), (5, true));
        assert!((100_000..200_000).contains(&taken.bytes), "{}", taken.bytes);
        assert_eq!(all(&dir.path().join("missing")), (Taken::default(), true));
        assert_eq!(all(&dir.path().join("same")), (Taken::default(), false), "the path is not a folder");
    }

    /// Creates nested folders, `depth` of them, each with a file next to the next one; returns the last one.
    fn deep(top: &Path, depth: usize) -> OwnedFd {
        let mut folder = open(top, flags(), Mode::empty()).unwrap();
        for _ in 0..depth {
            openat(&folder, "file", OFlags::CREATE | OFlags::WRONLY, 0o600.into()).unwrap();
            mkdirat(&folder, "folder", 0o700.into()).unwrap();
            folder = openat(&folder, "folder", flags(), Mode::empty()).unwrap();
        }
        folder
    }

    /// Removes a folder with a program that handles any depth.
    fn remove(folder: &Path) {
        assert!(std::process::Command::new("rm").arg("-rf").arg(folder).status().unwrap().success());
    }

    /// Returns the number of folders that this process has open.
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
        // A single step at a time, for the maximum number of pauses.
        while !measure.go_on(|| true) {
            pauses += 1;
            if pauses % 100 == 1 {
                assert!(open_folders(&top) <= 2);
            }
        }
        // Longer than the maximum length of a path.
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
        // A folder on the way back is elsewhere now; and a new one next to it was not counted yet.
        let above = (0..3).fold(top.clone(), |path, _| path.join("folder"));
        std::fs::rename(above.join("folder"), dir.path().join("elsewhere/moved")).unwrap();
        assert!(measure.go_on(|| false));
        assert_eq!((measure.taken().inodes, measure.is_whole()), (2 * levels as u64 + 1, true));
    }

    #[test]
    fn a_measurement_that_loses_its_way_is_marked_and_counts_nothing_elsewhere() {
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
    fn a_removal_during_the_walk_does_not_end_the_measurement() {
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
    fn a_tree_as_deep_as_a_path_can_name_is_measured_fully_at_any_width() {
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
    fn a_measurement_stays_within_its_memory() {
        let dir = beelet_testing::folders::in_memory();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        // More levels than the memory allows.
        drop(beelet_testing::folders::make_deep(&top, 2 * MEMORY / 100));
        let mut measure = Measure::new(&top);
        assert!(measure.go_on(|| false));
        assert!(!measure.is_whole() && measure.is_too_deep() && measure.taken().inodes > 5000, "{measure:?}");
        beelet_base::walk::remove_folder(&top).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn usage_beyond_the_burst_is_delayed_by_the_share() {
        let mut budget = Budget::new(100);
        assert_eq!(budget.due(), Duration::ZERO);
        budget.spend(BURST + Duration::from_millis(10));
        assert_eq!(budget.due(), Duration::from_secs(1));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(budget.due(), Duration::from_millis(500));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(budget.due(), Duration::ZERO);
        // A long idle time allows only another burst.
        tokio::time::sleep(Duration::from_secs(10_000)).await;
        budget.spend(Duration::ZERO);
        budget.spend(BURST + Duration::from_millis(10));
        assert_eq!(budget.due(), Duration::from_secs(1));
    }
}
