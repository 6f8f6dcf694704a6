//! What the agent needs of this machine for itself and its pods: folders, space, limits, a port.

use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::machine::existing;
use super::{Finding, Patient};
use beelet_bpf::quota::{self, Uncounted};
use beelet_systemd::logind::Logind;

const MIB: u64 = 1 << 20;
/// The kubelet's default of maxPods.
const USUAL_PODS: u64 = 110;

pub(super) fn running(patient: &Patient) -> Vec<Finding> {
    let socket = patient.config.socket();
    vec![match UnixStream::connect(&socket) {
        Ok(_) => Finding::ok("agent", format!("one is running, at {}", socket.display())),
        Err(_) => Finding::ok("agent", format!("none is running at {}", socket.display())),
    }]
}

pub(super) fn manifests(patient: &Patient) -> Vec<Finding> {
    let check = "manifests";
    vec![match &patient.config.static_pod_path {
        None => Finding::degraded(
            check,
            "no staticPodPath is configured",
            "the agent has no pods to run",
            "set staticPodPath in the KubeletConfiguration, and give the file with --config",
        ),
        Some(path) if path.exists() => Finding::ok(check, path.display().to_string()),
        Some(path) if !existing(path).is_dir() => Finding::degraded(
            check,
            format!("{} cannot be there: {} is no folder", path.display(), existing(path).display()),
            "there are no pods",
            "name another folder as staticPodPath",
        ),
        Some(path) => Finding::degraded(
            check,
            format!("{} does not exist", path.display()),
            "there are no pods until it does",
            "apply a manifest: `beelet apply -f FILE` makes the folder",
        ),
    }]
}

pub(super) fn space(patient: &Patient) -> Vec<Finding> {
    let config = &patient.config;
    [
        ("state", &config.beelet.state_dir, "what must survive a restart cannot be kept"),
        ("pods", &config.beelet.pods_dir, "pods' volumes and hosts files cannot be written"),
        ("logs", &config.pod_logs_dir, "containers' logs are cut off, and containers may stop"),
    ]
    .into_iter()
    .map(|(check, path, consequence)| {
        // What does not exist yet will be made in the nearest folder that does.
        match rustix::fs::statvfs(existing(path)) {
            Ok(stat) => {
                let free = stat.f_bavail.saturating_mul(stat.f_frsize);
                // Some file systems have no inode limit and say 0.
                let inodes = if stat.f_files == 0 { u64::MAX } else { stat.f_favail };
                judge_space(check, path, free, inodes, consequence)
            }
            Err(error) => {
                let detail = format!("{}: {error}", path.display());
                Finding::missing(
                    check,
                    detail,
                    consequence,
                    "make the folder, or name another in the configuration",
                )
            }
        }
    })
    .collect()
}

/// What the daemon's own checks say of a start.
pub(super) fn start(patient: &Patient) -> Vec<Finding> {
    let judge = |&(setting, ref refused): &(&'static str, anyhow::Result<()>)| match refused {
        Ok(()) => Finding::ok(setting, "the agent can start with it"),
        Err(why) => {
            Finding::missing(setting, crate::with_causes(why), "the agent refuses to start", "as said above")
        }
    };
    patient.refused.iter().map(judge).collect()
}

/// What the agent starts without, but warns of.
pub(super) fn warned(patient: &Patient) -> Vec<Finding> {
    let (config, mut findings) = (&patient.config, Vec::new());
    if let Some(path) = config.resolv_conf.as_ref().filter(|path| !path.is_file()) {
        findings.push(Finding::degraded(
            "resolvConf",
            format!("{} is no file", path.display()),
            "pods wait until it is",
            "name another file, or \"\" for none, as resolvConf",
        ));
    }
    if let Some(path) = config.beelet.image_archives.as_ref().filter(|path| path.exists() && !path.is_dir()) {
        findings.push(Finding::degraded(
            "imageArchives",
            format!("{} is no folder", path.display()),
            "no image is taken from there",
            "name a folder as imageArchives",
        ));
    }
    findings
}

/// How the sizes of pods' volumes are found.
pub(super) fn quotas(patient: &Patient) -> Vec<Finding> {
    let walked = "volumes are measured by walking through them, within 1 % of a core";
    vec![match quota::counted(&patient.config.beelet.pods_dir) {
        Ok(()) => Finding::ok("volume sizes", "counted by the kernel, by project"),
        Err(Uncounted::Off(why)) => Finding::ok("volume sizes", format!("{walked}: {why}")),
        Err(Uncounted::Refused(why)) => {
            Finding::degraded("volume sizes", why, walked, "allow the system call quotactl_fd")
        }
    }]
}

