//! Walks a tree that containers have written to, by descriptors: follows no symbolic link, crosses no mount,
//! and accepts any depth and any number of names. At any depth a walk has two folders open: the top, and the
//! one that it reads. The walk descends by opening a name in that folder, and ascends through `..`, where it
//! must find the folder that it came from. If another process has moved that folder, the walk searches the
//! way back from the top, by names, and skips the rest of a folder that it does not find again
//! ([`WalkStep::Lost`]). To hide files from a walk, a container has to move, while the walk is below a
//! folder, both that folder and the one in it that the walk came through.
//!
//! Memory is bounded too: names are read in batches, and dropped when too many wait, to be read again later.
//! A walk can be paused between two steps for any time. [`remove_folder`] removes a tree this way. All
//! functions block.

pub mod remove;

use std::collections::VecDeque;
use std::ffi::{CStr, CString, OsStr};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, SeekFrom};
use rustix::io::Errno;

pub use self::remove::{remove, remove_folder};

/// Bytes of a folder that are read at a time.
const BATCH: usize = 8 << 10;
/// Maximum depth of a walk.
pub const DEEPEST: usize = 1 << 20;
/// Maximum memory of a walk for its path and for waiting names, in bytes.
pub const MEMORY: usize = 128 << 20;
/// Divisor of a walk's memory: above that part, the names of a level are dropped when the walk descends from
/// it.
const SHARE_OF_NAMES: usize = 8;

/// A walk through a tree, one [step](Walk::step) at a time.
#[derive(Debug)]
pub struct Walk {
    top: OwnedFd,
    /// The folder being read: the last of `levels`.
    here: OwnedFd,
    levels: Vec<Level>,
    /// Memory in use for levels and names, in bytes.
    memory: usize,
    /// Maximum memory, in bytes.
    most: usize,
}

/// A step of a walk.
#[derive(Debug, PartialEq, Eq)]
pub enum WalkStep {
    /// A name in [`Walk::here`], and its type when it was read. The walk descends into a folder only if it is
    /// [entered](Walk::enter).
    Entry(CString, FileType),
    /// The end of [`Walk::here`] and of all folders entered below it.
    End,
    /// The return from the folder of this name to [`Walk::here`].
    Left(CString),
    /// The loss of the way back: the rest of one or more folders is skipped. The walk continues in
    /// [`Walk::here`], which is nearer to the top.
    Lost,
}

/// A folder on the way from the top.
#[derive(Debug)]
struct Level {
    /// Name of the folder in its parent.
    name: CString,
    id: Id,
    /// Position after the last returned name, at which reading continues.
    at: u64,
    /// True if the folder's descriptor is at the end of the names in `todo`.
    in_place: bool,
    todo: VecDeque<Name>,
    ended: bool,
}

/// Device and inode.
type Id = (u64, u64);

#[derive(Debug)]
struct Name {
    name: CString,
    kind: FileType,
    /// Position after this name.
    next: u64,
}

impl Walk {
    /// Starts a walk through the folder `name` of `parent`, which must be on the same mount and not a link.
    pub(crate) fn open(parent: impl AsFd, name: &OsStr) -> Result<Self, Errno> {
        Self::of(rustix::fs::openat2(parent, name, FOLDER, Mode::empty(), BELOW)?)
    }

    /// Starts a walk through a folder that is open for reading.
    pub fn of(top: OwnedFd) -> Result<Self, Errno> {
        Self::within(top, MEMORY)
    }

    /// Starts a walk as [`Self::of`] does, with its own limit of memory in bytes.
    pub fn within(top: OwnedFd, most: usize) -> Result<Self, Errno> {
        let level = Level::new(CString::default(), id(&top)?);
        let here = rustix::io::fcntl_dupfd_cloexec(&top, 0)?;
        Ok(Self { top, here, memory: level.weight(), levels: vec![level], most })
    }

