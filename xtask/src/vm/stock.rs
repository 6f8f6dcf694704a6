//! A stock machine: a Debian as it comes, with its own kernel, systemd as process 1, cgroup v2 alone and its
//! containerd with the systemd cgroup driver. The agent is installed with the unit of `packaging/`;
//! `check.sh` runs it there as any unit would, and what it found is read from the disk once the machine is
//! off.
//!
//! What takes minutes (the packages) is kept below cargo's target folder; the disk is made anew each time.

use super::boot::QEMU;
use crate::{setup, shell};
use anyhow::{Context as _, Result, bail};
use beelet_tests::{images, workdir};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The machines by name, with the Debian release that each is.
const MACHINES: &[(&str, &str)] = &[("debian-12", "bookworm")];
/// What is installed beside what Debian can't do without.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,udev,linux-image-cloud-amd64,containerd,runc,containernetworking-plugins,\
                        iproute2,kmod,procps";
/// The disk's size: twice what is on it.
const DISK: &str = "3G";
/// What the checks are told by, on the disk.
const RESULTS: &str = "/check/results";

/// What the kernel is told: a quick boot under emulation, and pressure information.
const COMMAND_LINE: &str =
    "console=ttyS0 root=/dev/vda rw quiet mitigations=off nokaslr psi=1 systemd.show_status=0";

const CHECK: &str = include_str!("stock/check.sh");

const CHECK_UNIT: &str = "\
[Unit]
After=containerd.service dbus.service
Wants=containerd.service
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/bin/sh /check/check.sh
StandardOutput=file:/check/results
StandardError=file:/check/errors
ExecStopPost=/bin/systemctl --force poweroff
[Install]
WantedBy=multi-user.target
";

/// Boots the machine `name` and prints what its checks found.
///
/// # Errors
/// A check failed, or the machine could not be made or did not come to its end.
pub(super) fn run(name: &str, deadline: Duration) -> Result<()> {
    let Some((_, release)) = MACHINES.iter().find(|(machine, _)| *machine == name) else {
        let known: Vec<&str> = MACHINES.iter().map(|(name, _)| *name).collect();
        bail!("there is no machine {name}; there are: {}", known.join(", "));
    };
    let work = super::work().join("machines").join(name);
    fs::create_dir_all(&work).with_context(|| format!("could not make {}", work.display()))?;
    let packages = packages(&work, release)?;
    let root = work.join("root");
    unpack(&packages, &root)?;
    install(&root)?;
    let disk = work.join("disk.img");
    make_disk(&root, &disk)?;
    eprintln!(".. {name} boots");
    let (kernel, initrd) = (boot_file(&root, "vmlinuz-")?, boot_file(&root, "initrd.img-")?);
    let end = boot(&kernel, &initrd, &disk, &work.join("console"), deadline);
    let results = read_back(&disk, RESULTS)?;
    print!("{results}");
    end?;
    verdict(&results)
}

/// Every check passed, and the last one came.
fn verdict(results: &str) -> Result<()> {
    let failed = results.lines().filter(|line| line.starts_with("FAIL ")).count();
    let passed = results.lines().filter(|line| line.starts_with("ok ")).count();
    if results.lines().next_back() != Some("done") {
        bail!("the machine went off before its checks ended: {passed} passed, {failed} failed");
    }
    if failed > 0 {
        bail!("{failed} checks failed, {passed} passed");
    }
    eprintln!("{passed} checks passed");
    Ok(())
}

/// The root file system as the packages make it, from the cache if it was made before.
fn packages(work: &Path, release: &str) -> Result<PathBuf> {
    let tar = work.join("packages.tar");
    if tar.exists() {
        return Ok(tar);
    }
    if setup::find("mmdebstrap").is_none() {
        bail!("mmdebstrap is missing: apt-get install mmdebstrap");
    }
    eprintln!(".. install {release}'s packages into a folder (some minutes, once)");
    let part = work.join("packages.part.tar");
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=minbase"]).arg(format!("--include={PACKAGES}"));
    shell::run(command.arg(release).arg(&part))?;
    fs::rename(&part, &tar).with_context(|| format!("could not make {}", tar.display()))?;
    Ok(tar)
}

/// What was there before goes: a machine begins as it was installed.
fn unpack(tar: &Path, root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root).with_context(|| format!("could not remove {}", root.display()))?;
    }
    fs::create_dir(root).with_context(|| format!("could not make {}", root.display()))?;
    shell::run(Command::new("tar").arg("-C").arg(root).arg("-xf").arg(tar))
}

