//! How much is in a folder, by walking it: a little at a time, so that a volume with ten million files makes its own
//! measurement old, and neither the node slow nor anybody else's measurement late.
//!
//! What is in the folder is a container's, and changes while it is looked at. So folders are entered by descriptor, one
//! name at a time: no path gets too long, no link is followed, no mount is crossed. A walk has few descriptors and little
//! memory, however deep the folder is: those of the first levels stay open, from deeper ones it goes back by `..`, and looks
//! whether that is where it came from. What it can't reach is left out, and said to be: then there is *at least* so much.

use std::{
    ffi::{CStr, CString},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    time::Duration,
};

use rustix::{
    fs::{
        AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, Stat, fstat, open, openat2, seek,
        statat,
    },
    io::Errno,
    time::{ClockId, clock_gettime},
};
use tokio::time::Instant;

use super::disk::Taken;

/// What may be used at once after a pause: most folders are measured within it.
const BURST: Duration = Duration::from_millis(100);
/// Levels, from the top, whose folders stay open.
const OPEN: usize = 16;
/// What a walk may remember, in bytes: some ten thousand levels.
const MEMORY: usize = 1 << 20;
/// Bytes of a folder that are read at once.
const CHUNK: usize = 8192;
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

    /// How long to wait before more may be used.
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

/// A walk through a folder: what is in it, itself included, on its own file system.
#[derive(Debug)]
pub(super) struct Walk {
    levels: Vec<Level>,
    device: u64,
    bytes: u128,
    inodes: u128,
    /// What the levels take, in bytes.
    memory: usize,
    is_whole: bool,
}

/// A folder on the way from the top to where the walk is.
#[derive(Debug)]
struct Level {
    inode: u64,
    /// None for a level that is found again by the way back from the one below it.
    folder: Option<OwnedFd>,
    /// Where to read on.
    position: u64,
    /// Folders in it that were read, and not yet entered.
    pending: Vec<CString>,
    /// All of it has been read.
    ended: bool,
}

impl Walk {
    /// A walk that has not gone anywhere yet. A folder that isn't there is empty.
    pub(super) fn new(folder: &Path) -> Self {
        let mut walk = Self { levels: Vec::new(), device: 0, bytes: 0, inodes: 0, memory: 0, is_whole: true };
        let opened = open(folder, flags(), Mode::empty()).and_then(|top| Ok((fstat(&top)?, top)));
        match opened {
            Ok((stat, top)) => {
                walk.device = stat.st_dev;
                walk.count(&stat);
                walk.push(top, stat.st_ino);
            }
            Err(Errno::NOENT) => {}
            Err(_) => walk.is_whole = false,
        }
        walk
    }

    /// Goes on until all is counted, or `enough` says so; whether all is. Blocks for as long.
    pub(super) fn go_on(&mut self, mut enough: impl FnMut() -> bool) -> bool {
        while let Some(level) = self.levels.last_mut() {
            if let Some(name) = level.pending.pop() {
                self.memory = self.memory.saturating_sub(weight(&name));
                self.enter(&name);
            } else if level.ended {
                self.leave();
            } else {
                self.read_on();
            }
            if enough() {
                break;
            }
        }
        self.levels.is_empty()
    }

    /// What was counted until now.
    pub(super) fn taken(&self) -> Taken {
        let whole = |parts: u128| u64::try_from(parts.div_ceil(PARTS)).unwrap_or(u64::MAX);
        Taken { bytes: whole(self.bytes), inodes: whole(self.inodes) }
    }

    /// Whether nothing had to be left out so far.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// A file with several names is counted by each of them for its share: nothing needs to be remembered of it.
    fn count(&mut self, stat: &Stat) {
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let names = if is_folder { 1 } else { u128::from(stat.st_nlink).max(1) };
        let blocks = u128::from(u64::try_from(stat.st_blocks).unwrap_or(0));
        self.bytes += blocks * 512 * PARTS / names;
        self.inodes += PARTS / names;
    }

    fn push(&mut self, folder: OwnedFd, inode: u64) {
        // The levels above keep theirs open only near the top.
        if let Some(above) = self.levels.get_mut(OPEN..).and_then(<[Level]>::last_mut) {
            above.folder = None;
        }
        self.memory += size_of::<Level>();
        self.levels.push(Level {
            inode,
            folder: Some(folder),
            position: 0,
            pending: Vec::new(),
            ended: false,
        });
    }

    /// Reads a part of the folder where the walk is.
    fn read_on(&mut self) {
        let Some(mut level) = self.levels.pop() else { return };
        let mut chunk = [MaybeUninit::<u8>::uninit(); CHUNK];
        if let Some(folder) = &level.folder {
            let mut entries = RawDir::new(folder, &mut chunk);
            loop {
                match entries.next() {
                    Some(Ok(entry)) => {
                        level.position = entry.next_entry_cookie();
                        self.look_at(folder, entry.file_name(), &mut level.pending);
                    }
                    // It was removed while we were in it.
                    None | Some(Err(Errno::NOENT)) => level.ended = true,
                    Some(Err(_)) => (level.ended, self.is_whole) = (true, false),
                }
                if level.ended || entries.is_buffer_empty() {
                    break;
                }
            }
        }
        self.levels.push(level);
    }

