//! Boots a VM: runs QEMU with a kernel and an initramfs until its end or its deadline. Uses software
//! emulation only, so that results are the same in a VM, in a container and on a laptop. Dropping the future
//! kills the machine.

use super::results::{Event, Transcript};
use anyhow::{Context as _, Result};
use beelet_tests::workdir;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use xtask::cross::Arch;
use xtask::qemu::Qemu;
use xtask::setup;

/// Kernel command line of all guests. Enables cgroup v2 alone, pressure information and the BPF LSM; the
/// other options speed up an emulated guest or avoid false alarms (no mitigations, no watchdog, expedited
/// grace periods).
const COMMAND_LINE: &str = "quiet loglevel=3 panic=-1 psi=1 cgroup_no_v1=all mitigations=off nokaslr audit=0 \
                            lsm=landlock,bpf cryptomgr.notests rcupdate.rcu_expedited=1 nowatchdog";

/// Size of a guest's disk in bytes; the file is sparse.
const DISK: u64 = 1 << 30;

/// Returns QEMU's machine and processor.
fn hardware(arch: Arch) -> [&'static str; 4] {
    match arch {
        Arch::Amd64 => ["-machine", "q35", "-cpu", "max"],
        // A server's processor. The newest one signs return addresses, which is expensive to emulate.
        Arch::Arm64 => ["-machine", "virt", "-cpu", "neoverse-n1"],
    }
}

/// Returns the additional kernel arguments for an architecture.
fn console_arguments(arch: Arch) -> &'static str {
    match arch {
        Arch::Amd64 => "console=ttyS0 tsc=reliable no_timer_check",
        Arch::Arm64 => "console=ttyAMA0",
    }
}

/// Returns the device for a guest's test results: its second serial line.
pub(super) fn results_line(arch: Arch) -> &'static str {
    match arch {
        Arch::Amd64 => "ttyS1",
        Arch::Arm64 => "ttyAMA1",
    }
}

/// Configuration of a VM.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) arch: Arch,
    pub(super) qemu: Qemu,
    pub(super) image: PathBuf,
    pub(super) initrd: PathBuf,
    /// Empty disk, recreated at each boot; its files are not memory.
    pub(super) disk: PathBuf,
    /// Memory of the guest.
    pub(super) mebibytes: u64,
    /// File for the console's output.
    pub(super) console: PathBuf,
}

/// End of a boot, or of a run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All tests of the plan ran.
    Done,
    /// The machine died before the plan's end, with the cause.
    Died(String),
    /// The deadline passed first.
    Late(Duration),
    /// This signal interrupted the run.
    Stopped(&'static str),
}

impl End {
    /// Returns a message if the machine itself failed.
    pub(super) fn trouble(&self) -> Option<String> {
        match self {
            End::Done => None,
            End::Died(why) => Some(format!("the machine died at each boot: {why}")),
            End::Late(deadline) => {
                Some(format!("the machine was still running after {} s", deadline.as_secs()))
            }
            End::Stopped(signal) => Some(format!("interrupted by {signal}")),
        }
    }
}

impl Machine {
    /// Starts the machine and waits for its end. Calls `event` for each test.
    pub(super) async fn run(
        &self,
        deadline: Duration,
        event: impl FnMut(&Event, &Transcript),
    ) -> Result<(Transcript, End)> {
        workdir::write(&self.console, "")?;
        let disk = std::fs::File::create(&self.disk).and_then(|file| file.set_len(DISK));
        disk.with_context(|| format!("cannot create the disk {}", self.disk.display()))?;
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().context("cannot start QEMU")?;
        follow(child, deadline, event, |status| (status != 0).then(|| format!("QEMU exited with {status}")))
            .await
    }

    fn command(&self) -> Command {
        let mut command = mortal(&self.qemu.command());
        command.args(hardware(self.arch)).args(["-accel", "tcg,thread=multi,tb-size=512", "-smp", "2"]);
        command.arg("-m").arg(self.mebibytes.to_string());
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.arg("-kernel").arg(&self.image).arg("-initrd").arg(&self.initrd);
        command.arg("-append").arg(format!("{COMMAND_LINE} {}", console_arguments(self.arch)));
        // QEMU doubles a comma in a file's name.
        let named = |path: &Path| path.display().to_string().replace(',', ",,");
        let drive = format!("file={},if=none,id=disk,format=raw,cache=unsafe", named(&self.disk));
        command.arg("-drive").arg(drive).args(["-device", "virtio-blk-pci,drive=disk"]);
        // The first line is the console, the second carries the results.
        command.arg("-serial").arg(format!("file:{}", named(&self.console)));
        command.args(["-serial", "stdio"]);
        command
    }

