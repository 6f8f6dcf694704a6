//! Checks the agent's own needs: directories, free space, limits, a port.

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
        Ok(_) => Finding::ok("agent", format!("running at {}", socket.display())),
        Err(_) => Finding::ok("agent", format!("not running at {}", socket.display())),
    }]
}

pub(super) fn manifests(patient: &Patient) -> Vec<Finding> {
    let check = "manifests";
    vec![match &patient.config.static_pod_path {
        None => Finding::degraded(
            check,
            "`staticPodPath` is not set",
            "the agent runs no pods from manifests",
            "set `staticPodPath` in the KubeletConfiguration and pass the file with `--config`",
        ),
        Some(path) if path.exists() => Finding::ok(check, path.display().to_string()),
        Some(path) if !existing(path).is_dir() => Finding::degraded(
            check,
            format!("{} cannot exist: {} is not a directory", path.display(), existing(path).display()),
            "the agent runs no pods from manifests",
            "set `staticPodPath` to another directory",
        ),
        Some(path) => Finding::degraded(
            check,
            format!("{} does not exist", path.display()),
            "the agent runs no pods from manifests",
            "apply a manifest: `beelet apply -f FILE` creates the directory",
        ),
    }]
}

pub(super) fn space(patient: &Patient) -> Vec<Finding> {
    let config = &patient.config;
    [
        ("state", &config.beelet.state_dir, "the agent cannot save its state"),
        ("pods", &config.beelet.pods_dir, "the agent cannot write volumes and hosts files of pods"),
        ("logs", &config.pod_logs_dir, "container logs are truncated, and containers may stop"),
    ]
    .into_iter()
    .map(|(check, path, consequence)| {
        // A missing directory will be created in its closest existing ancestor.
        match rustix::fs::statvfs(existing(path)) {
            Ok(stat) => {
                let free = stat.f_bavail.saturating_mul(stat.f_frsize);
                // File systems without an inode limit report 0.
                let inodes = if stat.f_files == 0 { u64::MAX } else { stat.f_favail };
                judge_space(check, path, free, inodes, consequence)
            }
            Err(error) => {
                let detail = format!("{}: {error}", path.display());
                Finding::missing(check, detail, consequence, "create the directory, or configure another")
            }
        }
    })
    .collect()
}

/// Reports the results of the daemon's own start checks.
pub(super) fn start(patient: &Patient) -> Vec<Finding> {
    let judge = |&(setting, ref refused): &(&'static str, anyhow::Result<()>)| match refused {
        Ok(()) => Finding::ok(setting, "valid"),
        Err(why) => Finding::missing(
            setting,
            crate::with_causes(why),
            "the agent refuses to start",
            "see the error above",
        ),
    };
    patient.refused.iter().map(judge).collect()
}

/// Reports the settings that the agent only warns about.
pub(super) fn warned(patient: &Patient) -> Vec<Finding> {
    let (config, mut findings) = (&patient.config, Vec::new());
    if let Some(path) = config.resolv_conf.as_ref().filter(|path| !path.is_file()) {
        findings.push(Finding::degraded(
            "resolvConf",
            format!("{} is not a file", path.display()),
            "pods wait until the file exists",
            "set `resolvConf` to another file, or to `\"\"` for none",
        ));
    }
    if let Some(path) = config.beelet.image_archives.as_ref().filter(|path| path.exists() && !path.is_dir()) {
        findings.push(Finding::degraded(
            "imageArchives",
            format!("{} is not a directory", path.display()),
            "the agent imports no images from there",
            "set `imageArchives` to a directory",
        ));
    }
    findings
}

/// Reports the way in which volume sizes are measured.
pub(super) fn quotas(patient: &Patient) -> Vec<Finding> {
    let walked = "the agent measures volumes by walking them, within 1 % of a core";
    vec![match quota::counted(&patient.config.beelet.pods_dir) {
        Ok(()) => Finding::ok("volume sizes", "counted by the kernel per project quota"),
        Err(Uncounted::Off(why)) => Finding::ok("volume sizes", format!("{walked}: {why}")),
        Err(Uncounted::Refused(why)) => {
            Finding::degraded("volume sizes", why, walked, "allow the system call quotactl_fd")
        }
    }]
}

/// Checks that pods get the configured time to terminate when the machine shuts down.
pub(super) fn shutdown(patient: &Patient) -> Vec<Finding> {
    let (check, periods) = ("shutdown", &patient.config.shutdown);
    if periods.is_off() {
        return vec![Finding::ok(
            check,
            "the machine shuts down without waiting for pods (`shutdownGracePeriod` is 0)",
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
            format!("pods should get {wanted} s when the machine shuts down, but {error}"),
            "pods get only the time that the init system allows",
            "run `apt-get install dbus && systemctl enable --now dbus systemd-logind`",
        ),
        // The agent raises the delay itself, so a failure shows only while an agent runs.
        Ok(longest) if longest < periods.total() && UnixStream::connect(patient.config.socket()).is_ok() => {
            Finding::degraded(
                check,
                format!("logind waits at most {} s, but pods should get {wanted} s", longest.as_secs()),
                "pods that take longer are killed",
                format!(
                    "set `InhibitDelayMaxSec={}` in /etc/systemd/logind.conf",
                    periods.needed_delay().as_secs()
                ),
            )
        }
        Ok(_) => {
            Finding::ok(check, format!("pods get {wanted} s to terminate before the machine shuts down"))
        }
    }]
}

fn judge_space(check: &'static str, path: &Path, free: u64, inodes: u64, consequence: &str) -> Finding {
    let detail = format!("{}: {} MiB free", path.display(), free / MIB);
    let remedy = "free space on its file system, or configure another directory";
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
        Ok(_) => Finding::ok(check, format!("{instances} instances and {watches} watches per user")),
        Err(error) => Finding::degraded(
            check,
            format!("cannot create an instance ({error}); the limit is {instances} per user"),
            "the agent notices manifest changes only every `fileCheckFrequency`",
            "run `sysctl fs.inotify.max_user_instances=1024`",
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
    // A pod has at least a shim with a dozen threads, a pause process and a container.
    let needed = USUAL_PODS * 32;
    let detail = format!("{limit} processes and threads on this machine");
    if limit >= needed {
        return Finding::ok("process ids", detail);
    }
    Finding::degraded(
        "process ids",
        detail,
        format!(
            "{USUAL_PODS} pods (the default of `maxPods`) need about {needed}; the last pods would not start"
        ),
        "run `sysctl kernel.pid_max=4194304 kernel.threads-max=4194304`",
    )
}

pub(super) fn port(patient: &Patient) -> Vec<Finding> {
    let config = &patient.config;
    if config.healthz_port == 0 {
        return vec![Finding::ok("health port", "disabled")];
    }
    let address = (config.healthz_address, config.healthz_port);
    let detail = format!("{}:{}", address.0, address.1);
    vec![match TcpListener::bind(address) {
        Ok(_) => Finding::ok("health port", format!("{detail} is free")),
        Err(_) if UnixStream::connect(config.socket()).is_ok() => {
            Finding::ok("health port", format!("{detail} is in use, and an agent is running"))
        }
        Err(error) => Finding::missing(
            "health port",
            format!("{detail}: {error}"),
            "the agent refuses to start without its health and metrics server",
            "stop the process that uses it (a kubelet?), or set another `healthzPort` (0 disables it)",
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
