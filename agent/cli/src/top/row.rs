//! A row of the table: a pod or a container with its numbers, as displayed and sorted by the columns.

/// Numbers of a pod or a container; None if unknown.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Numbers {
    pub(super) ready: Option<bool>,
    pub(super) cpu: Option<f64>,
    pub(super) cpu_limit: Option<f64>,
    pub(super) throttled: Option<f64>,
    pub(super) p50: Option<f64>,
    pub(super) p99: Option<f64>,
    pub(super) preempted: Option<f64>,
    pub(super) memory: Option<u64>,
    pub(super) memory_limit: Option<u64>,
    /// Stall shares of CPU, memory and I/O as (some, full).
    pub(super) stalled: [Option<(f64, f64)>; 3],
    pub(super) retransmits: Option<f64>,
    pub(super) rx: Option<f64>,
    pub(super) tx: Option<f64>,
    pub(super) pids: Option<u64>,
    pub(super) oom_kills: u64,
    pub(super) restarts: u32,
    pub(super) age_seconds: Option<i64>,
}

impl Numbers {
    /// Returns the used share of the memory limit.
    pub(super) fn memory_share(&self) -> Option<f64> {
        let limit = self.memory_limit.filter(|limit| *limit > 0)?;
        Some(self.memory? as f64 / limit as f64)
    }
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// UID of the pod, followed by the container's name for a container.
    pub(super) key: String,
    pub(super) is_pod: bool,
    /// True if the pod's containers are shown.
    pub(super) expanded: bool,
    /// `namespace/name` of a pod, or a container's name.
    pub(super) name: String,
    pub(super) state: String,
    /// Reason why the pod is not ready or the container does not run.
    pub(super) why: String,
    /// Sentences about the causes of waits.
    pub(super) waited: Vec<String>,
    pub(super) numbers: Numbers,
    /// Run-queue p99 of the last seconds (CPU pressure without BPF programs), oldest first.
    pub(super) trend: Vec<u64>,
}
