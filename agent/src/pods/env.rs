//! A container's environment: literals, `$(VAR)` references and the downward API's `fieldRef`.

use std::collections::BTreeMap;

use beelet_policy::expand::expand;
use k8s_openapi::api::core::v1 as core;

use super::cri_config::NodeFacts;

/// Variables in the order they were defined; a later definition of the same name wins in place.
#[derive(Clone, Debug, Default)]
pub(super) struct Environment {
    order: Vec<String>,
    values: BTreeMap<String, String>,
}

impl Environment {
    /// The value of a variable.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.values.get(name).cloned()
    }

    /// All variables, in order.
    pub(super) fn into_pairs(mut self) -> impl Iterator<Item = (String, String)> {
        self.order.into_iter().filter_map(move |name| self.values.remove(&name).map(|value| (name, value)))
    }

    fn set(&mut self, name: &str, value: String) {
        if self.values.insert(name.to_owned(), value).is_none() {
            self.order.push(name.to_owned());
        }
    }
}

/// The environment of a container. A variable may refer to those before it. Fails, with a sentence,
/// where a variable's source can't be had.
pub(super) fn environment(
    pod: &core::Pod,
    container: &core::Container,
    pod_ips: &[String],
    node: &NodeFacts,
) -> Result<Environment, String> {
    let mut env = Environment::default();
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (_, Some(source)) => match &source.field_ref {
                Some(field) => field_value(pod, &field.field_path, pod_ips, node),
                None => Err("only fieldRef is supported as a source".to_owned()),
            }
            .map_err(|e| {
                format!("environment variable {} of container {}: {e}", variable.name, container.name)
            })?,
            (Some(text), None) => expand(text, |name| env.get(name)),
            (None, None) => String::new(),
        };
        env.set(&variable.name, value);
    }
    Ok(env)
}

/// The value of a downward API field path.
fn field_value(pod: &core::Pod, path: &str, pod_ips: &[String], node: &NodeFacts) -> Result<String, String> {
    let meta = &pod.metadata;
    if let Some((map, key)) = subscript(path) {
        let from = match map {
            "metadata.labels" => &meta.labels,
            "metadata.annotations" => &meta.annotations,
            _ => return Err(format!("fieldPath {path:?} is not known")),
        };
        return Ok(from.as_ref().and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    let spec = pod.spec.as_ref();
    Ok(match path {
        "metadata.name" => meta.name.clone().unwrap_or_default(),
        "metadata.namespace" => meta.namespace.clone().unwrap_or_default(),
        "metadata.uid" => meta.uid.clone().unwrap_or_default(),
        "spec.nodeName" => node.node_name.clone(),
        "spec.serviceAccountName" => spec.and_then(|s| s.service_account_name.clone()).unwrap_or_default(),
        "status.hostIP" | "status.hostIPs" => node.host_ip.to_string(),
        "status.podIP" => pod_ips.first().cloned().unwrap_or_default(),
        "status.podIPs" => pod_ips.join(","),
        _ => return Err(format!("fieldPath {path:?} is not known")),
    })
}

/// Splits `metadata.labels['key']` into its map and its key.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once("['")?;
    Some((map, rest.strip_suffix("']")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeFacts {
        NodeFacts {
            node_name: "n1".to_owned(),
            host_ip: [192, 0, 2, 1].into(),
            pod_logs_dir: "/logs".into(),
            host_dns: beelet_proto::cri::DnsConfig::default(),
            cluster_dns: Vec::new(),
            cluster_domain: String::new(),
        }
    }

    fn check(env_yaml: &str, expect: Result<&[(&str, &str)], &str>) {
        let container: core::Container =
            serde_json::from_value(serde_json::json!({"name": "c", "env": serde_json::from_str::<serde_json::Value>(env_yaml).unwrap()})).unwrap();
        let pod: core::Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": {"app": "w"}}
        }))
        .unwrap();
        let got = environment(&pod, &container, &["10.0.0.7".to_owned()], &node());
        let pairs = got.map(|e| e.into_pairs().collect::<Vec<_>>());
        let expect = expect
            .map(|list| list.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Vec<_>>());
        assert_eq!(pairs, expect.map_err(str::to_owned));
    }

    #[test]
    fn a_variable_refers_to_those_before_it_only() {
        check(
            r#"[{"name":"A","value":"1"},{"name":"B","value":"$(A)$(C)"},{"name":"C","value":"$$(A)"}]"#,
            Ok(&[("A", "1"), ("B", "1$(C)"), ("C", "$(A)")]),
        );
    }

    #[test]
    fn a_later_definition_wins_in_the_place_of_the_first() {
        check(
            r#"[{"name":"A","value":"1"},{"name":"B","value":"2"},{"name":"A","value":"3"}]"#,
            Ok(&[("A", "3"), ("B", "2")]),
        );
    }

    #[test]
    fn fields_of_the_pod() {
        let field =
            |path: &str| format!(r#"[{{"name":"F","valueFrom":{{"fieldRef":{{"fieldPath":"{path}"}}}}}}]"#);
        check(&field("metadata.name"), Ok(&[("F", "web")]));
        check(&field("metadata.labels['app']"), Ok(&[("F", "w")]));
        check(&field("metadata.labels['none']"), Ok(&[("F", "")]));
        check(&field("status.podIP"), Ok(&[("F", "10.0.0.7")]));
        check(&field("status.hostIP"), Ok(&[("F", "192.0.2.1")]));
        check(
            &field("metadata.color"),
            Err("environment variable F of container c: fieldPath \"metadata.color\" is not known"),
        );
    }
}
