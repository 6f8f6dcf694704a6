//! In-memory objects of a cluster, with the API server's rules that a node agent depends on: resource
//! versions, UIDs, conflicts, the status subresource, graceful deletion, and watches.

use std::collections::BTreeMap;

use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Bytes, Frame};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::patch;
use super::path::{Selection, Target};
use super::refusal::Refusal;

/// Body of an answer.
pub(super) type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// Output of a watch's lines; an error breaks its connection.
pub(super) type Lines = mpsc::UnboundedSender<Result<Frame<Bytes>, std::io::Error>>;

/// Collection, namespace, name.
type Key = (String, String, String);

/// Change of an object, for watches that begin in the past.
#[derive(Clone)]
struct Change {
    version: u64,
    collection: String,
    before: Option<Value>,
    /// None: the object was removed.
    after: Option<Value>,
}

struct Watch {
    id: u64,
    path: String,
    selection: Selection,
    lines: Lines,
}

/// Objects of a cluster.
#[derive(Default)]
pub(super) struct Store {
    objects: BTreeMap<Key, Value>,
    /// Newest resource version.
    version: u64,
    /// Oldest version at which a watch can begin.
    oldest: u64,
    log: Vec<Change>,
    watches: Vec<Watch>,
    counted: u64,
}

impl Store {
    fn count(&mut self) -> u64 {
        self.counted += 1;
        self.counted
    }

    fn key(target: &Target) -> Result<Key, Refusal> {
        let name = target.name.clone().ok_or_else(|| Refusal {
            code: 405,
            reason: "MethodNotAllowed",
            message: "the server does not allow this method on the requested resource".to_owned(),
        })?;
        Ok((target.collection.clone(), target.namespace.clone(), name))
    }

    pub(super) fn get(&self, target: &Target) -> Result<Value, Refusal> {
        self.objects.get(&Self::key(target)?).cloned().ok_or_else(|| Refusal::not_found(target))
    }

    /// Returns the UID of an object.
    pub(super) fn uid(&self, target: &Target) -> Option<String> {
        let object = self.objects.get(&Self::key(target).ok()?)?;
        object["metadata"]["uid"].as_str().map(str::to_owned)
    }

    pub(super) fn list(&self, target: &Target, query: &BTreeMap<String, String>) -> Value {
        let selection = Selection::of(target, query);
        let items: Vec<Value> = self.selected(&selection).cloned().collect();
        let (group, _) = target.collection.rsplit_once('/').unwrap_or_default();
        json!({
            "kind": format!("{}List", kind(target.resource())),
            "apiVersion": group.trim_start_matches("/apis/").trim_start_matches("/api/"),
            "metadata": { "resourceVersion": self.version.to_string() },
            "items": items,
        })
    }

    fn selected<'a>(&'a self, selection: &'a Selection) -> impl Iterator<Item = &'a Value> {
        let all = self.objects.iter();
        all.filter(|((collection, ..), object)| selection.has(collection, object)).map(|(_, object)| object)
    }

    /// Returns every object of a collection.
    pub(super) fn all(&self, collection: &str) -> Vec<Value> {
        let all = self.objects.iter();
        all.filter(|((of, ..), _)| of == collection).map(|(_, object)| object.clone()).collect()
    }

    /// Creates an object.
    pub(super) fn create(&mut self, target: &Target, mut object: Value) -> Result<Value, Refusal> {
        let metadata = &object["metadata"];
        if metadata["resourceVersion"].as_str().is_some_and(|version| !version.is_empty()) {
            let message = "resourceVersion should not be set on objects to be created".to_owned();
            return Err(Refusal { code: 500, reason: "InternalError", message });
        }
        let name = match (metadata["name"].as_str(), metadata["generateName"].as_str()) {
            (Some(name), _) => name.to_owned(),
            (None, Some(prefix)) => format!("{prefix}{:05}", self.count()),
            (None, None) => return Err(Refusal::bad("name or generateName is required")),
        };
        if metadata["namespace"].as_str().is_some_and(|namespace| namespace != target.namespace) {
            let cause =
                "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Refusal::bad(cause));
        }
        let target = Target { name: Some(name.clone()), ..target.clone() };
        let key = Self::key(&target)?;
        if self.objects.contains_key(&key) {
            let message = format!("{} {name:?} already exists", target.resource());
            return Err(Refusal { code: 409, reason: "AlreadyExists", message });
        }
        let uid = format!("00000000-0000-4000-8000-{:012x}", self.count());
        let metadata = &mut object["metadata"];
        metadata["name"] = name.into();
        if !target.namespace.is_empty() {
            metadata["namespace"] = target.namespace.clone().into();
        }
        metadata["uid"] = uid.into();
        metadata["creationTimestamp"] = now(0).into();
        if object.get("spec").is_some() {
            object["metadata"]["generation"] = 1.into();
        }
        if target.resource() == "pods" {
            object["status"] = json!({ "phase": "Pending" });
        }
        if object["kind"].is_null() {
            object["kind"] = kind(target.resource()).into();
            let (group, _) = target.collection.rsplit_once('/').unwrap_or_default();
            object["apiVersion"] = group.trim_start_matches("/apis/").trim_start_matches("/api/").into();
        }
        Ok(self.write(key, object))
    }

