//! Pods of an author who wants to harm the node: each is a valid pod except for one field. Every field of the
//! API's schema ([`crate::schema`]) is set in turn to the worst values of its kind. [`pairs`] are pods whose
//! harm takes several fields.

mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Map, Value, json};

use self::values::worst_of;
use crate::schema::{self, Field, Kind, Step};

/// Node that the pods are assigned to.
pub const NODE: &str = "testnode";
/// Image of their containers.
pub const IMAGE: &str = "localhost/beelet/app:1";

/// Hostile value of a field.
#[derive(Clone, Debug, PartialEq)]
pub enum Hostile {
    /// A JSON value.
    Value(Value),
    /// Text, repeated.
    Text(&'static str, usize),
    /// List with this number of good elements.
    Elements(usize),
    /// Map with this number of good entries.
    Entries(usize),
    /// Map with one entry, whose key is this text, repeated.
    Key(&'static str, usize),
    /// Nested lists of this depth.
    Nested(usize),
}

/// Kind of attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Numbers, amounts, ports and times.
    Numbers,
    /// Texts and keys.
    Texts,
    /// Numbers of elements in lists and maps.
    Counts,
    /// JSON types other than the field's.
    Types,
}

/// Pod with one hostile field.
#[derive(Clone, Debug)]
pub struct Case {
    /// The field.
    pub field: Arc<Field>,
    /// Its value.
    pub hostile: Hostile,
    /// Kind of attack.
    pub group: Group,
    /// Pod around the field.
    good: Arc<Good>,
}

/// Valid pod that has the field.
#[derive(Debug)]
struct Good {
    pod: Value,
    pointer: String,
}

impl Case {
    /// Returns the pod.
    #[must_use]
    pub fn pod(&self) -> Value {
        let mut pod = self.good.pod.clone();
        if let Some(place) = pod.pointer_mut(&self.good.pointer) {
            let worst = self.worst(place);
            *place = worst;
        }
        pod
    }

    /// Returns the pod as a static manifest: without the fields that the API server adds, except the hostile
    /// one.
    #[must_use]
    pub fn manifest(&self) -> Value {
        let mut pod = self.pod();
        let added = [("/metadata", "uid"), ("/metadata", "namespace"), ("/spec", "nodeName")];
        for (parent, name) in added.into_iter().filter(|(_, name)| !self.field.goes_through(name)) {
            let parent = pod.pointer_mut(parent).and_then(Value::as_object_mut);
            parent.and_then(|parent| parent.remove(name));
        }
        pod
    }

    /// Returns the hostile value for a field whose valid value is `good`.
    fn worst(&self, good: &Value) -> Value {
        let text = |text: &str, times: &usize| text.repeat(*times);
        match &self.hostile {
            Hostile::Value(value) => value.clone(),
            Hostile::Text(part, times) => text(part, times).into(),
            Hostile::Elements(count) => (0..*count).map(|number| element(good, number)).collect(),
            Hostile::Entries(count) => {
                let value = first_value(good);
                let entries = (0..*count).map(|number| (format!("k{number}"), value.clone()));
                Value::Object(entries.collect())
            }
            Hostile::Key(part, times) => {
                Value::Object(Map::from_iter([(text(part, times), first_value(good))]))
            }
            Hostile::Nested(levels) => (0..*levels).fold(json!([]), |inner, _| json!([inner])),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {:?}", self.field, self.hostile)
    }
}

/// Returns an element of a long list, with a unique name if it has one.
fn element(list: &Value, number: usize) -> Value {
    let mut element = list.get(0).cloned().unwrap_or_default();
    for field in ["name", "mountPath", "path"] {
        if let Some(Value::String(text)) = element.get_mut(field) {
            text.push_str(&number.to_string());
        }
    }
    element
}

fn first_value(map: &Value) -> Value {
    map.as_object().and_then(|map| map.values().next()).cloned().unwrap_or_default()
}

/// Returns the cases of all fields of a pod.
///
/// # Panics
/// If [`crate::schema`] does not know a part of the schema, or a pod that should be valid is not.
#[must_use]
pub fn cases() -> Vec<Case> {
    let fields = pod_fields();
    let (kinds, mut cases) = (kinds(&fields), Vec::new());
    for field in &fields {
        let good = Arc::new(good(field, &kinds));
        let field = Arc::new(field.clone());
        for (group, hostile) in worst_of(field.kind) {
            cases.push(Case { field: Arc::clone(&field), hostile, group, good: Arc::clone(&good) });
        }
    }
    cases
}

/// Returns every `one_of`th case of a group, or all with `cargo xtask test --long`.
#[must_use]
pub fn cases_of(group: Group, one_of: usize) -> Vec<Case> {
    let step = if std::env::var_os("BEELET_LONG").is_some() { 1 } else { one_of };
    cases().into_iter().filter(|case| case.group == group).step_by(step).collect()
}

/// Returns every place in a pod.
///
/// # Panics
/// If [`crate::schema`] does not know a part of the schema.
#[must_use]
pub fn pod_fields() -> Vec<Field> {
    schema::fields::<Pod>().unwrap_or_else(|problem| panic!("{problem}"))
}

// ---- Valid pods ----

/// Returns a pod that the API server would assign to the tests' node, with its defaults.
#[must_use]
pub fn plain(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "default", "uid": "8a0d0c0e-0000-4000-8000-000000000001" },
        "spec": {
            "nodeName": NODE, "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "enableServiceLinks": false,
            "schedulerName": "default-scheduler", "terminationGracePeriodSeconds": 2, "securityContext": {},
            "containers": [{
                "name": "main", "image": IMAGE, "command": ["/bin/testapp"], "imagePullPolicy": "IfNotPresent",
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File", "resources": {},
            }],
        },
    })
}

