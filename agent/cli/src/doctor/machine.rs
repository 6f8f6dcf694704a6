//! Checks of the kernel and of the agent's privileges.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use caps::{CapSet, Capability};

use super::{Finding, Patient};
use beelet_bpf::NetnsHandle;
use beelet_cgroups::{Cgroups, Trial, Version};

/// Tolerated difference between the clocks of file systems and machines.
const CLOCK_SLACK: Duration = Duration::from_secs(24 * 3600);
/// The oldest kernel that the BPF programs support. They use atomic exchanges, which the JIT of arm64
/// supports since Linux 5.18.
const OLDEST: (u32, u32) = if cfg!(target_arch = "aarch64") { (5, 18) } else { (5, 15) };

pub(super) fn kernel_version(_: &Patient) -> Vec<Finding> {
    let uname = rustix::system::uname();
    vec![judge_version(&uname.release().to_string_lossy(), OLDEST)]
}

fn judge_version(release: &str, oldest: (u32, u32)) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let detail = format!("Linux {release}");
    if version >= oldest {
        return Finding::ok("kernel", detail);
    }
    Finding::degraded(
        "kernel",
        detail,
        format!("the BPF programs need Linux {}.{}; TCP probes connect instead", oldest.0, oldest.1),
        "run a newer kernel",
    )
}

pub(super) fn btf(_: &Patient) -> Vec<Finding> {
    let path = "/sys/kernel/btf/vmlinux";
    vec![match fs::metadata(path) {
        Ok(_) => Finding::ok("BTF", path),
        Err(error) => Finding::degraded(
            "BTF",
            format!("{path}: {error}"),
            "the BPF programs cannot be relocated for this kernel; TCP probes connect instead",
            "run a kernel built with CONFIG_DEBUG_INFO_BTF=y",
        ),
    }]
}

/// Capabilities with the operation that needs each one, and the effect of its absence.
const CAPABILITIES: &[(Capability, &str, &str)] = &[
    (
        Capability::CAP_SYS_ADMIN,
        "the agent cannot enter pod networks or mount file systems",
        "kernel-side checks of pods are lost",
    ),
    (Capability::CAP_BPF, "the agent cannot load BPF programs", "TCP probes connect instead"),
    (Capability::CAP_PERFMON, "BPF programs cannot read kernel structures", "TCP probes connect instead"),
    (
        Capability::CAP_NET_ADMIN,
        "the agent cannot attach BPF programs to the sockets of cgroups",
        "fewer hooks see listeners",
    ),
    (
        Capability::CAP_KILL,
        "the agent cannot kill processes of other users",
        "leftover processes of a pod may keep its cgroup",
    ),
    (
        Capability::CAP_SYS_RESOURCE,
        "the agent cannot lower `oom_score_adj` of a process",
        "the agent is not protected from the OOM killer; a runtime under the same restriction cannot start any sandbox \
         unless its CRI configuration sets `restrict_oom_score_adj = true`",
    ),
];

pub(super) fn privileges(_: &Patient) -> Vec<Finding> {
    let mut findings = Vec::new();
    let user = rustix::process::geteuid();
    findings.push(if user.is_root() {
        Finding::ok("user", "root")
    } else {
        Finding::missing(
            "user",
            format!("user {}", user.as_raw()),
            "the agent cannot use cgroups, the runtime's socket or pod directories",
            "run beelet as root; its systemd unit drops the privileges that it does not need",
        )
    });
    let lacking: Vec<_> = CAPABILITIES
        .iter()
        .filter(|(capability, ..)| !caps::has_cap(None, CapSet::Effective, *capability).unwrap_or(false))
        .collect();
    if lacking.is_empty() {
        findings.push(Finding::ok("capabilities", "all required capabilities"));
    }
    findings.extend(lacking.into_iter().map(|(capability, detail, consequence)| {
        Finding::degraded(
            "capabilities",
            format!("{capability} is missing: {detail}"),
            *consequence,
            "grant it with `AmbientCapabilities` and `CapabilityBoundingSet` of the unit, or in the container's capabilities",
        )
    }));
    findings
}

pub(super) fn cgroups(patient: &Patient) -> Vec<Finding> {
    let config = &patient.config;
    let cgroups =
        match Cgroups::discover(&config.cgroup_root, beelet_units::cgroup_driver::CgroupDriver::Cgroupfs) {
            Ok(cgroups) => cgroups,
            Err(error) => {
                return vec![Finding::missing(
                    "cgroups",
                    error.to_string(),
                    "the agent cannot start pods",
                    "see the error above",
                )];
            }
        };
    if let Err(error) = cgroups.paths.require_root() {
        let remedy = "correct `cgroupRoot`, or create the cgroup in every hierarchy";
        return vec![Finding::missing("cgroups", error.to_string(), "the agent refuses to start", remedy)];
    }
    let try_one = || Trial::make(&cgroups, &format!("beelet-doctor-try-{}", std::process::id()))?.remove();
    if rustix::process::geteuid().is_root()
        && let Err(error) = try_one()
    {
        // The error's text contains the fix.
        return vec![Finding::missing(
            "cgroups",
            error.to_string(),
            "the agent refuses to start",
            "see the error above",
        )];
    }
    let version = cgroups.paths.version();
    let names: Vec<String> = cgroups.paths.controllers().into_iter().collect();
    let mut findings = vec![Finding::ok("cgroups", format!("{version}, with {}", names.join(" ")))];
    if version != Version::V2 && config.fail_cgroup_v1 {
        findings.push(Finding::missing(
            "cgroups",
            format!("{version}, and the configuration sets `failCgroupV1: true`"),
            "the agent refuses to start",
            "boot with `systemd.unified_cgroup_hierarchy=1`, or remove `failCgroupV1`",
        ));
    }
    if version != Version::V2 && config.single_process_oom_kill == Some(false) {
        findings.push(Finding::missing(
            "cgroups",
            format!("{version}, and the configuration sets `singleProcessOOMKill: false`"),
            "the agent refuses to start",
            "boot with `systemd.unified_cgroup_hierarchy=1`, or remove `singleProcessOOMKill`",
        ));
    }
    if version == Version::V1 {
        findings.push(Finding::degraded(
            "cgroups",
            "no cgroup2 hierarchy is mounted",
            "BPF programs cannot attach; TCP probes connect instead",
            "mount -t cgroup2 none /sys/fs/cgroup/unified",
        ));
    }
    for (controller, consequence) in [
        ("pids", "the agent cannot enforce `podPidsLimit`"),
        ("cpuset", "the agent cannot assign CPUs"),
        ("hugetlb", "the agent cannot limit huge pages"),
    ] {
        if !names.iter().any(|name| name == controller) {
            let detail = format!("the {controller} controller is missing");
            findings.push(Finding::degraded(
                "cgroups",
                detail,
                consequence,
                "enable it in the kernel and mount it",
            ));
        }
    }
    findings
}