    /// Returns the top folder.
    pub fn top(&self) -> BorrowedFd<'_> {
        self.top.as_fd()
    }

    /// Returns the folder of the last step.
    pub fn here(&self) -> BorrowedFd<'_> {
        self.here.as_fd()
    }

    /// Returns the depth of the folder below the top.
    pub fn depth(&self) -> usize {
        self.levels.len().saturating_sub(1)
    }

    /// Returns the next step; `None` after the end of the top. A failed step can be repeated, or the folder
    /// [skipped](Walk::skip).
    pub fn step(&mut self) -> Result<Option<WalkStep>, Errno> {
        loop {
            let Some(level) = self.levels.last_mut() else { return Ok(None) };
            if let Some(name) = level.todo.pop_front() {
                self.memory -= name.weight();
                let Name { name, kind, next } = name;
                level.at = next;
                let kind = if kind == FileType::Unknown { kind_of(&self.here, &name)? } else { kind };
                return Ok(Some(WalkStep::Entry(name, kind)));
            }
            if level.ended {
                return self.leave();
            }
            if !self.read()? {
                return Ok(Some(WalkStep::End));
            }
        }
    }

    /// Enters the folder of the last step. Fails if the entry is not a folder (any more), is a mount point
    /// (`XDEV`), or is deeper than [`DEEPEST`] or the walk's memory allows (`NAMETOOLONG`).
    pub fn enter(&mut self, name: &CStr) -> Result<(), Errno> {
        if self.levels.len() > DEEPEST {
            return Err(Errno::NAMETOOLONG);
        }
        let folder = rustix::fs::openat2(&self.here, name, FOLDER, Mode::empty(), BELOW)?;
        let level = Level::new(name.to_owned(), id(&folder)?);
        if let Some(above) = self.levels.last_mut() {
            above.in_place = false;
            if self.memory > self.most / SHARE_OF_NAMES {
                self.memory -= above.forget();
            }
        }
        if self.memory + level.weight() > self.most {
            return Err(Errno::NAMETOOLONG);
        }
        self.memory += level.weight();
        self.levels.push(level);
        self.here = folder;
        Ok(())
    }

    /// Skips the rest of [`Walk::here`]. Returns false if it is at its end.
    pub fn skip(&mut self) -> bool {
        let Some(level) = self.levels.last_mut().filter(|level| !level.ended) else { return false };
        level.ended = true;
        self.memory -= level.forget();
        true
    }

    /// Ascends from a folder at its end.
    fn leave(&mut self) -> Result<Option<WalkStep>, Errno> {
        let Some(above) = self.levels.len().checked_sub(2).and_then(|above| self.levels.get(above)) else {
            self.pop();
            return Ok(None);
        };
        match self.above(above.id)? {
            Some(folder) => {
                self.here = folder;
                Ok(Some(WalkStep::Left(self.pop())))
            }
            None => self.find_back().map(Some),
        }
    }

    /// Returns the folder above this one; `None` if this folder was not entered from there.
    fn above(&self, wanted: Id) -> Result<Option<OwnedFd>, Errno> {
        // Not beneath, but still on the same mount.
        let flags = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(&self.here, c"..", FOLDER, Mode::empty(), flags) {
            Ok(folder) => Ok(Some(folder).filter(|folder| id(folder) == Ok(wanted))),
            Err(e) if is_elsewhere(e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Descends from the top to the folder above this one, or to the last folder of that path that still
    /// exists.
    fn find_back(&mut self) -> Result<WalkStep, Errno> {
        let wanted = self.depth().saturating_sub(1);
        let mut folder = rustix::io::fcntl_dupfd_cloexec(&self.top, 0)?;
        let mut found = 0;
        for level in self.levels.iter().skip(1).take(wanted) {
            match rustix::fs::openat2(&folder, level.name.as_c_str(), FOLDER, Mode::empty(), BELOW) {
                Ok(below) if id(&below)? == level.id => folder = below,
                Ok(_) => break,
                Err(e) if is_elsewhere(e) => break,
                Err(e) => return Err(e),
            }
            found += 1;
        }
        self.here = folder;
        let left = self.pop();
        if found == wanted {
            return Ok(WalkStep::Left(left));
        }
        while self.depth() > found {
            self.pop();
        }
        Ok(WalkStep::Lost)
    }

    /// Removes the last level and returns its name.
    fn pop(&mut self) -> CString {
        let Some(mut level) = self.levels.pop() else { return CString::default() };
        self.memory -= level.weight() + level.forget();
        level.name
    }

    /// Reads the next names of the folder; returns false at its end.
    fn read(&mut self) -> Result<bool, Errno> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        if !level.in_place {
            rustix::fs::seek(&self.here, SeekFrom::Start(level.at))?;
            level.in_place = true;
        }
        let mut buffer = [MaybeUninit::<u8>::uninit(); BATCH];
        let mut dir = RawDir::new(&self.here, &mut buffer);
        while let Some(entry) = dir.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // The folder itself was removed while it was read.
                Err(Errno::NOENT) => break,
                Err(e) => return Err(e),
            };
            let name = entry.file_name();
            if name != c"." && name != c".." {
                let next = entry.next_entry_cookie();
                let name = Name { name: name.to_owned(), kind: entry.file_type(), next };
                self.memory += name.weight();
                level.todo.push_back(name);
            }
            if dir.is_buffer_empty() {
                return Ok(true);
            }
        }
        level.ended = true;
        Ok(false)
    }
}

