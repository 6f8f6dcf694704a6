//! The configuration in effect, printed so that it can be read again.

use std::collections::BTreeMap;

use beelet_codec::data;
use beelet_units::quantity::Quantity;

use super::Config;
use super::beelet::{AutonomyWire, BeeletWire};
use super::kubelet::{CrashLoopBackOffWire, KubeletWire, MemorySwapWire, TracingWire, UserNamespacesWire};
use super::server;
use super::tuner::TunerWire;
use super::unsupported;
use super::values::{Amounts, GoDuration};

pub(super) fn print(config: &Config) -> String {
    let mut text = String::new();
    for (version, kind, body) in [
        ("kubelet.config.k8s.io/v1beta1", "KubeletConfiguration", data::to_value(&kubelet(config))),
        ("beelet.dev/v1alpha1", "BeeletConfiguration", data::to_value(&beelet(config))),
    ] {
        // Plain structs of strings, numbers and maps: the writer has nothing to refuse.
        let body = body.map_err(|error| error.to_string());
        let body = body.and_then(|body| beelet_codec::yaml(&body).map_err(|error| error.to_string()));
        let body = body.unwrap_or_else(|error| format!("# cannot be printed: {error}\n"));
        text += &format!("---\napiVersion: {version}\nkind: {kind}\n{body}");
    }
    text
}

pub(super) fn kubelet_value(config: &Config) -> serde_json::Value {
    // Plain structs of strings, numbers and maps: the writer has nothing to refuse.
    let mut value = data::to_value(&kubelet(config)).unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        object.extend(unsupported::defaults());
        object.extend(unsupported::set(&config.unread));
        object.insert("kind".to_owned(), "KubeletConfiguration".into());
        object.insert("apiVersion".to_owned(), "kubelet.config.k8s.io/v1beta1".into());
    }
    value
}

