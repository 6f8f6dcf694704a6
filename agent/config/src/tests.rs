mod page;
mod v1beta1;

use std::io::Write;
use std::net::Ipv4Addr;

use super::*;

fn load(text: &str) -> Result<(Config, Vec<Warning>), ConfigFaults> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    Config::load(file.path())
}

/// A KubeletConfiguration with these lines, the first of which is line 3.
fn kubelet(body: &str) -> String {
    format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{body}\n")
}

fn beelet(body: &str) -> String {
    format!("apiVersion: beelet.dev/v1alpha1\nkind: BeeletConfiguration\n{body}\n")
}

#[track_caller]
fn set(text: &str) -> Config {
    let (config, warnings) = load(text).unwrap();
    assert_eq!(warnings, [], "{text}");
    config
}

/// Returns the error or warning without the file's name.
fn nameless(said: &impl ToString, place: &FilePlace) -> String {
    said.to_string().strip_prefix(&format!("{}:", place.file.display())).unwrap().to_owned()
}

/// Returns the errors without the file's name.
#[track_caller]
fn errors(text: &str) -> Vec<String> {
    load(text).unwrap_err().errors.iter().map(|error| nameless(error, &error.place)).collect()
}

#[track_caller]
fn check_error(text: &str, expected: &str) {
    let errors = errors(text);
    assert!(errors.len() == 1 && errors[0].starts_with(expected), "{errors:?}");
}

/// Checks that a file loads with exactly the expected warning, and returns the configuration.
#[track_caller]
fn check_warning(text: &str, expected: &str) -> Config {
    let (config, warnings) = load(text).unwrap();
    let warnings: Vec<String> = warnings.iter().map(|one| nameless(one, &one.place)).collect();
    assert!(warnings.len() == 1 && warnings[0].starts_with(expected), "{warnings:?}");
    config
}

#[test]
fn an_empty_file_is_the_kubelets_defaults() {
    let config = set("");
    assert_eq!(config, set(&kubelet("")));
    assert_eq!(config.runtime_endpoint, "unix:///run/containerd/containerd.sock");
    assert_eq!(config.image_endpoint, config.runtime_endpoint);
    assert_eq!(config.pod_pids_limit, -1);
    assert_eq!(config.file_check_frequency, Duration::from_secs(20));
    assert_eq!(config.runtime_request_timeout, Duration::from_secs(120));
    assert_eq!(config.cpu_cfs_quota_period, Duration::from_millis(100));
    assert_eq!(config.healthz_address.to_string(), "127.0.0.1");
    assert_eq!(config.healthz_port, 10248);
    assert_eq!(config.cgroup_root, "/");
    assert_eq!(config.pod_logs_dir, Path::new("/var/log/pods"));
    assert_eq!(config.resolv_conf.as_deref(), Some(Path::new("/etc/resolv.conf")));
    assert_eq!(config.static_pod_path, None);
    assert_eq!(config.beelet.state_dir, Path::new("/var/lib/beelet"));
    assert_eq!(config.beelet.pods_dir, Path::new("/var/lib/beelet/pods"));
    assert_eq!(config.socket(), Path::new("/run/beelet/beelet.sock"));
    assert!(config.cpu_cfs_quota && !config.fail_cgroup_v1);
    assert_eq!(config.single_process_oom_kill, None);
    assert!(!config.node_name.is_empty());
}

#[test]
fn values_are_taken_from_both_documents_in_any_order() {
    let both = [beelet("nodeName: edge-1"), kubelet("podPidsLimit: 7")];
    for text in [format!("{}---\n{}", both[0], both[1]), format!("{}---\n{}", both[1], both[0])] {
        let config = set(&text);
        assert_eq!((config.node_name.as_str(), config.pod_pids_limit), ("edge-1", 7));
    }
}

