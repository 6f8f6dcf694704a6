//! Walks a tree that containers have written to, by descriptors: no symbolic link is followed, no mount is
//! crossed, and no depth and no number of names is too much. A walk has one folder open at a time. It goes
//! down by opening a name in that folder, and up through `..`, where it must find the folder that it came
//! from.
//!
//! Memory is bounded too: names are read in batches, and a level of the way takes some hundred bytes. A walk
//! can be set aside between two steps for as long as one likes. [`remove_folder`] removes a tree by such
//! walks. Blocking, all of it.

pub mod remove;

use std::collections::VecDeque;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, SeekFrom};
use rustix::io::Errno;

pub use self::remove::{remove, remove_folder};

/// Bytes of names that are read at once.
const BATCH: usize = 32 << 10;
/// Names that may wait in all levels together before those of a level are dropped, to be read again on the
/// way back.
const WAITING: usize = 1 << 16;
/// Levels of the deepest tree that is walked: a bound for the memory of the way, 100 MiB.
pub const DEEPEST: usize = 1 << 20;

/// See the module's head.
#[derive(Debug)]
pub struct Walk {
    /// The folder that is read now: the last of `levels`.
    here: OwnedFd,
    levels: Vec<Level>,
    /// Names read and not given yet, in all levels.
    waiting: usize,
    buffer: Vec<u8>,
}

/// What a walk comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// A name in [`Walk::here`], and what it was when it was read. A folder is walked only if it is
    /// [entered](Walk::enter).
    Entry(CString, FileType),
    /// Everything in [`Walk::here`] was given, and all that was entered below it.
    End,
    /// The folder of this name in [`Walk::here`], which was entered, lies behind.
    Left(CString),
}

/// A folder on the way from the top.
#[derive(Debug)]
struct Level {
    /// Its name in the one above.
    name: CString,
    id: Id,
    /// Where reading goes on: after the last name that was given.
    at: u64,
    /// The descriptor of the folder stands where the names in `todo` end.
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
    /// The place after it.
    next: u64,
}

impl Walk {
    /// A walk through the folder `name` of `parent`, which is on the same mount, and is no link.
    pub fn open(parent: impl AsFd, name: &OsStr) -> Result<Self, Errno> {
        let flags = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
        Self::of(rustix::fs::openat2(parent, name, FOLDER, Mode::empty(), flags)?)
    }

    /// A walk through a folder that is open for reading.
    pub fn of(top: OwnedFd) -> Result<Self, Errno> {
        let level = Level::new(CString::default(), id(&top)?);
        Ok(Self { here: top, levels: vec![level], waiting: 0, buffer: Vec::with_capacity(BATCH) })
    }

