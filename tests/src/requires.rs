//! Requirements of tests, checked before they start.
//!
//! A test that cannot run must not pass silently: [`require!`](crate::require) prints the reason, and records
//! it for `cargo xtask test` to show at the end.

use crate::containerd;
use std::path::{Path, PathBuf};

pub use beelet_tests_base::requires::{Missing, find_program, kube_apiserver, leave_out, missing, skip};

/// Checks for root, for tests that change the machine: cgroups, network namespaces, mounts.
pub fn root() -> Result<(), Missing> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(missing("root is required", "run the tests as root"))
}

/// Checks the requirements of BPF programs: capabilities, a cgroup2 hierarchy to attach to, the kernel's BTF.
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
            "CAP_BPF is required",
            "run the test in a container or shell that has CAP_BPF or CAP_SYS_ADMIN",
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

/// Checks the requirements of real pods: root, containerd with its `ctr`, runc, the CNI plugins, a static
/// busybox, `ip`.
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

/// Checks for dbus-daemon, for tests with a private bus and a scripted logind.
pub fn dbus_daemon() -> Result<(), Missing> {
    match find_program("dbus-daemon") {
        Some(_) => Ok(()),
        None => Err(missing("dbus-daemon is not installed", "cargo xtask setup --for test")),
    }
}

/// Checks for a real API server: etcd, and the kube-apiserver that `KUBE_APISERVER` names.
pub fn apiserver() -> Result<(), Missing> {
    kube_apiserver()?;
    crate::cluster::etcd().map(drop)
}

/// Checks for an API server with ClusterTrustBundles.
pub fn trust_bundles() -> Result<(), Missing> {
    apiserver_of(crate::cluster::TRUST_BUNDLES, "trust bundles")
}

/// Checks for an API server with ResourceClaims.
pub fn resource_claims() -> Result<(), Missing> {
    apiserver_of(crate::cluster::RESOURCE_CLAIMS, "resource claims")
}

/// Checks for an API server of at least this minor version.
fn apiserver_of(least: u32, what: &str) -> Result<(), Missing> {
    apiserver()?;
    let remedy = "name a newer kube-apiserver in KUBE_APISERVER";
    match crate::cluster::minor_version() {
        Ok(minor) if minor >= least => Ok(()),
        Ok(minor) => Err(missing(format!("{what} need an API server of 1.{least}, not 1.{minor}"), remedy)),
        Err(error) => Err(missing(format!("{error:#}"), remedy)),
    }
}

/// Third-party program that tests start: the one that the variable names, or the machine's.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    variable: &'static str,
    name: &'static str,
}

/// Kubernetes' own client.
pub const KUBECTL: Program = Program { variable: "KUBECTL", name: "kubectl" };
/// Kubernetes' own controllers.
pub const CONTROLLER_MANAGER: Program =
    Program { variable: "KUBE_CONTROLLER_MANAGER", name: "kube-controller-manager" };
/// Kubernetes' own scheduler.
pub const SCHEDULER: Program = Program { variable: "KUBE_SCHEDULER", name: "kube-scheduler" };
/// Prometheus' own checker of pages and rules.
pub const PROMTOOL: Program = Program { variable: "PROMTOOL", name: "promtool" };
/// Prometheus, as a consumer of a node's metrics.
pub const PROMETHEUS: Program = Program { variable: "PROMETHEUS", name: "prometheus" };
/// metrics-server, as a consumer of a node's metrics.
pub const METRICS_SERVER: Program = Program { variable: "METRICS_SERVER", name: "metrics-server" };

impl Program {
    /// Returns the program's path.
    ///
    /// # Errors
    /// The program is not installed.
    pub fn given(&self) -> Result<PathBuf, Missing> {
        let Program { variable, name } = self;
        let remedy = format!("give the path of a {name} in {variable}");
        match std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from) {
            Some(path) if path.is_file() => Ok(path),
            Some(path) => {
                Err(missing(format!("{variable} names {}, which is not a file", path.display()), remedy))
            }
            None => find_program(name).ok_or_else(|| missing(format!("{name} is not installed"), remedy)),
        }
    }
}