/// The agent, its unit and configuration, containerd's, images, and the checks.
fn install(root: &Path) -> Result<()> {
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    eprintln!(".. build the agent");
    shell::run(shell::cargo().args(["build", "--package", "beelet"]))?;
    let strip = Command::new("strip")
        .arg("-o")
        .arg(at("/usr/bin/beelet"))
        .arg(workdir::target_dir().join("debug/beelet"))
        .status();
    if !strip.context("could not start strip")?.success() {
        bail!("strip could not copy the agent into the machine");
    }
    for (path, text) in [
        ("/etc/containerd/config.toml", containerd_config()),
        ("/etc/cni/net.d/10-pods.conflist", NETWORK.to_owned()),
        ("/etc/beelet/beelet.yaml", AGENT_CONFIG.to_owned()),
        ("/etc/fstab", String::new()),
        ("/etc/systemd/system/check.service", CHECK_UNIT.to_owned()),
        ("/check/check.sh", CHECK.to_owned()),
    ] {
        workdir::write(&at(path), text)?;
    }
    let unit = shell::repository().join("packaging/beelet.service");
    fs::copy(&unit, at("/etc/systemd/system/beelet.service"))
        .with_context(|| format!("could not copy {}", unit.display()))?;
    let wanted = at("/etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    std::os::unix::fs::symlink("/etc/systemd/system/check.service", wanted.join("check.service"))?;
    fs::create_dir_all(at("/check/images"))?;
    for image in images::standard()? {
        let name = image.path.file_name().context("an image has a file's name")?.to_owned();
        fs::copy(&image.path, at("/check/images").join(name))?;
    }
    Ok(())
}

fn containerd_config() -> String {
    format!(
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\nSystemdCgroup = true\n",
        images::PAUSE
    )
}

const NETWORK: &str = r#"{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods1",
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]]}}]}
"#;

const AGENT_CONFIG: &str = "\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: systemd
staticPodPath: /etc/beelet/manifests
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
evictionHard: {memory.available: 16Mi}
memoryReservationPolicy: TieredReservation
podPidsLimit: 512
imageGCHighThresholdPercent: 100
---
apiVersion: beelet.dev/v1alpha1
kind: BeeletConfiguration
nodeName: stock
";

fn make_disk(root: &Path, disk: &Path) -> Result<()> {
    let _ = fs::remove_file(disk); // none, as a rule
    shell::run(Command::new("truncate").args(["-s", DISK]).arg(disk))?;
    shell::run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).arg(root).arg(disk))
}

/// The one file of that name in the machine's `/boot`.
fn boot_file(root: &Path, prefix: &str) -> Result<PathBuf> {
    let names =
        fs::read_dir(root.join("boot"))?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let found = names.filter(|name| name.starts_with(prefix)).max();
    Ok(root.join("boot").join(found.with_context(|| format!("the machine has no {prefix}* in /boot"))?))
}

/// Runs the machine until it is off, or the deadline.
fn boot(kernel: &Path, initrd: &Path, disk: &Path, console: &Path, deadline: Duration) -> Result<()> {
    // One thread: QEMU is bound to the life of the thread that starts it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut machine = qemu(kernel, initrd, disk, console).spawn().context("could not start QEMU")?;
        tokio::select! {
            status = machine.wait() => match status.context("could not wait for QEMU")? {
                status if status.success() => Ok(()),
                status => bail!("QEMU ended with {status}; see {}", console.display()),
            },
            () = tokio::time::sleep(deadline) => {
                bail!("the machine was not off after {} s; see {}", deadline.as_secs(), console.display())
            }
            signal = super::interrupted() => bail!("{} came: the VM was ended", signal?),
        }
    })
}

fn qemu(kernel: &Path, initrd: &Path, disk: &Path, console: &Path) -> tokio::process::Command {
    let qemu = setup::find(QEMU).unwrap_or_else(|| PathBuf::from(QEMU));
    // QEMU doubles a comma in a file's name.
    let named = |path: &Path| path.display().to_string().replace(',', ",,");
    // Killed with us, however we end.
    let mut command = tokio::process::Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(qemu);
    command.args(["-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", "2"]);
    command.args(["-m", "2048", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    command.args(["-append", COMMAND_LINE]);
    command.arg("-drive").arg(format!("file={},if=virtio,format=raw,cache=unsafe", named(disk)));
    command.arg("-serial").arg(format!("file:{}", named(console)));
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// A file of the machine's disk, without mounting it.
fn read_back(disk: &Path, file: &str) -> Result<String> {
    let mut command = Command::new("debugfs");
    let output = command.arg("-R").arg(format!("cat {file}")).arg(disk).output();
    Ok(String::from_utf8_lossy(&output.context("could not start debugfs")?.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_passes_only_if_its_checks_came_to_their_end() {
        assert!(verdict("# 6.1\nok a\nok b\ndone\n").is_ok());
        for (results, why) in [
            ("", "before its checks ended"),
            ("ok a\n", "1 passed, 0 failed"),
            ("ok a\nFAIL b: no\ndone\n", "1 checks failed, 1 passed"),
        ] {
            assert!(verdict(results).unwrap_err().to_string().contains(why), "{results:?}");
        }
    }

    #[test]
    fn the_checks_are_shell_that_a_shell_understands() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("script"), CHECK).unwrap();
        let output = Command::new("sh").arg("-n").arg(dir.path().join("script")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn an_unknown_machine_is_told_with_those_there_are() {
        let error = run("debian-1", Duration::ZERO).unwrap_err().to_string();
        assert_eq!(error, "there is no machine debian-1; there are: debian-12");
    }
}
