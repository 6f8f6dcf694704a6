//! What may be chosen of the kernel half: whether it is used, and from what on it tells of a container that
//! waits.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Whether to use BPF.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BpfMode {
    /// As far as this kernel and these privileges allow.
    #[default]
    Auto,
    /// Nowhere: every fallback is in use.
    Off,
}

/// From what on a container's waiting is sent as an edge: how long its threads, added up, may wait within a
/// second. Zero: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PressureEdges {
    /// For a CPU that is free.
    pub run_queue_wait: ByQos,
    /// For memory that is free.
    pub reclaim: ByQos,
}

/// One duration per QoS class.
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
    /// A twentieth of a second hurts what was promised a CPU of its own, a tenth what was promised a share;
    /// what was promised nothing is reported only where it stands still for want of memory.
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self {
            run_queue_wait: ByQos { guaranteed: ms(50), burstable: ms(100), best_effort: Duration::ZERO },
            reclaim: ByQos { guaranteed: ms(50), burstable: ms(100), best_effort: ms(500) },
        }
    }
}