/// Checks for kubectl.
pub fn kubectl() -> Result<(), Missing> {
    KUBECTL.given().map(drop)
}

/// Checks for Kubernetes' controllers and scheduler.
pub fn controllers() -> Result<(), Missing> {
    CONTROLLER_MANAGER.given()?;
    SCHEDULER.given().map(drop)
}

/// Checks for promtool.
pub fn promtool() -> Result<(), Missing> {
    PROMTOOL.given().map(drop)
}

/// Checks for Prometheus.
pub fn prometheus() -> Result<(), Missing> {
    PROMETHEUS.given().map(drop)
}

/// Checks for metrics-server.
pub fn metrics_server() -> Result<(), Missing> {
    METRICS_SERVER.given().map(drop)
}

/// Checks the requirements of host ports: the CNI plugin portmap, and iptables with its nat table.
pub fn portmap() -> Result<(), Missing> {
    if cni_bin_dir().is_none_or(|dir| !dir.join("portmap").exists()) {
        return Err(missing("the CNI plugin portmap is not installed", "cargo xtask setup --for test"));
    }
    let Some(iptables) = find_program("iptables") else {
        return Err(missing(
            "iptables is not installed",
            "install iptables, which the CNI plugin portmap uses",
        ));
    };
    let listed = std::process::Command::new(iptables).args(["-t", "nat", "-S"]).output();
    if listed.is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    Err(missing(
        "iptables cannot list its nat table",
        "use a kernel with NAT, and a shell that may change it",
    ))
}

/// Checks the requirements of a container run by runc alone: root, runc, a static busybox.
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

/// Checks for containerd 2, which `CONTAINERD` must name.
pub fn containerd_2() -> Result<(), Missing> {
    containerd()?;
    let remedy =
        "set CONTAINERD to the path of a containerd 2 binary, with its ctr and shim in the same folder";
    let binary = match containerd::given() {
        None => return Err(missing("containerd 2 is required", remedy)),
        Some(Err(error)) => return Err(missing(format!("{error:#}"), remedy)),
        Some(Ok(binary)) => binary,
    };
    match containerd::version_of(&binary) {
        Ok((2.., _)) => Ok(()),
        Ok((major, minor)) => Err(missing(format!("CONTAINERD names a containerd {major}.{minor}"), remedy)),
        Err(error) => Err(missing(format!("{error:#}"), remedy)),
    }
}

/// Checks for CRIU on this kernel, for tests that checkpoint a running container.
pub fn criu() -> Result<(), Missing> {
    let Some(criu) = find_program("criu") else {
        return Err(missing("criu is not installed", "install CRIU, or put it into PATH"));
    };
    match std::process::Command::new(criu).arg("check").output() {
        Ok(checked) if checked.status.success() => Ok(()),
        Ok(checked) => {
            let why = String::from_utf8_lossy(&checked.stderr);
            let why = why.lines().next().unwrap_or("criu check failed");
            Err(missing(format!("criu does not work on this kernel: {why}"), "put a newer CRIU into PATH"))
        }
        Err(error) => Err(missing(format!("cannot run criu: {error}"), "put another CRIU into PATH")),
    }
}

/// Checks for a third-party device plugin, which `DEVICE_PLUGIN` must name.
pub fn device_plugin() -> Result<(), Missing> {
    match given_device_plugin() {
        Some(path) if path.is_file() => Ok(()),
        Some(path) => Err(missing(
            format!("DEVICE_PLUGIN names {}, which is not a file", path.display()),
            "set DEVICE_PLUGIN to a device plugin",
        )),
        None => Err(missing(
            "a device plugin written in Go is required",
            "set DEVICE_PLUGIN to the path of Kubernetes' sample-device-plugin",
        )),
    }
}