impl Level {
    fn new(name: CString, id: Id) -> Self {
        Self { name, id, at: 0, in_place: true, todo: VecDeque::new(), ended: false }
    }

    /// Returns the level's memory without the waiting names, in bytes.
    fn weight(&self) -> usize {
        size_of::<Self>() + self.name.count_bytes()
    }

    /// Drops the waiting names and returns their memory in bytes.
    fn forget(&mut self) -> usize {
        std::mem::take(&mut self.todo).iter().map(Name::weight).sum()
    }
}

impl Name {
    /// Returns the name's memory in bytes.
    fn weight(&self) -> usize {
        size_of::<Self>() + self.name.count_bytes()
    }
}

/// Flags for opening folders.
const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// Restrictions on descending, enforced by the kernel.
const BELOW: ResolveFlags =
    ResolveFlags::NO_XDEV.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::BENEATH);

/// Returns true if an error means that a folder was moved, removed or replaced.
fn is_elsewhere(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV)
}

/// Returns the type of a name, without following a link; `Unknown` if the name was removed.
fn kind_of(folder: &OwnedFd, name: &CStr) -> Result<FileType, Errno> {
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode)),
        Err(Errno::NOENT) => Ok(FileType::Unknown),
        Err(e) => Err(e),
    }
}

fn id(folder: &OwnedFd) -> Result<Id, Errno> {
    let stat = rustix::fs::fstat(folder)?;
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use beelet_testing::folders::{in_memory, make_deep};
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    fn open(path: &Path) -> Walk {
        Walk::of(fs::File::open(path).unwrap().into()).unwrap()
    }

    /// Walks everything; returns the names that are not folders, and the number of folders left.
    fn walk_all(mut walk: Walk) -> (Vec<String>, usize) {
        let (mut files, mut left) = (Vec::new(), 0);
        while let Some(step) = walk.step().unwrap() {
            match step {
                WalkStep::Entry(name, FileType::Directory) => walk.enter(&name).unwrap(),
                WalkStep::Entry(name, _) => files.push(name.into_string().unwrap()),
                WalkStep::Left(_) => left += 1,
                WalkStep::End => {}
                WalkStep::Lost => panic!("no folder moves in this test"),
            }
        }
        (files, left)
    }

    #[test]
    fn every_name_of_a_large_folder_is_returned_once() {
        let dir = in_memory();
        // More than one batch, with folders among the names, from which the walk returns.
        for i in 0..3000 {
            let name = dir.path().join(format!("{:x<60}", format!("{i}-")));
            if i % 100 == 0 {
                fs::create_dir_all(name.join("sub")).unwrap();
                fs::write(name.join(format!("inner-{i}")), "").unwrap();
            } else {
                fs::write(name, "").unwrap();
            }
        }
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        let (files, left) = walk_all(open(dir.path()));
        assert_eq!((files.len(), left), (3000 - 30 + 30 + 1, 60));
        assert_eq!(files.iter().collect::<BTreeSet<_>>().len(), files.len());
    }

    #[test]
    fn names_that_were_dropped_to_hold_the_bound_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..20 {
            fs::create_dir(dir.path().join(i.to_string())).unwrap();
        }
        let mut walk = open(dir.path());
        // As if that much memory were in use already.
        walk.most = walk.memory * SHARE_OF_NAMES;
        let mut entered = BTreeSet::new();
        while let Some(step) = walk.step().unwrap() {
            if let WalkStep::Entry(name, _) = step {
                walk.enter(&name).unwrap();
                assert!(entered.insert(name));
                assert!(walk.levels[0].todo.is_empty());
            }
        }
        assert_eq!((entered.len(), walk.memory), (20, 0));
    }

    #[test]
    fn a_tree_of_many_thousand_levels_is_walked_with_two_folders_open() {
        let dir = in_memory();
        drop(make_deep(dir.path(), 20_000));
        let mut walk = open(dir.path());
        let mut deepest = 0;
        while let Some(step) = walk.step().unwrap() {
            deepest = deepest.max(walk.depth());
            if let WalkStep::Entry(name, _) = step {
                walk.enter(&name).unwrap();
            }
        }
        assert_eq!(deepest, 20_000);
        remove_folder(dir.path()).unwrap();
    }

    /// Enters the first folder of each level down to a depth; returns the files on the way.
    fn descend(walk: &mut Walk, depth: usize) -> Vec<String> {
        let mut files = Vec::new();
        while walk.depth() < depth {
            match walk.step().unwrap() {
                Some(WalkStep::Entry(name, FileType::Directory)) => walk.enter(&name).unwrap(),
                Some(WalkStep::Entry(name, _)) => files.push(name.into_string().unwrap()),
                step => panic!("{step:?}"),
            }
        }
        files
    }

    /// Adds files next to a folder: some are read before it, some after it.
    fn add_files(folder: &Path) {
        for i in 0..20 {
            fs::write(folder.join(i.to_string()), "").unwrap();
        }
    }

    #[test]
    fn a_folder_that_is_moved_during_the_walk_is_left_to_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("top/a/b/c")).unwrap();
        add_files(&dir.path().join("top/a"));
        let mut walk = open(&dir.path().join("top"));
        let mut files = descend(&mut walk, 3);
        fs::rename(dir.path().join("top/a/b"), dir.path().join("elsewhere")).unwrap();
        let left = |name: &CStr| Ok(Some(WalkStep::Left(name.to_owned())));
        assert_eq!(walk.step(), Ok(Some(WalkStep::End)));
        assert_eq!(walk.step(), left(c"c"));
        assert_eq!(walk.step(), Ok(Some(WalkStep::End)));
        assert_eq!(walk.step(), left(c"b"));
        let (rest, left) = walk_all(walk);
        files.extend(rest);
        assert_eq!((files.len(), left), (20, 1));
    }

    #[test]
    fn of_folders_moved_apart_during_the_walk_one_is_lost_and_all_above_is_walked() {
        let dir = tempfile::tempdir().unwrap();
        let (top, elsewhere) = (dir.path().join("top"), dir.path().join("elsewhere"));
        fs::create_dir_all(top.join("a/b/c")).unwrap();
        add_files(&top.join("a"));
        fs::create_dir_all(elsewhere.join("deep")).unwrap();
        fs::write(elsewhere.join("not-ours"), "").unwrap();
        let mut walk = open(&top);
        let mut files = descend(&mut walk, 3);
        fs::rename(top.join("a/b/c"), elsewhere.join("c")).unwrap();
        fs::rename(top.join("a/b"), elsewhere.join("deep/b")).unwrap();
        // A new folder of the same name is not the former one.
        fs::create_dir(top.join("a/b")).unwrap();
        assert_eq!((walk.step(), walk.step()), (Ok(Some(WalkStep::End)), Ok(Some(WalkStep::Lost))));
        assert_eq!(walk.depth(), 1);
        files.extend(walk_all(walk).0);
        files.sort();
        files.dedup();
        assert!(files.len() == 20 && !files.contains(&"not-ours".to_owned()), "{files:?}");
    }

    #[test]
    fn a_skipped_folder_returns_no_more_names() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a/1", "a/2", "b/1"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let mut walk = open(dir.path());
        descend(&mut walk, 1);
        assert!(matches!(walk.step(), Ok(Some(WalkStep::Entry(..)))));
        assert!(walk.skip() && !walk.skip());
        assert!(matches!(walk.step(), Ok(Some(WalkStep::Left(_)))));
        descend(&mut walk, 1);
    }

    #[test]
    fn a_walk_goes_no_deeper_than_its_memory() {
        let dir = in_memory();
        drop(make_deep(dir.path(), 300));
        let mut walk = Walk::within(fs::File::open(dir.path()).unwrap().into(), 16 << 10).unwrap();
        let (mut refused, mut most) = (0, 0);
        while let Some(step) = walk.step().unwrap() {
            if let WalkStep::Entry(name, _) = step {
                refused += usize::from(walk.enter(&name) == Err(Errno::NAMETOOLONG));
            }
            most = most.max(walk.memory);
        }
        assert_eq!((refused, walk.memory), (1, 0));
        assert!(most <= 16 << 10, "{most}");
    }

    #[test]
    fn links_cannot_be_entered() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        std::os::unix::fs::symlink("folder", dir.path().join("link")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let mut walk = open(dir.path());
        assert_eq!(walk.enter(c"link"), Err(Errno::NOTDIR));
        assert_eq!(walk.enter(c"file"), Err(Errno::NOTDIR));
        assert_eq!(walk.enter(c".."), Err(Errno::XDEV));
        assert_eq!(walk.enter(c"folder"), Ok(()));
        assert_eq!(walk.depth(), 1);
    }
}
