//! Cgroup drivers, and the names of their cgroups.

use serde::{Deserialize, Serialize};

/// Driver of the cgroups; the values are those of KubeletConfiguration's `cgroupDriver`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupDriver {
    /// `/kubepods/burstable/pod<uid>`.
    #[default]
    Cgroupfs,
    /// `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice`.
    Systemd,
}
