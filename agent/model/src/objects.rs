//! Objects that pods refer to by name: ConfigMaps, Secrets and RuntimeClasses, from the API server of a
//! cluster or from manifests on a standalone node; and the services of a cluster.
//!
//! A set is immutable; each change of a manifest builds a new one. Values of secrets must never get into a
//! log: the types' `Debug` shows names only.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beelet_policy::pod::references::{self, Kind, Reference, TokenReference};
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::origin::Origin;

/// An object with its file.
#[derive(Clone, Debug)]
struct Kept<T> {
    file: PathBuf,
    object: Arc<T>,
}

impl<T: PartialEq> PartialEq for Kept<T> {
    /// Compares pointers first.
    fn eq(&self, other: &Self) -> bool {
        self.file == other.file && (Arc::ptr_eq(&self.object, &other.object) || self.object == other.object)
    }
}

/// Objects of one kind by namespace and name; cluster-wide objects have an empty namespace.
type ByName<T> = BTreeMap<(String, String), Kept<T>>;

/// Services of a cluster. Cloning them, and comparing clones, is cheap.
#[derive(Clone)]
pub struct Services(Arc<Vec<Service>>);

impl Services {
    /// Creates the set of all services.
    pub fn new(all: Vec<Service>) -> Self {
        Self(Arc::new(all))
    }

    /// Iterates over the services.
    pub fn iter(&self) -> impl Iterator<Item = &Service> {
        self.0.iter()
    }
}

impl PartialEq for Services {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

/// Trust bundles of a cluster, by name.
pub type TrustBundles = Arc<BTreeMap<String, ClusterTrustBundle>>;

/// Tokens of service accounts, by pod and audience.
#[derive(Clone, Default, PartialEq)]
pub struct Tokens {
    all: BTreeMap<TokenReference, Arc<str>>,
    /// True if pods start without missing tokens, while no API server issues any.
    pub are_optional: bool,
}

impl Tokens {
    /// Adds a token.
    pub fn add(&mut self, of: TokenReference, token: Arc<str>) {
        self.all.insert(of, token);
    }

    /// Returns a token.
    pub fn get(&self, of: &TokenReference) -> Option<&str> {
        self.all.get(of).map(|token| &**token)
    }

    /// Returns true if a token is missing that `pod` needs for its start.
    fn are_missing(&self, pod: &Pod) -> bool {
        !self.are_optional && references::tokens(pod).iter().any(|token| !self.all.contains_key(token))
    }

    /// Adds the tokens of `others` that this set lacks.
    fn add_missing(&mut self, others: &Self) {
        for (of, token) in &others.all {
            self.all.entry(of.clone()).or_insert_with(|| Arc::clone(token));
        }
        self.are_optional |= others.are_optional;
    }
}

/// Set of all objects that pods may refer to.
#[derive(Clone, Default, PartialEq)]
pub struct Objects {
    config_maps: ByName<ConfigMap>,
    secrets: ByName<Secret>,
    runtime_classes: ByName<RuntimeClass>,
    /// Tokens of service accounts.
    pub tokens: Tokens,
    /// Services; None on a standalone node, and until the API server has listed them.
    pub services: Option<Services>,
    /// Trust bundles; None until a pod refers to one and the API server has listed them.
    pub trust_bundles: Option<TrustBundles>,
    /// Objects requested from the API server, without an answer yet.
    unread: BTreeSet<Reference>,
}

/// An object from a manifest.
#[derive(Clone, PartialEq)]
pub enum Object {
    /// Configuration, as text or bytes.
    ConfigMap(Arc<ConfigMap>),
    /// Confidential configuration.
    Secret(Arc<Secret>),
    /// A runtime handler for pods.
    RuntimeClass(Arc<RuntimeClass>),
}

impl Object {
    /// Returns `ConfigMap`, `Secret` or `RuntimeClass`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::ConfigMap(_) => "ConfigMap",
            Self::Secret(_) => "Secret",
            Self::RuntimeClass(_) => "RuntimeClass",
        }
    }

    /// Returns the object's metadata.
    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::ConfigMap(map) => &map.metadata,
            Self::Secret(secret) => &secret.metadata,
            Self::RuntimeClass(class) => &class.metadata,
        }
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metadata = self.metadata();
        write!(f, "{} {:?}/{:?}", self.kind(), metadata.namespace, metadata.name)
    }
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Objects")
            .field("config_maps", &self.config_maps.keys())
            .field("secrets", &self.secrets.keys())
            .field("runtime_classes", &self.runtime_classes.keys())
            .field("tokens", &self.tokens.all.keys())
            .field("services", &self.services.as_ref().map(|services| services.0.len()))
            .field("trust_bundles", &self.trust_bundles.as_ref().map(|bundles| bundles.len()))
            .field("unread", &self.unread)
            .finish()
    }
}