#[test]
fn values_are_understood_as_the_kubelet_does() {
    let field = |body: &str| set(&kubelet(body));
    assert_eq!(field("runtimeRequestTimeout: 1m30s").runtime_request_timeout, Duration::from_secs(90));
    assert_eq!(field("fileCheckFrequency: 0s").file_check_frequency, Duration::from_secs(20));
    assert_eq!(field("cpuCFSQuotaPeriod: 10ms").cpu_cfs_quota_period, Duration::from_millis(10));
    assert_eq!(field("healthzPort: 0").healthz_port, 0);
    assert_eq!(field("healthzBindAddress: '::1'").healthz_address.to_string(), "::1");
    assert_eq!(field("cgroupRoot: /a/b/").cgroup_root, "/a/b");
    assert_eq!(field("cgroupRoot: ''").cgroup_root, "/");
    assert_eq!(field("cgroupRoot: a").cgroup_root, "/a");
    assert_eq!(field("cgroupDriver: systemd").cgroup_driver, Some(CgroupDriver::Systemd));
    assert_eq!(field("cgroupDriver: \"\"").cgroup_driver, None);
    assert_eq!(field("resolvConf: ''").resolv_conf, None);
    assert_eq!(field("staticPodPath: null").static_pod_path, None);
    assert_eq!(field("containerRuntimeEndpoint: /x.sock").runtime_endpoint, "unix:///x.sock");
    assert_eq!(field("containerRuntimeEndpoint: unix:///x.sock").image_endpoint, "unix:///x.sock");
    assert_eq!(field("imageServiceEndpoint: unix:///y.sock").image_endpoint, "unix:///y.sock");
    let reserved = field("systemReserved: {cpu: 1, memory: 1Gi}\nkubeReserved: {cpu: 250m}");
    assert_eq!(reserved.reserved("cpu").milli_value(), 1250);
    assert_eq!(reserved.reserved("memory").value(), 1 << 30);
    assert_eq!(reserved.reserved("pid").value(), 0);
    assert_eq!(field("qosReserved: {memory: 50%}").qos_reserved["memory"], 50);
    assert_eq!(field("clusterDNS: [10.0.0.10, 'fd00::a']").cluster_dns.len(), 2);
    assert_eq!(
        field("crashLoopBackOff: {maxContainerRestartPeriod: 10s}").max_container_restart_period,
        Duration::from_secs(10)
    );
}

#[test]
fn thresholds_are_the_kubelets_by_default_and_replaced_as_a_whole() {
    let hard = |body: &str| -> Vec<(String, String)> {
        let shown = set(&kubelet(body)).effective_kubelet();
        let hard = shown["evictionHard"].as_object().unwrap().iter();
        hard.map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned())).collect()
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(
        hard(""),
        [
            pair("imagefs.available", "15%"),
            pair("imagefs.inodesFree", "5%"),
            pair("memory.available", "100Mi"),
            pair("nodefs.available", "10%"),
            pair("nodefs.inodesFree", "5%"),
        ]
    );
    assert_eq!(hard("evictionHard: {memory.available: 1Gi}"), [pair("memory.available", "1Gi")]);
    assert_eq!(hard("evictionHard: {}"), []);
    let merged = hard("evictionHard: {memory.available: 1Gi}\nmergeDefaultEvictionSettings: true");
    assert_eq!(merged.len(), 5);
    assert!(merged.contains(&pair("memory.available", "1Gi")));
    let soft = set(&kubelet(
        "evictionHard: {pid.available: 0%}\nevictionSoft: {memory.available: 10%}\nevictionSoftGracePeriod: \
         {memory.available: 1m30s}\nevictionMinimumReclaim: {memory.available: 5Mi}",
    ));
    let [soft] = <[_; 1]>::try_from(soft.eviction.thresholds).unwrap();
    assert_eq!(soft.grace, Duration::from_secs(90));
    assert!(soft.min_reclaim.is_some());
}

#[test]
fn the_number_of_pods_is_limited_by_cpus_too() {
    assert_eq!(set("").pod_limit(64), 110);
    assert_eq!(set(&kubelet("podsPerCore: 10")).pod_limit(4), 40);
    assert_eq!(set(&kubelet("podsPerCore: 10")).pod_limit(64), 110);
    assert_eq!(set(&kubelet("maxPods: 7")).pod_limit(1), 7);
}

#[test]
fn kubeadms_zeros_are_the_kubelets_defaults() {
    let (config, warnings) = load(include_str!("testdata/kubeadm.yaml")).unwrap();
    let unread: Vec<&str> = warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(unread, [""; 0]);
    // Overwrite the fields that kubeadm sets: all others must have the defaults.
    let expected = set(&kubelet(
        "authentication: {x509: {clientCAFile: /etc/kubernetes/pki/ca.crt}}\ncgroupDriver: systemd\n\
         clusterDNS: [10.96.0.10]\nclusterDomain: cluster.local\nresolvConf: /run/systemd/resolve/resolv.conf\n\
         rotateCertificates: true\nstaticPodPath: /etc/kubernetes/manifests",
    ));
    assert_eq!(config.effective(), expected.effective());
    assert_eq!(config.node.status_update_frequency, Duration::from_secs(10));
    assert_eq!(config.node.status_report_frequency, Duration::from_secs(300));
    let shown = config.effective_kubelet();
    for (field, value) in
        [("syncFrequency", "1m0s"), ("httpCheckFrequency", "20s"), ("cpuManagerReconcilePeriod", "10s")]
    {
        assert_eq!(shown[field], value, "{field}");
    }
}

