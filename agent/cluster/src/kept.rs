//! File format of the cached objects of the API server.

use std::collections::BTreeMap;
use std::sync::Arc;

use beelet_codec::{ApiType, data};
use beelet_model::{
    objects::{Object, Services},
    table::PodName,
};
use beelet_policy::{
    node::fit::NodeView,
    pod::references::{Kind, Reference, TokenReference},
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::warn;

use crate::{assigned::Wanted, held::Held};

/// The unencrypted record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Kept {
    /// The node's name.
    pub(crate) node: String,
    /// Time of the write.
    pub(crate) at: Timestamp,
    labels: Option<BTreeMap<String, String>>,
    taints: Vec<Value>,
    /// True if the runtime supports strict supplemental groups.
    #[serde(default)]
    strict_groups: bool,
    pods: Vec<Value>,
    objects: Vec<KeptObject>,
    services: Option<Vec<Value>>,
}

/// An object, or the record that no object of this name exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct KeptObject {
    kind: String,
    namespace: String,
    name: String,
    object: Option<Value>,
}

/// The sealed record.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct KeptSecrets {
    secrets: Vec<KeptObject>,
    tokens: Vec<KeptToken>,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct KeptToken {
    namespace: String,
    service_account: String,
    pod: String,
    uid: String,
    audience: String,
    expiration_seconds: i64,
    token: String,
}

impl Kept {
    /// Returns the record of the current objects, with an unset time.
    pub(crate) fn of(node: &str, pods: &Wanted, held: &Held, view: Option<NodeView>) -> Self {
        let wanted = pods.iter().flat_map(|all| all.pods.values());
        let strict_groups = view.as_ref().is_some_and(|view| view.strict_groups);
        let (labels, taints) = view.map(|view| (Some(view.labels), view.taints)).unwrap_or_default();
        let services = held.services.as_ref();
        Self {
            node: node.to_owned(),
            at: Timestamp::UNIX_EPOCH,
            labels,
            taints: taints.iter().filter_map(|taint| data::to_value(taint).ok()).collect(),
            strict_groups,
            pods: wanted.map(|pod| pod.to_value()).collect(),
            objects: kept_objects(held, false),
            services: services.map(|all| all.iter().map(ApiType::to_value).collect()),
        }
    }

    /// Sets the time of the write.
    pub(crate) fn dated(self, at: Timestamp) -> Self {
        Self { at, ..self }
    }

    /// Returns the pods, the objects that they refer to, and the node's selectable properties.
    pub(crate) fn restored(&self) -> (BTreeMap<PodName, Arc<core::Pod>>, Held, Option<NodeView>) {
        let pods = self.pods.iter().filter_map(read::<core::Pod>);
        let pods = pods.map(|pod| (PodName::of(&pod), Arc::new(pod)));
        let mut held = Held::default();
        restore(&self.objects, false, &mut held);
        let services =
            self.services.as_ref().map(|all| all.iter().filter_map(read::<core::Service>).collect());
        held.services = services.map(Services::new);
        let node = self.labels.clone().map(|labels| NodeView {
            name: self.node.clone(),
            labels,
            taints: self.taints.iter().filter_map(|taint| data::read(taint).ok()).collect(),
            strict_groups: self.strict_groups,
        });
        (pods.collect(), held, node)
    }
}

impl KeptSecrets {
    /// Returns the record of the current Secrets and tokens.
    pub(crate) fn of(held: &Held) -> Self {
        let tokens = held.tokens.iter().map(|(of, token)| KeptToken {
            namespace: of.namespace.clone(),
            service_account: of.service_account.clone(),
            pod: of.pod.clone(),
            uid: of.uid.clone(),
            audience: of.audience.clone(),
            expiration_seconds: of.expiration_seconds,
            token: token.to_string(),
        });
        Self { secrets: kept_objects(held, true), tokens: tokens.collect() }
    }

    /// Adds the recorded Secrets and tokens to `held`.
    pub(crate) fn restore(&self, held: &mut Held) {
        restore(&self.secrets, true, held);
        held.tokens.extend(self.tokens.iter().map(|kept| {
            let of = TokenReference {
                namespace: kept.namespace.clone(),
                service_account: kept.service_account.clone(),
                pod: kept.pod.clone(),
                uid: kept.uid.clone(),
                audience: kept.audience.clone(),
                expiration_seconds: kept.expiration_seconds,
            };
            (of, Arc::from(kept.token.as_str()))
        }));
    }
}

fn kept_objects(held: &Held, secret: bool) -> Vec<KeptObject> {
    let ours = held.objects.iter().filter(|(reference, _)| is_secret(reference.kind) == secret);
    let kept = ours.map(|(reference, object)| KeptObject {
        kind: reference.kind.as_str().to_owned(),
        namespace: reference.namespace.clone(),
        name: reference.name.clone(),
        object: object.as_ref().map(value),
    });
    kept.collect()
}

fn value(object: &Object) -> Value {
    match object {
        Object::ConfigMap(map) => map.to_value(),
        Object::Secret(secret) => secret.to_value(),
        Object::RuntimeClass(class) => class.to_value(),
    }
}

fn restore(kept: &[KeptObject], secret: bool, held: &mut Held) {
    for one in kept {
        let kinds = [Kind::ConfigMap, Kind::Secret];
        let kind = kinds.into_iter().find(|kind| kind.as_str() == one.kind && is_secret(*kind) == secret);
        let Some(kind) = kind else { continue };
        let object = one.object.as_ref().map(|value| match kind {
            Kind::ConfigMap => read::<core::ConfigMap>(value).map(|map| Object::ConfigMap(Arc::new(map))),
            Kind::Secret => read::<core::Secret>(value).map(|secret| Object::Secret(Arc::new(secret))),
        });
        let reference = Reference { kind, namespace: one.namespace.clone(), name: one.name.clone() };
        match object {
            // The object existed, but its content is unreadable.
            Some(None) => {}
            Some(Some(object)) => drop(held.objects.insert(reference, Some(object))),
            None => drop(held.objects.insert(reference, None)),
        }
    }
}

/// Reads a cached object. The record has a checksum, so an unreadable object was written by another version.
fn read<T: ApiType>(value: &Value) -> Option<T> {
    let read = T::from_value(value);
    // A value may be secret.
    read.inspect_err(|problem| warn!(field = problem.path, "cannot read a cached object; skipping it")).ok()
}

/// Returns true if objects of this kind are cached only in the sealed record.
fn is_secret(kind: Kind) -> bool {
    match kind {
        Kind::Secret => true,
        Kind::ConfigMap => false,
    }
}
