//! Formats, checks and mounts disks with the machine's own tools (blkid, mkfs, fsck, mount), like Kubernetes'
//! `mount-utils`. Must never format a disk that has any content that blkid knows.

use std::{fs, path::Path, process::ExitStatus, time::Duration};

use beelet_base::{
    folder::{PRIVATE, make_folder},
    program::{Bounds, Complaints, Ended, Program},
};
use beelet_policy::volumes::file_system::{FileSystem, mount_options};
use rustix::{io::Errno, mount::MountFlags};

use crate::{Error, mounts};

/// Time limit for the inspection of a disk and for a mount.
pub(crate) const SHORT: Duration = Duration::from_secs(120);
/// Time limit for formatting or repairing a disk.
pub(crate) const LONG: Duration = Duration::from_secs(3600);
/// Maximum number of bytes kept of a tool's output.
const SAID: usize = 4096;
/// fsck(8): errors were left uncorrected.
const UNCORRECTED: i32 = 4;
/// blkid(8): nothing was found.
const NOTHING_FOUND: i32 = 2;

/// Mounts a disk, after formatting it if it has no file system. Idempotent.
pub(crate) fn mount(
    disk: &Path,
    target: &Path,
    file_system: FileSystem,
    read_only: bool,
    options: &[String],
) -> Result<(), Error> {
    if mounts::is_mount_point(target)? {
        return Ok(());
    }
    let defaults = if read_only { ["ro", "defaults"].as_slice() } else { &["defaults"] };
    let options = options.iter().map(String::as_str).chain(defaults.iter().copied());
    let options = mount_options(options).map_err(Error::unmet_of)?;
    let found = format_of(disk)?;
    if found.is_empty() {
        if read_only {
            let disk = disk.display();
            return Err(Error::unmet(format!(
                "cannot mount unformatted disk {disk} as we are manipulating it in read-only mode"
            )));
        }
        format(disk, file_system)?;
    } else if !read_only {
        check(disk)?;
    }
    make_folder(target, PRIVATE)?;
    let mount = internal_mount().setting("-t", file_system.name()).setting("-o", options);
    let mounted = succeed(&mount.operand(disk).operand(target), SHORT);
    if mounted.is_err() {
        // The next attempt makes the folder again.
        let _ = fs::remove_dir(target);
    }
    mounted
}

/// Bind mounts a folder with these options.
pub(crate) fn bind(from: &Path, target: &Path, options: &[String]) -> Result<(), Error> {
    let failed = |e: Errno| Error::io("mount on", target)(e);
    match options {
        [] => rustix::mount::mount_bind(from, target).map_err(failed),
        [only] if only == "ro" => {
            rustix::mount::mount_bind(from, target).map_err(failed)?;
            let flags = MountFlags::BIND | MountFlags::RDONLY;
            rustix::mount::mount_remount(target, flags, "").or_else(|e| {
                mounts::unmount(target)?;
                Err(failed(e))
            })
        }
        options => {
            let options = ["bind"].into_iter().chain(options.iter().map(String::as_str));
            let options = mount_options(options).map_err(Error::unmet_of)?;
            let bind = internal_mount().setting("-o", options).operand(from).operand(target);
            let bound = succeed(&bind, SHORT);
            if bound.is_err() && mounts::is_mount_point(target)? {
                mounts::unmount(target)?;
            }
            bound
        }
    }
}

/// Returns mount(8) without its helpers, so that mount starts no program for a file system type.
fn internal_mount() -> Program {
    Program::tool("mount").flag("-i")
}

/// Returns the format of a disk; empty only if blkid found nothing at all.
fn format_of(disk: &Path) -> Result<String, Error> {
    let blkid = Program::tool("blkid").flag("-p").setting("-s", "TYPE").setting("-s", "PTTYPE");
    let (status, said) = say(&blkid.setting("-o", "export").operand(disk), SHORT)?;
    match status.code() {
        Some(0) => {
            read_format(&said).ok_or_else(|| Error::unmet(format!("blkid returns invalid output: {said}")))
        }
        Some(NOTHING_FOUND) => Ok(String::new()),
        _ => Err(failed("blkid", status, &said)),
    }
}