#[test]
fn a_number_of_zero_is_no_value_where_the_kubelet_has_it_so() {
    let field = |body: &str| set(&kubelet(body));
    assert_eq!(field("maxPods: 0").max_pods, 110);
    assert_eq!(field("registryBurst: 0").registry_burst, 10);
    assert_eq!(field("eventBurst: 0").node.event_burst, 100);
    assert_eq!(field("maxOpenFiles: 0").max_open_files, 1_000_000);
    assert_eq!(field("nodeLeaseDurationSeconds: 0").node.lease_duration, Duration::from_secs(40));
    // These fields are pointers in the kubelet's type: their zeros count.
    assert_eq!(field("registryPullQPS: 0").registry_pull_qps, 0);
    assert_eq!(field("eventRecordQPS: 0").node.event_qps, 0);
    // Only an explicit update frequency sets the report frequency, too.
    let report = |body: &str| field(body).node.status_report_frequency;
    assert_eq!(report("nodeStatusUpdateFrequency: 20s"), Duration::from_secs(20));
    assert_eq!(report("nodeStatusUpdateFrequency: 0s"), Duration::from_secs(300));
    let both = report("nodeStatusUpdateFrequency: 0s\nnodeStatusReportFrequency: 1m");
    assert_eq!(both, Duration::from_secs(60));
}

#[test]
fn image_collection_is_off_at_a_hundred_percent_without_a_maximum_age() {
    let gc = |body: &str| set(&kubelet(body)).image_gc;
    assert!(gc("").is_on());
    assert!(!gc("imageGCHighThresholdPercent: 100").is_on());
    assert!(gc("imageGCHighThresholdPercent: 100\nimageMaximumGCAge: 240h").is_on());
    assert_eq!(gc("imageMinimumGCAge: 0s").min_age, Duration::from_secs(120));
}

#[test]
fn our_own_fields_are_understood() {
    let field = |body: &str| set(&beelet(body)).beelet;
    assert_eq!(field("bpf: off").bpf, BpfMode::Off);
    assert_eq!(field("bpf: 'off'").bpf, BpfMode::Off);
    assert_eq!(field("bpf: auto").bpf, BpfMode::Auto);
    assert_eq!(field("bpf: null").bpf, BpfMode::Auto);
    assert_eq!(field("tcpProbes: connect").tcp_probes, TcpProbes::Connect);
    assert_eq!(field("edgePolicy: threshold").edge_policy, EdgePolicy::Threshold);
    assert_eq!(field("").liveness_canary, Duration::ZERO);
    assert_eq!(field("").liveness_stalled, QueueRule::Room);
    assert_eq!(field("livenessStalled: fail").liveness_stalled, QueueRule::Accepted);
    assert_eq!(field("").exec_probes, ExecMode::Runtime);
    assert_eq!(field("execProbes: direct").exec_probes, ExecMode::Direct);
    assert_eq!(field("execSocket: /x/y").exec_socket, Path::new("/x/y"));
    assert_eq!(field("").probe_connections, Connections::Fresh);
    assert_eq!(field("probeConnections: reuse").probe_connections, Connections::Reuse);
    assert_eq!(field("livenessCanary: 10s").liveness_canary, Duration::from_secs(10));
    assert_eq!(field("livenessCanary: 0s").liveness_canary, Duration::ZERO);
    assert_eq!(field("cpuWeightFormula: proportional").cpu_weight_formula, CpuWeightFormula::Proportional);
    assert_eq!(field("stateDir: /x").pods_dir, Path::new("/x/pods"));
    assert_eq!(field("kubeletDir: /x").kubelet_dir, Path::new("/x"));
    assert_eq!(field("").kubelet_dir, Path::new("/var/lib/kubelet"));
    assert_eq!(field("devicePluginWait: 1m").device_plugin_wait, Duration::from_secs(60));
    assert_eq!(field("devicePluginWait: 0s").device_plugin_wait, Duration::ZERO);
    assert_eq!(field("").device_plugin_wait, Duration::from_secs(300));
    assert!(field("stopPodsOnExit: true").stop_pods_on_exit);
    assert!(field("adoptKubeletPods: true").adopt_kubelet_pods && !field("bpf: off").adopt_kubelet_pods);
    assert_eq!(field("preemption: minimal").preemption, preemption::Policy::Minimal);
    assert_eq!(field("evictionMemorySignal: reclaimable").eviction_memory_signal, MemorySignal::Reclaimable);
    assert_eq!(field("").eviction_memory_signal, MemorySignal::WorkingSet);
    assert_eq!(field("evictionSwap: counted").eviction_swap, EvictionSwap::Counted);
    assert_eq!(field("").eviction_swap, EvictionSwap::Ignored);
    assert_eq!(field("").container_gc.max_per_pod_container, 1);
    assert_eq!(field("containerGCMaxPerPodContainer: -1").container_gc.max_per_pod_container, -1);
    assert_eq!(field("containerGCMinimumAge: 1m").container_gc.min_age, Duration::from_secs(60));
    assert!(field("criticalStaticPods: true").critical_static_pods);
}