/// Kinds of values by place.
type Kinds<'a> = BTreeMap<&'a [Step], Kind>;

fn kinds(fields: &[Field]) -> Kinds<'_> {
    fields.iter().map(|field| (field.path.as_slice(), field.kind)).collect()
}

/// Returns a valid pod that has `field`, with the field's place. A list or a map has one entry.
fn good(field: &Field, kinds: &Kinds<'_>) -> Good {
    let mut pod = plain("pod");
    let entry = match field.kind {
        Kind::List => Some(Step::Item),
        Kind::Map => Some(Step::Key),
        _ => None,
    };
    let way: Vec<Step> = field.path.iter().copied().chain(entry).collect();
    let mut pointers = vec![String::new()];
    for place in 1..=way.len() {
        let pointer =
            reach(&mut pod, pointers.last().map_or("", String::as_str), &way[..place], way.get(place), kinds);
        pointers.push(pointer);
    }
    accompany(field, &mut pod);
    let pointer = pointers.swap_remove(field.path.len());
    Good { pod: with_required_fields(&pod, field), pointer }
}

/// Follows the last step of `way` from `from` and creates a valid value there if it is missing. Returns the
/// place.
fn reach(pod: &mut Value, from: &str, way: &[Step], next: Option<&Step>, kinds: &Kinds<'_>) -> String {
    let (Some((step, before)), Some(kind)) = (way.split_last(), kinds.get(way).copied()) else {
        panic!("{way:?} has no kind")
    };
    let Some(parent) = pod.pointer_mut(from) else { panic!("nothing at {from}") };
    let next_is_object = next.is_some_and(|next| {
        let path: Vec<Step> = way.iter().chain([next]).copied().collect();
        matches!(kinds.get(path.as_slice()), Some(Kind::Object(_)))
    });
    let key = match step {
        Step::Field(name) => name,
        Step::Item => "0",
        Step::Key => key_of(before),
    };
    match parent {
        Value::Array(list) if list.is_empty() => list.push(good_value(kind, way, next_is_object)),
        Value::Array(_) => {}
        parent if parent.get(key).is_none_or(Value::is_null) => {
            parent[key] = good_value(kind, way, next_is_object);
        }
        _ => {}
    }
    format!("{from}/{}", key.replace('~', "~0").replace('/', "~1"))
}

/// Returns the key for an entry of a map.
fn key_of(map: &[Step]) -> &'static str {
    match map.last() {
        Some(Step::Field("limits" | "requests" | "overhead" | "allocatedResources" | "capacity")) => "memory",
        _ => "extra",
    }
}