impl Objects {
    /// Adds an object, and replaces one of its kind and name. Objects of the API server have an empty file.
    pub fn add(&mut self, file: &Path, object: &Object) {
        let metadata = object.metadata();
        let name = metadata.name.clone().unwrap_or_default();
        let key = (metadata.namespace.clone().unwrap_or_default(), name);
        match object {
            Object::ConfigMap(map) => insert(&mut self.config_maps, key, file, map),
            Object::Secret(secret) => insert(&mut self.secrets, key, file, secret),
            Object::RuntimeClass(class) => insert(&mut self.runtime_classes, key, file, class),
        }
    }

    /// Records that an object may exist, but was not read yet.
    pub fn add_unread(&mut self, reference: Reference) {
        self.unread.insert(reference);
    }

    /// Returns true if the API server has not answered yet about an object that `pod` refers to, so that it
    /// is unknown whether the pod can run. Every pod of the API server refers to the services, by its
    /// variables.
    pub fn is_unread(&self, pod: &Pod) -> bool {
        Origin::of(pod).is_api()
            && (self.services.is_none()
                || (self.trust_bundles.is_none() && references::wants_trust_bundles(pod))
                || references::of(pod).iter().any(|reference| self.unread.contains(reference))
                || self.tokens.are_missing(pod))
    }

    /// Returns true if the ConfigMaps and Secrets that `pod` refers to are the same, or absent, in both.
    pub fn are_same_for(&self, others: &Self, pod: &Pod) -> bool {
        references::of(pod).iter().all(|Reference { kind, namespace, name }| match kind {
            Kind::ConfigMap => self.config_map(namespace, name) == others.config_map(namespace, name),
            Kind::Secret => self.secret(namespace, name) == others.secret(namespace, name),
        })
    }

    /// Returns true if the volumes of `pod` that are made of objects show the same with both.
    pub fn show_the_same_to(&self, others: &Self, pod: &Pod) -> bool {
        self.is_unread(pod) == others.is_unread(pod)
            && self.are_same_for(others, pod)
            && references::tokens(pod).iter().all(|token| self.tokens.get(token) == others.tokens.get(token))
            && (self.trust_bundles == others.trust_bundles || !references::wants_trust_bundles(pod))
    }

    /// Returns true if the set has neither objects nor settings about missing ones.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns true if both sets are equal; compares pointers first.
    pub fn are_same(one: &Arc<Self>, other: &Arc<Self>) -> bool {
        Arc::ptr_eq(one, other) || one == other
    }

    /// Adds the objects of `others` that this set lacks.
    pub(crate) fn add_missing(&mut self, others: &Self) {
        self.tokens.add_missing(&others.tokens);
        self.unread.extend(others.unread.iter().cloned());
        if self.services.is_none() {
            self.services.clone_from(&others.services);
        }
        if self.trust_bundles.is_none() {
            self.trust_bundles.clone_from(&others.trust_bundles);
        }
        add_missing(&mut self.config_maps, &others.config_maps);
        add_missing(&mut self.secrets, &others.secrets);
        add_missing(&mut self.runtime_classes, &others.runtime_classes);
    }

    /// Returns a ConfigMap.
    pub fn config_map(&self, namespace: &str, name: &str) -> Option<&ConfigMap> {
        get(&self.config_maps, namespace, name)
    }

    /// Returns a Secret.
    pub fn secret(&self, namespace: &str, name: &str) -> Option<&Secret> {
        get(&self.secrets, namespace, name)
    }

    /// Returns a RuntimeClass.
    pub fn runtime_class(&self, name: &str) -> Option<&RuntimeClass> {
        get(&self.runtime_classes, "", name)
    }