#[test]
fn a_bad_value_is_an_error_with_its_place() {
    let check = |body: &str, expected: &str| check_error(&kubelet(body), expected);
    check("podPidsLimit: many", "3:15: podPidsLimit: invalid type");
    check("podPidsLimit: -2", "3:15: podPidsLimit: -2 is out of range");
    check("cgroupRoot: /\nruntimeRequestTimeout: 2 minutes", "4:24: runtimeRequestTimeout: ");
    check("runtimeRequestTimeout: 120", "3:24: runtimeRequestTimeout: ");
    check("healthzPort: 65536", "3:14: healthzPort: 65536 is out of range: 0 to 65535");
    check("healthzBindAddress: localhost", "3:21: healthzBindAddress: \"localhost\" is not an IP address");
    check("topologyManagerPolicy: strict", "3:24: topologyManagerPolicy: \"strict\" is not one of");
    check("staticPodPath: /a/../b", "3:16: staticPodPath: ");
    check("cgroupRoot: /a/../b", "3:13: cgroupRoot: ");
    check("cgroupDriver: cgroups", "3:15: cgroupDriver: \"cgroups\" is neither cgroupfs nor systemd");
    check("cpuCFSQuotaPeriod: 2s", "3:20: cpuCFSQuotaPeriod: 2s is out of range");
    check(
        "containerRuntimeEndpoint: tcp://x",
        "3:27: containerRuntimeEndpoint: \"tcp://x\" is not a unix socket",
    );
    check("systemReserved:\n  cpu: abc", "4:8: systemReserved.cpu: ");
    check("systemReserved: {gpu: 1}", "3:23: systemReserved.gpu: cannot be reserved");
    check("kubeReserved: {cpu: -1}", "3:21: kubeReserved.cpu: \"-1\" is below zero");
    check("qosReserved: {memory: 50}", "3:23: qosReserved.memory: ");
    check("qosReserved: {cpu: 50%}", "3:20: qosReserved.cpu: ");
    check(
        "enforceNodeAllocatable: [pods, everything]",
        "3:32: enforceNodeAllocatable[1]: \"everything\" is not one of",
    );
    check("enforceNodeAllocatable: [kube-reserved]", " kubeReservedCgroup: must be set, because");
    check(
        "enforceNodeAllocatable: [kube-reserved, kube-reserved-compressible]\nkubeReservedCgroup: /kube",
        "3:1: enforceNodeAllocatable: kube-reserved and kube-reserved-compressible exclude each other",
    );
    check(
        "enforceNodeAllocatable: [system-reserved]\nsystemReservedCgroup: /a/../b",
        "4:23: systemReservedCgroup: \"/a/../b\" must be a path below the cgroup root",
    );
    check(
        "enforceNodeAllocatable: [system-reserved]\nsystemReservedCgroup: /",
        "4:23: systemReservedCgroup: ",
    );
    check("tlsCipherSuites: [TLS_RSA_WITH_AES_128_GCM_SHA256]", "3:1: tlsCipherSuites: none of these");
    check("memoryThrottlingFactor: 1.5", "3:25: memoryThrottlingFactor: 1.5 must be above 0");
    check("memoryReservationPolicy: All", "3:26: memoryReservationPolicy: \"All\" is neither");
    check("crashLoopBackOff: {maxContainerRestartPeriod: 400s}", "3:47: crashLoopBackOff.maxContainer");
    check("imageGCHighThresholdPercent: 101", "3:30: imageGCHighThresholdPercent: 101 is out of range");
    check("imageGCHighThresholdPercent: 80", " imageGCLowThresholdPercent: 80 is not below");
    check("imageMaximumGCAge: 1m", "3:20: imageMaximumGCAge: 60s is not above imageMinimumGCAge");
    check("evictionHard: {memory.free: 1Gi}", "3:29: evictionHard.memory.free: unknown signal");
    check("evictionHard: {memory.available: 1Go}", "3:34: evictionHard.memory.available: ");
    check("evictionHard: {memory.available: 110%}", "3:34: evictionHard.memory.available: ");
    check(
        "evictionSoft: {memory.available: 1Gi}",
        "3:34: evictionSoft.memory.available: has no grace period",
    );
    check_error(&beelet("preemption: random"), "3:13: preemption: unknown variant `random`");
    check_error(&beelet("bpf: maybe"), "3:6: bpf: auto or off");
    check_error(&beelet("nodeName: Not A Name"), "3:11: nodeName: ");
    check_error(&beelet("pinName: a/b"), "3:10: pinName: ");
    check_error(&beelet("tcpProbes: both"), "3:12: tcpProbes: unknown variant `both`");
}