    /// Returns the last lines of the console.
    pub(super) fn last_words(&self) -> Vec<String> {
        last_lines(&self.console)
    }
}

/// Returns the last lines of a file, as information about a dead machine.
pub(super) fn last_lines(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let lines: Vec<String> = text.lines().map(|line| line.trim_end().to_owned()).collect();
    lines[lines.len().saturating_sub(30)..].to_vec()
}

/// Parses a program's standard output as a guest's results until it ends or the deadline kills it. `broken`
/// returns a message for exit statuses that are not a result of the tests.
pub(super) async fn follow(
    mut child: Child,
    deadline: Duration,
    mut event: impl FnMut(&Event, &Transcript),
    broken: impl Fn(i32) -> Option<String>,
) -> Result<(Transcript, End)> {
    let mut transcript = Transcript::default();
    let mut stdout = BufReader::new(child.stdout.take().context("the child has no standard output")?);
    let stderr = child.stderr.take();
    let errors = tokio::spawn(async move {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = stderr {
            let _ = pipe.read_to_end(&mut bytes).await; // a partial text is better than none
        }
        String::from_utf8_lossy(&bytes).trim().to_owned()
    });
    let whole = tokio::time::timeout(deadline, async {
        let mut line = Vec::new();
        while stdout.read_until(b'\n', &mut line).await? > 0 {
            if let Some(happened) = transcript.line(&String::from_utf8_lossy(&line)) {
                event(&happened, &transcript);
            }
            line.clear();
        }
        child.wait().await
    })
    .await;
    let end = match whole {
        Err(_) => {
            child.kill().await.context("cannot kill the machine at its deadline")?;
            End::Late(deadline)
        }
        Ok(status) => {
            let status = status.context("cannot read from the machine")?;
            let errors = errors.await.unwrap_or_default();
            let details = if errors.is_empty() { String::new() } else { format!(": {errors}") };
            match status.code().map_or_else(|| Some(status.to_string()), &broken) {
                Some(why) => End::Died(format!("{why}{details}")),
                None if !transcript.done => {
                    End::Died(format!("the machine ended before its tests did{details}"))
                }
                None => End::Done,
            }
        }
    };
    Ok((transcript, end))
}

/// Returns a command that is killed when the thread that starts it ends.
pub(super) fn mortal(command: &std::process::Command) -> Command {
    let mut mortal = match setup::find("setpriv") {
        Some(setpriv) => {
            let mut mortal = Command::new(setpriv);
            mortal.args(["--pdeathsig", "KILL"]).arg(command.get_program());
            mortal
        }
        None => Command::new(command.get_program()),
    };
    mortal.args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            mortal.env(name, value);
        }
    }
    mortal
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Follows a shell script; an even status stands for a broken machine.
    fn run(script: &str, deadline: Duration) -> (Transcript, End) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
            let broken = |status: i32| (status & 1 == 0).then(|| format!("status {status}"));
            follow(command.spawn().unwrap(), deadline, |_, _| {}, broken).await.unwrap()
        })
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_completed_plan_is_done_regardless_of_its_tests() {
        let (transcript, end) = run("echo begin 0 1; echo end 0 2 101; echo done 1; exit 3", PATIENCE);
        assert_eq!(end, End::Done);
        assert_eq!(transcript.verdicts.len(), 1);
    }

    #[test]
    fn a_machine_that_dies_says_what_it_can() {
        let died = |script| run(script, PATIENCE).1;
        assert_eq!(died("echo no such device >&2; exit 2"), End::Died("status 2: no such device".into()));
        assert_eq!(died("exit 1"), End::Died("the machine ended before its tests did".into()));
        assert!(matches!(died("kill -9 $$"), End::Died(why) if why.contains("signal: 9")));
    }

    #[test]
    fn a_machine_that_does_not_end_is_killed_at_its_deadline() {
        let deadline = Duration::from_millis(200);
        let (transcript, end) = run("echo begin 7 1; exec sleep 1000", deadline);
        assert_eq!(end, End::Late(deadline));
        // The line may arrive before or after the deadline; only the end matters.
        assert!(matches!(transcript.running(), None | Some(7)));
    }

    #[test]
    fn what_the_console_showed_last_is_kept() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text: String = (0..100).map(|number| format!("line {number}\r\n")).collect();
        std::fs::write(file.path(), text).unwrap();
        let lines = last_lines(file.path());
        assert_eq!((lines.len(), lines[0].as_str(), lines[29].as_str()), (30, "line 70", "line 99"));
    }
}
