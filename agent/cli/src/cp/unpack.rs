//! Unpacks an archive from a container. The archive is untrusted: every member stays below the target and no
//! link leads out of it (openat2(2) with `RESOLVE_BENEATH` and `RESOLVE_NO_SYMLINKS`), existing files are
//! replaced and never written through, and special mode bits are dropped.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use beelet_base::archive::{self, Kind, Member, Reader};
use beelet_base::pieces;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use tokio::sync::mpsc;

/// Maximum lines about skipped members.
const MOST_LINES: usize = 20;
/// Maximum depth of nested directories.
const DEEPEST: usize = 256;

/// Target directory and naming of an archive's members.
pub(super) struct Unpacker {
    root: OwnedFd,
    /// First part of the members' names in the archive, or ".".
    name: Vec<u8>,
    /// Local name; None keeps the name in the archive.
    renamed: Option<Vec<u8>>,
    left_out: Vec<String>,
    more: usize,
    /// True once a member has been copied.
    made: bool,
}

impl Unpacker {
    /// Unpacks `name` of the archive into `to` if that is a directory, else under the name `to`.
    pub(super) fn new(name: &str, to: &Path) -> anyhow::Result<Self> {
        let is_into = to.is_dir();
        let all = name == ".";
        if all && !is_into {
            fs::create_dir(to).with_context(|| format!("cannot create {}", to.display()))?;
        }
        let (folder, renamed) = if is_into || all {
            (to, None)
        } else {
            let name = to.file_name().with_context(|| format!("{} is not a file name", to.display()))?;
            let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty());
            (folder.unwrap_or(Path::new(".")), Some(name.as_bytes().to_vec()))
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(folder, flags, Mode::empty());
        let root = root.with_context(|| format!("cannot open the directory {}", folder.display()))?;
        Ok(Self { root, name: name.as_bytes().to_vec(), renamed, left_out: Vec::new(), more: 0, made: false })
    }

    /// Unpacks all members and returns one line per skipped member with the reason.
    pub(super) fn unpack(
        mut self,
        pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    ) -> anyhow::Result<Vec<String>> {
        let mut reader = Reader::new(pieces::Reader::new(pieces));
        while let Some(member) = reader.next_member()? {
            let shown = String::from_utf8_lossy(&member.name).into_owned();
            let Some(parts) = self.parts(&member.name) else {
                self.leave_out(&shown, "its path leads out of the copied tree");
                continue;
            };
            self.one(&member, &parts, &mut reader).with_context(|| shown)?;
        }
        // Reads the rest so that the sender can finish.
        io::copy(&mut reader.into_inner(), &mut io::sink())?;
        if let (false, [why, ..]) = (self.made, &self.left_out[..]) {
            bail!("nothing was copied ({why})");
        }
        if self.more > 0 {
            self.left_out.push(format!("and {} more", self.more));
        }
        Ok(self.left_out)
    }

    /// Returns a member's path below the target, or None if the member lies elsewhere.
    fn parts(&self, name: &[u8]) -> Option<Vec<Vec<u8>>> {
        let mut parts: Vec<Vec<u8>> = archive::parts(name)?.into_iter().map(<[u8]>::to_vec).collect();
        if self.name != b"." {
            if *parts.first()? != self.name {
                return None;
            }
            if let Some(renamed) = &self.renamed {
                parts[0].clone_from(renamed);
            }
        }
        (parts.len() <= DEEPEST).then_some(parts)
    }

    fn one(&mut self, member: &Member, parts: &[Vec<u8>], content: &mut impl Read) -> anyhow::Result<()> {
        let Some((name, folders)) = parts.split_last() else { return Ok(()) };
        let folder = self.folder(folders)?;
        let shown = || String::from_utf8_lossy(&parts.join(&b'/')).into_owned();
        match &member.kind {
            Kind::Folder => make_folder(folder.as_fd(), name)?,
            Kind::File => {
                let mut file = new_file(folder.as_fd(), name, member.mode)?;
                io::copy(content, &mut file)?;
            }
            Kind::Link(target) if self.stays(target, folders.len()) => {
                clear(folder.as_fd(), name)?;
                rustix::fs::symlinkat(OsStr::from_bytes(target), &folder, OsStr::from_bytes(name))?;
            }
            Kind::Link(target) => {
                let target = String::from_utf8_lossy(target);
                let why = format!("its link target {target} is outside the copied tree");
                self.leave_out(&shown(), &why);
                return Ok(());
            }
            Kind::HardLink(target) => match self.parts(target) {
                Some(target) => self.copy(&target, folder.as_fd(), name, member.mode)?,
                None => {
                    self.leave_out(&shown(), "its hard link target is outside the copied tree");
                    return Ok(());
                }
            },
            Kind::Other => {
                self.leave_out(&shown(), "not a file, directory or link");
                return Ok(());
            }
        }
        self.made = true;
        Ok(())
    }