#[test]
fn a_file_that_a_kubelet_starts_with_is_honoured_as_far_as_it_can_be() {
    let check = |body: &str, expected: &str| check_warning(&kubelet(body), expected);
    // DecodeKubeletConfigurationIntoInternal of the kubelet: strict, then lenient.
    check("staticPodsPath: /x", "3:17: staticPodsPath: unknown field; did you mean staticPodPath?");
    check("imageGCHighThreshhold: 1", "3:24: imageGCHighThreshhold: unknown field");
    check("imageMinimumGcAge: 2m", "3:20: imageMinimumGcAge: unknown field; did you mean imageMinimumGCAge?");
    check("stateDir: /x", "3:11: stateDir: unknown field");
    let config = check("MaxPods: 60", "3:10: MaxPods: unknown field; did you mean maxPods?");
    assert_eq!(config.max_pods, 110);
    let config = check("metadata: {name: edge}\nmaxPods: 40", "3:1: metadata: unknown field");
    assert_eq!(config.max_pods, 40);
    check("nodefs.available: 10%", "3:19: nodefs.available: unknown field");
    check("crashLoopBackOff: {max: 1s}", "3:25: crashLoopBackOff.max: unknown field");
    let config = check("maxPods: 40\nmaxPods: 60", "4:10: maxPods: duplicate field");
    assert_eq!(config.max_pods, 60);
    let suites = "tlsCipherSuites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_RSA_WITH_AES_128_GCM_SHA256]";
    let config = check(suites, "3:58: tlsCipherSuites[1]: \"TLS_RSA_WITH_AES_128_GCM_SHA256\" is ignored");
    assert_eq!(config.server.cipher_suites, ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"]);
    check("enforceNodeAllocatable: []", "3:1: enforceNodeAllocatable: \"none\" has no effect");
    check("enforceNodeAllocatable: [none]", "3:26: enforceNodeAllocatable[0]: \"none\" has no effect");
    check("cgroupsPerQOS: false", "3:16: cgroupsPerQOS: false has no effect");
    let config = check("healthzBindAddress: 0.0.0.0", "3:21: healthzBindAddress: 127.0.0.1 is used instead");
    assert_eq!(config.healthz_address, Ipv4Addr::LOCALHOST);
    let config = check("healthzBindAddress: \"::\"", "3:21: healthzBindAddress: ::1 is used instead");
    assert!(config.healthz_address.is_loopback());
    let config = check("clusterDNS: [dns, 10.0.0.1]", "3:14: clusterDNS[0]: \"dns\" is ignored");
    assert_eq!(config.cluster_dns.len(), 1);
    check("systemReservedCgroup: /a/../b", "3:23: systemReservedCgroup: \"/a/../b\" must be a path");
}

#[test]
fn the_cgroup_of_daemons_is_named_with_or_without_slashes() {
    let check = |written: &str, expected: &str| {
        let body = format!("enforceNodeAllocatable: [system-reserved]\nsystemReservedCgroup: {written}\n");
        assert_eq!(set(&kubelet(&body)).system_reserved_cgroup.unwrap().path, expected);
        set(&kubelet(&format!("systemReservedCgroup: {written}")));
    };
    check("system.slice", "/system.slice");
    check("/podruntime.slice/", "/podruntime.slice");
    check("a//b", "/a/b");
}

#[test]
fn a_relative_path_is_below_the_folder_of_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kubelet.yaml");
    let body =
        "staticPodPath: manifests\nauthentication: {x509: {clientCAFile: pki/ca.crt}}\nresolvConf: \"\"";
    std::fs::write(&file, kubelet(body)).unwrap();
    let (config, _) = Config::load(&file).unwrap();
    assert_eq!(config.static_pod_path, Some(dir.path().join("manifests")));
    assert_eq!(config.server.client_ca_file, Some(dir.path().join("pki/ca.crt")));
    assert_eq!(config.resolv_conf, None);
}