/// Returns a valid value of a kind at `path`. A pod may use only one of several alternatives: omits the
/// default one if an object field of the same parent follows.
fn good_value(kind: Kind, path: &[Step], next_is_object: bool) -> Value {
    match kind {
        Kind::Bool => true.into(),
        Kind::Int32 | Kind::Int64 | Kind::IntOrString => 1.into(),
        Kind::Text => {
            let mut names = path.iter().rev();
            let name = names.find_map(|step| if let Step::Field(name) = step { Some(*name) } else { None });
            good_text(name.unwrap_or_default()).into()
        }
        Kind::Quantity => "64Mi".into(),
        Kind::Time => "2026-01-01T00:00:00Z".into(),
        Kind::Json | Kind::Map => json!({}),
        Kind::List => json!([]),
        Kind::Object(name) => {
            let mut fields = companions(name);
            fields.retain(|_, value| !(next_is_object && value.is_object()));
            Value::Object(fields)
        }
    }
}

/// Returns the other fields that an object of this type needs to be valid. [`with_required_fields`] adds the
/// required fields of types that are not listed here.
fn companions(name: &str) -> Map<String, Value> {
    let run = json!({ "command": ["true"] });
    let fields = match name {
        "Container" | "EphemeralContainer" => {
            json!({ "name": "extra", "image": IMAGE, "command": ["/bin/testapp"], "imagePullPolicy": "IfNotPresent" })
        }
        "Probe" => json!({ "exec": run, "timeoutSeconds": 30 }),
        "LifecycleHandler" => json!({ "exec": run }),
        "Volume" => json!({ "name": "extra", "emptyDir": {} }),
        "EnvVar" => json!({ "name": "EXTRA" }),
        "EnvVarSource" => json!({ "fieldRef": { "fieldPath": "metadata.name" } }),
        "EnvFromSource" => json!({ "configMapRef": { "name": "conf" } }),
        "VolumeProjection" => json!({ "configMap": { "name": "conf" } }),
        "ConfigMapVolumeSource" | "ConfigMapProjection" | "ConfigMapEnvSource" => json!({ "name": "conf" }),
        "SecretProjection" | "SecretEnvSource" => json!({ "name": "secret" }),
        "SecretVolumeSource" => json!({ "secretName": "secret" }),
        "ConfigMapKeySelector" => json!({ "name": "conf", "key": "greeting" }),
        "SecretKeySelector" => json!({ "name": "secret", "key": "greeting" }),
        "VolumeMount" => json!({ "name": "extra", "mountPath": "/extra" }),
        "PodOS" => json!({ "name": "linux" }),
        "SeccompProfile" | "AppArmorProfile" => json!({ "type": "Unconfined" }),
        "Toleration" => json!({ "operator": "Exists" }),
        "Sysctl" => json!({ "name": "net.ipv4.ip_local_port_range", "value": "1024 65535" }),
        "DownwardAPIVolumeFile" => json!({ "path": "extra", "fieldRef": { "fieldPath": "metadata.name" } }),
        "KeyToPath" => json!({ "key": "greeting", "path": "extra" }),
        "PersistentVolumeClaimTemplate" => json!({ "spec": { "accessModes": ["ReadWriteOnce"] } }),
        _ => json!({}),
    };
    fields.as_object().cloned().unwrap_or_default()
}

/// Returns a harmless text for a field of this name.
fn good_text(field: &str) -> &'static str {
    match field {
        "image" | "reference" => IMAGE,
        "mountPath" => "/extra-too",
        "devicePath" | "path" | "server" | "volumePath" | "directory" | "workingDir" => "/extra",
        "terminationMessagePath" => "/dev/termination-log",
        "ip" | "podIP" | "hostIP" | "ips" => "192.0.2.9",
        "fieldPath" => "metadata.name",
        "resource" => "limits.cpu",
        "key" => "greeting",
        "command" => "/bin/testapp",
        "iqn" => "iqn.2001-04.com.example:extra",
        "targetPortal" => "192.0.2.1:3260",
        "driver" => "extra.example.com",
        "operator" => "Exists",
        "phase" => "Pending",
        _ => "extra",
    }
}

/// Adds the other parts of the pod that make the field effective: a mount of its volume, a volume of its
/// mount.
fn accompany(field: &Field, pod: &mut Value) {
    let spec = &mut pod["spec"];
    if field.goes_through("volumeMounts") || field.goes_through("volumes") {
        if spec["volumes"].is_null() {
            spec["volumes"] = json!([{ "name": "extra", "emptyDir": {} }]);
        }
        let mounts = &mut spec["containers"][0]["volumeMounts"];
        if mounts.is_null() && field.path.len() > 2 {
            *mounts = json!([{ "name": "extra", "mountPath": "/extra" }]);
        }
    }
}

