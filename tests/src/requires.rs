//! What a test needs from the machine, checked before it starts.
//!
//! A test that can't run here must not pass in silence: [`require!`](crate::require) prints why, and writes
//! it down for `cargo xtask test` to show at the end.

use crate::containerd;
use std::path::{Path, PathBuf};

pub use beelet_tests_base::requires::{Missing, find_program, kube_apiserver, leave_out, missing, skip};

/// The test changes the machine: cgroups, network namespaces, mounts.
pub fn root() -> Result<(), Missing> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(missing("it needs root", "run the tests as root"))
}

/// The test loads BPF programs: the capabilities for it, a cgroup2 hierarchy to attach to, the kernel's BTF.
pub fn bpf() -> Result<(), Missing> {
    const CAP_SYS_ADMIN: u64 = 1 << 21;
    const CAP_BPF: u64 = 1 << 39;
    root()?;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .unwrap_or(0);
    if effective & (CAP_SYS_ADMIN | CAP_BPF) == 0 {
        return Err(missing(
            "it needs CAP_BPF",
            "run it in a container or shell that has CAP_BPF or CAP_SYS_ADMIN",
        ));
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Err(missing("the kernel has no BTF", "use a kernel built with CONFIG_DEBUG_INFO_BTF"));
    }
    if !crate::guards::hierarchies().is_ok_and(|all| all.iter().any(|hierarchy| hierarchy.v2)) {
        return Err(missing(
            "no cgroup2 hierarchy is mounted",
            "mount -t cgroup2 none /sys/fs/cgroup/unified",
        ));
    }
    Ok(())
}

/// The test runs real pods: root, containerd with its `ctr`, runc, the CNI plugins, a static busybox, `ip`.
pub fn containerd() -> Result<(), Missing> {
    root()?;
    let setup = "cargo xtask setup --for test";
    if find_program("containerd").is_none() && containerd::given().is_none() {
        return Err(missing("containerd is not installed", setup));
    }
    for program in ["runc", "ip"] {
        if find_program(program).is_none() {
            return Err(missing(format!("{program} is not installed"), setup));
        }
    }
    for plugin in ["bridge", "host-local", "loopback"] {
        if cni_bin_dir().is_none_or(|dir| !dir.join(plugin).exists()) {
            return Err(missing(format!("the CNI plugin {plugin} is not installed"), setup));
        }
    }
    if crate::images::busybox().is_err() {
        return Err(missing("no static busybox is installed", setup));
    }
    Ok(())
}

/// The test has a bus of its own, and on it a logind that does as it is told.
pub fn dbus_daemon() -> Result<(), Missing> {
    match find_program("dbus-daemon") {
        Some(_) => Ok(()),
        None => Err(missing("dbus-daemon is not installed", "cargo xtask setup --for test")),
    }
}

/// The test asks a real API server: etcd, and the kube-apiserver that `KUBE_APISERVER` names.
pub fn apiserver() -> Result<(), Missing> {
    kube_apiserver()?;
    crate::cluster::etcd().map(drop)
}

/// The test asks an API server for ClusterTrustBundles.
pub fn trust_bundles() -> Result<(), Missing> {
    apiserver_of(crate::cluster::TRUST_BUNDLES, "trust bundles")
}

/// The test asks an API server for ResourceClaims.
pub fn resource_claims() -> Result<(), Missing> {
    apiserver_of(crate::cluster::RESOURCE_CLAIMS, "resource claims")
}

/// An API server of at least this minor version.
fn apiserver_of(least: u32, what: &str) -> Result<(), Missing> {
    apiserver()?;
    let remedy = "name a newer kube-apiserver in KUBE_APISERVER";
    match crate::cluster::minor_version() {
        Ok(minor) if minor >= least => Ok(()),
        Ok(minor) => Err(missing(format!("{what} need an API server of 1.{least}, not 1.{minor}"), remedy)),
        Err(error) => Err(missing(format!("{error:#}"), remedy)),
    }
}

/// A program of others that tests start: the one that the variable names, or the machine's.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    variable: &'static str,
    name: &'static str,
}

/// Kubernetes' own client.
pub const KUBECTL: Program = Program { variable: "KUBECTL", name: "kubectl" };
/// Prometheus' own checks of pages and rules.
pub const PROMTOOL: Program = Program { variable: "PROMTOOL", name: "promtool" };
/// Prometheus, which watches a node.
pub const PROMETHEUS: Program = Program { variable: "PROMETHEUS", name: "prometheus" };
/// metrics-server, which watches a node.
pub const METRICS_SERVER: Program = Program { variable: "METRICS_SERVER", name: "metrics-server" };

