//! Who makes cgroups, and how they are called.

use serde::{Deserialize, Serialize};

/// Names of cgroup folders; the names of the values are KubeletConfiguration's `cgroupDriver`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupDriver {
    /// `/kubepods/burstable/pod<uid>`.
    #[default]
    Cgroupfs,
    /// `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice`.
    Systemd,
}
