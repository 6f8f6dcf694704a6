//! The kubelet's flags for settings of its configuration, as in `AddKubeletConfigFlags`
//! (cmd/kubelet/app/options), and its flags without an effect.

use beelet_units::duration;
use serde_json::{Map, Value, json};

use super::nested;

/// Syntax of a flag's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Text,
    /// No value, or `=true` or `=false`.
    Switch,
    Number,
    Duration,
    /// `a,b,c`
    List,
    /// `a=1,b=2`
    Map,
    /// `a=true,b=false`
    Gates,
    /// `memory.available<100Mi,...`
    Thresholds,
    /// `key=value:effect,...`
    Taints,
}

impl Shape {
    /// Returns true if the value is a comma-separated list, which a repeated flag extends.
    pub(super) fn has_parts(self) -> bool {
        matches!(self, Shape::List | Shape::Map | Shape::Gates | Shape::Thresholds)
    }

    /// Returns true for a map that replaces the file's. Feature gates of both are merged.
    pub(super) fn is_map(self) -> bool {
        matches!(self, Shape::Map | Shape::Thresholds)
    }
}

/// A flag and its setting.
#[derive(Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    /// Path of the field from the document's root.
    pub(super) field: &'static str,
    pub(super) shape: Shape,
}

impl Flag {
    /// Returns a document with the flag's setting.
    pub(super) fn fields(&self, value: &str) -> Result<Map<String, Value>, String> {
        Ok(nested(self.field, parsed(self.shape, value)?))
    }
}

fn parsed(shape: Shape, text: &str) -> Result<Value, String> {
    let parts = || text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pairs = |separator: char| {
        parts()
            .map(|part| {
                let (name, value) =
                    part.split_once(separator).ok_or(format!("{part:?} has no '{separator}'"))?;
                Ok((name.trim().to_owned(), value.trim()))
            })
            .collect::<Result<Vec<_>, String>>()
    };
    let map = |pairs: Vec<(String, &str)>| {
        Value::Object(pairs.into_iter().map(|(name, value)| (name, json!(value))).collect())
    };
    Ok(match shape {
        Shape::Text => json!(text),
        Shape::Switch => json!(switch(text)?),
        Shape::Number => json!(text.parse::<i64>().map_err(|error| error.to_string())?),
        Shape::Duration => {
            duration::parse(text).map_err(|error| error.to_string())?;
            json!(text)
        }
        Shape::List => json!(parts().collect::<Vec<_>>()),
        Shape::Map => map(pairs('=')?),
        Shape::Thresholds => map(pairs('<')?),
        Shape::Gates => {
            let gates = pairs('=')?.into_iter().map(|(name, value)| Ok((name, json!(switch(value)?))));
            Value::Object(gates.collect::<Result<_, String>>()?)
        }
        Shape::Taints => Value::Array(parts().map(taint).collect::<Result<_, _>>()?),
    })
}

/// Parses a boolean like Go's `strconv.ParseBool`.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

fn taint(text: &str) -> Result<Value, String> {
    let (key, effect) =
        text.rsplit_once(':').ok_or(format!("{text:?} is not a taint; use key=value:effect"))?;
    let (key, value) = key.split_once('=').unwrap_or((key, ""));
    Ok(json!({ "key": key, "value": value, "effect": effect }))
}

const fn flag(name: &'static str, field: &'static str, shape: Shape) -> Flag {
    Flag { name, field, shape }
}