impl Program {
    /// Its path.
    ///
    /// # Errors
    /// There is none.
    pub fn given(&self) -> Result<PathBuf, Missing> {
        let Program { variable, name } = self;
        let remedy = format!("give the path of a {name} in {variable}");
        match std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from) {
            Some(path) if path.is_file() => Ok(path),
            Some(path) => {
                Err(missing(format!("{variable} names {}, which is not a file", path.display()), remedy))
            }
            None => find_program(name).ok_or_else(|| missing(format!("there is no {name}"), remedy)),
        }
    }
}

/// The test asks an API server by kubectl.
pub fn kubectl() -> Result<(), Missing> {
    KUBECTL.given().map(drop)
}

/// The test has pages and rules checked by promtool.
pub fn promtool() -> Result<(), Missing> {
    PROMTOOL.given().map(drop)
}

/// The test has a node watched by Prometheus.
pub fn prometheus() -> Result<(), Missing> {
    PROMETHEUS.given().map(drop)
}

/// The test has a node watched by metrics-server.
pub fn metrics_server() -> Result<(), Missing> {
    METRICS_SERVER.given().map(drop)
}

/// The test gives a container a port of the machine: the CNI plugin portmap, and iptables with its nat table.
pub fn portmap() -> Result<(), Missing> {
    if cni_bin_dir().is_none_or(|dir| !dir.join("portmap").exists()) {
        return Err(missing("the CNI plugin portmap is not installed", "cargo xtask setup --for test"));
    }
    let Some(iptables) = find_program("iptables") else {
        return Err(missing("iptables is not installed", "install it; the CNI plugin portmap works by it"));
    };
    let listed = std::process::Command::new(iptables).args(["-t", "nat", "-S"]).output();
    if listed.is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    Err(missing("iptables can't list its nat table", "use a kernel with NAT, and a shell that may change it"))
}

/// The test runs a container by runc alone: root, runc, a static busybox.
pub fn runc() -> Result<(), Missing> {
    root()?;
    if find_program("runc").is_none() {
        return Err(missing("runc is not installed", "cargo xtask setup --for test"));
    }
    if crate::images::busybox().is_err() {
        return Err(missing("no static busybox is installed", "cargo xtask setup --for test"));
    }
    Ok(())
}

/// The test needs what only containerd 2 has: `CONTAINERD` must name one.
pub fn containerd_2() -> Result<(), Missing> {
    containerd()?;
    let remedy = "give the path of a containerd 2 binary, its ctr and shim beside it, in CONTAINERD";
    let binary = match containerd::given() {
        None => return Err(missing("it needs containerd 2", remedy)),
        Some(Err(error)) => return Err(missing(format!("{error:#}"), remedy)),
        Some(Ok(binary)) => binary,
    };
    match containerd::version_of(&binary) {
        Ok((2.., _)) => Ok(()),
        Ok((major, minor)) => Err(missing(format!("CONTAINERD names a containerd {major}.{minor}"), remedy)),
        Err(error) => Err(missing(format!("{error:#}"), remedy)),
    }
}

/// The test writes a running container's state into an archive: CRIU, for this kernel.
pub fn criu() -> Result<(), Missing> {
    let Some(criu) = find_program("criu") else {
        return Err(missing("criu is not installed", "install CRIU, or put it into PATH"));
    };
    match std::process::Command::new(criu).arg("check").output() {
        Ok(checked) if checked.status.success() => Ok(()),
        Ok(checked) => {
            let why = String::from_utf8_lossy(&checked.stderr);
            let why = why.lines().next().unwrap_or("criu check failed");
            Err(missing(format!("criu can't work on this kernel: {why}"), "put a newer CRIU into PATH"))
        }
        Err(error) => Err(missing(format!("criu can't be run: {error}"), "put another CRIU into PATH")),
    }
}

/// The test runs a device plugin that nobody here wrote: `DEVICE_PLUGIN` must name one, and how to start it.
pub fn device_plugin() -> Result<(), Missing> {
    match given_device_plugin() {
        Some(path) if path.is_file() => Ok(()),
        Some(path) => {
            Err(missing(format!("DEVICE_PLUGIN names {}, which is not a file", path.display()), "name one"))
        }
        None => Err(missing(
            "it needs a device plugin written in Go",
            "give the path of Kubernetes' sample-device-plugin in DEVICE_PLUGIN",
        )),
    }
}

