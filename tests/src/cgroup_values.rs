//! Comparison of the values in a pod's cgroup with the expected ones.

use crate::guards::CgroupRoot;
use anyhow::{Context as _, Result};

/// CPU share and limits of a pod, in the kubelet's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// `cpu.shares`; on cgroup v2, `cpu.weight` by the kubelet's linear formula.
    pub shares: u64,
    /// Microseconds of CPU time per 100 ms; `None`: unlimited.
    pub quota: Option<u64>,
    /// Bytes; `None`: unlimited.
    pub memory: Option<u64>,
}

/// Expected and actual value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Name of the file.
    pub file: &'static str,
    /// Expected content.
    pub expected: String,
    /// Actual content.
    pub found: String,
}

impl Row {
    /// Returns true if the values are equal.
    pub fn ok(&self) -> bool {
        self.expected == self.found
    }
}

/// Value of v1's memory controller for "unlimited": the largest multiple of the page size (4 KiB) that fits.
const V1_UNLIMITED: u64 = 0x7fff_ffff_ffff_f000;

/// Compares the values of the cgroup with the agent's path `path` below `root`, on the cgroup version that
/// has the controllers.
pub fn check(root: &CgroupRoot, path: &str, expected: Expected) -> Result<Vec<Row>> {
    let dir = |controller: &str| {
        root.folder(controller, path).with_context(|| format!("no cgroup hierarchy has {controller}"))
    };
    let (cpu, memory) = (dir("cpu")?, dir("memory")?);
    let row = |folder: &std::path::Path, file: &'static str, expected: String| {
        let found = crate::workdir::read(&folder.join(file))?.trim().to_owned();
        Ok::<_, anyhow::Error>(Row { file, expected, found })
    };
    if cpu.join("cpu.shares").exists() {
        let quota = expected.quota.map_or("-1".to_owned(), |quota| quota.to_string());
        let bytes = expected.memory.unwrap_or(V1_UNLIMITED).to_string();
        return Ok(vec![
            row(&cpu, "cpu.shares", expected.shares.to_string())?,
            row(&cpu, "cpu.cfs_quota_us", quota)?,
            row(&memory, "memory.limit_in_bytes", bytes)?,
        ]);
    }
    // KEP-2254: shares 2..=262144 onto weight 1..=10000.
    let weight = 1 + (expected.shares.max(2) - 2) * 9999 / 262_142;
    let quota = expected.quota.map_or("max".to_owned(), |quota| quota.to_string());
    Ok(vec![
        row(&cpu, "cpu.weight", weight.to_string())?,
        row(&cpu, "cpu.max", format!("{quota} 100000"))?,
        row(&memory, "memory.max", expected.memory.map_or("max".to_owned(), |bytes| bytes.to_string()))?,
    ])
}

/// Returns the agent's path of a pod's cgroup, given QoS class and UID; [`CgroupRoot::folder`] finds its
/// folder.
pub fn pod_path(qos: &str, uid: &str) -> String {
    match qos {
        "Burstable" => format!("/kubepods/burstable/pod{uid}"),
        "BestEffort" => format!("/kubepods/besteffort/pod{uid}"),
        _ => format!("/kubepods/pod{uid}"),
    }
}
