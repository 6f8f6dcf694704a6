//! Disks with a file system, by the machine's own tools (blkid, mkfs, fsck, mount), as Kubernetes'
//! `mount-utils` does it. Must never format a disk that has anything on it that blkid knows.

use std::{
    fs,
    io::{PipeReader, Read as _},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use beelet_base::folder::{PRIVATE, make_folder};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    mount::MountFlags,
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};

use crate::{Error, mounts};

/// How long a look at a disk or a mount may take.
pub(crate) const SHORT: Duration = Duration::from_secs(120);
/// How long a disk may take to be formatted or mended.
const LONG: Duration = Duration::from_secs(3600);
/// Bytes that are kept of what a tool says.
const SAID: usize = 4096;
/// fsck(8): errors were left uncorrected.
const UNCORRECTED: i32 = 4;
/// blkid(8): nothing was found.
const NOTHING_FOUND: i32 = 2;

/// Mounts a disk, which gets a file system first if it has none. Harmless to repeat.
pub(crate) fn mount(
    disk: &Path,
    target: &Path,
    file_system: &str,
    read_only: bool,
    options: &[String],
) -> Result<(), Error> {
    if mounts::is_mount_point(target)? {
        return Ok(());
    }
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
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(if read_only { ["ro", "defaults"].as_slice() } else { &["defaults"] });
    let mut command = Command::new("mount");
    command.args(["-t", file_system, "-o", &all.join(",")]).arg(disk).arg(target);
    let mounted = succeed(command, SHORT);
    if mounted.is_err() {
        // The next try makes it again.
        let _ = fs::remove_dir(target);
    }
    mounted
}

/// Shows a folder at another place too, with these options.
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
            let mut command = Command::new("mount");
            command.args(["-o", &format!("bind,{}", options.join(","))]).arg(from).arg(target);
            let bound = succeed(command, SHORT);
            if bound.is_err() && mounts::is_mount_point(target)? {
                mounts::unmount(target)?;
            }
            bound
        }
    }
}

/// What is on a disk; nothing only if blkid found nothing at all.
fn format_of(disk: &Path) -> Result<String, Error> {
    let mut command = Command::new("blkid");
    command.args(["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export"]).arg(disk);
    let (status, said) = say(command, SHORT)?;
    match status.code() {
        Some(0) => {
            read_format(&said).ok_or_else(|| Error::unmet(format!("blkid returns invalid output: {said}")))
        }
        Some(NOTHING_FOUND) => Ok(String::new()),
        _ => Err(failed("blkid", status, &said)),
    }
}

/// The format in blkid's words (`KEY=VALUE`, one per line): a partition table counts as one.
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

fn format(disk: &Path, file_system: &str) -> Result<(), Error> {
    if file_system.contains('/') {
        return Err(Error::unmet(format!("{file_system:?} is no file system")));
    }
    let mut command = Command::new(format!("mkfs.{file_system}"));
    match file_system {
        "ext3" | "ext4" => drop(command.args(["-F", "-m0"])),
        "xfs" => drop(command.arg("-f")),
        _ => {}
    }
    command.arg(disk);
    succeed(command, LONG)
}

/// Mends what fsck can mend by itself. A machine without fsck goes without.
fn check(disk: &Path) -> Result<(), Error> {
    let mut command = Command::new("fsck");
    command.arg("-a").arg(disk);
    let Ok((status, said)) = say(command, LONG) else { return Ok(()) };
    if status.code() == Some(UNCORRECTED) {
        let disk = disk.display();
        return Err(Error::unmet(format!(
            "'fsck' found errors on device {disk} but could not correct them: {said}"
        )));
    }
    Ok(())
}

pub(crate) fn succeed(command: Command, within: Duration) -> Result<(), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let (status, said) = say(command, within)?;
    if status.success() { Ok(()) } else { Err(failed(&program, status, &said)) }
}

fn failed(program: &str, status: ExitStatus, said: &str) -> Error {
    Error::unmet(format!("{program} failed ({status}): {}", said.trim()))
}

/// Runs a tool; how it ended, and the beginning of what it said, as text.
fn say(command: Command, within: Duration) -> Result<(ExitStatus, String), Error> {
    let (status, said) = run(command, within, SAID)?;
    Ok((status, String::from_utf8_lossy(&said).into_owned()))
}

