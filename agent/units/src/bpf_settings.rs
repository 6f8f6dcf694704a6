//! Settings of the kernel programs: their use, and the thresholds of pressure edges.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Use of BPF.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BpfMode {
    /// Use as much BPF as this kernel and these privileges allow.
    #[default]
    Auto,
    /// Use no BPF, only fallbacks.
    Off,
}

/// Thresholds of a container's pressure edges: total wait of its threads within a second above which the
/// programs send an edge. Zero: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PressureEdges {
    /// Wait for a free CPU.
    pub run_queue_wait: ByQos,
    /// Wait for free memory.
    pub reclaim: ByQos,
}

/// A duration per QoS class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByQos {
    /// Guaranteed pods.
    pub guaranteed: Duration,
    /// Burstable pods.
    pub burstable: Duration,
    /// BestEffort pods.
    pub best_effort: Duration,
}

impl Default for PressureEdges {
    /// A twentieth of a second hurts a pod with CPUs of its own (Guaranteed), a tenth a pod with a share
    /// (Burstable); a BestEffort pod is reported only when it stands still for lack of memory.
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self {
            run_queue_wait: ByQos { guaranteed: ms(50), burstable: ms(100), best_effort: Duration::ZERO },
            reclaim: ByQos { guaranteed: ms(50), burstable: ms(100), best_effort: ms(500) },
        }
    }
}
