//! What a pod's cgroup says, next to what it should say.

use crate::guards::CgroupRoot;
use anyhow::{Context as _, Result};

/// A pod's share of the CPU and its bounds, in the kubelet's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// `cpu.shares`; on cgroup v2, `cpu.weight` by the kubelet's linear formula.
    pub shares: u64,
    /// Microseconds of CPU time in every 100 ms; `None`: no bound.
    pub quota: Option<u64>,
    /// Bytes; `None`: no bound.
    pub memory: Option<u64>,
}

/// One value as it is and as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The file's name.
    pub file: &'static str,
    /// What it should hold.
    pub expected: String,
    /// What it holds.
    pub found: String,
}

impl Row {
    /// Returns true if the two are the same.
    pub fn ok(&self) -> bool {
        self.expected == self.found
    }
}

/// What v1's memory controller shows for "no bound": the largest multiple of the page size that fits (4 KiB
/// pages).
const V1_UNLIMITED: u64 = 0x7fff_ffff_ffff_f000;

/// Reads the values of the cgroup that the agent calls `path`, below `root`, on whichever cgroup version
/// holds the controllers.
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

/// What the agent calls the cgroup of the pod of this QoS class and uid: [`CgroupRoot::folder`] finds it.
pub fn pod_path(qos: &str, uid: &str) -> String {
    match qos {
        "Burstable" => format!("/kubepods/burstable/pod{uid}"),
        "BestEffort" => format!("/kubepods/besteffort/pod{uid}"),
        _ => format!("/kubepods/pod{uid}"),
    }
}