    /// Creates or replaces an object completely, including its status, as a test or a controller does.
    pub(super) fn set(&mut self, target: &Target, object: Value) -> Result<Value, Refusal> {
        if self.get(target).is_err() {
            let status = object["status"].clone();
            let mut object = object;
            object["metadata"]["name"] = target.name.clone().into();
            let mut made = self.create(&Target { name: None, ..target.clone() }, object)?;
            if status.is_null() {
                return Ok(made);
            }
            made["status"] = status;
            return Ok(self.write(Self::key(target)?, made));
        }
        let old = self.get(target)?;
        let mut new = object;
        for field in ["name", "namespace", "uid", "creationTimestamp"] {
            if !old["metadata"][field].is_null() {
                new["metadata"][field] = old["metadata"][field].clone();
            }
        }
        Ok(self.write(Self::key(target)?, new))
    }

    /// Replaces an object, or its status.
    pub(super) fn update(&mut self, target: &Target, new: Value) -> Result<Value, Refusal> {
        let old = self.get(target)?;
        self.change(target, &old, new)
    }

    /// Changes an object, or its status.
    pub(super) fn patch(&mut self, target: &Target, kind: &str, change: &Value) -> Result<Value, Refusal> {
        let old = self.get(target)?;
        let mut new = old.clone();
        patch::apply(kind, &mut new, change)?;
        self.change(target, &old, new)
    }

    fn change(&mut self, target: &Target, old: &Value, mut new: Value) -> Result<Value, Refusal> {
        let key = Self::key(target)?;
        let (was, is) = (&old["metadata"], &new["metadata"]);
        let given = |field: &str| is[field].as_str().is_some_and(|value| !value.is_empty());
        if given("uid") && is["uid"] != was["uid"] {
            let cause = format!(
                "Precondition failed: UID in precondition: {}, UID in object meta: {}",
                is["uid"], was["uid"]
            );
            return Err(Refusal::conflict(target, &cause));
        }
        if given("resourceVersion") && is["resourceVersion"] != was["resourceVersion"] {
            let cause =
                "the object has been modified; please apply your changes to the latest version and try again";
            return Err(Refusal::conflict(target, cause));
        }
        for field in [
            "name",
            "namespace",
            "uid",
            "creationTimestamp",
            "generation",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ] {
            match was.get(field) {
                Some(value) => new["metadata"][field] = value.clone(),
                None => {
                    new["metadata"].as_object_mut().map(|metadata| metadata.remove(field));
                }
            }
        }
        let keeps_status = ["pods", "nodes"].contains(&target.resource());
        let kept = match target.subresource.as_deref() {
            Some("status") => Some("spec"),
            _ if keeps_status => Some("status"),
            _ => None,
        };
        if let Some(field) = kept {
            match old.get(field) {
                Some(value) => new[field] = value.clone(),
                None => {
                    new.as_object_mut().map(|fields| fields.remove(field));
                }
            }
        }
        if new["spec"] != old["spec"] {
            new["metadata"]["generation"] = (was["generation"].as_u64().unwrap_or(0) + 1).into();
        }
        new["metadata"]["resourceVersion"] = was["resourceVersion"].clone();
        if new == *old {
            return Ok(new);
        }
        let finalizers = new["metadata"]["finalizers"].as_array().is_some_and(|all| !all.is_empty());
        let doomed = new["metadata"]["deletionGracePeriodSeconds"] == 0 && !finalizers;
        let new = self.write(key.clone(), new);
        if doomed {
            self.remove(&key);
        }
        Ok(new)
    }