/// All flags, by name.
pub(super) const FLAGS: &[Flag] = &[
    flag("address", "address", Shape::Text),
    flag("allowed-unsafe-sysctls", "allowedUnsafeSysctls", Shape::List),
    flag("anonymous-auth", "authentication.anonymous.enabled", Shape::Switch),
    flag("authentication-token-webhook", "authentication.webhook.enabled", Shape::Switch),
    flag("authentication-token-webhook-cache-ttl", "authentication.webhook.cacheTTL", Shape::Duration),
    flag("authorization-mode", "authorization.mode", Shape::Text),
    flag(
        "authorization-webhook-cache-authorized-ttl",
        "authorization.webhook.cacheAuthorizedTTL",
        Shape::Duration,
    ),
    flag(
        "authorization-webhook-cache-unauthorized-ttl",
        "authorization.webhook.cacheUnauthorizedTTL",
        Shape::Duration,
    ),
    flag("cgroup-driver", "cgroupDriver", Shape::Text),
    flag("cgroup-root", "cgroupRoot", Shape::Text),
    flag("cgroups-per-qos", "cgroupsPerQOS", Shape::Switch),
    flag("client-ca-file", "authentication.x509.clientCAFile", Shape::Text),
    flag("cluster-dns", "clusterDNS", Shape::List),
    flag("cluster-domain", "clusterDomain", Shape::Text),
    flag("container-log-max-files", "containerLogMaxFiles", Shape::Number),
    flag("container-log-max-size", "containerLogMaxSize", Shape::Text),
    flag("container-runtime-endpoint", "containerRuntimeEndpoint", Shape::Text),
    flag("contention-profiling", "enableContentionProfiling", Shape::Switch),
    flag("cpu-cfs-quota", "cpuCFSQuota", Shape::Switch),
    flag("cpu-cfs-quota-period", "cpuCFSQuotaPeriod", Shape::Duration),
    flag("cpu-manager-policy", "cpuManagerPolicy", Shape::Text),
    flag("cpu-manager-policy-options", "cpuManagerPolicyOptions", Shape::Map),
    flag("cpu-manager-reconcile-period", "cpuManagerReconcilePeriod", Shape::Duration),
    flag("enable-controller-attach-detach", "enableControllerAttachDetach", Shape::Switch),
    flag("enable-debugging-handlers", "enableDebuggingHandlers", Shape::Switch),
    flag("enable-server", "enableServer", Shape::Switch),
    flag("enforce-node-allocatable", "enforceNodeAllocatable", Shape::List),
    flag("event-burst", "eventBurst", Shape::Number),
    flag("event-qps", "eventRecordQPS", Shape::Number),
    flag("eviction-hard", "evictionHard", Shape::Thresholds),
    flag("eviction-max-pod-grace-period", "evictionMaxPodGracePeriod", Shape::Number),
    flag("eviction-minimum-reclaim", "evictionMinimumReclaim", Shape::Map),
    flag("eviction-pressure-transition-period", "evictionPressureTransitionPeriod", Shape::Duration),
    flag("eviction-soft", "evictionSoft", Shape::Thresholds),
    flag("eviction-soft-grace-period", "evictionSoftGracePeriod", Shape::Map),
    flag("fail-cgroupv1", "failCgroupV1", Shape::Switch),
    flag("fail-swap-on", "failSwapOn", Shape::Switch),
    flag("feature-gates", "featureGates", Shape::Gates),
    flag("file-check-frequency", "fileCheckFrequency", Shape::Duration),
    flag("hairpin-mode", "hairpinMode", Shape::Text),
    flag("healthz-bind-address", "healthzBindAddress", Shape::Text),
    flag("healthz-port", "healthzPort", Shape::Number),
    flag("http-check-frequency", "httpCheckFrequency", Shape::Duration),
    flag("image-gc-high-threshold", "imageGCHighThresholdPercent", Shape::Number),
    flag("image-gc-low-threshold", "imageGCLowThresholdPercent", Shape::Number),
    flag("image-service-endpoint", "imageServiceEndpoint", Shape::Text),
    flag("kernel-memcg-notification", "kernelMemcgNotification", Shape::Switch),
    flag("kube-api-burst", "kubeAPIBurst", Shape::Number),
    flag("kube-api-content-type", "contentType", Shape::Text),
    flag("kube-api-qps", "kubeAPIQPS", Shape::Number),
    flag("kube-reserved", "kubeReserved", Shape::Map),
    flag("kube-reserved-cgroup", "kubeReservedCgroup", Shape::Text),
    flag("kubelet-cgroups", "kubeletCgroups", Shape::Text),
    flag("local-storage-capacity-isolation", "localStorageCapacityIsolation", Shape::Switch),
    flag("make-iptables-util-chains", "makeIPTablesUtilChains", Shape::Switch),
    flag("manifest-url", "staticPodURL", Shape::Text),
    flag("max-open-files", "maxOpenFiles", Shape::Number),
    flag("max-pods", "maxPods", Shape::Number),
    flag("memory-manager-policy", "memoryManagerPolicy", Shape::Text),
    flag("minimum-image-ttl-duration", "imageMinimumGCAge", Shape::Duration),
    flag("node-status-max-images", "nodeStatusMaxImages", Shape::Number),
    flag("node-status-update-frequency", "nodeStatusUpdateFrequency", Shape::Duration),
    flag("oom-score-adj", "oomScoreAdj", Shape::Number),
    flag("pod-cidr", "podCIDR", Shape::Text),
    flag("pod-manifest-path", "staticPodPath", Shape::Text),
    flag("pod-max-pids", "podPidsLimit", Shape::Number),
    flag("pods-per-core", "podsPerCore", Shape::Number),
    flag("port", "port", Shape::Number),
    flag("protect-kernel-defaults", "protectKernelDefaults", Shape::Switch),
    flag("provider-id", "providerID", Shape::Text),
    flag("qos-reserved", "qosReserved", Shape::Map),
    flag("read-only-port", "readOnlyPort", Shape::Number),
    flag("register-node", "registerNode", Shape::Switch),
    flag("register-with-taints", "registerWithTaints", Shape::Taints),
    flag("registry-burst", "registryBurst", Shape::Number),
    flag("registry-qps", "registryPullQPS", Shape::Number),
    flag("reserved-cpus", "reservedSystemCPUs", Shape::Text),
    flag("resolv-conf", "resolvConf", Shape::Text),
    flag("rotate-certificates", "rotateCertificates", Shape::Switch),
    flag("rotate-server-certificates", "serverTLSBootstrap", Shape::Switch),
    flag("runonce", "runOnce", Shape::Switch),
    flag("runtime-request-timeout", "runtimeRequestTimeout", Shape::Duration),
    flag("seccomp-default", "seccompDefault", Shape::Switch),
    flag("serialize-image-pulls", "serializeImagePulls", Shape::Switch),
    flag("streaming-connection-idle-timeout", "streamingConnectionIdleTimeout", Shape::Duration),
    flag("sync-frequency", "syncFrequency", Shape::Duration),
    flag("system-cgroups", "systemCgroups", Shape::Text),
    flag("system-reserved", "systemReserved", Shape::Map),
    flag("system-reserved-cgroup", "systemReservedCgroup", Shape::Text),
    flag("tls-cert-file", "tlsCertFile", Shape::Text),
    flag("tls-cipher-suites", "tlsCipherSuites", Shape::List),
    flag("tls-min-version", "tlsMinVersion", Shape::Text),
    flag("tls-private-key-file", "tlsPrivateKeyFile", Shape::Text),
    flag("topology-manager-policy", "topologyManagerPolicy", Shape::Text),
    flag("topology-manager-policy-options", "topologyManagerPolicyOptions", Shape::Map),
    flag("topology-manager-scope", "topologyManagerScope", Shape::Text),
    flag("volume-plugin-dir", "volumePluginDir", Shape::Text),
    flag("volume-stats-agg-period", "volumeStatsAggPeriod", Shape::Duration),
];

