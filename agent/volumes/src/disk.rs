//! Disks with a file system, by the machine's own tools (blkid, mkfs, fsck, mount), as Kubernetes'
//! `mount-utils` does it. Must never format a disk that has anything on it that blkid knows.

use std::{
    fs,
    io::{self, ErrorKind, PipeReader, Read as _},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use beelet_base::folder::{PRIVATE, make_folder};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
    mount::MountFlags,
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};

use crate::{Error, mounts};

/// How long a look at a disk or a mount may take.
pub(crate) const SHORT: Duration = Duration::from_secs(120);
/// How long a disk may take to be formatted or mended.
pub(crate) const LONG: Duration = Duration::from_secs(3600);
/// Bytes that are kept of what a tool says.
const SAID: usize = 4096;
/// Bytes that a pipe holds, see pipe(7). No more are read of what a program said before it ended.
const PIPE: usize = 64 << 10;
/// How often a program is asked whether it has ended, on a kernel that has no file for it.
const ASK: Duration = Duration::from_millis(50);
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
pub(crate) fn run(command: Command, within: Duration, most: usize) -> Result<(ExitStatus, Vec<u8>), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let wrong = |cause: io::Error| Error::unmet(format!("cannot run {program}: {cause}; is it installed?"));
    let began = Instant::now();
    let (mut child, pipe) = start(command).map_err(wrong)?;
    // None on a kernel that is too old.
    let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok();
    let mut heard = Heard { pipe: Some(pipe), text: Vec::new(), most, buffer: vec![0; PIPE] };
    let waited = wait(&mut child, &mut heard, end.as_ref(), || within.checked_sub(began.elapsed()));
    if let Ok(Some(status)) = waited {
        return Ok((status, heard.text));
    }
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    // It may hang in the kernel: whoever waits for its end waits elsewhere. A system without a thread left
    // keeps a dead process until the agent ends.
    let _ = thread::Builder::new().name("late-program".to_owned()).spawn(move || child.wait());
    match waited {
        Err(cause) => Err(wrong(cause)),
        Ok(_) => Err(Error::unmet(format!("{program} took longer than {} s", within.as_secs()))),
    }
}

/// Starts a program in a group of its own; the pipe has what it says, and reading it never waits.
fn start(mut command: Command) -> io::Result<(Child, PipeReader)> {
    let (pipe, writer) = io::pipe()?;
    ioctl_fionbio(&pipe, true)?;
    let errors = writer.try_clone()?;
    // The command's ends of the pipe go with it: with them open, the pipe would never come to an end.
    let child = command.stdin(Stdio::null()).stdout(writer).stderr(errors).process_group(0).spawn()?;
    Ok((child, pipe))
}

/// Waits for a program's end, and hears it meanwhile. None: its time is up. `left` is asked each time, since
/// a program may say something without end, and may live on after it has closed the pipe.
fn wait(
    child: &mut Child,
    heard: &mut Heard,
    end: Option<&OwnedFd>,
    left: impl Fn() -> Option<Duration>,
) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            // Its last words. The pipe may be written to by others still, so it is read once.
            heard.hear()?;
            return Ok(Some(status));
        }
        let Some(left) = left().filter(|left| !left.is_zero()) else { return Ok(None) };
        let left = if end.is_some() { left } else { left.min(ASK) };
        if heard.has_more(end, left)? {
            heard.hear()?;
        }
    }
}

/// What a program says.
struct Heard {
    /// None: nobody can say anything any more.
    pipe: Option<PipeReader>,
    text: Vec<u8>,
    /// More bytes aren't kept.
    most: usize,
    buffer: Vec<u8>,
}

impl Heard {
    /// Waits until there is something to hear, `end` says that the program has ended, or the time is over.
    fn has_more(&self, end: Option<&OwnedFd>, left: Duration) -> io::Result<bool> {
        let timeout = Timespec::try_from(left).unwrap_or_default();
        let mut ready: Vec<PollFd<'_>> = Vec::with_capacity(2);
        ready.extend(self.pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        ready.extend(end.map(|end| PollFd::new(end, PollFlags::IN)));
        match poll(&mut ready, Some(&timeout)) {
            Err(Errno::INTR) => Ok(false),
            Err(cause) => Err(cause.into()),
            Ok(_) => Ok(self.pipe.is_some() && !ready[0].revents().is_empty()),
        }
    }

    /// Reads what the pipe has now, once.
    fn hear(&mut self) -> io::Result<()> {
        let Some(pipe) = &mut self.pipe else { return Ok(()) };
        match pipe.read(&mut self.buffer) {
            Ok(0) => self.pipe = None,
            Ok(count) => {
                let room = self.most.saturating_sub(self.text.len());
                self.text.extend_from_slice(&self.buffer[..count.min(room)]);
            }
            Err(cause) if matches!(cause.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(cause) => return Err(cause),
        }
        Ok(())
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
    fn a_tool_that_never_ends_is_late_whatever_it_says() {
        let late = |script: &str| {
            let why = say(shell(script), Duration::from_millis(100)).unwrap_err().to_string();
            assert!(why.starts_with("sh took longer than"), "{script}: {why}");
        };
        late("yes");
        late("exec >&- 2>&-; sleep 1000");
        late("exec >&- 2>&-; sleep 1000 & wait");
    }

    #[test]
    fn a_tools_child_that_never_stops_writing_holds_up_nobody() {
        let (status, said) = say(shell("yes & echo done; exit 3"), SHORT).unwrap();
        assert_eq!(status.code(), Some(3));
        assert!(said.contains("done") || said.len() == SAID, "{said}");
    }

    #[test]
    fn a_kernel_without_a_file_for_a_process_hears_and_ends_it_too() {
        let ends = |script: &str, left: Option<Duration>| {
            let (mut child, pipe) = start(shell(script)).unwrap();
            let mut heard = Heard { pipe: Some(pipe), text: Vec::new(), most: SAID, buffer: vec![0; PIPE] };
            let status = wait(&mut child, &mut heard, None, || left).unwrap();
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
            (status.and_then(|status| status.code()), String::from_utf8(heard.text).unwrap())
        };
        assert_eq!(ends("echo out; exit 3", Some(SHORT)), (Some(3), "out\n".to_owned()));
        assert_eq!(ends("echo out; exec >&- 2>&-; exit 4", Some(SHORT)), (Some(4), "out\n".to_owned()));
        assert_eq!(ends("exec >&- 2>&-; sleep 1000", None), (None, String::new()));
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
