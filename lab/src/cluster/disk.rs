//! Disk of a machine: a file system in a sparse file, so that a machine can run out of room alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use beelet_tests::guards;

use super::programs::output;

/// Size of the disk, of which a machine uses 1 to 2 GiB.
const SIZE: &str = "12G";
/// File that fills the disk.
const FILLER: &str = "filler";

fn image(dir: &Path) -> PathBuf {
    dir.with_extension("disk")
}

/// Creates the disk of the machine with this folder, and mounts it there.
pub(super) fn create(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let image = image(dir);
    output(Command::new("truncate").args(["-s", SIZE]).arg(&image))?;
    // Without a journal and reserved blocks: neither matters here.
    output(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0", "-O", "^has_journal"]).arg(&image))?;
    output(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(dir)).map(drop)
}

/// Unmounts and removes the disk, if there is one.
pub(super) fn remove(dir: &Path) -> Result<()> {
    if guards::mounts()?.iter().any(|mount| mount.path == dir) {
        output(Command::new("umount").arg("-l").arg(dir))?;
    }
    remove_file(&image(dir)).context("the machine's disk")
}

/// Fills the disk of the machine with this folder up to this share, in percent.
pub(super) fn fill(dir: &Path, percent: u8) -> Result<()> {
    let found = rustix::fs::statvfs(dir).context("cannot measure the machine's disk")?;
    let left = found.f_blocks.saturating_mul(u64::from(100_u8.saturating_sub(percent))) / 100;
    let size = found.f_bavail.saturating_sub(left).saturating_mul(found.f_frsize);
    let size = size.to_string();
    output(Command::new("fallocate").args(["-l", &size]).arg(dir.join(FILLER))).map(drop)
}

/// Gives the room back.
pub(super) fn free(dir: &Path) -> Result<()> {
    remove_file(&dir.join(FILLER)).context("cannot free the disk")
}

/// Removes a file, if there is one.
fn remove_file(file: &Path) -> std::io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