/// Adds the fields that the types require, as the types serialize them.
fn with_required_fields(pod: &Value, field: &Field) -> Value {
    let written = serde_json::from_value::<Pod>(pod.clone()).and_then(|pod| serde_json::to_value(&pod));
    let mut whole = written.unwrap_or_else(|problem| panic!("{field}: {problem}: {pod:#}"));
    fill(&mut whole, pod);
    whole
}

/// Sets the fields of `whole` that `pod` lacks to valid texts; adds back fields that `whole` omitted because
/// they are empty.
fn fill(whole: &mut Value, pod: &Value) {
    match (whole, pod) {
        (Value::Object(whole), Value::Object(pod)) => {
            for (key, value) in whole.iter_mut() {
                match pod.get(key) {
                    Some(of_pod) => fill(value, of_pod),
                    None if value == "" => *value = good_text(key).into(),
                    None => {}
                }
            }
            for (key, value) in pod.iter().filter(|(_, value)| !value.is_null()) {
                whole.entry(key).or_insert_with(|| value.clone());
            }
        }
        (Value::Array(whole), Value::Array(pod)) => {
            whole.iter_mut().zip(pod).for_each(|(whole, pod)| fill(whole, pod));
        }
        _ => {}
    }
}

// ---- Fields that hurt in combination ----

/// Pod with several hostile fields.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Name of the attack.
    pub name: &'static str,
    /// The pod.
    pub pod: Value,
}

