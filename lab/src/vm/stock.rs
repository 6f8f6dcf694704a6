//! Stock machine: an unmodified Debian with its own kernel and all its modules, systemd as process 1,
//! AppArmor, its containerd, two NUMA nodes, swap, huge pages and a disk with project quotas. The agent is
//! installed from beelet's package, as an administrator would do. `check.sh` runs there as a unit, and the
//! lab reads its results from the disk when the machine is off.
//!
//! The machine is booted twice: the first boot ends with `systemctl poweroff`, which is part of the checks.
//!
//! The packages, whose installation takes minutes, are kept below cargo's target folder; the disks are
//! recreated each time.

mod e2e;

pub(super) use self::e2e::{Wanted, bench, end_to_end};

use super::{page, programs};
use anyhow::{Context as _, Result, bail};
use beelet_tests::{images, workdir};
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use xtask::qemu::{self, Qemu};
use xtask::rootfs::{self, Made};
use xtask::{cross::Arch, package, shell};

/// Available machine.
struct Stock {
    name: &'static str,
    /// Debian release.
    release: &'static str,
    /// Additional kernel arguments.
    kernel_arguments: &'static str,
    /// Cgroup version and driver, for the checks.
    cgroups: &'static str,
    driver: &'static str,
}

const MACHINES: &[Stock] = &[
    Stock { name: "debian-12", release: "bookworm", kernel_arguments: "", cgroups: "v2", driver: "systemd" },
    Stock { name: "debian-13", release: "trixie", kernel_arguments: "", cgroups: "v2", driver: "systemd" },
    Stock {
        name: "debian-12-v1",
        release: "bookworm",
        kernel_arguments: "systemd.unified_cgroup_hierarchy=0",
        cgroups: "v1",
        driver: "cgroupfs",
    },
];
/// Packages in addition to Debian's minimal set.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,udev,linux-image-cloud-amd64,containerd,runc,containernetworking-plugins,\
                        iproute2,iptables,kmod,procps,apparmor,e2fsprogs,xfsprogs,python3-grpcio,python3-prometheus-client";
/// Sizes of the disks: the first is twice its content; the second is for pods' volumes.
const DISK: &str = "4G";
const VOLUMES: &str = "1G";
/// File on the disk with the results of the checks.
const RESULTS: &str = "/check/results";
/// Number of boots.
const BOOTS: u32 = 2;

/// Kernel command line: a quick boot under emulation, pressure information, and huge pages.
const COMMAND_LINE: &str = "console=ttyS0 root=/dev/vda rw quiet mitigations=off nokaslr psi=1 systemd.show_status=0 \
                            hugepages=32 panic=-1";

/// Clock of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// Counts instructions, one per `2^pace` nanoseconds, and uses the real clock only while idle. A busy
    /// host then slows the machine in a way that is invisible inside, instead of making every deadline inside
    /// pass early. QEMU supports this only with one thread for both processors.
    Instructions { pace: u8 },
    /// Uses the host's clock, with a thread per processor: for benches on an otherwise idle host.
    Host,
}

impl Clock {
    /// Returns QEMU's arguments.
    fn arguments(self) -> Vec<String> {
        match self {
            Clock::Instructions { pace } => vec![
                "-accel".to_owned(),
                "tcg,thread=single,tb-size=512".to_owned(),
                "-icount".to_owned(),
                format!("shift={pace},sleep=on"),
            ],
            Clock::Host => vec!["-accel".to_owned(), "tcg,thread=multi,tb-size=512".to_owned()],
        }
    }
}

/// Processor with all features that QEMU can emulate, except those that make programs copy and clear memory
/// byte by byte with one instruction: this is fast in hardware, but an emulator whose clock counts
/// instructions leaves its loop at every byte. Without these features a machine boots in two thirds of the
/// time.
const CPU: &str = "max,erms=off,fsrm=off,fzrm=off,fsrs=off,fsrc=off";

const CHECK: &str = include_str!("stock/check.sh");

