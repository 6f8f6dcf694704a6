//! Fields of KubeletConfiguration v1beta1 (as of Kubernetes 1.37) that this version reads past, and why.
//!
//! A field is in exactly one place: here, or in [`super::kubelet::KubeletWire`]. Whoever makes one work moves
//! it there.

use serde_json::{Map, Value, json};

/// The reason why `field` has no effect; `None` if v1beta1 has no such field, or if it has an effect.
pub(super) fn reason(field: &str) -> Option<&'static str> {
    GROUPS.iter().find(|group| group.fields.contains(&field)).map(|group| group.reason)
}

/// All of them.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().flat_map(|group| group.fields.iter().copied())
}

/// What those of them are by default that have a default (`SetDefaults_KubeletConfiguration` of the kubelet),
/// as `/configz` shows them.
pub(super) fn defaults() -> Map<String, Value> {
    let defaults = json!({
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "containerLogMaxWorkers": 1,
        "contentType": "application/vnd.kubernetes.protobuf",
        "cpuManagerPolicy": "none",
        "cpuManagerReconcilePeriod": "10s",
        "enableControllerAttachDetach": true,
        "enableProfilingHandler": true,
        "hairpinMode": "promiscuous-bridge",
        "httpCheckFrequency": "20s",
        "iptablesDropBit": 15,
        "iptablesMasqueradeBit": 14,
        "kubeAPIBurst": 100,
        "kubeAPIQPS": 50,
        "makeIPTablesUtilChains": true,
        "memoryManagerPolicy": "None",
        "syncFrequency": "1m0s",
    });
    defaults.as_object().cloned().unwrap_or_default()
}

/// Those of the fields that were written with a value. What the kubelet has a default for, and is written as
/// zero, is not: kubeadm writes `0s` and the like for whatever it does not set.
pub(super) fn set(fields: &Map<String, Value>) -> Map<String, Value> {
    let defaults = defaults();
    // Their zeros are values: they are pointers in the kubelet's type.
    let pointers = ["kubeAPIQPS", "iptablesDropBit", "iptablesMasqueradeBit", "containerLogMaxWorkers"];
    let is_zero = |value: &Value| match value {
        Value::String(text) => {
            text.is_empty() || beelet_units::duration::parse(text).is_ok_and(|time| time.is_zero())
        }
        value => value.as_i64() == Some(0),
    };
    let is_unset = |name: &str, value: &Value| {
        defaults.contains_key(name) && !pointers.contains(&name) && is_zero(value)
    };
    let set = fields.iter().filter(|(name, value)| !is_unset(name, value));
    set.map(|(name, value)| (name.clone(), value.clone())).collect()
}

struct Group {
    reason: &'static str,
    fields: &'static [&'static str],
}

const GROUPS: &[Group] = &[
    Group {
        reason: "the server's keys are agreed on as its TLS library prefers",
        fields: &["tlsCurvePreferences"],
    },
    Group {
        reason: "there are no profiles to ask the server for in this version",
        fields: &["enableContentionProfiling", "enableProfilingHandler"],
    },
    Group {
        reason: "requests to the API server are few, and in JSON: there is nothing to tune",
        fields: &["contentType", "kubeAPIQPS", "kubeAPIBurst"],
    },
    Group {
        reason: "objects that pods use are followed where the API server is asked for them",
        fields: &["configMapAndSecretChangeDetectionStrategy"],
    },
    Group {
        reason: "volumes are attached and detached by a controller where there is an API server, and by the agent \
                 where there is none",
        fields: &["enableControllerAttachDetach"],
    },
    Group {
        reason: "the agent runs until it is told to end, as the kubelet does since 1.30",
        fields: &["runOnce"],
    },
    Group {
        reason: "pods come from the files of staticPodPath only",
        fields: &["httpCheckFrequency", "staticPodURL", "staticPodURLHeader"],
    },
    Group {
        reason: "the kernel's word on memory pressure is always listened to, where it can be had",
        fields: &["kernelMemcgNotification"],
    },
    Group {
        reason: "CPUs, memory and NUMA nodes are not pinned in this version: containers share what their node has",
        fields: &[
            "cpuManagerPolicy",
            "cpuManagerPolicyOptions",
            "cpuManagerReconcilePeriod",
            "memoryManagerPolicy",
            "topologyManagerPolicyOptions",
            "reservedMemory",
            "draManagerReconcilePeriod",
        ],
    },
    Group {
        reason: "cgroups outside the pods' own are left alone in this version",
        fields: &["kubeletCgroups", "systemCgroups"],
    },
    Group { reason: "one container's log is rotated at a time", fields: &["containerLogMaxWorkers"] },
    Group {
        reason: "the network is the CNI plugin's business",
        fields: &["hairpinMode", "makeIPTablesUtilChains", "iptablesMasqueradeBit", "iptablesDropBit"],
    },
    Group {
        reason: "pods are compared with the runtime whenever something happens, and all of them at every relist",
        fields: &["syncFrequency"],
    },
    Group {
        reason: "beelet has no feature gates: what it can do, it does as its own section says",
        fields: &["featureGates", "showHiddenMetricsForVersion"],
    },
    Group {
        reason: "logging is set on the command line (-v, --log-format) and by RUST_LOG",
        fields: &["logging"],
    },
];
