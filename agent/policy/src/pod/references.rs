//! Objects that a pod refers to by name: they must be present before the pod runs, and are kept current while
//! it does.
//!
//! The Node authorizer derives from these references everything that a node may read; the agent must never
//! request anything else.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, Pod, ProjectedVolumeSource, ServiceAccountTokenProjection, Volume,
};

use crate::pod::ephemeral_containers;
use beelet_units::object_name;

/// A kind of object that pods refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `v1.ConfigMap`.
    ConfigMap,
    /// `v1.Secret`.
    Secret,
}

impl Kind {
    /// Returns the kind's name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
        }
    }
}

/// The identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// The object's kind.
    pub kind: Kind,
    /// The pod's own namespace: references never leave it.
    pub namespace: String,
    /// The object's name.
    pub name: String,
}

/// A token of the pod's service account that a volume requests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenReference {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's service account.
    pub service_account: String,
    /// The pod that the token is bound to.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// The audience; empty for the API server itself.
    pub audience: String,
    /// Requested lifetime in seconds.
    pub expiration_seconds: i64,
}

/// Default lifetime of a token.
const TOKEN_SECONDS: i64 = 3600;

/// Returns the objects that a pod refers to, without those whose names are invalid: these count as missing
/// and are never requested.
#[must_use]
pub fn of(pod: &Pod) -> BTreeSet<Reference> {
    let mut found = Found { namespace: namespace(pod), references: BTreeSet::new() };
    let Some(spec) = &pod.spec else { return found.references };
    for secret in spec.image_pull_secrets.iter().flatten() {
        found.add(Kind::Secret, Some(&secret.name));
    }
    let ephemeral = ephemeral_containers(spec);
    for container in spec.init_containers.iter().flatten().chain(&spec.containers).chain(&ephemeral) {
        found.container(container);
    }
    for volume in spec.volumes.iter().flatten() {
        found.volume(volume);
    }
    found.references
}

/// Returns the tokens that a pod's volumes request.
#[must_use]
pub fn tokens(pod: &Pod) -> BTreeSet<TokenReference> {
    let Some(spec) = &pod.spec else { return BTreeSet::new() };
    let volumes = spec.volumes.iter().flatten();
    let projections = volumes.filter_map(|volume| volume.projected.as_ref()).flat_map(projections);
    let wanted = projections.filter_map(|projection| projection.service_account_token.as_ref());
    wanted.map(|source| token(pod, source)).collect()
}

/// Returns the first volume of a pod that requests this token.
#[must_use]
pub fn volume_of_token<'a>(pod: &'a Pod, of: &TokenReference) -> Option<&'a str> {
    let asks = |source: &ProjectedVolumeSource| {
        let mut wanted = projections(source).filter_map(|part| part.service_account_token.as_ref());
        wanted.any(|source| token(pod, source) == *of)
    };
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.find(|volume| volume.projected.as_ref().is_some_and(asks)).map(|volume| volume.name.as_str())
}

/// Returns true if any of a pod's volumes has certificates of trust bundles.
#[must_use]
pub fn wants_trust_bundles(pod: &Pod) -> bool {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let mut projections = volumes.filter_map(|volume| volume.projected.as_ref()).flat_map(projections);
    projections.any(|projection| projection.cluster_trust_bundle.is_some())
}

/// Returns the token that a projection of a pod's volume requests.
#[must_use]
pub fn token(pod: &Pod, source: &ServiceAccountTokenProjection) -> TokenReference {
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
    TokenReference {
        namespace: namespace(pod),
        service_account: account.filter(|name| !name.is_empty()).unwrap_or_else(|| "default".to_owned()),
        pod: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        audience: source.audience.clone().unwrap_or_default(),
        expiration_seconds: source.expiration_seconds.unwrap_or(TOKEN_SECONDS),
    }
}

fn projections(
    source: &ProjectedVolumeSource,
) -> impl Iterator<Item = &k8s_openapi::api::core::v1::VolumeProjection> {
    source.sources.iter().flatten()
}

fn namespace(pod: &Pod) -> String {
    pod.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned())
}

struct Found {
    namespace: String,
    references: BTreeSet<Reference>,
}