const CHECK_UNIT: &str = "\
[Unit]
After=containerd.service dbus.service systemd-logind.service
Wants=containerd.service
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/bin/sh /check/check.sh
StandardOutput=append:/check/results
StandardError=append:/check/errors
# The machine powers off even if the script fails; the script itself may have requested a regular shutdown.
ExecStopPost=/bin/sh -c '[ -e /check/going-down ] || systemctl --force poweroff'
[Install]
WantedBy=multi-user.target
";

/// Boots the machine `name` and prints the results of its checks; with `write_docs`, also writes them to
/// docs/machines.md. Installs the program `agent`, or a debug build of it.
///
/// # Errors
/// A check failed, or the machine could not be built or did not complete.
pub(super) fn run(name: &str, agent: Option<&Path>, deadline: Duration, write_docs: bool) -> Result<()> {
    let stock = known(name)?;
    let began = Instant::now();
    let (work, root, _lock) = unpacked(stock)?;
    install(&root, stock, agent)?;
    let machine = Machine::new(stock, &work, root)?;
    let made = began.elapsed();
    let end = (1..=BOOTS).try_for_each(|boot| {
        eprintln!(".. booting {name} ({boot} of {BOOTS})");
        machine.boot(boot == 1, &work.join(format!("console-{boot}")), deadline)
    });
    let results = read_back(&machine.disk, RESULTS)?;
    print!("{results}");
    let took = began.elapsed() - made;
    println!("# built in {} s, booted and checked in {} s", made.as_secs(), took.as_secs());
    end?;
    if write_docs {
        page::write(name, &results, made, took)?;
    }
    verdict(&results)
}

fn known(name: &str) -> Result<&'static Stock> {
    let known: Vec<&str> = MACHINES.iter().map(|stock| stock.name).collect();
    let found = MACHINES.iter().find(|stock| stock.name == name);
    found.with_context(|| format!("unknown machine {name}; known: {}", known.join(", ")))
}

/// Creates the machine's folder, and in it a fresh root with the content of Debian's packages. The folder is
/// locked for this run while the file is open.
fn unpacked(stock: &Stock) -> Result<(PathBuf, PathBuf, fs::File)> {
    let machines = qemu::folder().join("machines");
    let work = machines.join(stock.name);
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let file = work.join("lock");
    let lock = fs::File::create(&file).with_context(|| format!("cannot create {}", file.display()))?;
    if lock.try_lock().is_err() {
        bail!("another run is using {}; wait for its end", work.display());
    }
    let root = work.join("root");
    let packages = rootfs::packages(&machines, "machine", stock.release, PACKAGES, Made::Installed)?;
    rootfs::unpack(&packages, &root)?;
    Ok((work, root, lock))
}

/// Returns an error unless every check passed and the last one was reached.
fn verdict(results: &str) -> Result<()> {
    let failed = results.lines().filter(|line| line.starts_with("FAIL ")).count();
    let passed = results.lines().filter(|line| line.starts_with("ok ")).count();
    if !results.lines().any(|line| line == "done") {
        bail!("the machine powered off before its checks ended: {passed} passed, {failed} failed");
    }
    if failed > 0 {
        bail!("{failed} checks failed, {passed} passed");
    }
    eprintln!("{passed} checks passed");
    Ok(())
}

