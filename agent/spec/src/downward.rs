//! The downward API: a pod's data about itself, for variables and for files of volumes.
//! Formats and rounding are the kubelet's (`pkg/fieldpath`, `pkg/api/v1/resource`).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use beelet_policy::resources::is_pod_level_resource;
use beelet_units::quantity::Quantity;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::api::resource::Quantity as Text};

use crate::Error;
use beelet_model::pod::NodeFacts;

/// Returns the value of a field of the pod.
///
/// # Errors
/// Fails for an unknown field.
pub fn field(pod: &core::Pod, path: &str, pod_ips: &[String], node: &NodeFacts) -> Result<String, Error> {
    let meta = &pod.metadata;
    let unknown = || Error::UnknownField(path.to_owned());
    if let Some((map, key)) = subscript(path) {
        let from = match map {
            "metadata.labels" => &meta.labels,
            "metadata.annotations" => &meta.annotations,
            _ => return Err(unknown()),
        };
        return Ok(from.as_ref().and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    let spec = pod.spec.as_ref();
    Ok(match path {
        "metadata.name" => meta.name.clone().unwrap_or_default(),
        "metadata.namespace" => meta.namespace.clone().unwrap_or_default(),
        "metadata.uid" => meta.uid.clone().unwrap_or_default(),
        "metadata.labels" => whole_map(meta.labels.as_ref()),
        "metadata.annotations" => whole_map(meta.annotations.as_ref()),
        "spec.nodeName" => node.node_name.clone(),
        "spec.serviceAccountName" => spec.and_then(|s| s.service_account_name.clone()).unwrap_or_default(),
        "status.hostIP" | "status.hostIPs" => {
            let ips = node.host.now();
            let shown: Vec<String> = ips.iter().map(ToString::to_string).collect();
            let primary = shown.first().ok_or(Error::NoHostIp)?;
            if path == "status.hostIP" { primary.clone() } else { shown.join(",") }
        }
        "status.podIP" => pod_ips.first().cloned().unwrap_or_default(),
        "status.podIPs" => pod_ips.join(","),
        _ => return Err(unknown()),
    })
}

/// Splits `metadata.labels['key']` into its map and its key.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once("['")?;
    Some((map, rest.strip_suffix("']")?))
}

/// Formats one line per entry, `key="value"`, sorted by key (`fieldpath.FormatMap`).
fn whole_map(map: Option<&BTreeMap<String, String>>) -> String {
    let line = |(key, value): (&String, &String)| format!("{key}={}", quoted(value));
    map.into_iter().flatten().map(line).collect::<Vec<_>>().join("\n")
}

/// Quotes a text like Go's `%q`, which scripts in containers expect.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            c if c.is_control() && u32::from(c) < 0x80 => {
                // Writing to a String can't fail.
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Returns the limit of the pod as a whole (KEP-2837), if set.
fn pod_limit(pod: &core::Pod, name: &str) -> Result<Option<Quantity>, Error> {
    let limits = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.limits.as_ref());
    let Some(text) = limits.and_then(|limits| limits.get(name)).filter(|_| is_pod_level_resource(name))
    else {
        return Ok(None);
    };
    let limit = quantity(text, || format!("the pod's limit of {name}"))?;
    Ok(Some(limit).filter(|limit| !limit.is_zero()))
}

/// Parses the amount of a field.
fn quantity(text: &Text, field: impl FnOnce() -> String) -> Result<Quantity, Error> {
    Quantity::parse(&text.0).map_err(|cause| Error::AmountOf { field: field(), cause })
}

/// Returns a container's resource in units of the divisor, rounded up. An unset limit defaults to the pod's,
/// else to the node's amount for pods, an unset request to zero.
///
/// # Errors
/// Fails for an unknown resource or container, or an unreadable amount.
pub fn resource(
    pod: &core::Pod,
    own: Option<&core::Container>,
    selector: &core::ResourceFieldSelector,
    node: &NodeFacts,
) -> Result<String, Error> {
    let container = match selector.container_name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => {
            beelet_model::pod::container_of(pod, name).ok_or_else(|| Error::NoContainer(name.to_owned()))?
        }
        None => own.ok_or(Error::NoContainerName)?,
    };
    let unknown = || Error::UnknownResource(selector.resource.clone());
    let (list, name) = selector.resource.split_once('.').ok_or_else(unknown)?;
    let resources = container.resources.as_ref();
    let amounts = match list {
        "limits" => resources.and_then(|r| r.limits.as_ref()),
        "requests" => resources.and_then(|r| r.requests.as_ref()),
        _ => return Err(unknown()),
    };
    let set = amounts.and_then(|amounts| amounts.get(name)).map(|text| Quantity::parse(&text.0));
    let amount = match set.transpose()? {
        Some(amount) => amount,
        None if list == "limits" => pod_limit(pod, name)?.unwrap_or_else(|| node.allocatable(name)),
        None => Quantity::ZERO,
    };
    let divisor = match &selector.divisor {
        Some(text) => quantity(text, || "divisor".to_owned())?,
        None => Quantity::ZERO,
    };
    Ok(in_units(name, amount, divisor).to_string())
}

