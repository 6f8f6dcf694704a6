//! Parsing of requests: the resource in the path, and the objects that the query selects.

use std::collections::BTreeMap;
use std::fmt;

use http::Method;
use serde_json::Value;

/// Operation of a request, in the words of the API server's audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    /// Reads one object.
    Get,
    /// Reads a collection.
    List,
    /// Follows a collection, or one object.
    Watch,
    /// Creates an object.
    Create,
    /// Replaces an object.
    Update,
    /// Changes an object.
    Patch,
    /// Removes an object.
    Delete,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Watch => "watch",
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
        })
    }
}

/// Resource in a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// Group, version and resource: `/api/v1/pods`, `/apis/coordination.k8s.io/v1/leases`.
    pub(super) collection: String,
    /// Empty for cluster-scoped resources, and for lists of all namespaces.
    pub(super) namespace: String,
    pub(super) name: Option<String>,
    /// `status`, `token`, …
    pub(super) subresource: Option<String>,
}

impl Target {
    /// Parses a path without its query; None if it names no resource.
    pub(super) fn of(path: &str) -> Option<Target> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (root, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => (format!("/api/{version}"), rest),
            ["apis", group, version, rest @ ..] => (format!("/apis/{group}/{version}"), rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            // Path of a namespace itself.
            ["namespaces"] | ["namespaces", _] | ["namespaces", _, "status" | "finalize"] => ("", rest),
            ["namespaces", namespace, rest @ ..] => (*namespace, rest),
            _ => ("", rest),
        };
        let (resource, name, subresource) = match rest {
            [resource] => (resource, None, None),
            [resource, name] => (resource, Some(name), None),
            [resource, name, subresource] => (resource, Some(name), Some(subresource)),
            _ => return None,
        };
        Some(Target {
            collection: format!("{root}/{resource}"),
            namespace: namespace.to_owned(),
            name: name.map(ToString::to_string),
            subresource: subresource.map(ToString::to_string),
        })
    }

    /// Returns the verb of a method with this path and query.
    pub(super) fn verb(method: &Method, path: &str, query: &BTreeMap<String, String>) -> Verb {
        let watched = query.get("watch").is_some_and(|value| value != "false" && value != "0");
        match *method {
            Method::POST => Verb::Create,
            Method::PUT => Verb::Update,
            Method::PATCH => Verb::Patch,
            Method::DELETE => Verb::Delete,
            _ if watched => Verb::Watch,
            _ if Target::of(path).is_some_and(|target| target.name.is_none()) => Verb::List,
            _ => Verb::Get,
        }
    }

    /// Returns the resource's name: `pods`.
    pub(super) fn resource(&self) -> &str {
        self.collection.rsplit('/').next().unwrap_or_default()
    }
}

/// Returns true if a path matches a pattern, in which `*` stands for one part.
pub(super) fn fits(pattern: &str, path: &str) -> bool {
    let (mut pattern, mut path) = (pattern.split('/'), path.split('/'));
    loop {
        match (pattern.next(), path.next()) {
            (None, None) => return true,
            (Some(wanted), Some(part)) if wanted == "*" || wanted == part => {}
            _ => return false,
        }
    }
}

/// Objects of a collection that a query selects.
#[derive(Debug, Clone, Default)]
pub(super) struct Selection {
    pub(super) collection: String,
    namespace: String,
    name: Option<String>,
    fields: Vec<Term>,
    labels: Vec<Term>,
}

/// Part of a selector: `spec.nodeName=a`, `status.phase!=Failed`, `app`, `!app`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    key: String,
    /// None: tests the existence of the key.
    value: Option<String>,
    equal: bool,
}

impl Selection {
    pub(super) fn of(target: &Target, query: &BTreeMap<String, String>) -> Selection {
        let terms = |name| query.get(name).map(|text| terms(text)).unwrap_or_default();
        Selection {
            collection: target.collection.clone(),
            namespace: target.namespace.clone(),
            name: target.name.clone(),
            fields: terms("fieldSelector"),
            labels: terms("labelSelector"),
        }
    }