const OF_CADVISOR: &str = "beelet measures containers without cAdvisor";

/// Accepted flags without an effect: name, reason, and true for a flag without a value.
pub(super) const IGNORED: &[(&str, &str, bool)] = &[
    ("application-metrics-count-limit", OF_CADVISOR, false),
    ("boot-id-file", OF_CADVISOR, false),
    ("cloud-config", "clouds have their own controllers", false),
    ("container-hints", OF_CADVISOR, false),
    ("container-runtime", "containerRuntimeEndpoint selects the runtime", false),
    ("containerd", OF_CADVISOR, false),
    ("containerd-namespace", OF_CADVISOR, false),
    ("enable-load-reader", OF_CADVISOR, true),
    ("event-storage-age-limit", OF_CADVISOR, false),
    ("event-storage-event-limit", OF_CADVISOR, false),
    (
        "experimental-allocatable-ignore-eviction",
        "eviction thresholds always reduce the allocatable resources",
        true,
    ),
    ("experimental-mounter-path", "the agent mounts volumes itself", false),
    ("global-housekeeping-interval", OF_CADVISOR, false),
    ("housekeeping-interval", OF_CADVISOR, false),
    ("log-flush-frequency", "log lines are written at once", false),
    ("log-cadvisor-usage", OF_CADVISOR, true),
    ("log-json-info-buffer-size", "log lines are written at once", false),
    ("log-json-split-stream", "all log lines go to standard error", true),
    ("log-text-info-buffer-size", "log lines are written at once", false),
    ("log-text-split-stream", "all log lines go to standard error", true),
    ("machine-id-file", OF_CADVISOR, false),
    ("manifest-url-header", "pods come from the files of staticPodPath only", false),
    ("max-housekeeping-interval", OF_CADVISOR, false),
    ("maximum-dead-containers", "set containerGCMaxContainers of the BeeletConfiguration", false),
    (
        "maximum-dead-containers-per-container",
        "set containerGCMaxPerPodContainer of the BeeletConfiguration",
        false,
    ),
    ("minimum-container-ttl-duration", "set containerGCMinimumAge of the BeeletConfiguration", false),
    ("network-plugin", "the container runtime runs the network plugin", false),
    ("pod-infra-container-image", "the container runtime selects and retains its sandbox image", false),
    ("register-schedulable", "register with a taint instead", true),
    ("reserved-memory", "memory is not pinned to NUMA nodes in this version", false),
    ("runtime-cgroups", "the agent leaves the runtime's own cgroup alone", false),
    ("storage-driver-buffer-duration", OF_CADVISOR, false),
    ("storage-driver-db", OF_CADVISOR, false),
    ("storage-driver-host", OF_CADVISOR, false),
    ("storage-driver-password", OF_CADVISOR, false),
    ("storage-driver-secure", OF_CADVISOR, true),
    ("storage-driver-table", OF_CADVISOR, false),
    ("storage-driver-user", OF_CADVISOR, false),
    ("vmodule", "RUST_LOG sets levels by module", false),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, text: &str, expected: Value) {
        let flag = FLAGS.iter().find(|flag| flag.name == name).unwrap();
        assert_eq!(flag.fields(text).map(Value::Object), Ok(expected), "--{name}={text}");
    }

    #[test]
    fn flags_say_what_a_document_would() {
        check("max-pods", "20", json!({ "maxPods": 20 }));
        check("anonymous-auth", "false", json!({ "authentication": { "anonymous": { "enabled": false } } }));
        check("node-status-update-frequency", "1h0m0s", json!({ "nodeStatusUpdateFrequency": "1h0m0s" }));
        check("cluster-dns", "10.0.0.1, 10.0.0.2,", json!({ "clusterDNS": ["10.0.0.1", "10.0.0.2"] }));
        check(
            "system-reserved",
            "cpu=1,memory=1Gi",
            json!({ "systemReserved": { "cpu": "1", "memory": "1Gi" } }),
        );
        check(
            "eviction-hard",
            "memory.available<5%",
            json!({ "evictionHard": { "memory.available": "5%" } }),
        );
        check("feature-gates", "A=true,B=0", json!({ "featureGates": { "A": true, "B": false } }));
        check(
            "register-with-taints",
            "a=b:NoSchedule,c:NoExecute",
            json!({ "registerWithTaints": [
                { "key": "a", "value": "b", "effect": "NoSchedule" },
                { "key": "c", "value": "", "effect": "NoExecute" },
            ] }),
        );
    }

    #[test]
    fn flags_of_the_kubelet_that_nobody_needs_keep_nobody_from_starting() {
        for name in ["containerd", "housekeeping-interval", "reserved-memory", "log-text-split-stream"] {
            assert!(IGNORED.iter().any(|(known, ..)| *known == name), "{name}");
        }
    }

    #[test]
    fn no_flag_is_there_twice_and_each_has_a_field() {
        let mut names: Vec<&str> = FLAGS.iter().map(|flag| flag.name).collect();
        assert!(names.is_sorted());
        names.extend(IGNORED.iter().map(|(name, ..)| *name));
        names.extend(super::super::OWN.iter().map(|(name, ..)| *name));
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_bad_value_is_refused() {
        for (name, text) in [
            ("max-pods", "many"),
            ("anonymous-auth", "maybe"),
            ("system-reserved", "cpu"),
            ("sync-frequency", "5"),
        ] {
            let flag = FLAGS.iter().find(|flag| flag.name == name).unwrap();
            assert!(flag.fields(text).is_err(), "--{name}={text}");
        }
    }
}