#[test]
fn all_faults_of_a_file_are_listed_with_everything_that_has_no_effect() {
    let text = kubelet(
        "podPidsLimit: many\nhealthzPort: 65536\nmaxPod: 1\nhairpinMode: none\nevictionHard: {memory.free: 1Gi, \
         memory.available: 1Go}\ncgroupsPerQOS: false",
    ) + "---\n"
        + &beelet("podPidsLimit: 1\npinName: a/b\nbpf: maybe\nbpf: auto");
    let faults = load(&text).unwrap_err();
    let mut fields: Vec<&str> = faults.errors.iter().map(|error| error.field.as_str()).collect();
    fields.sort_unstable();
    let expected = [
        "bpf",
        "evictionHard.memory.available",
        "evictionHard.memory.free",
        "healthzPort",
        "pinName",
        "podPidsLimit",
        "podPidsLimit",
    ];
    assert_eq!(fields, expected);
    let warned: Vec<&str> = faults.warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(warned, ["maxPod", "hairpinMode", "cgroupsPerQOS"]);
    assert_eq!(faults.to_string().lines().count(), 7);
}

#[test]
fn an_unknown_field_of_our_own_is_an_error() {
    check_error(&beelet("bpf: auto\nbpf: off"), "4:6: bpf: duplicate field; keep one");
    check_error(&beelet("podPidsLimit: 1"), "3:15: podPidsLimit: unknown field");
    check_error(&beelet("failSwapOn: true"), "3:13: failSwapOn: unknown field");
}

#[test]
fn a_file_that_is_no_configuration_is_refused() {
    check_error("a: [", "1:4: unclosed bracket");
    check_error("just text", "1:1: apiVersion \"\" with kind \"\" is not a configuration");
    check_error("apiVersion: v1\nkind: Pod\n", "1:1: apiVersion \"v1\" with kind \"Pod\"");
    check_error(&format!("{}---\n{}", kubelet(""), kubelet("")), "5:1: kind: the file has two documents");
    check_error(&"#".repeat(2 << 20), " the configuration has more than 1048576 bytes");
    let missing = Config::load(Path::new("/nonexistent/beelet.yaml")).unwrap_err().to_string();
    assert!(missing.starts_with("/nonexistent/beelet.yaml: cannot open the configuration"), "{missing}");
}

#[test]
fn a_known_field_without_effect_is_a_warning_that_names_it() {
    let (config, warnings) =
        load(&kubelet("enableProfilingHandler: true\npodPidsLimit: 3\nhairpinMode: none")).unwrap();
    assert_eq!(config.pod_pids_limit, 3);
    let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 2);
    assert!(
        warnings[0].contains(":3:25: enableProfilingHandler: has no effect: this version serves no profiles"),
        "{}",
        warnings[0]
    );
    assert!(warnings[1].contains(":5:14: hairpinMode: has no effect"), "{}", warnings[1]);
}