impl Found {
    fn add(&mut self, kind: Kind, name: Option<&String>) {
        if let Some(name) = name.filter(|name| object_name::impossible(name).is_none()) {
            let (namespace, name) = (self.namespace.clone(), name.clone());
            self.references.insert(Reference { kind, namespace, name });
        }
    }

    fn container(&mut self, container: &Container) {
        for source in container.env_from.iter().flatten() {
            self.add(Kind::ConfigMap, source.config_map_ref.as_ref().map(|reference| &reference.name));
            self.add(Kind::Secret, source.secret_ref.as_ref().map(|reference| &reference.name));
        }
        let sources = container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref());
        for source in sources {
            self.add(Kind::ConfigMap, source.config_map_key_ref.as_ref().map(|key| &key.name));
            self.add(Kind::Secret, source.secret_key_ref.as_ref().map(|key| &key.name));
        }
    }

    fn volume(&mut self, volume: &Volume) {
        self.add(Kind::ConfigMap, volume.config_map.as_ref().map(|source| &source.name));
        self.add(Kind::Secret, volume.secret.as_ref().and_then(|source| source.secret_name.as_ref()));
        for projection in volume.projected.iter().flat_map(projections) {
            self.add(Kind::ConfigMap, projection.config_map.as_ref().map(|source| &source.name));
            self.add(Kind::Secret, projection.secret.as_ref().map(|source| &source.name));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1"}, "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn every_place_that_names_an_object_is_found() {
        let check = |mut spec: Value, expected: &[&str]| {
            if spec.get("containers").is_none() {
                spec["containers"] = json!([]);
            }
            let found = of(&pod(&spec));
            assert!(found.iter().all(|reference| reference.namespace == "shop"));
            let found: Vec<String> =
                found.iter().map(|r| format!("{} {}", r.kind.as_str(), r.name)).collect();
            assert_eq!(found, expected, "{spec}");
        };
        let container = |container: Value| {
            let mut named = container;
            named["name"] = json!("c");
            named
        };
        check(json!({}), &[]);
        check(json!({"imagePullSecrets": [{"name": "s"}, {"name": ""}]}), &["Secret s"]);
        let names = [json!("../s"), json!("a?watch=1"), json!("a".repeat(254)), json!("a".repeat(300_000))];
        let impossible = names.map(|name| json!({"name": "v", "configMap": {"name": name}}));
        check(json!({"volumes": impossible}), &[]);
        let from = json!([{"configMapRef": {"name": "m"}}, {"secretRef": {"name": "s", "optional": true}}]);
        check(json!({"containers": [container(json!({"envFrom": from}))]}), &["ConfigMap m", "Secret s"]);
        let keys = json!([
            {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "C", "value": "x"},
        ]);
        check(json!({"initContainers": [container(json!({"env": keys}))]}), &["ConfigMap m", "Secret s"]);
        check(
            json!({"volumes": [
                {"name": "a", "configMap": {"name": "m"}},
                {"name": "b", "secret": {"secretName": "s"}},
                {"name": "c", "projected": {"sources": [{"configMap": {"name": "n"}}, {"secret": {"name": "t"}}]}},
                {"name": "d", "emptyDir": {}},
            ]}),
            &["ConfigMap m", "ConfigMap n", "Secret s", "Secret t"],
        );
    }

    #[test]
    fn tokens_belong_to_the_pods_account_and_the_requested_audience() {
        let source = |token: Value| json!({"sources": [{"serviceAccountToken": token}]});
        let spec = json!({
            "serviceAccountName": "robot", "containers": [],
            "volumes": [
                {"name": "a", "projected": source(json!({"path": "token"}))},
                {"name": "b", "projected": source(json!({"path": "x", "audience": "vault", "expirationSeconds": 600}))},
            ],
        });
        let found: Vec<TokenReference> = tokens(&pod(&spec)).into_iter().collect();
        let shown: Vec<String> = found
            .iter()
            .map(|t| {
                format!(
                    "{}/{} {}/{} {:?} {}",
                    t.namespace, t.service_account, t.pod, t.uid, t.audience, t.expiration_seconds
                )
            })
            .collect();
        assert_eq!(shown, ["shop/robot web/u1 \"\" 3600", "shop/robot web/u1 \"vault\" 600"]);
        assert_eq!(tokens(&pod(&json!({"containers": []}))), BTreeSet::new());
    }
}
