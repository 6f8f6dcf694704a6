//! Invalid answers, as a broken server, a proxy or a load balancer may send in place of an API server.

use std::sync::Arc;

use serde_json::{Value, json};

use super::script::{Fault, Script};

/// Invalid answer.
#[derive(Clone)]
pub struct Hostile {
    /// Description of the answer.
    pub name: &'static str,
    fault: Fault,
}

impl Script<'_> {
    /// Executes the request, and sends this answer.
    pub fn answer_hostile(self, answer: &Hostile) {
        self.fault(answer.fault.clone());
    }
}

/// Returns answers whose body is not an object, or not of the requested kind.
#[must_use]
pub fn bodies() -> Vec<Hostile> {
    let version = "9".repeat(60);
    let bookmark = json!({ "type": "BOOKMARK", "object": { "kind": "Pod", "metadata": { "resourceVersion": version } } });
    let all = [
        ("nothing", String::new()),
        ("a string", r#""ok""#.to_owned()),
        ("a number", "7".to_owned()),
        ("a number that no type holds", "1e999".to_owned()),
        ("a boolean", "true".to_owned()),
        ("null", "null".to_owned()),
        ("a list", "[]".to_owned()),
        ("a list of lists", "[[[]]]".to_owned()),
        ("lists in each other", "[".repeat(100_000)),
        ("objects in each other", r#"{"metadata":"#.repeat(100_000)),
        ("an empty object", "{}".to_owned()),
        ("half an object", r#"{"kind":"#.to_owned()),
        ("an HTML page", "<html><body>502 Bad Gateway</body></html>".to_owned()),
        ("an invalid status", r#"{"kind":"Status","status":7,"code":"ok"}"#.to_owned()),
        ("metadata of null", r#"{"metadata":null,"spec":null,"status":null}"#.to_owned()),
        ("metadata that is text", r#"{"metadata":"ok","spec":"ok","status":"ok","items":"ok"}"#.to_owned()),
        ("metadata that is a list", r#"{"metadata":[{}],"spec":[],"status":[],"items":[]}"#.to_owned()),
        ("a list without objects", r#"{"kind":"PodList","items":[1,"a",null,[]]}"#.to_owned()),
        ("a list of empty objects", r#"{"kind":"PodList","items":[{},{"metadata":null}]}"#.to_owned()),
        ("a list that is an object", r#"{"kind":"PodList","items":{}}"#.to_owned()),
        ("an event of text", "{\"type\":\"ADDED\",\"object\":\"ok\"}\n".to_owned()),
        ("an event without metadata", "{\"type\":\"DELETED\",\"object\":{\"metadata\":null}}\n".to_owned()),
        ("an event without a type", "{\"type\":{},\"object\":{}}\n".to_owned()),
        ("a bookmark of the far future", format!("{bookmark}\n")),
        ("an error with an invalid code", "{\"type\":\"ERROR\",\"object\":{\"code\":-1}}\n".to_owned()),
        ("an error of text", "{\"type\":\"ERROR\",\"object\":{\"code\":\"410\"}}\n".to_owned()),
    ];
    let hostile = |(name, body): (_, String)| Hostile { name, fault: Fault::Body(body.into_bytes()) };
    all.into_iter().map(hostile).collect()
}

/// Returns answers that are valid except for a part.
#[must_use]
pub fn alterations() -> Vec<Hostile> {
    vec![
        altered("metadata of null", |object| object["metadata"] = Value::Null),
        altered("metadata that is a list", |object| object["metadata"] = json!([{}])),
        altered("a version that no type holds", |object| {
            object["metadata"]["resourceVersion"] = "9".repeat(60).into();
        }),
        altered_list("a list of a version of noise", |list| {
            list["metadata"]["resourceVersion"] = json!("%00/../\u{1}");
        }),
        altered_list("a list of a version that no URL has room for", |list| {
            list["metadata"]["resourceVersion"] = "9".repeat(100_000).into();
        }),
        altered("a version that is a number", |object| object["metadata"]["resourceVersion"] = json!(7)),
        altered("a version of noise", |object| object["metadata"]["resourceVersion"] = json!("%00/../\u{1}")),
        altered("a name that leads elsewhere", |object| {
            object["metadata"]["name"] = json!("../../etc");
            object["metadata"]["namespace"] = json!("..");
        }),
        altered("no UID", |object| object["metadata"]["uid"] = Value::Null),
        altered("a kind that is a number", |object| object["kind"] = json!(7)),
        altered("another kind", |object| object["kind"] = json!("Banana")),
        altered("a spec of text", |object| object["spec"] = json!("ok")),
        altered("a status that is a list", |object| object["status"] = json!([1, 2])),
        altered("data that is a number", |object| object["data"] = json!(7)),
    ]
}

/// Returns the alteration `change` of a list.
fn altered_list(name: &'static str, change: impl Fn(&mut Value) + Send + Sync + 'static) -> Hostile {
    let alter = move |answer: &mut Value| {
        if answer["items"].is_array() {
            change(answer);
        }
    };
    Hostile { name, fault: Fault::Alter(Arc::new(alter)) }
}

/// Returns the alteration `change` of an object, or of each object in a list.
fn altered(name: &'static str, change: impl Fn(&mut Value) + Send + Sync + 'static) -> Hostile {
    let alter = move |answer: &mut Value| {
        if let Some(items) = answer.get_mut("items").and_then(Value::as_array_mut) {
            items.iter_mut().for_each(&change);
        } else if answer.is_object() {
            change(answer);
        }
    };
    Hostile { name, fault: Fault::Alter(Arc::new(alter)) }
}