#[test]
fn the_effective_configuration_reads_back_as_itself() {
    for text in [
        String::new(),
        kubelet("staticPodPath: /p\nqosReserved: {memory: 50%}\nresolvConf: ''"),
        kubelet("systemReserved: {cpu: 250m, memory: 1.5Gi}\nkubeReserved: {ephemeral-storage: 1e9}"),
        kubelet("enforceNodeAllocatable: [pods]\nclusterDNS: ['10.0.0.10']\nruntimeRequestTimeout: 1.5s"),
        kubelet(
            "evictionHard: {memory.available: 5%}\nevictionMaxPodGracePeriod: 0\nmaxPods: 3\nimageMaximumGCAge: 1h",
        ),
        kubelet("evictionSoft: {nodefs.available: 1Gi}\nevictionSoftGracePeriod: {nodefs.available: 1m}"),
        beelet("preemption: minimal\ncontainerGCMaxContainers: 9"),
        kubelet(
            "enforceNodeAllocatable: [pods, system-reserved, kube-reserved-compressible]\n\
             systemReservedCgroup: /system\nkubeReservedCgroup: /kube/lets\nmemoryReservationPolicy: TieredReservation",
        ),
        kubelet("memoryThrottlingFactor: 0.8"),
        kubelet("podCIDR: 10.244.1.0/24,fd00:1::/64"),
        kubelet("singleProcessOOMKill: true"),
        kubelet("tracing: {samplingRatePerMillion: 1000}"),
        kubelet("tracing: {endpoint: 'unix:///run/otel.sock', samplingRatePerMillion: 1000000}"),
        beelet("autonomy: {enabled: false, after: 2m, keyFile: /etc/beelet/key, statefulSets: true}"),
        beelet("nodeConditions: [NodeProblemDetector, EKS]"),
        kubelet("shutdownGracePeriod: 30s\nshutdownGracePeriodCriticalPods: 10s"),
        kubelet(
            "shutdownGracePeriodByPodPriority: [{priority: 9, shutdownGracePeriodSeconds: 5}, {priority: -1, \
             shutdownGracePeriodSeconds: 0}]",
        ),
        beelet("tuner: {mode: off, interval: 1s, cpuWaitPerMille: 30, cpuWaitP99: 2ms, memoryFloor: 32Mi}"),
        beelet(
            "tuner: {mode: enforce, scheduler: sched-ext, cpuCaps: always, hotTicks: 3, burstPercent: 0, backOff: 1m, reclaim: enforce, reclaimRate: 8Mi, reclaimSwapRate: 512Ki, helplessSteps: 0, gainPercent: 20, standstillTicks: 40, bestEffortDiskWeight: 10}",
        ),
        beelet(
            "nodeName: 'on'\nbpf: off\nlivenessCanary: 0s\ntcpProbes: connect\nstopPodsOnExit: true\npodsDir: /elsewhere",
        ),
    ] {
        let config = set(&text);
        assert_eq!(set(&config.effective()), config, "{}", config.effective());
    }
}

#[test]
fn fields_without_an_effect_are_shown_as_they_were_written_or_as_the_kubelets_defaults() {
    let names: Vec<&str> = unsupported::names().collect();
    for field in unsupported::defaults().keys() {
        assert!(names.contains(&field.as_str()), "{field} has an effect: `effective` shows it");
    }
    let shown = |config: &Config, field: &str| config.effective_kubelet()[field].clone();
    let config = set("");
    assert_eq!(shown(&config, "syncFrequency"), "1m0s");
    assert_eq!(shown(&config, "featureGates"), serde_json::Value::Null);
    let base =
        kubelet("featureGates: {MemoryQoS: true, PodsAPI: true}\nsyncFrequency: 2m\nhttpCheckFrequency: 3s");
    let drop_in = kubelet("featureGates: {PodsAPI: false}\nhttpCheckFrequency: 1s");
    let (config, _) = layered(&base, &[("10.conf", &drop_in)], &[]).unwrap();
    assert_eq!(shown(&config, "featureGates"), serde_json::json!({ "MemoryQoS": true, "PodsAPI": false }));
    assert_eq!(shown(&config, "httpCheckFrequency"), "1s");
    assert_eq!(shown(&config, "syncFrequency"), "2m");
}

#[test]
fn zeros_of_fields_without_an_effect_cause_no_warning() {
    let warned = |text: &str| -> Vec<String> {
        let (_, warnings) = layered(&kubelet(text), &[], &[]).unwrap();
        warnings.into_iter().map(|warning| warning.field).collect()
    };
    // As kubeadm writes them.
    let zeros = "httpCheckFrequency: 0s\nsyncFrequency: 0s\nlogging:\n  flushFrequency: 0\n  options:\n    \
                 json: {infoBufferSize: \"0\"}\n  verbosity: 0";
    assert_eq!(warned(zeros), [""; 0]);
    assert_eq!(warned("syncFrequency: 1s\nlogging: {verbosity: 2}"), ["syncFrequency", "logging"]);
    assert_eq!(warned("kubeAPIQPS: 0"), ["kubeAPIQPS"]);
}

#[test]
fn the_disk_weight_of_best_effort_pods_is_below_the_kernels_default() {
    assert_eq!(
        set(&beelet("tuner: {bestEffortDiskWeight: 99}")).beelet.tuner.law.best_effort_disk_weight,
        99
    );
    check_error(
        &beelet("tuner: {bestEffortDiskWeight: 100}"),
        "3:31: tuner.bestEffortDiskWeight: 100 is out of range: 0 to 99",
    );
}

/// A configuration of a file, drop-in files by name, and flags.
fn layered(
    file: &str,
    drop_ins: &[(&str, &str)],
    flags: &[(&str, serde_json::Value)],
) -> Result<(Config, Vec<Warning>), ConfigFaults> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.yaml");
    std::fs::write(&path, file).unwrap();
    let folder = dir.path().join("drop-ins");
    std::fs::create_dir(&folder).unwrap();
    for (name, text) in drop_ins {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let flags = flags.iter().map(|(name, fields)| Setting {
        name: (*name).to_owned(),
        kubelet: fields.as_object().unwrap().clone(),
        beelet: serde_json::Map::new(),
        replaces: None,
    });
    Config::layered(Sources { file: Some(path), drop_ins: Some(folder), flags: flags.collect() })
}

