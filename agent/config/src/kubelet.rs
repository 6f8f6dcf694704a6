//! Wire type of `kind: KubeletConfiguration` (kubelet.config.k8s.io/v1beta1), with the fields that have an
//! effect.
//!
//! All fields are optional; [`super::resolve`] sets the defaults.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::values::{Amounts, GoDuration};

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct KubeletWire {
    pub(super) static_pod_path: Option<String>,
    pub(super) file_check_frequency: Option<GoDuration>,
    pub(super) pod_logs_dir: Option<String>,
    pub(super) container_runtime_endpoint: Option<String>,
    pub(super) image_service_endpoint: Option<String>,
    pub(super) runtime_request_timeout: Option<GoDuration>,
    pub(super) healthz_bind_address: Option<String>,
    pub(super) healthz_port: Option<i64>,
    pub(super) cgroup_root: Option<String>,
    #[serde(rename = "cgroupsPerQOS")]
    pub(super) cgroups_per_qos: Option<bool>,
    pub(super) cgroup_driver: Option<String>,
    #[serde(rename = "failCgroupV1")]
    pub(super) fail_cgroup_v1: Option<bool>,
    #[serde(rename = "cpuCFSQuota")]
    pub(super) cpu_cfs_quota: Option<bool>,
    #[serde(rename = "cpuCFSQuotaPeriod")]
    pub(super) cpu_cfs_quota_period: Option<GoDuration>,
    pub(super) pod_pids_limit: Option<i64>,
    pub(super) system_reserved: Option<Amounts>,
    pub(super) kube_reserved: Option<Amounts>,
    #[serde(rename = "reservedSystemCPUs", skip_serializing_if = "Option::is_none")]
    pub(super) reserved_system_cpus: Option<String>,
    pub(super) enforce_node_allocatable: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) system_reserved_cgroup: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kube_reserved_cgroup: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_throttling_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_reservation_policy: Option<String>,
    #[serde(rename = "singleProcessOOMKill", skip_serializing_if = "Option::is_none")]
    pub(super) single_process_oom_kill: Option<bool>,
    pub(super) qos_reserved: Option<Amounts>,
    #[serde(rename = "clusterDNS")]
    pub(super) cluster_dns: Option<Vec<String>>,
    pub(super) cluster_domain: Option<String>,
    pub(super) resolv_conf: Option<String>,
    pub(super) crash_loop_back_off: Option<CrashLoopBackOffWire>,
    pub(super) fail_swap_on: Option<bool>,
    pub(super) protect_kernel_defaults: Option<bool>,
    pub(super) memory_swap: Option<MemorySwapWire>,
    pub(super) user_namespaces: Option<UserNamespacesWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) feature_gates: Option<BTreeMap<String, bool>>,
    pub(super) cpu_manager_policy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cpu_manager_policy_options: Option<BTreeMap<String, String>>,
    pub(super) cpu_manager_reconcile_period: Option<GoDuration>,
    pub(super) memory_manager_policy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reserved_memory: Option<Vec<ReservedMemoryWire>>,
    pub(super) topology_manager_policy: Option<String>,
    pub(super) topology_manager_scope: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) topology_manager_policy_options: Option<BTreeMap<String, String>>,
    pub(super) serialize_image_pulls: Option<bool>,
    pub(super) max_parallel_image_pulls: Option<i64>,
    pub(super) image_pull_credentials_verification_policy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) preloaded_images_verification_allowlist: Option<Vec<String>>,
    #[serde(rename = "registryPullQPS")]
    pub(super) registry_pull_qps: Option<i64>,
    pub(super) registry_burst: Option<i64>,
    pub(super) container_log_max_size: Option<String>,
    pub(super) container_log_max_files: Option<i64>,
    pub(super) container_log_monitor_interval: Option<GoDuration>,
    pub(super) seccomp_default: Option<bool>,
    pub(super) allowed_unsafe_sysctls: Option<Vec<String>>,
    pub(super) oom_score_adj: Option<i64>,
    pub(super) max_open_files: Option<i64>,
    pub(super) max_pods: Option<i64>,
    #[serde(rename = "podCIDR")]
    pub(super) pod_cidr: Option<String>,
    pub(super) pods_per_core: Option<i64>,
    #[serde(rename = "imageMinimumGCAge")]
    pub(super) image_minimum_gc_age: Option<GoDuration>,
    #[serde(rename = "imageMaximumGCAge")]
    pub(super) image_maximum_gc_age: Option<GoDuration>,
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub(super) image_gc_high_threshold_percent: Option<i64>,
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub(super) image_gc_low_threshold_percent: Option<i64>,
    pub(super) eviction_hard: Option<Amounts>,
    pub(super) merge_default_eviction_settings: Option<bool>,
    pub(super) eviction_soft: Option<Amounts>,
    pub(super) eviction_soft_grace_period: Option<Amounts>,
    pub(super) eviction_pressure_transition_period: Option<GoDuration>,
    pub(super) eviction_max_pod_grace_period: Option<i64>,
    pub(super) eviction_minimum_reclaim: Option<Amounts>,
    pub(super) local_storage_capacity_isolation: Option<bool>,
    pub(super) volume_stats_agg_period: Option<GoDuration>,
    pub(super) volume_plugin_dir: Option<String>,
    pub(super) register_node: Option<bool>,
    pub(super) register_with_taints: Option<Vec<TaintWire>>,
    #[serde(rename = "providerID")]
    pub(super) provider_id: Option<String>,
    pub(super) node_status_update_frequency: Option<GoDuration>,
    pub(super) node_status_report_frequency: Option<GoDuration>,
    pub(super) node_status_max_images: Option<i64>,
    pub(super) node_lease_duration_seconds: Option<i64>,
    #[serde(rename = "eventRecordQPS")]
    pub(super) event_record_qps: Option<i64>,
    pub(super) event_burst: Option<i64>,
    pub(super) rotate_certificates: Option<bool>,
    pub(super) enable_server: Option<bool>,
    pub(super) address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) port: Option<i64>,
    pub(super) read_only_port: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tls_cert_file: Option<String>,
    #[serde(rename = "serverTLSBootstrap")]
    pub(super) server_tls_bootstrap: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tls_private_key_file: Option<String>,
    pub(super) tls_cipher_suites: Option<Vec<String>>,
    pub(super) tls_min_version: Option<String>,
    pub(super) authentication: Option<AuthenticationWire>,
    pub(super) authorization: Option<AuthorizationWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tracing: Option<TracingWire>,
    pub(super) enable_debugging_handlers: Option<bool>,
    pub(super) enable_system_log_handler: Option<bool>,
    pub(super) enable_debug_flags_handler: Option<bool>,
    pub(super) enable_system_log_query: Option<bool>,
    pub(super) streaming_connection_idle_timeout: Option<GoDuration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shutdown_grace_period: Option<GoDuration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shutdown_grace_period_critical_pods: Option<GoDuration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shutdown_grace_period_by_pod_priority: Option<Vec<ShutdownPeriodWire>>,
}