/// The program that `DEVICE_PLUGIN` names.
pub fn given_device_plugin() -> Option<PathBuf> {
    std::env::var_os("DEVICE_PLUGIN").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The test runs a device plugin on Python's gRPC.
pub fn python_grpc() -> Result<(), Missing> {
    if python_with_grpc().is_some() {
        return Ok(());
    }
    Err(missing(
        "no Python has grpcio",
        "cargo xtask setup --for test, or name a Python that has it in PYTHON_GRPC",
    ))
}

/// The test reads pages of metrics with Prometheus' own Python parser.
pub fn python_prometheus() -> Result<(), Missing> {
    if python_with("prometheus_client", None).is_some() {
        return Ok(());
    }
    Err(missing("no Python has prometheus_client", "cargo xtask setup --for test"))
}

/// A Python that has grpcio: the one that `PYTHON_GRPC` names (of a virtual environment, say), or the
/// machine's.
pub fn python_with_grpc() -> Option<PathBuf> {
    python_with("grpc", std::env::var_os("PYTHON_GRPC").map(PathBuf::from))
}

/// A Python that has a module: the one that was named, or one of the machine's.
pub fn python_with(module: &str, named: Option<PathBuf>) -> Option<PathBuf> {
    let machines = [find_program("python3"), Some(PathBuf::from("/usr/bin/python3"))].into_iter().flatten();
    let has_it = |python: &PathBuf| {
        let asked = std::process::Command::new(python).arg("-c").arg(format!("import {module}")).output();
        asked.is_ok_and(|output| output.status.success())
    };
    named.into_iter().chain(machines).find(has_it)
}

/// The test sees who waits by the kernel's pressure stall information.
pub fn psi() -> Result<(), Missing> {
    if Path::new("/proc/pressure/cpu").exists() {
        return Ok(());
    }
    Err(missing("the kernel counts no pressure", "boot with psi=1, on a kernel with CONFIG_PSI"))
}

/// The test takes minutes: only with `cargo xtask test --long`.
pub fn long() -> Result<(), Missing> {
    if std::env::var_os("BEELET_LONG").is_some() {
        return Ok(());
    }
    Err(missing("it takes minutes", "cargo xtask test --long"))
}

/// The test gives the agent a clock of its own, which it steps: libfaketime.
pub fn faketime() -> Result<(), Missing> {
    match faketime_library() {
        Some(_) => Ok(()),
        None => Err(missing("libfaketime is not installed", "cargo xtask setup --for test")),
    }
}

/// libfaketime for programs with threads, where Debian and upstream install it.
pub fn faketime_library() -> Option<PathBuf> {
    let libs = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = libs.chain(["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from));
    folders.map(|dir| dir.join("faketime/libfaketimeMT.so.1")).find(|path| path.is_file())
}

/// The test runs a redis: Debian's, whose server lies in the package of its tools.
pub fn redis() -> Result<(), Missing> {
    if find_program("redis-cli").is_some() && find_program("redis-check-rdb").is_some() {
        return Ok(());
    }
    Err(missing("redis is not installed", "cargo xtask setup --for test"))
}

/// The test stops the agent at its system calls: strace, and leave to trace.
pub fn strace() -> Result<(), Missing> {
    root()?;
    let Some(strace) = find_program("strace") else {
        return Err(missing("strace is not installed", "cargo xtask setup --for test"));
    };
    let tried = std::process::Command::new(strace).args(["-qq", "-e", "trace=none", "true"]).output();
    if tried.is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    Err(missing("strace can't trace here", "use a container or shell that has CAP_SYS_PTRACE"))
}

/// The folder of the CNI plugins: Debian's, or the one that upstream's packages use.
pub fn cni_bin_dir() -> Option<PathBuf> {
    ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"]
        .map(PathBuf::from)
        .into_iter()
        .find(|dir| dir.is_dir())
}

/// Returns from the calling test, loudly, where the machine lacks something that it needs:
/// `require!(root)`, `require!(bpf)`, `require!(containerd, bpf)`, `require!(long)`.
#[macro_export]
macro_rules! require {
    ($($need:ident),+ $(,)?) => {
        $(
            if let Err(missing) = $crate::requires::$need() {
                $crate::requires::skip(&missing);
                return;
            }
        )+
    };
}