    /// Deletes an object according to `DeleteOptions`: pods on a node gracefully.
    pub(super) fn delete(&mut self, target: &Target, options: &Value) -> Result<Value, Refusal> {
        let key = Self::key(target)?;
        let mut object = self.get(target)?;
        for field in ["uid", "resourceVersion"] {
            let (wanted, is) = (&options["preconditions"][field], &object["metadata"][field]);
            if !wanted.is_null() && wanted != is {
                let cause = format!(
                    "the {field} in the precondition ({wanted}) does not match the one in record ({is})"
                );
                return Err(Refusal::conflict(target, &cause));
            }
        }
        let grace = self.grace(target, &object, options);
        let metadata = &mut object["metadata"];
        let finalizers = metadata["finalizers"].as_array().is_some_and(|all| !all.is_empty());
        if grace == 0 && !finalizers {
            return Ok(self.remove(&key).unwrap_or_default());
        }
        // A grace period without a deletion has no effect: a real API server removes it when the pod is
        // created.
        let before = metadata["deletionGracePeriodSeconds"].as_i64();
        let sooner = metadata["deletionTimestamp"].is_null() || before.is_none_or(|before| grace < before);
        if !sooner {
            return Ok(object);
        }
        metadata["deletionTimestamp"] = now(grace.unsigned_abs()).into();
        metadata["deletionGracePeriodSeconds"] = grace.into();
        let generation = metadata["generation"].as_u64().unwrap_or(0);
        metadata["generation"] = (generation + 1).into();
        Ok(self.write(key, object))
    }

    /// Removes the objects of a collection that a query selects; returns them.
    pub(super) fn delete_all(&mut self, target: &Target, query: &BTreeMap<String, String>) -> Value {
        let removed = self.list(target, query);
        for object in removed["items"].as_array().into_iter().flatten() {
            let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
            let one = Target { name: Some(text("name")), namespace: text("namespace"), ..target.clone() };
            // The object exists, since it was selected.
            let _ = self.delete(&one, &Value::Null);
        }
        removed
    }

    /// Returns the grace period in seconds. Negative values are valid: 1.36 accepts any value in
    /// DeleteOptions and keeps it.
    fn grace(&self, target: &Target, object: &Value, options: &Value) -> i64 {
        let ended = ["Succeeded", "Failed"].iter().any(|phase| object["status"]["phase"] == *phase);
        if target.resource() != "pods" || object["spec"]["nodeName"].is_null() || ended {
            return 0;
        }
        let of_pod = object["spec"]["terminationGracePeriodSeconds"].as_i64();
        options["gracePeriodSeconds"].as_i64().or(of_pod).unwrap_or(30)
    }

    fn write(&mut self, key: Key, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let before = self.objects.insert(key.clone(), object.clone());
        self.publish(Change {
            version: self.version,
            collection: key.0,
            before,
            after: Some(object.clone()),
        });
        object
    }

    fn remove(&mut self, key: &Key) -> Option<Value> {
        let mut object = self.objects.remove(key)?;
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.publish(Change {
            version: self.version,
            collection: key.0.clone(),
            before: Some(object.clone()),
            after: None,
        });
        Some(object)
    }

    // ---- Watches ----

    /// Sends a watch all changes since its version, and later ones. Returns its number.
    pub(super) fn watch(
        &mut self,
        target: &Target,
        path: &str,
        query: &BTreeMap<String, String>,
        lines: Lines,
    ) -> u64 {
        let selection = Selection::of(target, query);
        let since = query.get("resourceVersion").map_or("", String::as_str);
        let listed = query.get("sendInitialEvents").is_some_and(|value| value == "true");
        let mut first = Vec::new();
        if listed || ["", "0"].contains(&since) {
            first.extend(self.selected(&selection).map(|object| event("ADDED", object)));
            if listed {
                first.push(self.bookmark(&selection, true));
            }
        } else {
            let since: u64 = since.parse().unwrap_or(0);
            if since < self.oldest {
                let message = format!("too old resource version: {since} ({})", self.oldest);
                send(&lines, &event("ERROR", &Refusal { code: 410, reason: "Expired", message }.status()));
                return self.count();
            }
            let later = self.log.iter().filter(|change| change.version > since);
            first.extend(later.filter_map(|change| event_of(&selection, change)));
        }
        for event in first {
            send(&lines, &event);
        }
        let id = self.count();
        self.watches.push(Watch { id, path: path.to_owned(), selection, lines });
        id
    }

    fn publish(&mut self, change: Change) {
        self.watches.retain(|watch| match event_of(&watch.selection, &change) {
            Some(event) => send(&watch.lines, &event),
            None => !watch.lines.is_closed(),
        });
        self.log.push(change);
    }