fn kubelet(config: &Config) -> KubeletWire {
    let text = |path: &std::path::Path| Some(path.to_string_lossy().into_owned());
    let percents = config.qos_reserved.iter().map(|(name, percent)| (name.clone(), format!("{percent}%")));
    let (shutdown, critical) = super::shutdown::totals(&config.shutdown);
    KubeletWire {
        static_pod_path: Some(
            config.static_pod_path.as_ref().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default(),
        ),
        file_check_frequency: Some(GoDuration(config.file_check_frequency)),
        pod_logs_dir: text(&config.pod_logs_dir),
        container_runtime_endpoint: Some(config.runtime_endpoint.clone()),
        image_service_endpoint: Some(config.image_endpoint.clone()),
        runtime_request_timeout: Some(GoDuration(config.runtime_request_timeout)),
        healthz_bind_address: Some(config.healthz_address.to_string()),
        healthz_port: Some(config.healthz_port.into()),
        cgroup_root: Some(config.cgroup_root.clone()),
        cgroups_per_qos: Some(true),
        cgroup_driver: config.cgroup_driver.as_ref().and_then(word),
        fail_cgroup_v1: Some(config.fail_cgroup_v1),
        cpu_cfs_quota: Some(config.cpu_cfs_quota),
        cpu_cfs_quota_period: Some(GoDuration(config.cpu_cfs_quota_period)),
        pod_pids_limit: Some(config.pod_pids_limit),
        system_reserved: Some(amounts(&config.system_reserved)),
        kube_reserved: Some(amounts(&config.kube_reserved)),
        reserved_system_cpus: Some(config.reserved_system_cpus.clone()).filter(|cpus| !cpus.is_empty()),
        enforce_node_allocatable: Some(enforced(config)),
        system_reserved_cgroup: config.system_reserved_cgroup.as_ref().map(|cgroup| cgroup.path.clone()),
        kube_reserved_cgroup: config.kube_reserved_cgroup.as_ref().map(|cgroup| cgroup.path.clone()),
        memory_throttling_factor: config.memory_qos.and_then(|qos| qos.throttling_factor),
        memory_reservation_policy: config.memory_qos.and_then(|qos| word(&qos.reservation)),
        qos_reserved: Some(Amounts(percents.collect())),
        cluster_dns: Some(config.cluster_dns.iter().map(ToString::to_string).collect()),
        cluster_domain: Some(config.cluster_domain.clone()),
        resolv_conf: Some(
            config.resolv_conf.as_ref().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default(),
        ),
        tracing: config.tracing.as_ref().map(|tracing| TracingWire {
            endpoint: Some(tracing.endpoint.clone()),
            sampling_rate_per_million: Some(i64::from(tracing.per_million)),
        }),
        crash_loop_back_off: Some(CrashLoopBackOffWire {
            max_container_restart_period: Some(GoDuration(config.max_container_restart_period)),
        }),
        image_pull_credentials_verification_policy: word(&config.image_verification.policy),
        preloaded_images_verification_allowlist: Some(config.image_verification.allowlist.clone())
            .filter(|list| !list.is_empty()),
        fail_swap_on: Some(config.fail_swap_on),
        protect_kernel_defaults: Some(config.protect_kernel_defaults),
        memory_swap: Some(MemorySwapWire { swap_behavior: word(&config.swap_behavior) }),
        user_namespaces: Some(UserNamespacesWire { ids_per_pod: Some(config.user_ids_per_pod.into()) }),
        topology_manager_policy: word(&config.topology.0),
        topology_manager_scope: word(&config.topology.1),
        serialize_image_pulls: Some(config.parallel_image_pulls == Some(1)),
        max_parallel_image_pulls: Some(
            config.parallel_image_pulls.map_or(0, |pulls| i64::try_from(pulls).unwrap_or(i64::MAX)),
        ),
        registry_pull_qps: Some(config.registry_pull_qps.into()),
        registry_burst: Some(config.registry_burst.into()),
        container_log_max_size: Some(config.container_log_max_size.to_string()),
        container_log_max_files: i64::try_from(config.container_log_max_files).ok(),
        container_log_monitor_interval: Some(GoDuration(config.container_log_monitor_interval)),
        seccomp_default: Some(config.seccomp_default),
        allowed_unsafe_sysctls: Some(config.allowed_unsafe_sysctls.clone()),
        single_process_oom_kill: config.single_process_oom_kill,
        oom_score_adj: Some(config.oom_score_adj.into()),
        max_open_files: Some(config.max_open_files.try_into().unwrap_or(i64::MAX)),
        max_pods: Some(config.max_pods.into()),
        pod_cidr: Some(config.pod_cidr.clone()),
        pods_per_core: Some(config.pods_per_core.into()),
        image_minimum_gc_age: Some(GoDuration(config.image_gc.min_age)),
        image_maximum_gc_age: Some(GoDuration(config.image_gc.max_age)),
        image_gc_high_threshold_percent: Some(config.image_gc.high_percent),
        image_gc_low_threshold_percent: Some(config.image_gc.low_percent),
        eviction_hard: Some(Amounts(config.eviction.texts.hard.clone())),
        merge_default_eviction_settings: Some(false),
        eviction_soft: Some(Amounts(config.eviction.texts.soft.clone())),
        eviction_soft_grace_period: Some(Amounts(config.eviction.texts.soft_grace.clone())),
        eviction_pressure_transition_period: Some(GoDuration(config.eviction.pressure_transition)),
        eviction_max_pod_grace_period: Some(match config.eviction.max_pod_grace {
            Some(grace) => grace.as_secs().try_into().unwrap_or(i64::MAX),
            None => -1,
        }),
        eviction_minimum_reclaim: Some(Amounts(config.eviction.texts.min_reclaim.clone())),
        local_storage_capacity_isolation: Some(config.local_storage_isolation),
        volume_stats_agg_period: Some(GoDuration(config.volume_stats_period)),
        volume_plugin_dir: text(&config.volume_plugin_dir),
        register_node: Some(config.node.register),
        register_with_taints: Some(super::node::taint_wires(&config.node)),
        provider_id: Some(config.node.provider_id.clone()),
        node_status_update_frequency: Some(GoDuration(config.node.status_update_frequency)),
        node_status_report_frequency: Some(GoDuration(config.node.status_report_frequency)),
        node_status_max_images: Some(
            config.node.status_max_images.map_or(-1, |most| i64::try_from(most).unwrap_or(i64::MAX)),
        ),
        node_lease_duration_seconds: i64::try_from(config.node.lease_duration.as_secs()).ok(),
        event_record_qps: Some(config.node.event_qps.into()),
        event_burst: Some(config.node.event_burst.into()),
        rotate_certificates: Some(config.node.rotate_certificates),
        enable_server: Some(config.server.enabled),
        address: Some(config.server.address.to_string()),
        port: config.server.port.map(Into::into),
        read_only_port: Some(config.server.read_only_port.into()),
        tls_cert_file: config.server.tls_files.as_ref().and_then(|files| text(&files.certificate)),
        tls_private_key_file: config.server.tls_files.as_ref().and_then(|files| text(&files.key)),
        tls_cipher_suites: Some(config.server.cipher_suites.clone()),
        tls_min_version: word(&config.server.min_version),
        authentication: Some(server::authentication(&config.server)),
        authorization: Some(server::authorization(&config.server)),
        enable_debugging_handlers: Some(config.server.debugging_handlers),
        enable_system_log_handler: Some(config.server.system_logs),
        enable_system_log_query: Some(config.server.log_query),
        enable_debug_flags_handler: Some(config.server.debug_flags),
        server_tls_bootstrap: Some(config.server.tls_bootstrap),
        streaming_connection_idle_timeout: Some(GoDuration(config.server.stream_idle_timeout)),
        shutdown_grace_period: shutdown,
        shutdown_grace_period_critical_pods: critical,
        shutdown_grace_period_by_pod_priority: super::shutdown::by_priority(&config.shutdown),
    }
}

