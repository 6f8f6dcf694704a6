//! Allowed kernel settings of pods: harmless ones of the pod's own namespaces, and those that the node's
//! configuration allows (`allowedUnsafeSysctls`). As in the kubelet (`pkg/kubelet/sysctl`), others are
//! refused.

use k8s_openapi::api::core::v1::PodSpec;

use crate::cri_config::with_dots;

/// Namespaced settings that cannot harm other pods.
const SAFE: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
];

/// Returns the reason for refusing a pod's settings, if any: a sentence that begins with the field.
#[must_use]
pub fn refused(spec: &PodSpec, allowed: &[String]) -> Option<String> {
    let listed = spec.security_context.as_ref().and_then(|context| context.sysctls.as_ref());
    listed.into_iter().flatten().enumerate().find_map(|(index, sysctl)| {
        let name = with_dots(&sysctl.name);
        let why = refused_one(&name, spec, allowed)?;
        Some(format!("spec.securityContext.sysctls[{index}].name: {name} {why}"))
    })
}

fn refused_one(name: &str, spec: &PodSpec, allowed: &[String]) -> Option<String> {
    let of_network = name.starts_with("net.");
    let of_ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|start| name.starts_with(start))
        || name == "kernel.sem";
    if of_network && spec.host_network == Some(true) {
        return Some("would change the machine's own network: not with hostNetwork".to_owned());
    }
    if of_ipc && spec.host_ipc == Some(true) {
        return Some("would change the machine's own IPC: not with hostIPC".to_owned());
    }
    if !of_network && !of_ipc {
        return Some("belongs to no namespace: it would change the whole machine".to_owned());
    }
    let fits = |pattern: &String| {
        let pattern = with_dots(pattern);
        pattern.strip_suffix('*').map_or(pattern == name, |start| name.starts_with(start))
    };
    (!SAFE.contains(&name) && !allowed.iter().any(fits)).then(|| {
        "is not one of the safe ones; add it to allowedUnsafeSysctls in the configuration to allow it"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn only_safe_and_allowed_settings_of_the_pods_own_namespaces() {
        let check = |name: &str, more: Value, expected: Option<&str>| {
            let mut spec =
                json!({"containers": [], "securityContext": {"sysctls": [{"name": name, "value": "1"}]}});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let spec: PodSpec = serde_json::from_value(spec).unwrap();
            let allowed = ["kernel.msg*".to_owned(), "net/core/somaxconn".to_owned()];
            let why = refused(&spec, &allowed);
            match expected {
                None => assert_eq!(why, None, "{name}"),
                Some(part) => assert!(why.as_ref().is_some_and(|why| why.contains(part)), "{name}: {why:?}"),
            }
        };
        check("net.ipv4.tcp_syncookies", json!({}), None);
        check("net/ipv4/tcp_syncookies", json!({}), None);
        check("kernel.shm_rmid_forced", json!({}), None);
        check("kernel.msgmax", json!({}), None);
        check("net.core.somaxconn", json!({}), None);
        check(
            "net.ipv4.tcp_mem",
            json!({}),
            Some("[0].name: net.ipv4.tcp_mem is not one of the safe ones; add it"),
        );
        check("kernel.sem", json!({}), Some("allowedUnsafeSysctls"));
        check("vm.swappiness", json!({}), Some("belongs to no namespace"));
        check("net.ipv4.tcp_syncookies", json!({"hostNetwork": true}), Some("not with hostNetwork"));
        check("kernel.shm_rmid_forced", json!({"hostIPC": true}), Some("not with hostIPC"));
        check("kernel.shm_rmid_forced", json!({"hostNetwork": true}), None);
    }
}