#[test]
fn drop_ins_are_merged_in_the_order_of_their_names_and_flags_overrule_them() {
    let base =
        kubelet("maxPods: 10\nsystemReserved: {cpu: 1, memory: 1Gi}\nclusterDNS: [10.0.0.1, 10.0.0.2]");
    let first = kubelet("maxPods: 20\nsystemReserved: {cpu: 2}\nclusterDNS: [10.0.0.3]");
    let second = kubelet("maxPods: 30");
    let ignored = kubelet("maxPods: 99");
    let files = [("20.conf", second.as_str()), ("10.conf", first.as_str()), ("30.yaml", ignored.as_str())];
    let (config, warnings) = layered(&base, &files, &[]).unwrap();
    assert_eq!(warnings, []);
    assert_eq!(config.max_pods, 30);
    assert_eq!(config.reserved("cpu").value(), 2);
    assert_eq!(config.reserved("memory").value(), 1 << 30);
    assert_eq!(config.cluster_dns.len(), 1);
    let flags = [("--max-pods", serde_json::json!({ "maxPods": 40 }))];
    assert_eq!(layered(&base, &files, &flags).unwrap().0.max_pods, 40);
}

#[test]
fn an_error_names_the_source_that_has_the_last_word() {
    let base = kubelet("maxPods: 10\npodPidsLimit: -2");
    let drop_in = kubelet("maxPods: -1");
    let error = layered(&base, &[("10.conf", &drop_in)], &[]).unwrap_err().to_string();
    assert!(error.contains("config.yaml:4:15: podPidsLimit:"), "{error}");
    assert!(error.contains("10.conf:3:10: maxPods:"), "{error}");
    let error = layered(&kubelet(""), &[("10.conf", &drop_in)], &[]).unwrap_err().to_string();
    assert!(error.contains("10.conf:3:10: maxPods: -1 is out of range"), "{error}");
    let flags = [("--max-pods", serde_json::json!({ "maxPods": -3 }))];
    let error = layered(&kubelet(""), &[("10.conf", &drop_in)], &flags).unwrap_err().to_string();
    assert_eq!(error, "--max-pods: maxPods: -3 is out of range: 0 to 2147483647");
    let error = layered(&base, &[("10.conf", "kind: Pod\napiVersion: v1\n")], &[]).unwrap_err().to_string();
    assert!(error.contains("10.conf") && error.contains("is not a configuration"), "{error}");
}

#[test]
fn a_flag_without_effect_is_a_warning_with_the_flags_name() {
    let flags = [("--kube-api-qps", serde_json::json!({ "kubeAPIQPS": 9 }))];
    let (_, warnings) = layered("", &[], &flags).unwrap();
    assert!(
        warnings[0].to_string().starts_with("--kube-api-qps: kubeAPIQPS: has no effect: "),
        "{}",
        warnings[0]
    );
}

#[test]
fn a_node_of_a_cluster_is_configured_as_the_kubelet_is() {
    let node = |body: &str| set(&kubelet(body)).node;
    let seconds = |looked: u64, reported: u64| (Duration::from_secs(looked), Duration::from_secs(reported));
    let times = |body: &str| (node(body).status_update_frequency, node(body).status_report_frequency);
    assert_eq!(times(""), seconds(10, 300));
    assert_eq!(times("nodeStatusUpdateFrequency: 4s"), seconds(4, 4));
    assert_eq!(times("nodeStatusUpdateFrequency: 4s\nnodeStatusReportFrequency: 1m"), seconds(4, 60));
    assert_eq!(node("").lease_duration, Duration::from_secs(40));
    assert_eq!(
        (node("").status_max_images, node("nodeStatusMaxImages: -1").status_max_images),
        (Some(50), None)
    );
    assert!(node("").register && !node("registerNode: false").register);
    let taints =
        node("registerWithTaints: [{key: a, value: b, effect: NoSchedule}, {key: c, effect: NoExecute}]")
            .taints;
    assert_eq!((taints[0].value.as_str(), taints[1].value.as_str()), ("b", ""));
    check_error(
        &kubelet("registerWithTaints: [{key: a, effect: Never}]"),
        "3:39: registerWithTaints[0].effect: \"Never\" is not one of",
    );
}