/// Memory reserved on a NUMA node.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct ReservedMemoryWire {
    pub(super) numa_node: i64,
    pub(super) limits: Amounts,
}

/// Grace period at the machine's shutdown for pods of at least this priority.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct ShutdownPeriodWire {
    pub(super) priority: i32,
    pub(super) shutdown_grace_period_seconds: i64,
}

/// A taint in the form of a v1.Node.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct TaintWire {
    pub(super) key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    pub(super) effect: String,
    /// Set by the API server; a file may contain it, copied from a Node.
    #[serde(skip_serializing)]
    pub(super) time_added: Option<serde_json::Value>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct MemorySwapWire {
    pub(super) swap_behavior: Option<String>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct UserNamespacesWire {
    #[serde(rename = "idsPerPod")]
    pub(super) ids_per_pod: Option<i64>,
}

/// component-base's TracingConfiguration.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct TracingWire {
    pub(super) endpoint: Option<String>,
    pub(super) sampling_rate_per_million: Option<i64>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct CrashLoopBackOffWire {
    pub(super) max_container_restart_period: Option<GoDuration>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct AuthenticationWire {
    pub(super) x509: Option<X509Wire>,
    pub(super) webhook: Option<WebhookAuthenticationWire>,
    pub(super) anonymous: Option<AnonymousWire>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct X509Wire {
    #[serde(rename = "clientCAFile", skip_serializing_if = "Option::is_none")]
    pub(super) client_ca_file: Option<String>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct WebhookAuthenticationWire {
    pub(super) enabled: Option<bool>,
    #[serde(rename = "cacheTTL")]
    pub(super) cache_ttl: Option<GoDuration>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct AnonymousWire {
    pub(super) enabled: Option<bool>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct AuthorizationWire {
    pub(super) mode: Option<String>,
    pub(super) webhook: Option<WebhookAuthorizationWire>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct WebhookAuthorizationWire {
    #[serde(rename = "cacheAuthorizedTTL")]
    pub(super) cache_authorized_ttl: Option<GoDuration>,
    #[serde(rename = "cacheUnauthorizedTTL")]
    pub(super) cache_unauthorized_ttl: Option<GoDuration>,
}