/// Runs a program; how it ended, and the first `most` bytes of what it said. One that takes too long is
/// killed, with those that it started. For those that live on after it, and could still say something, nobody
/// waits.
pub(crate) fn run(
    mut command: Command,
    within: Duration,
    most: usize,
) -> Result<(ExitStatus, Vec<u8>), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let wrong =
        |cause: std::io::Error| Error::unmet(format!("cannot run {program}: {cause}; is it installed?"));
    let (mut reader, writer) = std::io::pipe().map_err(wrong)?;
    let errors = writer.try_clone().map_err(wrong)?;
    command.stdin(Stdio::null()).stdout(writer).stderr(errors).process_group(0);
    let mut child = command.spawn().map_err(wrong)?;
    // Its ends of the pipe: with them open, reading would never come to an end.
    drop(command);
    let process = Pid::from_child(&child);
    // None on a kernel that is too old: then all that have the pipe are waited for.
    let end = pidfd_open(process, PidfdFlags::empty()).ok();
    let (began, mut said) = (Instant::now(), Vec::new());
    loop {
        let left = within.saturating_sub(began.elapsed());
        match next(&reader, end.as_ref(), left).map_err(|e| wrong(e.into()))? {
            Next::Again => {}
            Next::Ended => break,
            Next::Late => {
                let _ = kill_process_group(process, Signal::KILL);
                // It may hang in the kernel: whoever waits for its end waits elsewhere.
                std::thread::spawn(move || child.wait());
                return Err(Error::unmet(format!("{program} took longer than {} s", within.as_secs())));
            }
            Next::Said => {
                let mut piece = [0; 1024];
                let count = reader.read(&mut piece).map_err(wrong)?;
                if count == 0 {
                    break;
                }
                let room = most.saturating_sub(said.len());
                said.extend_from_slice(&piece[..count.min(room)]);
            }
        }
    }
    let status = child.wait().map_err(wrong)?;
    Ok((status, said))
}

/// What becomes of a program that runs.
enum Next {
    /// It says something, or nobody can any more.
    Said,
    /// It has ended, and has said all.
    Ended,
    /// Its time is up.
    Late,
    /// Something else was in between.
    Again,
}

fn next(reader: &PipeReader, end: Option<&OwnedFd>, left: Duration) -> Result<Next, Errno> {
    let timeout = Timespec::try_from(left).unwrap_or_default();
    let mut ready = vec![PollFd::new(reader, PollFlags::IN)];
    ready.extend(end.map(|end| PollFd::new(end, PollFlags::IN)));
    match poll(&mut ready, Some(&timeout)) {
        Err(Errno::INTR) => Ok(Next::Again),
        Err(e) => Err(e),
        Ok(0) => Ok(Next::Late),
        // What it has said last comes before its end.
        Ok(_) if !ready[0].revents().is_empty() => Ok(Next::Said),
        Ok(_) => Ok(Next::Ended),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_format_is_what_blkid_names_and_partitions_are_one() {
        let check =
            |said: &str, expected: Option<&str>| assert_eq!(read_format(said).as_deref(), expected, "{said}");
        check("DEVNAME=/dev/loop0\nTYPE=ext4\n", Some("ext4"));
        check("TYPE=ext4\nPTTYPE=dos\n", Some("unknown data, probably partitions"));
        check("DEVNAME=/dev/loop0\n", Some(""));
        check("noise\n", None);
    }

    #[test]
    fn a_tool_is_heard_and_one_that_hangs_is_ended() {
        let (status, said) = say(shell("echo out; echo err >&2; exit 3"), SHORT).unwrap();
        assert_eq!((status.code(), said.as_str()), (Some(3), "out\nerr\n"));
        let (_, said) = say(shell("head -c 100000 /dev/zero"), SHORT).unwrap();
        assert_eq!(said.len(), SAID);
        // One that it leaves behind may say something still; nobody waits for that.
        let (status, said) = say(shell("sleep 1000 & echo done; exec kill -9 $$"), SHORT).unwrap();
        assert_eq!((status.code(), said.as_str()), (None, "done\n"));
        let late = say(shell("sleep 1000"), Duration::from_millis(50)).unwrap_err().to_string();
        assert!(late.starts_with("sh took longer than"), "{late}");
        let none = say(Command::new("beelet-no-such-tool"), SHORT).unwrap_err().to_string();
        assert!(none.contains("beelet-no-such-tool") && none.ends_with("is it installed?"), "{none}");
        let failed = succeed(shell("echo broken; exit 1"), SHORT).unwrap_err().to_string();
        assert!(failed.contains("broken"), "{failed}");
    }

    #[test]
    fn an_unformatted_disk_is_formatted_once_and_never_read_only() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
        assert_eq!(format_of(&disk).unwrap(), "");
        let refused = mount(&disk, &dir.path().join("m"), "ext4", true, &[]).unwrap_err().to_string();
        assert!(refused.contains("unformatted"), "{refused}");
        format(&disk, "ext4").unwrap();
        assert_eq!(format_of(&disk).unwrap(), "ext4");
        check(&disk).unwrap();
        assert!(format(&disk, "a/b").is_err());
    }
}
