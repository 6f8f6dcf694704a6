//! Manifests of ConfigMaps, Secrets and RuntimeClasses for the pods of the same folder. The rules are the
//! API's (`pkg/apis/core/validation`, `pkg/apis/node/validation`).

use std::collections::BTreeMap;
use std::sync::Arc;

use beelet_units::quantity::Quantity;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::{Manifest, Object, names};
use beelet_codec::ApiType as _;
use beelet_codec::error::Problem;
use beelet_model::objects;

/// Maximum total size of all values, in bytes.
const DATA_MAX: usize = 1 << 20;
/// Maximum length of a key.
const KEY_MAX: usize = 253;

/// Reads a ConfigMap.
pub(super) fn config_map(value: &Value) -> Result<Manifest, Vec<Problem>> {
    let (mut map, unknown) = ConfigMap::read(value)?;
    let mut problems = namespaced(&mut map.metadata);
    let text = map.data.iter().flatten().map(|(key, text)| (key, text.len()));
    problems.extend(data("data", text));
    let bytes = map.binary_data.iter().flatten().map(|(key, ByteString(bytes))| (key, bytes.len()));
    problems.extend(data("binaryData", bytes));
    for key in map.binary_data.iter().flatten().map(|(key, _)| key) {
        if map.data.as_ref().is_some_and(|data| data.contains_key(key)) {
            problems.push(Problem::new(beelet_codec::field("binaryData", key), "is also a key of data"));
        }
    }
    manifest(objects::Object::ConfigMap(Arc::new(map)), problems, &unknown)
}

/// Reads a Secret. Its `stringData` becomes `data`, as in the API server.
pub(super) fn secret(value: &Value) -> Result<Manifest, Vec<Problem>> {
    let (mut secret, unknown) = Secret::read(value).map_err(|problems| {
        // A message of the decoder may quote the value.
        let hide = |problem: Problem| match problem.path.starts_with("data.") {
            true => Problem::new(problem.path, "must be a base64 string; use stringData for plain text"),
            false => problem,
        };
        problems.into_iter().map(hide).collect::<Vec<_>>()
    })?;
    let mut problems = namespaced(&mut secret.metadata);
    for (key, text) in secret.string_data.take().into_iter().flatten() {
        secret.data.get_or_insert_default().insert(key, ByteString(text.into_bytes()));
    }
    problems.extend(data(
        "data",
        secret.data.iter().flatten().map(|(key, ByteString(bytes))| (key, bytes.len())),
    ));
    manifest(objects::Object::Secret(Arc::new(secret)), problems, &unknown)
}

/// Reads a RuntimeClass.
pub(super) fn runtime_class(mut value: Value) -> Result<Manifest, Vec<Problem>> {
    for (_, amount) in
        value.pointer_mut("/overhead/podFixed").and_then(Value::as_object_mut).into_iter().flatten()
    {
        if let Value::Number(number) = amount {
            *amount = Value::String(number.to_string());
        }
    }
    let (mut class, unknown) = RuntimeClass::read(&value)?;
    // The class is not namespaced, regardless of its metadata.
    class.metadata.namespace = None;
    let mut problems: Vec<Problem> =
        names::subdomain("metadata.name", class.metadata.name.as_deref().unwrap_or_default())
            .into_iter()
            .collect();
    problems.extend(names::label("handler", &class.handler));
    let overhead = class.overhead.as_ref().and_then(|overhead| overhead.pod_fixed.as_ref());
    for (name, amount) in overhead.into_iter().flatten() {
        let path = beelet_codec::field("overhead.podFixed", name);
        match Quantity::parse(&amount.0) {
            Ok(amount) if amount < Quantity::ZERO => problems.push(Problem::new(path, "is negative")),
            Ok(_) => {}
            Err(error) => problems.push(Problem::new(path, error.to_string())),
        }
    }
    manifest(objects::Object::RuntimeClass(Arc::new(class)), problems, &unknown)
}

fn manifest(
    object: objects::Object,
    problems: Vec<Problem>,
    unknown: &[Problem],
) -> Result<Manifest, Vec<Problem>> {
    if !problems.is_empty() {
        return Err(problems);
    }
    let warnings = unknown.iter().map(Problem::to_string).collect();
    Ok(Manifest { object: Object::Other(object), content: [0; 32], warnings })
}

fn namespaced(metadata: &mut ObjectMeta) -> Vec<Problem> {
    if metadata.namespace.as_deref().unwrap_or_default().is_empty() {
        metadata.namespace = Some("default".to_owned());
    }
    let name = names::subdomain("metadata.name", metadata.name.as_deref().unwrap_or_default());
    let namespace = names::label("metadata.namespace", metadata.namespace.as_deref().unwrap_or_default());
    name.into_iter().chain(namespace).collect()
}

/// Checks keys and the total size of all values.
fn data<'k>(path: &str, entries: impl Iterator<Item = (&'k String, usize)>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut total = 0;
    for (key, length) in entries {
        total += length;
        if !is_key(key) {
            let rule =
                "is not a key: up to 253 letters, digits, '-', '_' and '.', and not beginning with '..'";
            problems
                .push(Problem::new(beelet_codec::field(path, key), format!("{} {rule}", names::quoted(key))));
        }
    }
    if total > DATA_MAX {
        problems.push(Problem::new(path, format!("has {total} bytes; {DATA_MAX} are allowed")));
    }
    problems
}