    /// Opens the directory at this path and creates missing parts. No part may be a link.
    fn folder(&self, parts: &[Vec<u8>]) -> anyhow::Result<OwnedFd> {
        let mut folder = self.root.try_clone()?;
        for part in parts {
            folder = match open_folder(folder.as_fd(), part) {
                Err(Errno::NOENT) => {
                    make_folder(folder.as_fd(), part)?;
                    open_folder(folder.as_fd(), part)
                }
                opened => opened,
            }
            .map_err(|error| match error {
                Errno::LOOP | Errno::XDEV | Errno::NOTDIR => {
                    anyhow::anyhow!("a link or a file blocks the path")
                }
                error => error.into(),
            })?;
        }
        Ok(folder)
    }

    /// Returns true if a link at this depth stays within the copied tree, regardless of the other members:
    /// all its `..` stand at its beginning, and there are at most as many as directories above the link. A
    /// link that the target passes through obeys the same rule.
    fn stays(&self, target: &[u8], depth: usize) -> bool {
        let parts: Vec<&[u8]> =
            target.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
        let up = parts.iter().take_while(|part| **part == b"..").count();
        // The copied directory is itself below the target.
        let above = if self.name == b"." { depth } else { depth.saturating_sub(1) };
        let has_folder = self.name == b"." || depth > 0;
        !target.starts_with(b"/") && has_folder && up <= above && !parts[up..].contains(&&b".."[..])
    }

    /// Copies the content of the already unpacked file that a hard link names.
    fn copy(&self, from: &[Vec<u8>], folder: BorrowedFd<'_>, name: &[u8], mode: u32) -> anyhow::Result<()> {
        let Some((from_name, folders)) = from.split_last() else { bail!("hard link without a target") };
        let from = self.folder(folders)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut from =
            File::from(rustix::fs::openat(from, OsStr::from_bytes(from_name), flags, Mode::empty())?);
        if !from.metadata()?.is_file() {
            bail!("hard link to something other than a file");
        }
        let mut file = new_file(folder, name, mode)?;
        io::copy(&mut from, &mut file)?;
        Ok(())
    }

    fn leave_out(&mut self, name: &str, why: &str) {
        if self.left_out.len() < MOST_LINES {
            self.left_out.push(format!("skipped {name}: {why}"));
        } else {
            self.more += 1;
        }
    }
}

fn open_folder(folder: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(folder, OsStr::from_bytes(name), flags, Mode::empty(), resolve)
}

fn make_folder(folder: BorrowedFd<'_>, name: &[u8]) -> anyhow::Result<()> {
    match rustix::fs::mkdirat(folder, OsStr::from_bytes(name), Mode::from_raw_mode(0o777)) {
        Err(Errno::EXIST) => match open_folder(folder, name) {
            Ok(_) => Ok(()),
            Err(_) => bail!("the path exists and is not a directory"),
        },
        made => Ok(made?),
    }
}

/// Creates a file that did not exist: removes any existing entry except a directory.
fn new_file(folder: BorrowedFd<'_>, name: &[u8], mode: u32) -> anyhow::Result<File> {
    clear(folder, name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(mode & 0o777);
    Ok(rustix::fs::openat(folder, OsStr::from_bytes(name), flags, mode)?.into())
}

fn clear(folder: BorrowedFd<'_>, name: &[u8]) -> anyhow::Result<()> {
    match rustix::fs::unlinkat(folder, OsStr::from_bytes(name), AtFlags::empty()) {
        Err(Errno::NOENT) | Ok(()) => Ok(()),
        Err(Errno::ISDIR) => bail!("the path is an existing directory"),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