/// Computes `amount / divisor`, rounded up; a zero divisor counts as one (`ExtractContainerResourceValue`).
fn in_units(name: &str, amount: Quantity, divisor: Quantity) -> i64 {
    let divisor = if divisor.is_zero() { Quantity::from_units(1) } else { divisor };
    let (amount, divisor) = match name {
        "cpu" => (amount.milli_value(), divisor.milli_value()),
        _ => (amount.value(), divisor.value()),
    };
    let divisor = divisor.max(1);
    amount / divisor + i64::from(amount % divisor > 0)
}

#[cfg(test)]
mod tests {
    use beelet_model::pod::HostIps;
    use serde_json::json;

    use super::*;

    #[test]
    fn whole_maps_are_written_as_the_kubelet_does() {
        let map = [("b", "x y"), ("a", "say \"hi\"\n"), ("c", "é\u{1}")];
        let map = map.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
        assert_eq!(whole_map(Some(&map)), "a=\"say \\\"hi\\\"\\n\"\nb=\"x y\"\nc=\"é\\x01\"");
        assert_eq!(whole_map(None), "");
    }

    #[test]
    fn a_pod_is_told_all_addresses_of_its_node_and_waits_while_there_are_none() {
        let told = |ips: &[&str], path: &str| {
            let host = HostIps::fixed(ips.iter().map(|ip| ip.parse().unwrap()).collect());
            let node = NodeFacts { host, ..crate::fixtures::node() };
            field(&core::Pod::default(), path, &[], &node).map_err(|error| error.to_string())
        };
        let both = ["fd00::1", "192.0.2.1"];
        assert_eq!(told(&both, "status.hostIP").as_deref(), Ok("fd00::1"));
        assert_eq!(told(&both, "status.hostIPs").as_deref(), Ok("fd00::1,192.0.2.1"));
        assert_eq!(told(&[], "status.hostIP"), Err("the node has no address".to_owned()));
    }

    #[test]
    fn resources_are_rounded_up_to_whole_units_of_the_divisor() {
        let pod: core::Pod = serde_json::from_value(json!({"spec": {"containers": [{
            "name": "c",
            "resources": {"limits": {"memory": "100Mi"}, "requests": {"cpu": "250m", "memory": "1000"}}
        }]}}))
        .unwrap();
        let check = |resource_name: &str, divisor: &str, expected: &str| {
            let selector = serde_json::from_value(
                json!({"resource": resource_name, "divisor": divisor, "containerName": "c"}),
            );
            let node = crate::fixtures::node();
            let value = resource(&pod, None, &selector.unwrap(), &node);
            assert_eq!(value.as_deref(), Ok(expected), "{resource_name} {divisor}");
        };
        check("requests.cpu", "0", "1");
        check("requests.cpu", "1m", "250");
        check("requests.cpu", "100m", "3");
        check("limits.memory", "1Mi", "100");
        check("requests.memory", "1Ki", "1");
        // Unset: the node's amount for pods.
        check("limits.cpu", "1", "4");
        check("limits.cpu", "1m", "4000");
        check("requests.ephemeral-storage", "1", "0");
    }

    #[test]
    fn a_resource_of_another_container_or_of_none() {
        let pod: core::Pod =
            serde_json::from_value(json!({"spec": {"containers": [{"name": "c"}]}})).unwrap();
        let check = |selector: serde_json::Value, part: &str| {
            let selector = serde_json::from_value(selector).unwrap();
            let error = resource(&pod, None, &selector, &crate::fixtures::node()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        check(json!({"resource": "limits.cpu", "containerName": "d"}), "no container \"d\"");
        check(json!({"resource": "limits.cpu"}), "containerName must say");
        check(json!({"resource": "cpu", "containerName": "c"}), "\"cpu\" is not known");
    }
}
