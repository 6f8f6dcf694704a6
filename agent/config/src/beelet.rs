//! Wire type of `kind: BeeletConfiguration` (beelet.dev/v1alpha1).

use serde::{Deserialize, Deserializer, Serialize};

use super::TcpProbes;
use super::pressure_edges::PressureEdgesWire;
use super::tuner::TunerWire;
use super::values::GoDuration;
use beelet_policy::{
    admission::preemption,
    eviction::{EvictionSwap, MemorySignal},
    probe::{
        EdgePolicy,
        listener::QueueRule,
        settings::{Connections, ExecMode},
    },
    resources::cgroups::CpuWeightFormula,
};
use beelet_units::bpf_settings::BpfMode;

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct BeeletWire {
    pub(super) node_name: Option<String>,
    pub(super) state_dir: Option<String>,
    pub(super) run_dir: Option<String>,
    pub(super) pods_dir: Option<String>,
    pub(super) image_archives: Option<String>,
    pub(super) seccomp_profile_root: Option<String>,
    #[serde(deserialize_with = "bpf_mode")]
    pub(super) bpf: Option<BpfMode>,
    pub(super) bpffs: Option<String>,
    pub(super) pin_name: Option<String>,
    pub(super) pressure_edges: Option<PressureEdgesWire>,
    pub(super) tcp_probes: Option<TcpProbes>,
    pub(super) edge_policy: Option<EdgePolicy>,
    pub(super) liveness_canary: Option<GoDuration>,
    pub(super) liveness_stalled: Option<QueueRule>,
    pub(super) exec_probes: Option<ExecMode>,
    pub(super) exec_socket: Option<String>,
    pub(super) probe_connections: Option<Connections>,
    pub(super) critical_static_pods: Option<bool>,
    pub(super) cpu_weight_formula: Option<CpuWeightFormula>,
    pub(super) kubelet_dir: Option<String>,
    pub(super) device_plugin_wait: Option<GoDuration>,
    pub(super) stop_pods_on_exit: Option<bool>,
    pub(super) adopt_kubelet_pods: Option<bool>,
    pub(super) preemption: Option<preemption::Policy>,
    pub(super) eviction_memory_signal: Option<MemorySignal>,
    pub(super) eviction_swap: Option<EvictionSwap>,
    #[serde(rename = "containerGCMinimumAge")]
    pub(super) container_gc_minimum_age: Option<GoDuration>,
    #[serde(rename = "containerGCMaxPerPodContainer")]
    pub(super) container_gc_max_per_pod_container: Option<i64>,
    #[serde(rename = "containerGCMaxContainers")]
    pub(super) container_gc_max_containers: Option<i64>,
    pub(super) pressure_interval: Option<GoDuration>,
    pub(super) max_measured_containers: Option<i64>,
    #[serde(rename = "metricsPodUID")]
    pub(super) metrics_pod_uid: Option<bool>,
    pub(super) unauthenticated_pods: Option<bool>,
    pub(super) tuner: Option<TunerWire>,
    pub(super) autonomy: Option<AutonomyWire>,
    pub(super) node_conditions: Option<Vec<String>>,
}

/// Settings for a cluster's node whose API server is absent.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct AutonomyWire {
    pub(super) enabled: Option<bool>,
    pub(super) after: Option<GoDuration>,
    pub(super) key_file: Option<String>,
    pub(super) stateful_sets: Option<bool>,
}

/// Reads the mode from a word or a boolean: YAML reads a bare `off` as false.
fn bpf_mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<BpfMode>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "auto or off")]
    enum Spelling {
        Mode(BpfMode),
        Switch(bool),
    }
    Ok(Option::<Spelling>::deserialize(deserializer)?.map(|spelling| match spelling {
        Spelling::Mode(mode) => mode,
        Spelling::Switch(true) => BpfMode::Auto,
        Spelling::Switch(false) => BpfMode::Off,
    }))
}
