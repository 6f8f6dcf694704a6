//! A line of the table: a pod or a container, with its numbers. The columns show it, and sort by it.

/// The numbers of a pod or a container. What is not known is `None`.
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
    /// Shares of the time: CPU, memory, devices; some and full.
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
    /// The part of the limit that is used.
    pub(super) fn memory_share(&self) -> Option<f64> {
        let limit = self.memory_limit.filter(|limit| *limit > 0)?;
        Some(self.memory? as f64 / limit as f64)
    }
}

/// A line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// The pod's UID; with the container's name behind it for a container.
    pub(super) key: String,
    pub(super) is_pod: bool,
    /// Whether its containers are shown.
    pub(super) expanded: bool,
    /// `namespace/name` of a pod, a container's name.
    pub(super) name: String,
    pub(super) state: String,
    /// Why it isn't ready, or doesn't run.
    pub(super) why: String,
    /// Who made it wait, where it did.
    pub(super) waited: Vec<String>,
    pub(super) numbers: Numbers,
    /// The last seconds' run-queue p99 (CPU pressure where no program measures), oldest first.
    pub(super) trend: Vec<u64>,
}