fn is_key(key: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    !key.is_empty()
        && key.len() <= KEY_MAX
        && key.bytes().all(allowed)
        && key != "."
        && !key.starts_with("..")
}

/// Returns a pod's overhead: that of its runtime class, as in the API server's admission. Returns an error if
/// the pod has a different one.
pub(super) fn overhead(
    written: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>,
    class: Option<&RuntimeClass>,
) -> Result<Option<BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>, String> {
    let fixed =
        class.and_then(|class| class.overhead.as_ref()).and_then(|overhead| overhead.pod_fixed.clone());
    match (written.filter(|costs| !costs.is_empty()), class) {
        (Some(costs), Some(_)) if Some(costs) != fixed.as_ref() => Err(
            "spec.overhead: differs from the overhead of the runtime class, which the agent sets; remove it"
                .to_owned(),
        ),
        (Some(costs), None) => Ok(Some(costs.clone())),
        _ => Ok(fixed),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(result: Result<Manifest, Vec<Problem>>, expected: Option<&str>) {
        let problems = result.map_or_else(|problems| problems, |_| Vec::new());
        let text: Vec<_> = problems.iter().map(|p| format!("{}: {}", p.path, p.message)).collect();
        match expected {
            None => assert!(text.is_empty(), "{text:?}"),
            Some(part) => assert!(text.iter().any(|t| t.contains(part)), "{text:?}"),
        }
    }

    #[test]
    fn config_maps_obey_the_rules_of_the_api() {
        let of = |more: Value| {
            let mut map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}});
            map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            config_map(&map)
        };
        check(of(json!({"data": {"a.b-c_D": "1"}, "binaryData": {"x": "/w=="}})), None);
        check(of(json!({"data": {"a/b": "1"}})), Some("data[\"a/b\"]: \"a/b\" is not a key"));
        check(of(json!({"data": {"..data": "1"}})), Some("is not a key"));
        check(of(json!({"data": {"a": "1"}, "binaryData": {"a": ""}})), Some("is also a key of data"));
        check(of(json!({"data": {"a": 1}})), Some("data.a: must be a string, not the number 1"));
        check(of(json!({"data": {"a": "x".repeat(DATA_MAX + 1)}})), Some("1048576 are allowed"));
        check(of(json!({"metadata": {"name": "M"}})), Some("metadata.name: \"M\" is not a name"));
        assert_eq!(of(json!({"color": 1})).unwrap().warnings.len(), 1);
    }

    #[test]
    fn secrets_are_decoded_and_never_quoted() {
        let of = |more: Value| {
            let mut secret = json!({"metadata": {"name": "s"}, "stringData": {"b": "plain"}});
            secret.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            secret_of(secret)
        };
        fn secret_of(value: Value) -> Result<Manifest, Vec<Problem>> {
            secret(&value)
        }
        let made = of(json!({"data": {"a": "aHVzaA==", "b": "eA=="}})).unwrap();
        let Object::Other(objects::Object::Secret(secret)) = made.object else { panic!("no secret") };
        let data = secret.data.clone().unwrap();
        assert_eq!(
            (data["a"].0.as_slice(), data["b"].0.as_slice()),
            (b"hush".as_slice(), b"plain".as_slice())
        );
        assert_eq!(secret.metadata.namespace.as_deref(), Some("default"));
        let wrong = of(json!({"data": {"a": "not base64!"}})).unwrap_err();
        assert!(wrong.iter().all(|p| !p.message.contains("not base64!")), "{wrong:?}");
    }

    #[test]
    fn runtime_classes_give_a_handler_and_an_overhead() {
        let of = |more: Value| {
            let mut class = json!({"metadata": {"name": "sandboxed"}, "handler": "runsc"});
            class.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            runtime_class(class)
        };
        check(of(json!({"overhead": {"podFixed": {"cpu": 1, "memory": "64Mi"}}})), None);
        check(of(json!({"handler": "Run SC"})), Some("handler: \"Run SC\" is not a name"));
        check(
            of(json!({"overhead": {"podFixed": {"cpu": "x"}}})),
            Some("overhead.podFixed.cpu: \"x\" is not a quantity"),
        );
    }

    #[test]
    fn a_pods_overhead_is_its_classs() {
        let class = |overhead: Value| -> RuntimeClass {
            serde_json::from_value(json!({"handler": "h", "overhead": {"podFixed": overhead}})).unwrap()
        };
        let costs = |value: Value| serde_json::from_value(value).unwrap();
        let quarter = class(json!({"cpu": "250m"}));
        assert_eq!(overhead(None, Some(&quarter)), Ok(Some(costs(json!({"cpu": "250m"})))));
        assert_eq!(overhead(Some(&costs(json!({"cpu": "1"}))), None), Ok(Some(costs(json!({"cpu": "1"})))));
        assert!(overhead(Some(&costs(json!({"cpu": "1"}))), Some(&quarter)).is_err());
        assert_eq!(overhead(None, None), Ok(None));
    }
}
