//! Patches: RFC 7386, and strategic merge as in the API server for the fields of nodes and pods.

use serde_json::{Map, Value};

use super::refusal::Refusal;

/// Merge keys of lists; a list that is missing here is replaced as a whole (`patchMergeKey` in Kubernetes'
/// types).
const KEYS: &[(&str, &str)] = &[
    ("addresses", "type"),
    ("conditions", "type"),
    ("containers", "name"),
    ("env", "name"),
    ("ephemeralContainers", "name"),
    ("hostAliases", "ip"),
    ("hostIPs", "ip"),
    ("imagePullSecrets", "name"),
    ("initContainers", "name"),
    ("ownerReferences", "uid"),
    ("podIPs", "ip"),
    ("resourceClaimStatuses", "name"),
    ("resourceClaims", "name"),
    ("taints", "key"),
    ("volumeMounts", "mountPath"),
    ("volumes", "name"),
];

/// Lists of plain values that are merged.
const SETS: &[&str] = &["finalizers", "podCIDRs"];

/// Applies a patch of this content type.
pub(super) fn apply(kind: &str, object: &mut Value, patch: &Value) -> Result<(), Refusal> {
    match kind.split(';').next().unwrap_or_default().trim() {
        "application/merge-patch+json" => merge(object, patch),
        "application/strategic-merge-patch+json" => strategic(object, patch),
        other => {
            let message = format!("the body of the request was in an unknown format - {other:?}");
            return Err(Refusal { code: 415, reason: "UnsupportedMediaType", message });
        }
    }
    Ok(())
}

/// Applies RFC 7386: maps are merged, everything else is replaced, null removes.
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *object = patch.clone();
        return;
    };
    let fields = as_map(object);
    for (name, change) in changes {
        if change.is_null() {
            fields.remove(name);
        } else {
            merge(fields.entry(name.as_str()).or_insert(Value::Null), change);
        }
    }
}

fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(fields) => fields,
        _ => unreachable!("the value is a map"),
    }
}

fn strategic(object: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *object = patch.clone();
        return;
    };
    let fields = as_map(object);
    if changes.get("$patch").is_some_and(|directive| directive == "replace") {
        *fields = changes.iter().filter(|(name, _)| !name.starts_with('$')).map(owned).collect();
        return;
    }
    if let Some(kept) = changes.get("$retainKeys").and_then(Value::as_array) {
        fields.retain(|name, _| kept.iter().any(|kept| kept == name));
    }
    for (name, change) in changes {
        if let Some(name) = name.strip_prefix("$deleteFromPrimitiveList/") {
            let gone = change.as_array().cloned().unwrap_or_default();
            if let Some(list) = fields.get_mut(name).and_then(Value::as_array_mut) {
                list.retain(|value| !gone.contains(value));
            }
        }
        if name.starts_with('$') {
            continue;
        }
        let key = KEYS.iter().find(|(list, _)| list == name).map(|(_, key)| *key);
        match (change, key) {
            (Value::Null, _) => {
                fields.remove(name);
            }
            (Value::Array(changes), Some(key)) => {
                merge_list(fields.entry(name.as_str()).or_insert(Value::Null), changes, key);
            }
            (Value::Array(changes), None) if SETS.contains(&name.as_str()) => {
                let list = as_list(fields.entry(name.as_str()).or_insert(Value::Null));
                for change in changes {
                    if !list.contains(change) {
                        list.push(change.clone());
                    }
                }
            }
            _ => strategic(fields.entry(name.as_str()).or_insert(Value::Null), change),
        }
    }
    for (name, order) in changes {
        let list =
            name.strip_prefix("$setElementOrder/").and_then(|name| Some((name, fields.get_mut(name)?)));
        let Some((name, Value::Array(list))) = list else { continue };
        let key = KEYS.iter().find(|(list, _)| *list == name).map(|(_, key)| *key);
        let same = |a: &Value, b: &Value| key.map_or(a == b, |key| a[key] == b[key]);
        let order = order.as_array().cloned().unwrap_or_default();
        let place = |value: &Value| order.iter().position(|wanted| same(wanted, value));
        // Elements missing in the order stay at the end, where the stable sort leaves them.
        list.sort_by_key(|value| place(value).unwrap_or(usize::MAX));
    }
}

fn owned((name, value): (&String, &Value)) -> (String, Value) {
    (name.clone(), value.clone())
}

fn as_list(value: &mut Value) -> &mut Vec<Value> {
    if !value.is_array() {
        *value = Value::Array(Vec::new());
    }
    match value {
        Value::Array(list) => list,
        _ => unreachable!("the value is a list"),
    }
}

fn merge_list(list: &mut Value, changes: &[Value], key: &str) {
    let list = as_list(list);
    if changes.iter().any(|change| change["$patch"] == "replace") {
        list.clear();
    }
    for change in changes.iter().filter(|change| change["$patch"] != "replace") {
        let found = list.iter().position(|element| element[key] == change[key]);
        match (found, change["$patch"] == "delete") {
            (Some(index), true) => {
                list.remove(index);
            }
            (None, true) => {}
            (Some(index), false) => strategic(&mut list[index], change),
            (None, false) => list.push(change.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn strategic_patches_merge_lists_by_their_keys() {
        let check = |mut object: Value, patch: Value, expected: Value| {
            strategic(&mut object, &patch);
            assert_eq!(object, expected, "{patch}");
        };
        let ready = |status: &str| json!({ "type": "Ready", "status": status });
        let two = json!({ "conditions": [ready("True"), { "type": "Other" }] });
        check(
            two.clone(),
            json!({ "conditions": [{ "type": "Ready", "status": "False" }] }),
            json!({ "conditions": [ready("False"), { "type": "Other" }] }),
        );
        check(
            two.clone(),
            json!({ "conditions": [{ "type": "Other", "$patch": "delete" }] }),
            json!({ "conditions": [ready("True")] }),
        );
        check(
            two,
            json!({ "conditions": [], "$setElementOrder/conditions": [{ "type": "Other" }, { "type": "Ready" }] }),
            json!({ "conditions": [{ "type": "Other" }, ready("True")] }),
        );
        check(json!({ "a": 1, "b": 2 }), json!({ "a": null }), json!({ "b": 2 }));
        check(json!({ "images": [1, 2] }), json!({ "images": [3] }), json!({ "images": [3] }));
        check(
            json!({ "finalizers": ["a", "b"] }),
            json!({ "$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["c"] }),
            json!({ "finalizers": ["b", "c"] }),
        );
        check(json!({ "a": 1 }), json!({ "$patch": "replace", "b": 2 }), json!({ "b": 2 }));
        let replaced = json!({ "addresses": [{ "$patch": "replace" }, { "type": "Hostname" }] });
        check(
            json!({ "addresses": [{ "type": "InternalIP" }] }),
            replaced,
            json!({ "addresses": [{ "type": "Hostname" }] }),
        );
    }

    #[test]
    fn merge_patches_replace_lists() {
        let mut object = json!({ "a": { "b": [1], "c": 2 }, "d": 3 });
        merge(&mut object, &json!({ "a": { "b": [4] }, "d": null }));
        assert_eq!(object, json!({ "a": { "b": [4], "c": 2 } }));
    }
}
