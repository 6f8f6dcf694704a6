//! Errors of cgroups, with their remedies.

use std::io;
use std::path::{Path, PathBuf};

use super::Version;

/// Failure to read, make or change a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No usable hierarchy.
    #[error(
        "no whole cgroup file system is mounted: mount cgroup2 at /sys/fs/cgroup, or run beelet outside its container"
    )]
    NotMounted,
    /// A required controller is missing.
    #[error(
        "the kernel's {controller} controller is not available to cgroups: mount its hierarchy, or enable it in the \
         root's cgroup.subtree_control{}",
        if *.controller == "memory" { "; boot with cgroup_enable=memory if the board turns it off" } else { "" }
    )]
    NoController {
        /// Name of the controller.
        controller: &'static str,
    },
    /// The systemd driver without systemd.
    #[error(
        "the cgroup driver is systemd, but systemd is not this machine's process 1 (/run/systemd/system is missing): set \
         `SystemdCgroup = false` in the runtime's configuration and `cgroupDriver: cgroupfs` in the agent's, or mount that \
         folder and /run/dbus if beelet runs in a container"
    )]
    NoSystemd,
    /// The systemd driver on version 1.
    #[error(
        "the cgroup driver is systemd, which beelet supports only on cgroup v2, but this machine's cgroups are {version}: \
         boot with `systemd.unified_cgroup_hierarchy=1`, or set `SystemdCgroup = false` in the runtime's configuration and \
         `cgroupDriver: cgroupfs` in the agent's"
    )]
    SystemdNeedsV2 {
        /// Version of the machine's cgroups.
        version: Version,
    },
    /// systemd refused, or did not answer.
    #[error(transparent)]
    Systemd(#[from] beelet_systemd::Error),
    /// The cgroup root is missing.
    #[error(
        "cgroupRoot: there is no cgroup {root} ({} is missing), and beelet makes only cgroups below it: correct the path, or \
         make the cgroup first, in every hierarchy",
        .missing.display()
    )]
    NoRoot {
        /// The root as configured.
        root: String,
        /// The missing directory.
        missing: PathBuf,
    },
    /// A path leads out of the cgroup root.
    #[error("{0:?} is not a cgroup path below the cgroup root")]
    Path(String),
    /// A path does not belong to a pod.
    #[error("{0} is not a pod's cgroup: its processes are not killed")]
    NotAPod(String),
    /// The controller of a file is in no hierarchy.
    #[error("{cgroup}: {file} cannot be set to {value:?}: no mounted hierarchy has its controller")]
    NoHierarchy {
        /// The cgroup.
        cgroup: String,
        /// The file.
        file: String,
        /// The value to write.
        value: String,
    },
    /// The kernel kept another value than the written one.
    #[error("{}: wrote {wrote:?} but the kernel keeps {kept:?}: another process may write to it too", .file.display())]
    Refused {
        /// The file.
        file: PathBuf,
        /// The written value.
        wrote: String,
        /// The file's value.
        kept: String,
    },
    /// A limit below the current usage would make the kernel kill processes at once.
    #[error(
        "{}: {limit} bytes are below the {used} in use: not written, because the kernel would kill processes at once; \
         beelet tries again when the usage fits",
        .file.display()
    )]
    WouldKill {
        /// The file.
        file: PathBuf,
        /// The requested limit.
        limit: u64,
        /// The current usage.
        used: u64,
    },
    /// The cgroup still has processes.
    #[error("{cgroup} still has processes: {}", listed(.pids))]
    NotEmpty {
        /// The cgroup.
        cgroup: String,
        /// Pids of the processes.
        pids: Vec<u32>,
    },
    /// The kernel or the file system refused an operation.
    #[error("cannot {action} {}: {source}{}", .path.display(), hint(.source, .path))]
    Io {
        /// The operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl CgroupError {
    /// Returns true if the error means that the cgroup or its file does not exist (any more).
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Io { source, .. } if super::is_gone(source))
    }

    /// Returns true if a removal failed because of processes that have not ended yet.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        match self {
            Self::NotEmpty { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::ResourceBusy,
            _ => false,
        }
    }

    /// Returns true if a request for reclaim failed because the kernel does not know its argument.
    #[must_use]
    pub fn is_unsupported_reclaim(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::InvalidInput)
    }

    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

fn listed(pids: &[u32]) -> String {
    let shown: Vec<String> = pids.iter().take(10).map(u32::to_string).collect();
    let more = if pids.len() > 10 { format!(" and {} more", pids.len() - 10) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// Explains an error of the kernel for the file.
fn hint(error: &io::Error, path: &Path) -> &'static str {
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match (error.kind(), file) {
        (io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem, _) => {
            " (beelet must be root, and cgroups mounted writable)"
        }
        (io::ErrorKind::ResourceBusy, "cgroup.subtree_control") => {
            " (a cgroup with processes of its own cannot have controllers for its children: make a cgroup below it, and \
             write each line of its cgroup.procs into that of the new one)"
        }
        (io::ErrorKind::ResourceBusy, "memory.limit_in_bytes") => {
            " (more than that is in use and cannot be reclaimed)"
        }
        (io::ErrorKind::InvalidInput, "cpu.cfs_quota_us" | "cpu.cfs_period_us") => {
            " (a cgroup cannot have a larger share of CPU than its parent, nor a smaller one than its children)"
        }
        _ => "",
    }
}