pub(super) fn pressure(_: &Patient) -> Vec<Finding> {
    vec![match fs::read_to_string("/proc/pressure/memory") {
        Ok(_) => Finding::ok("pressure (PSI)", "/proc/pressure"),
        Err(error) => Finding::degraded(
            "pressure (PSI)",
            format!("/proc/pressure: {error}"),
            "the agent cannot read how long processes wait for memory, CPU and disk",
            "run a kernel with `CONFIG_PSI=y`, and boot it with `psi=1`",
        ),
    }]
}

/// Checks the list of listening sockets, which confirms the programs' events and replaces them where they
/// cannot attach.
pub(super) fn sock_diag(_: &Patient) -> Vec<Finding> {
    let listed = NetnsHandle::of_process(std::process::id()).and_then(|own| own.listening(None));
    vec![match listed {
        Ok(_) => Finding::ok("sock_diag", "lists listening sockets"),
        Err(error) => Finding::degraded(
            "sock_diag",
            error.to_string(),
            "the agent cannot confirm BPF events of TCP ports; TCP probes connect where the programs cannot attach",
            "run `modprobe tcp_diag`, and add it to /etc/modules-load.d/",
        ),
    }]
}

pub(super) fn bpffs(patient: &Patient) -> Vec<Finding> {
    /// BPF_FS_MAGIC of linux/magic.h.
    const MAGIC: i64 = 0xcafe_4a11;
    let path = &patient.config.beelet.bpffs;
    let remedy = format!("run `mount -t bpf bpf {}`, or let the agent mount it", path.display());
    let consequence = "BPF maps of listeners do not survive a restart of the agent";
    vec![match rustix::fs::statfs(path.as_path()) {
        #[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
        // the field's type differs by architecture
        Ok(stat) if stat.f_type as i64 == MAGIC => Finding::ok("bpffs", path.display().to_string()),
        Ok(_) => {
            Finding::degraded("bpffs", format!("{} is not mounted", path.display()), consequence, remedy)
        }
        Err(error) => Finding::degraded("bpffs", format!("{}: {error}", path.display()), consequence, remedy),
    }]
}

/// Checks that the clock is not earlier than the build of this program.
pub(super) fn clock(_: &Patient) -> Vec<Finding> {
    let made = std::env::current_exe().and_then(fs::metadata).and_then(|metadata| metadata.modified());
    vec![judge_clock(SystemTime::now(), made.unwrap_or(SystemTime::UNIX_EPOCH))]
}

fn judge_clock(now: SystemTime, made: SystemTime) -> Finding {
    let shown = |time: SystemTime| {
        let time = jiff::Timestamp::try_from(time).unwrap_or_default();
        jiff::Timestamp::from_second(time.as_second()).unwrap_or_default().to_string()
    };
    if now.checked_add(CLOCK_SLACK).is_none_or(|now| now >= made) {
        return Finding::ok("clock", shown(now));
    }
    Finding::degraded(
        "clock",
        format!("the clock reads {}, but this program was built at {}", shown(now), shown(made)),
        "certificates of registries and servers are not valid yet; ages of pods and events are wrong",
        "set the clock and synchronise it (chrony, systemd-timesyncd)",
    )
}

/// Returns the closest existing ancestor of `path`, or `path` itself.
pub(super) fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn kernels_are_told_apart_by_their_first_two_numbers() {
        for (release, state) in [
            ("6.18.44-fc-v669", State::Ok),
            ("5.15.0-91-generic", State::Ok),
            ("5.15", State::Ok),
            ("5.14.21", State::Degraded),
            ("4.19.0", State::Degraded),
            ("unknown", State::Degraded),
        ] {
            assert_eq!(judge_version(release, (5, 15)).state, state, "{release}");
        }
        assert_eq!(judge_version("5.17.9", (5, 18)).state, State::Degraded, "arm64");
    }

    #[test]
    fn a_clock_before_the_programs_time_is_wrong() {
        let day = |days: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400);
        assert_eq!(judge_clock(day(100), day(90)).state, State::Ok);
        assert_eq!(judge_clock(day(100), day(101)).state, State::Ok);
        assert_eq!(judge_clock(day(0), day(90)).state, State::Degraded);
    }

    #[test]
    fn the_nearest_folder_that_exists_is_found() {
        assert_eq!(existing(Path::new("/proc/self/none/at/all")), Path::new("/proc/self"));
        assert_eq!(existing(Path::new("relative")), Path::new("/"));
    }
}
