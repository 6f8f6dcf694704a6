//! Errors of the kernel half, each with a remedy for the administrator.

use super::btf::BtfError;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Error of the kernel half or of a part of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The configuration turns BPF off.
    #[error("BPF is switched off")]
    Off,
    /// This kernel lacks a type, a field or a tracepoint that programs read.
    #[error(transparent)]
    Missing(#[from] BtfError),
    /// The kernel or the system refused a call.
    #[error("{message}")]
    Refused {
        /// The attempted operation and its error.
        message: String,
        /// Kind of the error, if known.
        kind: Option<ErrorKind>,
    },
    /// Programs cannot be attached to the pods' cgroup.
    #[error("{0}")]
    Cgroup(String),
    /// A map could not be used.
    #[error("could not use the BPF map {map}: {why}")]
    Map {
        /// Name of the map.
        map: String,
        /// The reason.
        why: String,
    },
    /// A bpf file system for pins is missing. Everything but the pins works without it.
    #[error("{why}")]
    NoFileSystem {
        /// Expected mount point.
        bpffs: PathBuf,
        /// The reason.
        why: String,
    },
    /// The place for pins holds foreign files.
    #[error("{0}")]
    Foreign(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl KernelError {
    pub(super) fn new(message: impl Into<String>) -> KernelError {
        KernelError::Failed(message.into())
    }

    pub(super) fn map(name: &str, error: &dyn std::fmt::Display) -> KernelError {
        KernelError::Map { map: name.to_owned(), why: error.to_string() }
    }

    /// Wraps the error of a system call.
    pub(super) fn io(what: &str, error: &std::io::Error) -> KernelError {
        KernelError::Refused { message: format!("{what}: {error}"), kind: Some(error.kind()) }
    }

    /// Wraps an error of aya's, with the causes that help the administrator.
    pub(super) fn refused(what: &str, error: &(dyn std::error::Error + 'static)) -> KernelError {
        let (mut kind, mut innermost, mut cause) = (None, String::new(), Some(error));
        while let Some(current) = cause {
            if let Some(io) = current.downcast_ref::<std::io::Error>() {
                kind = Some(io.kind());
            }
            innermost = current.to_string();
            cause = current.source();
        }
        let top = error.to_string();
        // The verifier's log is long. Its last lines before its statistics name the reason.
        let statistics = ["verification time", "stack depth", "processed "];
        let is_reason =
            |line: &&str| !line.trim().is_empty() && !statistics.iter().any(|word| line.starts_with(word));
        let mut lines: Vec<&str> = top.lines().rev().filter(is_reason).take(3).collect();
        lines.reverse();
        let top = lines.join("; ");
        let message = if top.contains(&innermost) {
            format!("{what}: {top}")
        } else {
            format!("{what}: {top}: {innermost}")
        };
        KernelError::Refused { message, kind }
    }

    /// Returns the remedy, a sentence for the administrator.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Off => "set bpf: Auto in the configuration",
            Self::Missing(_) => "use a kernel from 5.15 on (arm64: 5.18), built with CONFIG_DEBUG_INFO_BTF",
            Self::Refused { kind: Some(ErrorKind::PermissionDenied), .. } => {
                "run as root with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN; in a container also allow bpf(2) in its seccomp \
                 profile; see /sys/kernel/security/lockdown and the sysctl kernel.unprivileged_bpf_disabled"
            }
            Self::Refused { kind: Some(ErrorKind::NotFound), .. } => {
                "use a kernel built with CONFIG_DEBUG_INFO_BTF and CONFIG_BPF_SYSCALL"
            }
            Self::Cgroup(_) => {
                "mount cgroup2 (next to v1: mount -t cgroup2 none /sys/fs/cgroup/unified) and check cgroupRoot"
            }
            Self::NoFileSystem { bpffs, .. } => {
                return format!("mount one: mount -t bpf bpf {}", bpffs.display());
            }
            Self::Foreign(_) => "inspect it with `bpftool`; then remove it, or set another pinName",
            Self::Refused { .. } | Self::Map { .. } | Self::Failed(_) => {
                "please report it with the kernel's version and this message"
            }
        }
        .to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_a_remedy_that_fits_its_kind() {
        let check = |error: KernelError, expected: &str| {
            let remedy = error.remedy();
            assert!(remedy.contains(expected), "{error}: {remedy}");
        };
        let refused = |kind| KernelError::io("it failed", &kind);
        check(KernelError::Off, "bpf: Auto");
        check(BtfError::NoType("struct net".to_owned()).into(), "5.15");
        check(refused(ErrorKind::PermissionDenied.into()), "CAP_BPF");
        check(refused(ErrorKind::NotFound.into()), "CONFIG_BPF_SYSCALL");
        check(refused(ErrorKind::OutOfMemory.into()), "report");
        check(KernelError::Cgroup("/x is not a cgroup2 folder".to_owned()), "mount -t cgroup2");
        let why = "not mounted".to_owned();
        check(KernelError::NoFileSystem { bpffs: "/bpf".into(), why }, "mount -t bpf bpf /bpf");
        check(KernelError::Foreign("/bpf/beelet is not a folder".to_owned()), "pinName");
    }

    #[test]
    fn a_verifiers_log_is_cut_to_its_reason() {
        #[derive(Debug, thiserror::Error)]
        #[error("the log\n0: r1\n\n1: R1 invalid mem access\nprocessed 2 insns\nverification time 5 usec")]
        struct Log(#[source] std::io::Error);
        let error = KernelError::refused("refused", &Log(ErrorKind::PermissionDenied.into()));
        let message = "refused: the log; 0: r1; 1: R1 invalid mem access: permission denied".to_owned();
        assert_eq!(error, KernelError::Refused { message, kind: Some(ErrorKind::PermissionDenied) });
    }
}