/// Installs the agent's packages, containerd's configuration, images, test programs, and the checks.
fn install(root: &Path, stock: &Stock, agent: Option<&Path>) -> Result<()> {
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    let check = at("/check");
    eprintln!(".. building the agent and its packages");
    let built = programs::dynamic("kernel", agent)?;
    let binary = check.join("beelet");
    fs::create_dir_all(&check)?;
    shell::run(Command::new("strip").arg("-o").arg(&binary).arg(&built.agent))?;
    let helper = |of: &Path| of.with_file_name("beelet-exec");
    shell::run(Command::new("strip").arg("-o").arg(helper(&binary)).arg(helper(&built.agent)))?;
    let files = package::files(&binary, || Ok(Command::new(&binary)))?;
    for (revision, name) in [("1", "beelet.deb"), ("2", "upgrade.deb")] {
        let out = tempfile::tempdir().context("cannot create a folder for the package")?;
        let deb = package::build_deb(&files, Arch::Amd64, revision, package::Packed::Not, out.path(), 0)?;
        fs::copy(&deb, check.join(name)).with_context(|| format!("cannot copy {}", deb.display()))?;
    }
    fs::remove_file(helper(&binary))?;
    fs::remove_file(&binary)?;
    let machine = format!("machine={}\ncgroups={}\ndriver={}\n", stock.name, stock.cgroups, stock.driver);
    for (path, text) in [
        ("/etc/containerd/config.toml", containerd_config(stock.driver)),
        ("/etc/cni/net.d/10-pods.conflist", NETWORK.to_owned()),
        ("/etc/fstab", FSTAB.to_owned()),
        ("/etc/modules-load.d/check.conf", "quota_v2\ntcp_diag\n".to_owned()),
        ("/etc/systemd/system/check.service", CHECK_UNIT.to_owned()),
        ("/check/agent.yaml", agent_config(stock, stock.driver)),
        ("/check/machine", machine),
        ("/check/check.sh", CHECK.to_owned()),
    ] {
        workdir::write(&at(path), text)?;
    }
    // The journal of the first boot is read in the second; volumes are on the second disk.
    for folder in ["/var/log/journal", "/srv/pods", "/check/images", "/check/ends"] {
        fs::create_dir_all(at(folder))?;
    }
    want(root, "check.service")?;
    for image in images::standard()? {
        let name = image.path.file_name().context("an image file has no name")?.to_owned();
        fs::copy(&image.path, check.join("images").join(name))?;
    }
    fs::copy(images::testapp()?, check.join("testapp")).context("cannot copy the test app")?;
    shell::run(Command::new("strip").arg("-o").arg(check.join("kernel")).arg(built.test))
}

/// Enables the unit.
fn want(root: &Path, unit: &str) -> Result<()> {
    let wanted = root.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    std::os::unix::fs::symlink(Path::new("/etc/systemd/system").join(unit), wanted.join(unit))?;
    Ok(())
}

fn containerd_config(driver: &str) -> String {
    format!(
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\nSystemdCgroup = {}\n",
        images::PAUSE,
        driver == "systemd"
    )
}

const NETWORK: &str = r#"{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods1",
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]]}}]}
"#;

const FSTAB: &str = "/dev/vdb /srv/pods ext4 prjquota,nofail,x-systemd.device-timeout=300s 0 0\n";

const AGENT_CONFIG: &str = "\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: DRIVER
staticPodPath: /etc/beelet/manifests
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
evictionHard: {memory.available: 16Mi}
podPidsLimit: 512
imageGCHighThresholdPercent: 100
shutdownGracePeriodByPodPriority:
- {priority: 0, shutdownGracePeriodSeconds: 60}
- {priority: 2000000000, shutdownGracePeriodSeconds: 60}
QOS
---
apiVersion: beelet.dev/v1alpha1
kind: BeeletConfiguration
nodeName: stock
podsDir: /srv/pods/beelet
";

fn agent_config(stock: &Stock, driver: &str) -> String {
    // Cgroup v1 does not support this setting.
    let qos = if stock.cgroups == "v2" { "memoryReservationPolicy: TieredReservation" } else { "" };
    AGENT_CONFIG.replace("DRIVER", driver).replace("QOS", qos)
}

fn make_disk(disk: &Path, size: &str, how: &[&str]) -> Result<()> {
    let _ = fs::remove_file(disk); // usually it does not exist
    shell::run(Command::new("truncate").args(["-s", size]).arg(disk))?;
    shell::run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).args(how).arg(disk))
}

/// Returns the newest file with that prefix in the machine's `/boot`.
fn boot_file(root: &Path, prefix: &str) -> Result<PathBuf> {
    let names =
        fs::read_dir(root.join("boot"))?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let found = names.filter(|name| name.starts_with(prefix)).max();
    Ok(root.join("boot").join(found.with_context(|| format!("the machine has no {prefix}* in /boot"))?))
}

/// Machine to boot.
struct Machine {
    /// Content of the first disk.
    root: PathBuf,
    qemu: Qemu,
    kernel: PathBuf,
    initrd: PathBuf,
    disk: PathBuf,
    volumes: PathBuf,
    command_line: String,
    clock: Clock,
}