/// A value that is written as one word.
fn word(value: &impl serde::Serialize) -> Option<String> {
    data::to_value(value).ok()?.as_str().map(str::to_owned)
}

/// What is held to its amounts, by the kubelet's names.
fn enforced(config: &Config) -> Vec<String> {
    let daemons = [
        ("system-reserved", &config.system_reserved_cgroup),
        ("kube-reserved", &config.kube_reserved_cgroup),
    ];
    let named = daemons.into_iter().filter_map(|(name, cgroup)| {
        let suffix = if cgroup.as_ref()?.compressible_only { "-compressible" } else { "" };
        Some(format!("{name}{suffix}"))
    });
    std::iter::once("pods".to_owned()).chain(named).collect()
}

fn amounts(quantities: &BTreeMap<String, Quantity>) -> Amounts {
    Amounts(quantities.iter().map(|(name, quantity)| (name.clone(), quantity.to_string())).collect())
}

fn beelet(config: &Config) -> BeeletWire {
    let ours = &config.beelet;
    let text = |path: &std::path::Path| Some(path.to_string_lossy().into_owned());
    BeeletWire {
        node_name: Some(config.node_name.clone()),
        state_dir: text(&ours.state_dir),
        run_dir: text(&ours.run_dir),
        pods_dir: text(&ours.pods_dir),
        // Empty is a value here: none.
        image_archives: ours.image_archives.as_deref().and_then(text).or_else(|| Some(String::new())),
        seccomp_profile_root: text(&ours.seccomp_profile_root),
        bpf: Some(ours.bpf),
        bpffs: text(&ours.bpffs),
        pin_name: Some(ours.pin_name.clone()),
        pressure_edges: Some(super::pressure_edges::print(ours.pressure_edges)),
        tcp_probes: Some(ours.tcp_probes),
        edge_policy: Some(ours.edge_policy),
        liveness_canary: Some(GoDuration(ours.liveness_canary)),
        liveness_stalled: Some(ours.liveness_stalled),
        critical_static_pods: Some(ours.critical_static_pods),
        cpu_weight_formula: Some(ours.cpu_weight_formula),
        kubelet_dir: text(&ours.kubelet_dir),
        device_plugin_wait: Some(GoDuration(ours.device_plugin_wait)),
        stop_pods_on_exit: Some(ours.stop_pods_on_exit),
        preemption: Some(ours.preemption),
        container_gc_minimum_age: Some(GoDuration(ours.container_gc.min_age)),
        container_gc_max_per_pod_container: Some(ours.container_gc.max_per_pod_container),
        container_gc_max_containers: Some(ours.container_gc.max_containers),
        pressure_interval: Some(GoDuration(ours.pressure_interval)),
        max_measured_containers: i64::try_from(ours.max_measured_containers).ok(),
        metrics_pod_uid: Some(ours.metrics_pod_uid),
        unauthenticated_pods: Some(ours.unauthenticated_pods),
        tuner: Some(TunerWire::of(&ours.tuner)),
        autonomy: Some(AutonomyWire {
            enabled: Some(ours.autonomy.enabled),
            after: Some(GoDuration(ours.autonomy.after)),
            key_file: ours.autonomy.key_file.as_deref().and_then(text),
        }),
    }
}