/// Returns pods whose fields are harmless on their own. `$(VAR)` references double their value `doublings`
/// times.
#[must_use]
pub fn pairs(doublings: usize) -> Vec<Pair> {
    let most = i64::MAX.to_string();
    let pair = |name, change: &dyn Fn(&mut Value)| {
        let mut pod = plain(name);
        change(&mut pod);
        Pair { name, pod }
    };
    let container = |fields: Value| {
        move |pod: &mut Value| {
            let main = &mut pod["spec"]["containers"][0];
            fields.as_object().into_iter().flatten().for_each(|(key, value)| main[key] = value.clone());
        }
    };
    let chain = doubling_variables(doublings);
    let last = format!("$(V{doublings})");
    let long = json!([{ "name": "LONG", "value": "x".repeat(100_000) }]);
    let many = "$(LONG)".repeat(3000);
    let amounts = json!({ "cpu": most, "memory": most, "ephemeral-storage": most, "hugepages-2Mi": most });
    let all = json!({ "requests": amounts, "limits": amounts });
    let hook = json!({ "preStop": { "sleep": { "seconds": i64::MAX } } });
    let probe = json!({
        "exec": { "command": ["true"] }, "initialDelaySeconds": i32::MAX, "periodSeconds": i32::MAX, "timeoutSeconds": i32::MAX,
        "failureThreshold": i32::MAX, "successThreshold": 1, "terminationGracePeriodSeconds": i64::MAX,
    });
    let expanded = json!({ "exec": { "command": ["true", many] }, "timeoutSeconds": 30 });
    vec![
        pair("doubling-variables", &container(json!({ "env": chain }))),
        pair("doubling-arguments", &container(json!({ "env": chain, "args": [last, last] }))),
        pair(
            "many-references-in-a-command",
            &container(json!({ "env": long, "command": ["/bin/testapp", many] })),
        ),
        pair(
            "many-references-in-arguments",
            &container(json!({ "env": long, "args": vec!["$(LONG)"; 3000] })),
        ),
        pair("many-references-in-a-variable", &|pod| {
            let env = json!([long[0], { "name": "MANY", "value": many }]);
            container(json!({ "env": env }))(pod);
        }),
        pair("many-references-in-a-probe", &container(json!({ "env": long, "readinessProbe": expanded }))),
        pair("many-references-in-a-part-of-a-volume", &|pod| {
            let mount = json!({ "name": "extra", "mountPath": "/extra", "subPathExpr": many });
            container(json!({ "env": long, "volumeMounts": [mount] }))(pod);
            pod["spec"]["volumes"] = json!([{ "name": "extra", "emptyDir": {} }]);
        }),
        pair("no-end-of-grace", &|pod| {
            container(json!({ "lifecycle": hook, "livenessProbe": probe, "startupProbe": probe }))(pod);
            pod["spec"]["terminationGracePeriodSeconds"] = i64::MAX.into();
            pod["spec"]["activeDeadlineSeconds"] = i64::MAX.into();
        }),
        pair("all-amounts-at-most", &|pod| {
            container(json!({ "resources": all }))(pod);
            let main = pod["spec"]["containers"][0].clone();
            let more = |name: &str| {
                let mut one = main.clone();
                one["name"] = name.into();
                one
            };
            let mut sidecar = more("sidecar");
            sidecar["restartPolicy"] = "Always".into();
            pod["spec"]["containers"] = json!([main, more("second"), more("third")]);
            pod["spec"]["initContainers"] = json!([sidecar, more("init")]);
            pod["spec"]["overhead"] = amounts.clone();
            pod["spec"]["resources"] = all.clone();
        }),
        pair("annotations-of-the-agent", &|pod| {
            pod["metadata"]["annotations"] = json!({
                "probes.beelet.dev/main": "period=1ns timeout=1ns canary=1ns mode=kernel readiness.edge=immediate liveness.period=99999999999999h",
                "beelet.dev/probes": "period=0s,timeout=-1s", "beelet.dev/manifest": "/etc/passwd",
                "kubernetes.io/config.seen": "9999-12-31T23:59:59Z", "kubernetes.io/config.hash": "x",
                "container.apparmor.security.beta.kubernetes.io/main": "localhost/../../x",
                "kubectl.kubernetes.io/default-container": "none",
                "io.kubernetes.pod.terminationGracePeriod": most, "io.kubernetes.container.restartCount": most,
                "beelet.dev/restart-delay-seconds": most, "beelet.dev/round": most, "beelet.dev/devices": "[]",
            });
            container(json!({ "livenessProbe": { "exec": { "command": ["true"] }, "timeoutSeconds": 30 } }))(
                pod,
            );
        }),
        pair("labels-of-the-agent", &|pod| {
            pod["metadata"]["labels"] = json!({
                "io.kubernetes.pod.uid": "x", "io.kubernetes.pod.name": "x", "io.kubernetes.pod.namespace": "kube-system",
                "io.kubernetes.container.name": "x", "beelet.dev/managed-by": "other",
            });
        }),
        pair("annotations-at-their-limit", &|pod| {
            pod["metadata"]["annotations"] = json!({ "extra": "x".repeat(255 << 10) });
        }),
        pair("folders-in-each-other", &|pod| {
            let deep = format!("/extra{}", "/a".repeat(5000));
            pod["spec"]["volumes"] = json!([{ "name": "extra", "configMap": { "name": "conf" } }, { "name": "inner", "emptyDir": {} }]);
            let mounts =
                json!([{ "name": "extra", "mountPath": "/extra" }, { "name": "inner", "mountPath": deep }]);
            container(json!({ "volumeMounts": mounts }))(pod);
        }),
        pair("files-in-deep-folders", &|pod| {
            let path = |number: usize| format!("{}{number}", "a/".repeat(1000));
            let items: Vec<Value> =
                (0..100).map(|number| json!({ "key": "greeting", "path": path(number) })).collect();
            pod["spec"]["volumes"] =
                json!([{ "name": "extra", "configMap": { "name": "conf", "items": items } }]);
            container(json!({ "volumeMounts": [{ "name": "extra", "mountPath": "/extra" }] }))(pod);
        }),
        pair("one-name-for-all-containers", &|pod| {
            let main = pod["spec"]["containers"][0].clone();
            pod["spec"]["containers"] = vec![main; 50].into();
        }),
        // API server 1.36 stores them as the author of the pod wrote them, at any depth.
        pair("managed-fields-in-each-other", &|pod| {
            let deep = (0..300).fold(json!({}), |inner, _| json!({ "f:a": inner }));
            pod["metadata"]["managedFields"] = json!([{
                "manager": "author", "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z",
                "fieldsType": "FieldsV1", "fieldsV1": { "f:metadata": { "f:annotations": deep } },
            }]);
        }),
        pair("no-containers", &|pod| pod["spec"]["containers"] = json!([])),
    ]
}

/// Returns variables, each twice as long as the previous one.
fn doubling_variables(doublings: usize) -> Vec<Value> {
    let first = json!({ "name": "V0", "value": "0123456789abcdef" });
    let double = |number: usize| {
        let before = number - 1;
        json!({ "name": format!("V{number}"), "value": format!("$(V{before})$(V{before})") })
    };
    [first].into_iter().chain((1..=doublings).map(double)).collect()
}

#[cfg(test)]
mod tests;