/// Parses the format from blkid's output (`KEY=VALUE`, one per line). A partition table counts as a format.
fn read_format(said: &str) -> Option<String> {
    let mut found = String::new();
    for line in said.lines().filter(|line| !line.is_empty()) {
        match line.split_once('=')? {
            ("PTTYPE", _) => return Some("unknown data, probably partitions".to_owned()),
            ("TYPE", value) => value.clone_into(&mut found),
            _ => {}
        }
    }
    Some(found)
}

fn format(disk: &Path, file_system: FileSystem) -> Result<(), Error> {
    let maker = Program::tool(file_system.maker());
    let maker = match file_system.name() {
        "ext3" | "ext4" => maker.flag("-F").flag("-m0"),
        "xfs" => maker.flag("-f"),
        _ => maker,
    };
    succeed(&maker.operand(disk), LONG)
}

/// Repairs a file system as far as fsck can do that unattended. Skips the check if the machine has no fsck.
fn check(disk: &Path) -> Result<(), Error> {
    let Ok((status, said)) = say(&Program::tool("fsck").flag("-a").operand(disk), LONG) else {
        return Ok(());
    };
    if status.code() == Some(UNCORRECTED) {
        let disk = disk.display();
        return Err(Error::unmet(format!(
            "'fsck' found errors on device {disk} but could not correct them: {said}"
        )));
    }
    Ok(())
}

pub(crate) fn succeed(program: &Program, within: Duration) -> Result<(), Error> {
    let (status, said) = say(program, within)?;
    if status.success() { Ok(()) } else { Err(failed(&program.name(), status, &said)) }
}

fn failed(program: &str, status: ExitStatus, said: &str) -> Error {
    Error::unmet(format!("{program} failed ({status}): {}", said.trim()))
}

/// Runs a tool and returns its exit status and the beginning of its output as text.
fn say(program: &Program, within: Duration) -> Result<(ExitStatus, String), Error> {
    let Ended { status, output, .. } = run(program, within, SAID)?;
    Ok((status, String::from_utf8_lossy(&output).into_owned()))
}

/// Runs a program to its end, keeping the first `most` bytes of its output.
pub(crate) fn run(program: &Program, within: Duration, most: usize) -> Result<Ended, Error> {
    let bounds = Bounds { within, output: most, complaints: Complaints::InOutput };
    program.run_blocking(bounds).map_err(Error::unmet_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_table_counts_as_a_format() {
        let check =
            |said: &str, expected: Option<&str>| assert_eq!(read_format(said).as_deref(), expected, "{said}");
        check("DEVNAME=/dev/loop0\nTYPE=ext4\n", Some("ext4"));
        check("TYPE=ext4\nPTTYPE=dos\n", Some("unknown data, probably partitions"));
        check("DEVNAME=/dev/loop0\n", Some(""));
        check("noise\n", None);
    }

    #[test]
    fn a_failure_of_a_tool_has_its_name_and_output() {
        let ls = Program::tool("ls").operand("/beelet/no/such/folder");
        let why = succeed(&ls, SHORT).unwrap_err().to_string();
        assert!(why.starts_with("ls failed (exit status: 2): ") && why.contains("no/such"), "{why}");
        let why = succeed(&Program::tool("beelet-no-such-tool"), SHORT).unwrap_err().to_string();
        assert!(why.ends_with("is it installed?"), "{why}");
    }

    #[test]
    fn an_unformatted_disk_is_formatted_once_and_never_read_only() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
        assert_eq!(format_of(&disk).unwrap(), "");
        let refused =
            mount(&disk, &dir.path().join("m"), FileSystem::default(), true, &[]).unwrap_err().to_string();
        assert!(refused.contains("unformatted"), "{refused}");
        let loops = ["loop".to_owned()];
        let refused = mount(&disk, &dir.path().join("m"), FileSystem::default(), false, &loops);
        assert!(refused.unwrap_err().to_string().contains("\"loop\" is refused"));
        assert_eq!(format_of(&disk).unwrap(), "", "nothing was done to the disk");
        format(&disk, FileSystem::default()).unwrap();
        assert_eq!(format_of(&disk).unwrap(), "ext4");
        check(&disk).unwrap();
    }
}