    pub(super) fn has(&self, collection: &str, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.collection == collection
            && (self.namespace.is_empty() || text(&metadata["namespace"]) == self.namespace)
            && self.name.as_ref().is_none_or(|name| *name == text(&metadata["name"]))
            && self.fields.iter().all(|term| {
                let found = term.key.split('.').fold(object, |value, part| &value[part]);
                (term.value.as_deref() == Some(&text(found))) == term.equal
            })
            && self.labels.iter().all(|term| {
                let found = metadata["labels"][&term.key].as_str();
                match &term.value {
                    Some(value) => (found == Some(value)) == term.equal,
                    None => found.is_some() == term.equal,
                }
            })
    }
}

fn terms(selector: &str) -> Vec<Term> {
    let term = |text: &str| {
        let of = |key: &str, value: Option<&str>, equal| Term {
            key: key.trim().to_owned(),
            value: value.map(|value| value.trim().to_owned()),
            equal,
        };
        if let Some((key, value)) = text.split_once("!=") {
            of(key, Some(value), false)
        } else if let Some((key, value)) = text.split_once('=') {
            of(key, Some(value.trim_start_matches('=')), true)
        } else if let Some(key) = text.strip_prefix('!') {
            of(key, None, false)
        } else {
            of(text, None, true)
        }
    };
    selector.split(',').filter(|text| !text.is_empty()).map(term).collect()
}

/// Returns the parameters of a query, decoded.
pub(super) fn query(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(key), decoded(value))
        })
        .collect()
}

/// Decodes percent escapes and pluses (the form of HTML queries).
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = after.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match (first, hex) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
                continue;
            }
            (b'+', _) => bytes.push(b' '),
            (other, _) => bytes.push(*other),
        }
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_path_names_its_resource() {
        let check = |path: &str, collection: &str, namespace: &str, name: Option<&str>, sub: Option<&str>| {
            let target = Target::of(path).unwrap();
            let found = (target.collection.as_str(), target.namespace.as_str());
            assert_eq!(found, (collection, namespace), "{path}");
            assert_eq!((target.name.as_deref(), target.subresource.as_deref()), (name, sub), "{path}");
        };
        check("/api/v1/pods", "/api/v1/pods", "", None, None);
        check("/api/v1/nodes/a/status", "/api/v1/nodes", "", Some("a"), Some("status"));
        check("/api/v1/namespaces/a", "/api/v1/namespaces", "", Some("a"), None);
        check("/api/v1/namespaces/a/pods/b/status", "/api/v1/pods", "a", Some("b"), Some("status"));
        let leases = "/apis/coordination.k8s.io/v1/leases";
        check("/apis/coordination.k8s.io/v1/namespaces/a/leases", leases, "a", None, None);
        assert_eq!(Target::of("/healthz"), None);
    }

    #[test]
    fn a_pattern_has_stars_for_single_parts() {
        let check =
            |pattern: &str, path: &str, expected| assert_eq!(fits(pattern, path), expected, "{pattern}");
        check("/api/v1/nodes/*/status", "/api/v1/nodes/a/status", true);
        check("/api/v1/nodes/*", "/api/v1/nodes/a/status", false);
        check("/api/v1/nodes", "/api/v1/nodes", true);
    }

    #[test]
    fn a_query_selects_by_fields_and_labels() {
        let pod = json!({
            "metadata": { "name": "a", "namespace": "x", "labels": { "app": "web" } },
            "spec": { "nodeName": "n" },
        });
        let check = |path: &str, text: &str, expected| {
            let selection = Selection::of(&Target::of(path).unwrap(), &query(text));
            assert_eq!(selection.has("/api/v1/pods", &pod), expected, "{path}?{text}");
        };
        check("/api/v1/pods", "fieldSelector=spec.nodeName%3Dn", true);
        check("/api/v1/pods", "fieldSelector=spec.nodeName%3Dm", false);
        check("/api/v1/pods", "fieldSelector=metadata.name=a,status.phase!=Failed", true);
        check("/api/v1/pods", "labelSelector=app%3Dweb,!old", true);
        check("/api/v1/pods", "labelSelector=!app", false);
        check("/api/v1/namespaces/y/pods", "", false);
        check("/api/v1/namespaces/x/pods/a", "", true);
        check("/api/v1/nodes", "", false);
    }
}