impl Machine {
    fn new(stock: &Stock, work: &Path, root: PathBuf) -> Result<Machine> {
        Ok(Machine {
            qemu: Qemu::ensure(&qemu::folder(), Arch::Amd64)?,
            kernel: boot_file(&root, "vmlinuz-")?,
            initrd: boot_file(&root, "initrd.img-")?,
            disk: work.join("disk.img"),
            volumes: work.join("volumes.img"),
            command_line: format!("{COMMAND_LINE} {}", stock.kernel_arguments),
            clock: Clock::Instructions { pace: 0 },
            root,
        })
    }

    /// Boots the machine, on new disks if `new`, and waits until it is off; boots again if the emulator
    /// itself died (QEMU 10.0: `iotlb_to_section: Assertion … failed`, in one of five boots).
    fn boot(&self, new: bool, console: &Path, deadline: Duration) -> Result<()> {
        let run = || {
            if new {
                self.make_disks()?;
            }
            self.until_off(console, deadline)
        };
        let mut status = run()?;
        if status.signal().is_some() {
            eprintln!(".. QEMU died ({status}); booting again");
            status = run()?;
        }
        if !status.success() {
            bail!("QEMU exited with {status}; see {}", console.display());
        }
        Ok(())
    }

    fn make_disks(&self) -> Result<()> {
        make_disk(&self.disk, DISK, &["-d", &self.root.display().to_string()])?;
        make_disk(&self.volumes, VOLUMES, &["-O", "quota,project"])
    }

    /// Runs the machine until it is off, or until the deadline.
    fn until_off(&self, console: &Path, deadline: Duration) -> Result<ExitStatus> {
        // A single thread: QEMU is killed when the thread that started it ends.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut machine = self.command(console).spawn().context("cannot start QEMU")?;
            tokio::select! {
                status = machine.wait() => status.context("cannot wait for QEMU"),
                () = tokio::time::sleep(deadline) => {
                    bail!("the machine was still running after {} s; see {}", deadline.as_secs(), console.display())
                }
                signal = super::interrupted() => bail!("interrupted by {}; the VM was stopped", signal?),
            }
        })
    }

    fn command(&self, console: &Path) -> tokio::process::Command {
        // QEMU doubles a comma in a file's name.
        let named = |path: &Path| path.display().to_string().replace(',', ",,");
        let mut command = super::boot::mortal(&self.qemu.command());
        command.args(["-machine", "q35", "-cpu", CPU, "-smp", "2"]).args(self.clock.arguments());
        command.args(["-m", "2048", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        for node in ["0", "1"] {
            command.args(["-object", &format!("memory-backend-ram,id=m{node},size=1G")]);
            command.args(["-numa", &format!("node,nodeid={node},cpus={node},memdev=m{node}")]);
        }
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initrd);
        command.arg("-append").arg(&self.command_line);
        for disk in [&self.disk, &self.volumes] {
            command.arg("-drive").arg(format!("file={},if=virtio,format=raw,cache=unsafe", named(disk)));
        }
        command.arg("-serial").arg(format!("file:{}", named(console)));
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }
}

/// Reads a file from the machine's disk, without mounting it.
fn read_back(disk: &Path, file: &str) -> Result<String> {
    let mut command = Command::new("debugfs");
    let output = command.arg("-R").arg(format!("cat {file}")).arg(disk).output();
    Ok(String::from_utf8_lossy(&output.context("cannot start debugfs")?.stdout).into_owned())
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
    fn the_checks_are_valid_shell() {
        let dir = tempfile::tempdir().unwrap();
        for script in [CHECK, e2e::SCRIPT] {
            fs::write(dir.path().join("script"), script).unwrap();
            let output = Command::new("sh").arg("-n").arg(dir.path().join("script")).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }

    #[test]
    fn an_error_about_an_unknown_machine_lists_the_known_ones() {
        let error = run("debian-1", None, Duration::ZERO, false).unwrap_err().to_string();
        assert_eq!(error, "unknown machine debian-1; known: debian-12, debian-13, debian-12-v1");
    }
}