/// Whether pods get the time to end that the configuration gives them when the machine goes down.
pub(super) fn shutdown(patient: &Patient) -> Vec<Finding> {
    let (check, periods) = ("shutdown", &patient.config.shutdown);
    if periods.is_off() {
        return vec![Finding::ok(
            check,
            "the machine goes down without waiting for pods (shutdownGracePeriod is 0)",
        )];
    }
    let wanted = periods.total().as_secs();
    let asked = async { Logind::connect(None).await?.longest_delay().await };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let asked = runtime
        .map_err(|error| error.to_string())
        .and_then(|runtime| runtime.block_on(asked).map_err(|error| error.to_string()));
    vec![match asked {
        Err(error) => Finding::degraded(
            check,
            format!("pods are to get {wanted} s when the machine goes down, but {error}"),
            "they get what the init system gives them",
            "apt-get install dbus && systemctl enable --now dbus systemd-logind",
        ),
        // The agent raises it by itself; that it could not shows only while one runs.
        Ok(longest) if longest < periods.total() && UnixStream::connect(patient.config.socket()).is_ok() => {
            Finding::degraded(
                check,
                format!("logind waits {} s at most, and pods are to get {wanted} s", longest.as_secs()),
                "pods that take longer are cut off",
                format!(
                    "set InhibitDelayMaxSec={} in /etc/systemd/logind.conf",
                    periods.needed_delay().as_secs()
                ),
            )
        }
        Ok(_) => Finding::ok(check, format!("pods get {wanted} s to end before the machine goes down")),
    }]
}

fn judge_space(check: &'static str, path: &Path, free: u64, inodes: u64, consequence: &str) -> Finding {
    let detail = format!("{}: {} MiB free", path.display(), free / MIB);
    let remedy = "free some space in its file system, or name another folder in the configuration";
    match (free, inodes) {
        (..MIB, _) | (_, ..16) => Finding::missing(check, detail, consequence, remedy),
        (free, inodes) if free < 64 * MIB || inodes < 1024 => {
            Finding::degraded(check, detail, consequence, remedy)
        }
        _ => Finding::ok(check, detail),
    }
}

pub(super) fn inotify(_: &Patient) -> Vec<Finding> {
    let check = "inotify";
    let limit = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/fs/inotify/{name}")).unwrap_or_default();
        text.trim().to_owned()
    };
    let (instances, watches) = (limit("max_user_instances"), limit("max_user_watches"));
    vec![match inotify::Inotify::init() {
        Ok(_) => Finding::ok(check, format!("{instances} instances and {watches} watches a user")),
        Err(error) => Finding::degraded(
            check,
            format!("no instance can be had ({error}); the limit is {instances} a user"),
            "a changed manifest is seen only every fileCheckFrequency",
            "sysctl fs.inotify.max_user_instances=1024",
        ),
    }]
}

pub(super) fn processes(_: &Patient) -> Vec<Finding> {
    let read = |name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    vec![judge_processes(read("pid_max").min(read("threads-max")))]
}

fn judge_processes(limit: u64) -> Finding {
    // A pod is at least a shim of a dozen threads, a pause process and a container.
    let needed = USUAL_PODS * 32;
    let detail = format!("{limit} processes and threads on this machine");
    if limit >= needed {
        return Finding::ok("process ids", detail);
    }
    Finding::degraded(
        "process ids",
        detail,
        format!("{USUAL_PODS} pods, a usual number, take about {needed}: the last of them would not start"),
        "sysctl kernel.pid_max=4194304 kernel.threads-max=4194304",
    )
}

pub(super) fn port(patient: &Patient) -> Vec<Finding> {
    let config = &patient.config;
    if config.healthz_port == 0 {
        return vec![Finding::ok("health port", "none is configured")];
    }
    let address = (config.healthz_address, config.healthz_port);
    let detail = format!("{}:{}", address.0, address.1);
    vec![match TcpListener::bind(address) {
        Ok(_) => Finding::ok("health port", format!("{detail} is free")),
        Err(_) if UnixStream::connect(config.socket()).is_ok() => {
            Finding::ok("health port", format!("{detail} is taken, and an agent is running"))
        }
        Err(error) => Finding::missing(
            "health port",
            format!("{detail}: {error}"),
            "the agent does not start when it cannot serve health and metrics",
            "stop what is on it (a kubelet?), or set another healthzPort (0: none)",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn little_space_degrades_and_none_is_missing() {
        let judge = |free, inodes| judge_space("state", Path::new("/x"), free, inodes, "c").state;
        assert_eq!(judge(10 << 30, u64::MAX), State::Ok);
        assert_eq!(judge(63 * MIB, u64::MAX), State::Degraded);
        assert_eq!(judge(10 << 30, 1000), State::Degraded);
        assert_eq!(judge(1000, u64::MAX), State::Missing);
        assert_eq!(judge(10 << 30, 0), State::Missing);
    }

    #[test]
    fn pods_need_process_ids() {
        assert_eq!(judge_processes(4_194_304).state, State::Ok);
        assert_eq!(judge_processes(32_768).state, State::Ok);
        assert_eq!(judge_processes(2_048).state, State::Degraded);
        assert_eq!(judge_processes(0).state, State::Degraded);
    }
}