    /// Returns the file of the object with this kind and name.
    pub fn file(&self, kind: &str, namespace: &str, name: &str) -> Option<&Path> {
        let key = |namespace: &str| (namespace.to_owned(), name.to_owned());
        let file = match kind {
            "ConfigMap" => self.config_maps.get(&key(namespace)).map(|kept| kept.file.as_path()),
            "Secret" => self.secrets.get(&key(namespace)).map(|kept| kept.file.as_path()),
            "RuntimeClass" => self.runtime_classes.get(&key("")).map(|kept| kept.file.as_path()),
            _ => None,
        };
        file.filter(|file| !file.as_os_str().is_empty())
    }

    /// Returns the runtime's handler for a pod: its class's or, without a manifest for the class, the one
    /// with the class's own name; empty for a pod without a class.
    pub fn runtime_handler(&self, pod: &Pod) -> String {
        let class = pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref());
        let Some(name) = class.filter(|name| !name.is_empty()) else { return String::new() };
        self.runtime_class(name).map_or_else(|| name.to_owned(), |class| class.handler.clone())
    }
}

fn insert<T>(all: &mut ByName<T>, key: (String, String), file: &Path, object: &Arc<T>) {
    all.insert(key, Kept { file: file.to_owned(), object: Arc::clone(object) });
}

fn add_missing<T: Clone>(all: &mut ByName<T>, others: &ByName<T>) {
    for (key, kept) in others {
        all.entry(key.clone()).or_insert_with(|| kept.clone());
    }
}

fn get<'a, T>(all: &'a ByName<T>, namespace: &str, name: &str) -> Option<&'a T> {
    all.get(&(namespace.to_owned(), name.to_owned())).map(|kept| &*kept.object)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_do_not_show_in_debug_output() {
        let mut objects = Objects::default();
        let secret: Secret =
            serde_json::from_value(json!({"metadata": {"name": "s"}, "stringData": {"k": "hidden"}}))
                .unwrap();
        let object = Object::Secret(Arc::new(secret));
        objects.add(Path::new("/m/s.yaml"), &object);
        let shown = format!("{objects:?} {object:?}");
        assert!(shown.contains("\"s\"") && !shown.contains("hidden"), "{shown}");
    }

    #[test]
    fn a_pod_is_concerned_by_what_it_refers_to_alone() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": {"containers": [
            {"name": "c", "envFrom": [{"configMapRef": {"name": "conf"}}, {"secretRef": {"name": "key"}}]},
        ]}}))
        .unwrap();
        let with = |file: &str, kind: &str, name: &str, value: &str| {
            let object = json!({"metadata": {"name": name, "namespace": "default"}, "data": {"k": value}});
            let mut objects = Objects::default();
            let object = match kind {
                "Secret" => Object::Secret(Arc::new(serde_json::from_value(object).unwrap())),
                _ => Object::ConfigMap(Arc::new(serde_json::from_value(object).unwrap())),
            };
            objects.add(Path::new(file), &object);
            objects
        };
        let check = |before: &Objects, after: &Objects, same: bool| {
            assert_eq!(before.are_same_for(after, &pod), same, "{before:?} {after:?}");
        };
        let conf = with("/m/a", "ConfigMap", "conf", "1");
        check(&Objects::default(), &conf, false);
        check(&conf, &with("/m/a", "ConfigMap", "conf", "2"), false);
        check(&conf, &Objects::default(), false);
        check(&conf, &with("/m/b", "ConfigMap", "conf", "1"), true);
        check(&Objects::default(), &with("/m/a", "Secret", "key", "MQ=="), false);
        check(&Objects::default(), &with("/m/a", "ConfigMap", "another", "1"), true);
        check(&Objects::default(), &with("/m/a", "Secret", "conf", "MQ=="), true);
    }

    #[test]
    fn a_class_gives_its_handler() {
        let class = |handler: &str| {
            let class = json!({"metadata": {"name": "sandboxed"}, "handler": handler});
            Object::RuntimeClass(Arc::new(serde_json::from_value(class).unwrap()))
        };
        let mut objects = Objects::default();
        objects.add(Path::new("/m/a"), &class("runsc"));
        let check = |spec: serde_json::Value, handler: &str| {
            let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
            assert_eq!(objects.runtime_handler(&pod), handler);
        };
        check(json!({"runtimeClassName": "sandboxed", "containers": []}), "runsc");
        check(json!({"runtimeClassName": "kata", "containers": []}), "kata");
        check(json!({"containers": []}), "");
    }
}