    /// The folder that the last step was in.
    pub fn here(&self) -> BorrowedFd<'_> {
        self.here.as_fd()
    }

    /// How many levels the folder is below the top.
    pub fn depth(&self) -> usize {
        self.levels.len().saturating_sub(1)
    }

    /// The next step; None after the end of the top.
    pub fn step(&mut self) -> Result<Option<Step>, Errno> {
        loop {
            let Some(level) = self.levels.last_mut() else { return Ok(None) };
            if let Some(Name { name, kind, next }) = level.todo.pop_front() {
                self.waiting -= 1;
                level.at = next;
                let kind = if kind == FileType::Unknown { kind_of(&self.here, &name)? } else { kind };
                return Ok(Some(Step::Entry(name, kind)));
            }
            if level.ended {
                return self.leave();
            }
            if !self.read()? {
                return Ok(Some(Step::End));
            }
        }
    }

    /// Enters the folder that the last step named. Fails where it is none (any more), a mount point (`XDEV`),
    /// or deeper than [`DEEPEST`] (`NAMETOOLONG`).
    pub fn enter(&mut self, name: &CStr) -> Result<(), Errno> {
        if self.levels.len() > DEEPEST {
            return Err(Errno::NAMETOOLONG);
        }
        let flags = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
        let folder = rustix::fs::openat2(&self.here, name, FOLDER, Mode::empty(), flags)?;
        let level = Level::new(name.to_owned(), id(&folder)?);
        if let Some(above) = self.levels.last_mut() {
            above.in_place = false;
            if self.waiting > WAITING {
                self.waiting -= above.todo.len();
                above.todo = VecDeque::new();
            }
        }
        self.levels.push(level);
        self.here = folder;
        Ok(())
    }

    /// Goes up from a folder that has ended.
    fn leave(&mut self) -> Result<Option<Step>, Errno> {
        let left = self.levels.pop();
        let (Some(left), Some(above)) = (left, self.levels.last()) else { return Ok(None) };
        // Not beneath, but on the same mount still.
        let flags = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        let folder = rustix::fs::openat2(&self.here, c"..", FOLDER, Mode::empty(), flags)?;
        if id(&folder)? != above.id {
            // Somebody has moved it meanwhile: what is above it now is none of ours.
            return Err(Errno::STALE);
        }
        self.here = folder;
        Ok(Some(Step::Left(left.name)))
    }

    /// Reads the next names of the folder; false at its end.
    fn read(&mut self) -> Result<bool, Errno> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        if !level.in_place {
            rustix::fs::seek(&self.here, SeekFrom::Start(level.at))?;
            level.in_place = true;
        }
        let mut dir = RawDir::new(&self.here, self.buffer.spare_capacity_mut());
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
                level.todo.push_back(Name { name: name.to_owned(), kind: entry.file_type(), next });
                self.waiting += 1;
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
}

/// How folders are opened.
const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// What kind of thing a name stands for, a link seen as a link. What is gone is of no kind.
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

    /// Walks everything; the names of what is no folder, and how often a folder was left.
    fn walk_all(mut walk: Walk) -> (Vec<String>, usize) {
        let (mut files, mut left) = (Vec::new(), 0);
        while let Some(step) = walk.step().unwrap() {
            match step {
                Step::Entry(name, FileType::Directory) => walk.enter(&name).unwrap(),
                Step::Entry(name, _) => files.push(name.into_string().unwrap()),
                Step::Left(_) => left += 1,
                Step::End => {}
            }
        }
        (files, left)
    }

    #[test]
    fn every_name_is_given_once_however_many_there_are() {
        let dir = in_memory();
        // More than one batch, with folders among them that the walk comes back from.
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
        // As if as much waited already.
        walk.waiting = WAITING;
        let mut entered = BTreeSet::new();
        while let Some(step) = walk.step().unwrap() {
            if let Step::Entry(name, _) = step {
                walk.enter(&name).unwrap();
                assert!(entered.insert(name));
                assert!(walk.levels[0].todo.is_empty());
            }
        }
        assert_eq!((entered.len(), walk.waiting), (20, WAITING));
    }

    #[test]
    fn a_tree_of_many_thousand_levels_is_walked_with_one_folder_open() {
        let dir = in_memory();
        drop(make_deep(dir.path(), 20_000));
        let mut walk = open(dir.path());
        let mut deepest = 0;
        while let Some(step) = walk.step().unwrap() {
            deepest = deepest.max(walk.depth());
            if let Step::Entry(name, _) = step {
                walk.enter(&name).unwrap();
            }
        }
        assert_eq!(deepest, 20_000);
        remove_folder(dir.path()).unwrap();
    }

    #[test]
    fn a_folder_that_is_moved_during_the_walk_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("top/a/b")).unwrap();
        let mut walk = open(&dir.path().join("top"));
        for _ in 0..2 {
            let Some(Step::Entry(name, _)) = walk.step().unwrap() else { panic!() };
            walk.enter(&name).unwrap();
        }
        fs::rename(dir.path().join("top/a/b"), dir.path().join("elsewhere")).unwrap();
        assert_eq!(walk.step(), Ok(Some(Step::End)));
        assert_eq!(walk.step(), Err(Errno::STALE));
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
