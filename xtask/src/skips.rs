//! The reasons for which `cargo xtask test --strict` lets a machine skip a test. The runner counts a skipped
//! test as passed, so a CI without any tools would be green. In a strict run, a test that is skipped for
//! another reason is a failure.

/// An accepted reason: a part of its text, and the explanation why a CI machine can lack the missing thing.
struct Allowed {
    reason: &'static str,
    why: &'static str,
}

const fn allowed(reason: &'static str, why: &'static str) -> Allowed {
    Allowed { reason, why }
}

const BY_CHOICE: &str = "by choice: cargo xtask test --long runs it";
const ONE_VERSION: &str =
    "a machine has one version of cgroups; cargo xtask vm boots a machine with the other";
const KERNEL: &str = "no package changes the running kernel; cargo xtask vm boots other kernels";
const NO_PACKAGE: &str =
    "the distribution has no package of the program: an environment variable must name its path";
const PROMETHEUS: &str = "its package starts a server on installation; .ci/run unpacks the package instead";

const ALLOWED: &[Allowed] = &[
    allowed("the test takes minutes (", BY_CHOICE),
    allowed("kills fitted into", BY_CHOICE),
    allowed("the memory controller uses cgroup v1", ONE_VERSION),
    allowed("the memory controller uses cgroup v2", ONE_VERSION),
    allowed("cgroup version 1 has no memory.", ONE_VERSION),
    allowed("cgroup version 2 has no such rule", ONE_VERSION),
    allowed("this kernel allows a window of a second without the capability", KERNEL),
    allowed("no cgroup2 hierarchy counts stalls", KERNEL),
    allowed("the kernel has no pressure stall information", KERNEL),
    allowed("the kernel has no cpu.idle", KERNEL),
    allowed("the kernel has no null_blk device", KERNEL),
    allowed("the kernel has no /proc/PID/schedstat", KERNEL),
    allowed("the kernel does not count usage by project", KERNEL),
    allowed("this kernel has no sched_ext", KERNEL),
    allowed("a kernel with CONFIG_QFMT_V2 or CONFIG_XFS_QUOTA", KERNEL),
    allowed("(remedy: modprobe tcp_diag)", KERNEL),
    allowed("(remedy: modprobe veth, or use a kernel built with CONFIG_VETH)", KERNEL),
    allowed("iptables cannot list its nat table", KERNEL),
    allowed("containerd 2 is required (", NO_PACKAGE),
    allowed("KUBELET is not set", NO_PACKAGE),
    allowed("KUBE_APISERVER is not set", NO_PACKAGE),
    allowed("kubectl is not installed", NO_PACKAGE),
    allowed("kubectl debug needs an API server of 1.25", NO_PACKAGE),
    allowed("trust bundles need an API server of 1.33", NO_PACKAGE),
    allowed("resource claims need an API server of 1.34", NO_PACKAGE),
    allowed(
        "criu does not work on this kernel",
        "the distribution's CRIU is older than the CI machine's kernel",
    ),
    allowed("criu is not installed", "not every release of the distribution has a package of CRIU"),
    allowed("promtool is not installed", PROMETHEUS),
    allowed("prometheus is not installed", PROMETHEUS),
    allowed("metrics-server is not installed", NO_PACKAGE),
    allowed("a device plugin written in Go is required", NO_PACKAGE),
    allowed(
        "Python has no grpcio-tools",
        "the distribution's grpcio-tools is too old for optional fields; .ci/run installs it with pip",
    ),
    allowed(
        "the object that logs is not built",
        "only people who search for a fault in the programs need that object",
    ),
];

/// Returns the explanation if this reason is accepted.
pub(crate) fn why(reason: &str) -> Option<&'static str> {
    ALLOWED.iter().find(|allowed| reason.contains(allowed.reason)).map(|allowed| allowed.why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_tests_base::requires::missing;

    #[test]
    fn a_reason_that_a_package_or_root_would_remove_is_not_accepted() {
        let check = |what: &str, remedy: &str, expected: bool| {
            let reason = missing(what, remedy).to_string();
            assert_eq!(why(&reason).is_some(), expected, "{reason}");
        };
        check("the test takes minutes", "cargo xtask test --long", true);
        check("the kernel has no pressure stall information", "boot it with psi=1", true);
        check("containerd 2 is required", "give the path of a containerd 2 binary", true);
        check("CONTAINERD names a containerd 1.6", "give the path of a containerd 2 binary", false);
        check("root is required", "run the tests as root", false);
        check("containerd is not installed", "cargo xtask setup --for test", false);
        check("bpftool is not installed", "apt-get install bpftool", false);
        check("Python has no grpcio", "cargo xtask setup --for test", false);
        check("the kernel has no BTF", "use a kernel built with CONFIG_DEBUG_INFO_BTF", false);
        check("DEVICE_PLUGIN names /x, which is not a file", "name one", false);
    }
}