    fn look_at(&mut self, folder: &OwnedFd, name: &CStr, pending: &mut Vec<CString>) {
        if matches!(name.to_bytes(), b"." | b"..") {
            return;
        }
        match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_dev == self.device => {
                self.count(&stat);
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                    self.memory += weight(name);
                    pending.push(name.to_owned());
                }
            }
            // Something is mounted there, or it is gone.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(_) => self.is_whole = false,
        }
    }

    fn enter(&mut self, name: &CStr) {
        let Some(folder) = self.levels.last().and_then(|level| level.folder.as_ref()) else { return };
        if self.memory > MEMORY {
            self.is_whole = false;
            return;
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        match openat2(folder, name, flags(), Mode::empty(), resolve).and_then(|fd| Ok((fstat(&fd)?, fd))) {
            Ok((stat, folder)) => self.push(folder, stat.st_ino),
            // It is gone, or something else by now; or something is mounted there.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {}
            Err(_) => self.is_whole = false,
        }
    }

    fn leave(&mut self) {
        let Some(left) = self.levels.pop() else { return };
        self.memory = self.memory.saturating_sub(size_of::<Level>());
        let Some(above) = self.levels.last_mut().filter(|above| above.folder.is_none()) else { return };
        above.folder = left.folder.and_then(|left| parent(&left, self.device, above));
        if above.folder.is_some() {
            return;
        }
        // The folder that was left has been moved, or one above it removed: the way back is lost.
        self.is_whole = false;
        while self.levels.last().is_some_and(|level| level.folder.is_none()) {
            if let Some(level) = self.levels.pop() {
                let pending: usize = level.pending.iter().map(|name| weight(name)).sum();
                self.memory = self.memory.saturating_sub(size_of::<Level>() + pending);
            }
        }
    }
}

/// The folder above the one that was left, where it was read up to; None if it isn't the one that was come from.
fn parent(left: &OwnedFd, device: u64, above: &Level) -> Option<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let folder = openat2(left, c"..", flags(), Mode::empty(), resolve).ok()?;
    let stat = fstat(&folder).ok()?;
    if (stat.st_dev, stat.st_ino) != (device, above.inode) {
        return None;
    }
    if !above.ended {
        seek(&folder, SeekFrom::Start(above.position)).ok()?;
    }
    Some(folder)
}

fn flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// What a name takes of a walk's memory.
fn weight(name: &CStr) -> usize {
    name.count_bytes() + size_of::<CString>() + 1
}

/// What this thread has used.
pub(super) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{mkdirat, openat};

    use super::*;

    fn all(folder: &Path) -> (Taken, bool) {
        let mut walk = Walk::new(folder);
        assert!(walk.go_on(|| false));
        (walk.taken(), walk.is_whole())
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

    #[test]
    fn no_folder_is_too_deep_and_few_are_open_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let (top, depth) = (dir.path().join("top"), 3000);
        std::fs::create_dir(&top).unwrap();
        drop(deep(&top, depth));
        let (mut walk, mut most) = (Walk::new(&top), 0);
        // A step at a time, so that it goes on as often as can be.
        while !walk.go_on(|| true) {
            most = most.max(walk.levels.iter().filter(|level| level.folder.is_some()).count());
        }
        // Longer than any path may be.
        assert_eq!((walk.taken().inodes, walk.is_whole()), (2 * depth as u64 + 1, true));
        assert!(most <= OPEN + 2, "{most} open folders");
        assert_eq!(walk.memory, 0);
        remove(&top);
    }

    #[test]
    fn a_walk_that_loses_its_way_says_so_and_counts_nothing_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        std::fs::create_dir(dir.path().join("elsewhere")).unwrap();
        for i in 0..100 {
            std::fs::write(dir.path().join(format!("elsewhere/{i}")), "").unwrap();
        }
        let depth = OPEN + 10;
        drop(deep(&top, depth));
        let mut walk = Walk::new(&top);
        while walk.levels.len() <= depth {
            assert!(!walk.go_on(|| true));
        }
        // A folder on its way back is somewhere else now.
        let moved = (0..depth - 2).fold(top.clone(), |path, _| path.join("folder"));
        std::fs::rename(&moved, dir.path().join("elsewhere/moved")).unwrap();
        assert!(walk.go_on(|| false));
        assert!(!walk.is_whole());
        assert!((depth as u64..=2 * depth as u64 + 1).contains(&walk.taken().inodes), "{:?}", walk.taken());
        assert_eq!(walk.memory, 0);
    }

    #[test]
    fn what_goes_while_it_is_looked_at_ends_no_walk() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        drop(deep(&top, 3));
        let mut walk = Walk::new(&top);
        assert!(!walk.go_on(|| true));
        remove(&top);
        assert!(walk.go_on(|| false));
    }

    #[test]
    fn a_walk_remembers_no_more_than_it_may() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..50 {
            std::fs::create_dir_all(dir.path().join(format!("{i}/below"))).unwrap();
        }
        let mut walk = Walk::new(dir.path());
        walk.memory = MEMORY + 1;
        assert!(walk.go_on(|| false));
        assert!(!walk.is_whole());
        assert_eq!(walk.taken().inodes, 51, "at least");
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