/// Returns the program that `DEVICE_PLUGIN` names.
pub fn given_device_plugin() -> Option<PathBuf> {
    std::env::var_os("DEVICE_PLUGIN").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Checks for Python's gRPC, for tests of a device plugin on it.
pub fn python_grpc() -> Result<(), Missing> {
    if python_with_grpc().is_some() {
        return Ok(());
    }
    Err(missing(
        "no Python has grpcio",
        "cargo xtask setup --for test, or name a Python that has it in PYTHON_GRPC",
    ))
}

/// Checks for Prometheus' own Python parser of metrics.
pub fn python_prometheus() -> Result<(), Missing> {
    if python_with("prometheus_client", None).is_some() {
        return Ok(());
    }
    Err(missing("no Python has prometheus_client", "cargo xtask setup --for test"))
}

/// Returns a Python that has grpcio: the one that `PYTHON_GRPC` names (e.g. of a virtual environment), or the
/// machine's.
pub fn python_with_grpc() -> Option<PathBuf> {
    python_with("grpc", std::env::var_os("PYTHON_GRPC").map(PathBuf::from))
}

/// Returns a Python that has a module: the named one, or one of the machine's.
pub fn python_with(module: &str, named: Option<PathBuf>) -> Option<PathBuf> {
    let machines = [find_program("python3"), Some(PathBuf::from("/usr/bin/python3"))].into_iter().flatten();
    let has_it = |python: &PathBuf| {
        let asked = std::process::Command::new(python).arg("-c").arg(format!("import {module}")).output();
        asked.is_ok_and(|output| output.status.success())
    };
    named.into_iter().chain(machines).find(has_it)
}

/// Checks for the kernel's pressure stall information.
pub fn psi() -> Result<(), Missing> {
    if Path::new("/proc/pressure/cpu").exists() {
        return Ok(());
    }
    Err(missing(
        "the kernel has no pressure stall information",
        "boot with psi=1, on a kernel with CONFIG_PSI",
    ))
}

/// Checks for `cargo xtask test --long`, for tests that take minutes.
pub fn long() -> Result<(), Missing> {
    if std::env::var_os("BEELET_LONG").is_some() {
        return Ok(());
    }
    Err(missing("the test takes minutes", "cargo xtask test --long"))
}

/// Checks for libfaketime, for tests that step the agent's clock.
pub fn faketime() -> Result<(), Missing> {
    match faketime_library() {
        Some(_) => Ok(()),
        None => Err(missing("libfaketime is not installed", "cargo xtask setup --for test")),
    }
}

/// Returns libfaketime for multi-threaded programs, at the paths of Debian and upstream.
pub fn faketime_library() -> Option<PathBuf> {
    let libs = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = libs.chain(["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from));
    folders.map(|dir| dir.join("faketime/libfaketimeMT.so.1")).find(|path| path.is_file())
}

/// Checks for redis: Debian's, whose server is in the package of its tools.
pub fn redis() -> Result<(), Missing> {
    if find_program("redis-cli").is_some() && find_program("redis-check-rdb").is_some() {
        return Ok(());
    }
    Err(missing("redis is not installed", "cargo xtask setup --for test"))
}

/// Checks for strace and permission to trace, for tests that stop the agent at its system calls.
pub fn strace() -> Result<(), Missing> {
    root()?;
    let Some(strace) = find_program("strace") else {
        return Err(missing("strace is not installed", "cargo xtask setup --for test"));
    };
    let tried = std::process::Command::new(strace).args(["-qq", "-e", "trace=none", "true"]).output();
    if tried.is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    Err(missing("strace cannot trace here", "use a container or shell that has CAP_SYS_PTRACE"))
}

/// Returns the folder of the CNI plugins: Debian's, or that of upstream's packages.
pub fn cni_bin_dir() -> Option<PathBuf> {
    ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"]
        .map(PathBuf::from)
        .into_iter()
        .find(|dir| dir.is_dir())
}

/// Returns from the calling test, with a message, if the machine lacks a requirement: `require!(root)`,
/// `require!(bpf)`, `require!(containerd, bpf)`, `require!(long)`.
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
