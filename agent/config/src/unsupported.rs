//! Fields of KubeletConfiguration v1beta1 (as of Kubernetes 1.37) that this version ignores, with the
//! reasons.
//!
//! Each field is listed in exactly one place: here, or in [`super::kubelet::KubeletWire`] once it has an
//! effect.

use serde_json::{Map, Value, json};

/// Returns the reason why `field` has no effect; `None` if it is unknown or has an effect.
pub(super) fn reason(field: &str) -> Option<&'static str> {
    GROUPS.iter().find(|group| group.fields.contains(&field)).map(|group| group.reason)
}

/// Returns the names of all fields without an effect.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().flat_map(|group| group.fields.iter().copied())
}

/// Returns the fields without an effect, grouped by their reason, for docs/configuration.md.
#[cfg(test)]
pub(super) fn groups() -> impl Iterator<Item = (&'static [&'static str], &'static str)> {
    GROUPS.iter().map(|group| (group.fields, group.reason))
}

/// Returns the kubelet's defaults of these fields (`SetDefaults_KubeletConfiguration`), for `/configz`.
pub(super) fn defaults() -> Map<String, Value> {
    let defaults = json!({
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "containerLogMaxWorkers": 1,
        "contentType": "application/vnd.kubernetes.protobuf",
        "enableControllerAttachDetach": true,
        "enableProfilingHandler": true,
        "hairpinMode": "promiscuous-bridge",
        "httpCheckFrequency": "20s",
        "iptablesDropBit": 15,
        "iptablesMasqueradeBit": 14,
        "kubeAPIBurst": 100,
        "kubeAPIQPS": 50,
        "makeIPTablesUtilChains": true,
        "syncFrequency": "1m0s",
    });
    defaults.as_object().cloned().unwrap_or_default()
}

/// Returns the fields with a written value. A zero counts as unset if the kubelet has a default: kubeadm
/// writes `0s` and the like for all unset fields.
pub(super) fn set(fields: &Map<String, Value>) -> Map<String, Value> {
    let defaults = defaults();
    let is_unset = |name: &str, value: &Value| defaults.contains_key(name) && is_unset(name, value);
    let set = fields.iter().filter(|(name, value)| !is_unset(name, value));
    set.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Returns true if a field's value is the zero of its type, which counts as unset.
pub(super) fn is_unset(name: &str, value: &Value) -> bool {
    // These fields are pointers in the kubelet's type: their zeros count.
    let pointers = ["kubeAPIQPS", "iptablesDropBit", "iptablesMasqueradeBit", "containerLogMaxWorkers"];
    !pointers.contains(&name) && is_zero(value)
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::String(text) => {
            text.is_empty() || beelet_units::duration::parse(text).is_ok_and(|time| time.is_zero())
        }
        Value::Object(fields) => fields.values().all(is_zero),
        Value::Array(items) => items.is_empty(),
        Value::Null => true,
        // A boolean may have another default.
        value => value.as_i64() == Some(0),
    }
}

struct Group {
    reason: &'static str,
    fields: &'static [&'static str],
}

const GROUPS: &[Group] = &[
    Group { reason: "the server's TLS library chooses the curve", fields: &["tlsCurvePreferences"] },
    Group {
        reason: "this version serves no profiles",
        fields: &["enableContentionProfiling", "enableProfilingHandler"],
    },
    Group {
        reason: "requests to the API server are few and always in JSON",
        fields: &["contentType", "kubeAPIQPS", "kubeAPIBurst"],
    },
    Group {
        reason: "the agent always watches the objects that pods use",
        fields: &["configMapAndSecretChangeDetectionStrategy"],
    },
    Group {
        reason: "a controller attaches and detaches volumes if there is an API server, otherwise the agent does",
        fields: &["enableControllerAttachDetach"],
    },
    Group {
        reason: "the agent runs until it is stopped, as the kubelet does since 1.30",
        fields: &["runOnce"],
    },
    Group {
        reason: "pods come from the files of staticPodPath only",
        fields: &["httpCheckFrequency", "staticPodURL", "staticPodURLHeader"],
    },
    Group {
        reason: "the agent always uses the kernel's memory pressure notifications if available",
        fields: &["kernelMemcgNotification"],
    },
    Group {
        reason: "drivers of claims are compared with the pods at every change",
        fields: &["draManagerReconcilePeriod"],
    },
    Group {
        reason: "cgroups outside the pods' own are left alone in this version",
        fields: &["kubeletCgroups", "systemCgroups"],
    },
    Group { reason: "the agent rotates one log at a time", fields: &["containerLogMaxWorkers"] },
    Group {
        reason: "the CNI plugin sets up the network",
        fields: &["hairpinMode", "makeIPTablesUtilChains", "iptablesMasqueradeBit", "iptablesDropBit"],
    },
    Group {
        reason: "the agent syncs a pod at every change, and all pods at every relist",
        fields: &["syncFrequency"],
    },
    Group { reason: "no metric is hidden", fields: &["showHiddenMetricsForVersion"] },
    Group {
        reason: "logging is set on the command line (-v, --log-format) and by RUST_LOG",
        fields: &["logging"],
    },
];