    fn bookmark(&self, selection: &Selection, initial: bool) -> Value {
        let mut metadata = json!({ "resourceVersion": self.version.to_string() });
        if initial {
            metadata["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        let resource = selection.collection.rsplit('/').next().unwrap_or_default();
        event("BOOKMARK", &json!({ "kind": kind(resource), "metadata": metadata }))
    }

    /// Sends a bookmark to every watch of paths for which `chosen` returns true.
    pub(super) fn bookmarks(&mut self, chosen: impl Fn(&str) -> bool) {
        for watch in self.watches.iter().filter(|watch| chosen(&watch.path)) {
            send(&watch.lines, &self.bookmark(&watch.selection, false));
        }
    }

    /// Sends raw bytes.
    pub(super) fn say(&mut self, chosen: impl Fn(&str) -> bool, bytes: &[u8]) {
        for watch in self.watches.iter().filter(|watch| chosen(&watch.path)) {
            // Sending fails if the client has disconnected.
            let _ = watch.lines.send(Ok(Frame::data(Bytes::copy_from_slice(bytes))));
        }
    }

    /// Ends watches regularly, or breaks their connections.
    pub(super) fn cut(&mut self, chosen: impl Fn(&str) -> bool, broken: bool) {
        self.watches.retain(|watch| {
            let cut = chosen(&watch.path);
            if cut && broken {
                let _ = watch.lines.send(Err(std::io::Error::other("cut by the test")));
            }
            !cut
        });
    }

    /// Ends a watch whose time has expired.
    pub(super) fn end_watch(&mut self, id: u64) {
        self.watches.retain(|watch| watch.id != id);
    }

    /// Returns the paths of the open watches.
    pub(super) fn watched(&self) -> Vec<String> {
        self.watches.iter().filter(|watch| !watch.lines.is_closed()).map(|watch| watch.path.clone()).collect()
    }

    /// Discards the history: a watch can begin only now or later.
    pub(super) fn compact(&mut self) {
        self.oldest = self.version;
        self.log.clear();
    }
}

/// Returns the event of a change for a watch of `selection`: an object that enters the selection is new, one
/// that leaves it is deleted.
fn event_of(selection: &Selection, change: &Change) -> Option<Value> {
    let seen = |object: &&Value| selection.has(&change.collection, object);
    let (before, after) = (change.before.as_ref().filter(seen), change.after.as_ref().filter(seen));
    match (before, after) {
        (None, None) => None,
        (None, Some(object)) => Some(event("ADDED", object)),
        (Some(_), Some(object)) => Some(event("MODIFIED", object)),
        (Some(object), None) => {
            let mut object = object.clone();
            object["metadata"]["resourceVersion"] = change.version.to_string().into();
            Some(event("DELETED", &object))
        }
    }
}

fn event(kind: &str, object: &Value) -> Value {
    json!({ "type": kind, "object": object })
}

/// Sends an event; returns false if the client has disconnected.
fn send(lines: &Lines, event: &Value) -> bool {
    lines.send(Ok(Frame::data(format!("{event}\n").into()))).is_ok()
}

/// Returns a time `later` seconds from now, in Kubernetes' format.
pub(super) fn now(later: u64) -> String {
    let seconds = i64::try_from(later).unwrap_or(i64::MAX);
    let at = jiff::Timestamp::now().checked_add(jiff::SignedDuration::from_secs(seconds));
    at.unwrap_or(jiff::Timestamp::MAX).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns the kind of a resource's objects.
fn kind(resource: &str) -> &str {
    const KINDS: &[(&str, &str)] = &[
        ("certificatesigningrequests", "CertificateSigningRequest"),
        ("clustertrustbundles", "ClusterTrustBundle"),
        ("configmaps", "ConfigMap"),
        ("csidrivers", "CSIDriver"),
        ("csinodes", "CSINode"),
        ("events", "Event"),
        ("leases", "Lease"),
        ("namespaces", "Namespace"),
        ("nodes", "Node"),
        ("persistentvolumeclaims", "PersistentVolumeClaim"),
        ("persistentvolumes", "PersistentVolume"),
        ("pods", "Pod"),
        ("resourceclaims", "ResourceClaim"),
        ("resourceslices", "ResourceSlice"),
        ("runtimeclasses", "RuntimeClass"),
        ("secrets", "Secret"),
        ("serviceaccounts", "ServiceAccount"),
        ("services", "Service"),
        ("volumeattachments", "VolumeAttachment"),
    ];
    KINDS.iter().find(|(name, _)| *name == resource).map_or(resource, |(_, kind)| kind)
}
