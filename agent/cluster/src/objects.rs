//! Follows the ConfigMaps and Secrets that pods refer to and the tokens of their service accounts, each by
//! name and only while a pod refers to it, since a node may not read others. Also follows all services, which
//! every container of their namespace gets as environment variables.

use std::{collections::BTreeMap, sync::Arc};

use beelet_codec::ApiType;
use beelet_model::objects::{Object, Services};
use beelet_policy::pod::references::{Kind, Reference};
use beelet_state::events::Recorder;
use futures::{
    FutureExt, StreamExt,
    future::{AbortHandle, Abortable, Aborted, BoxFuture},
    stream::FuturesUnordered,
};
use k8s_openapi::{
    api::{certificates::v1beta1::ClusterTrustBundle, core::v1 as core},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tracing::{debug, warn};

use crate::{
    assigned::Wanted,
    client::Client,
    held::{Held, Item, items},
    tokens::{Waiting, keep_token},
    url::escaped,
    watch::{Collection, Sink, follow, key_of},
};

/// Follows the objects that the pods refer to, until dropped.
pub(crate) async fn keep(
    client: Client,
    wanted: watch::Receiver<Wanted>,
    held: watch::Sender<Held>,
    events: Recorder,
) {
    let held = Arc::new(held);
    tokio::join!(
        keep_all::<core::Service>(client.clone(), Arc::clone(&held)),
        keep_referred(&client, wanted, &held, &events)
    );
}

async fn keep_referred(
    client: &Client,
    mut pods: watch::Receiver<Wanted>,
    held: &Arc<watch::Sender<Held>>,
    events: &Recorder,
) {
    let mut running: BTreeMap<Item, AbortHandle> = BTreeMap::new();
    let mut work: FuturesUnordered<Abortable<BoxFuture<'static, ()>>> = FuturesUnordered::new();
    loop {
        let wanted = items(&pods.borrow_and_update());
        running.retain(|item, handle| {
            let stays = wanted.contains(item);
            if !stays {
                handle.abort();
            }
            stays
        });
        held.send_if_modified(|held| held.keep(&wanted));
        for item in &wanted {
            if !running.contains_key(item) {
                let (handle, registration) = AbortHandle::new_pair();
                let (client, out) = (client.clone(), Arc::clone(held));
                let task = match item.clone() {
                    Item::Object(reference) => keep_object(client, reference, out).boxed(),
                    Item::Token(of) => {
                        let waiting = Waiting { of, pods: pods.clone(), events: events.clone(), said: None };
                        keep_token(client, waiting, out).boxed()
                    }
                    Item::TrustBundles => keep_all::<ClusterTrustBundle>(client, out).boxed(),
                };
                work.push(Abortable::new(task, registration));
                running.insert(item.clone(), handle);
            }
        }
        loop {
            tokio::select! {
                changed = pods.changed() => {
                    if changed.is_err() { return }
                    break;
                }
                Some(ended) = work.next() => {
                    if let Err(Aborted) = ended {
                        debug!("stopped following an object that no pod refers to");
                    }
                }
            }
        }
    }
}

/// Follows one object until it is marked as immutable.
async fn keep_object(client: Client, reference: Reference, out: Arc<watch::Sender<Held>>) {
    let resource = match reference.kind {
        Kind::ConfigMap => "configmaps",
        Kind::Secret => "secrets",
    };
    let collection = Collection {
        path: format!("/api/v1/namespaces/{}/{resource}", escaped(&reference.namespace)),
        field: Some(("metadata.name", reference.name.clone())),
        // A streamed list saves one request per object.
        streamed: true,
    };
    let immutable = Arc::new(Notify::new());
    let mut one = One { reference, out, immutable: Arc::clone(&immutable) };
    tokio::select! {
        () = follow(&client, &collection, &mut one) => {}
        () = immutable.notified() => {}
    }
}

struct One {
    reference: Reference,
    out: Arc<watch::Sender<Held>>,
    immutable: Arc<Notify>,
}

impl One {
    fn set(&self, value: Option<&Value>) {
        let Reference { kind, namespace, name } = &self.reference;
        let read = |value: &Value| match kind {
            Kind::ConfigMap => core::ConfigMap::from_value(value)
                .map(|map| (map.immutable == Some(true), Object::ConfigMap(Arc::new(map)))),
            Kind::Secret => core::Secret::from_value(value)
                .map(|secret| (secret.immutable == Some(true), Object::Secret(Arc::new(secret)))),
        };
        let object = match value.map(read).transpose() {
            Ok(read) => read,
            Err(problem) => {
                // The log omits the value, which may be secret.
                warn!(kind = kind.as_str(), namespace, name, field = problem.path, "cannot read an object");
                return;
            }
        };
        if object.as_ref().is_some_and(|(immutable, _)| *immutable) {
            self.immutable.notify_one();
        }
        let object = object.map(|(_, object)| object);
        self.out.send_if_modified(|held| {
            let changed = held.objects.get(&self.reference) != Some(&object);
            held.objects.insert(self.reference.clone(), object);
            changed
        });
    }
}

impl Sink for One {
    fn listed(&mut self, objects: Vec<Value>) -> bool {
        let named = |object: &&Value| object["metadata"]["name"] == self.reference.name.as_str();
        self.set(objects.iter().find(named));
        true
    }

    fn applied(&mut self, object: &Value) {
        if object["metadata"]["name"] == self.reference.name.as_str() {
            self.set(Some(object));
        }
    }

    fn deleted(&mut self, object: &Value) {
        if object["metadata"]["name"] == self.reference.name.as_str() {
            self.set(None);
        }
    }
}

/// A type whose objects are all followed.
trait Gathered: ApiType + Clone + Send {
    /// Path of the collection.
    const PATH: &'static str;
    /// Log message for an unreadable object, with the consequence.
    const UNREAD: &'static str;

    /// Returns the parts that are kept; None to skip the object.
    fn kept(self) -> Option<Self>;

    /// Stores all objects, by namespace and name, in `held`. Returns true if that changes `held`.
    fn hand_over(all: &BTreeMap<(String, String), Self>, held: &mut Held) -> bool;
}

/// All bundles are followed, since a projection may select any of them.
impl Gathered for ClusterTrustBundle {
    const PATH: &'static str = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";
    const UNREAD: &'static str = "cannot read a ClusterTrustBundle; skipping it";

    fn kept(self) -> Option<Self> {
        Some(self)
    }

    fn hand_over(all: &BTreeMap<(String, String), Self>, held: &mut Held) -> bool {
        let by_name = all.iter().map(|((_, name), bundle)| (name.clone(), bundle.clone()));
        let bundles = Some(Arc::new(by_name.collect()));
        let changed = held.trust_bundles != bundles;
        held.trust_bundles = bundles;
        changed
    }
}

/// Only services with a cluster IP are kept: only these become environment variables.
impl Gathered for core::Service {
    const PATH: &'static str = "/api/v1/services";
    const UNREAD: &'static str = "cannot read a service; pods get no environment variables of it";

    fn kept(self) -> Option<Self> {
        reduced(self)
    }

    fn hand_over(all: &BTreeMap<(String, String), Self>, held: &mut Held) -> bool {
        let services = Some(Services::new(all.values().cloned().collect()));
        let changed = held.services != services;
        held.services = services;
        changed
    }
}

/// Follows all objects of a type.
async fn keep_all<T: Gathered>(client: Client, out: Arc<watch::Sender<Held>>) {
    let collection = Collection { path: T::PATH.to_owned(), field: None, streamed: false };
    follow(&client, &collection, &mut All::<T> { known: BTreeMap::new(), out }).await;
}

struct All<T> {
    known: BTreeMap<(String, String), T>,
    out: Arc<watch::Sender<Held>>,
}

impl<T: Gathered> All<T> {
    fn apply(&mut self, object: &Value) {
        let key = key_of(object);
        match T::from_value(object).map(T::kept) {
            Ok(Some(kept)) => drop(self.known.insert(key, kept)),
            Ok(None) => drop(self.known.remove(&key)),
            Err(problem) => {
                let metadata = &object["metadata"];
                let (namespace, name) = (metadata["namespace"].as_str(), metadata["name"].as_str());
                warn!(namespace, name, field = problem.path, "{}", T::UNREAD);
            }
        }
    }

    fn publish(&self) {
        self.out.send_if_modified(|held| T::hand_over(&self.known, held));
    }
}

impl<T: Gathered> Sink for All<T> {
    fn listed(&mut self, objects: Vec<Value>) -> bool {
        self.known.clear();
        objects.iter().for_each(|object| self.apply(object));
        self.publish();
        true
    }

    fn applied(&mut self, object: &Value) {
        self.apply(object);
        self.publish();
    }

    fn deleted(&mut self, object: &Value) {
        self.known.remove(&key_of(object));
        self.publish();
    }
}

/// Returns the parts of a service that become environment variables; None for a service without a cluster IP.
fn reduced(service: core::Service) -> Option<core::Service> {
    let spec = service.spec?;
    spec.cluster_ip.as_deref().filter(|address| !address.is_empty() && *address != "None")?;
    let metadata = ObjectMeta {
        namespace: service.metadata.namespace,
        name: service.metadata.name,
        ..ObjectMeta::default()
    };
    let spec =
        core::ServiceSpec { cluster_ip: spec.cluster_ip, ports: spec.ports, ..core::ServiceSpec::default() };
    Some(core::Service { metadata, spec: Some(spec), status: None })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use beelet_model::table::PodName;
    use beelet_policy::pod::references;
    use serde_json::json;

    use super::*;
    use crate::{
        assigned::Assignment,
        client::{Error, Kind as Failure},
    };

    fn pods(volumes: &Value) -> Wanted {
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1",
                "annotations": {"kubernetes.io/config.source": "api"}},
            "spec": {"containers": [], "volumes": volumes},
        }))
        .unwrap();
        let pod = Arc::new(pod);
        let pods = [(PodName::of(&pod), pod)].into();
        Some(Arc::new(Assignment { pods, ..Assignment::default() }))
    }

    fn no_services() -> Held {
        Held { services: Some(Services::new(Vec::new())), ..Held::default() }
    }

    fn one(held: &Arc<watch::Sender<Held>>) -> One {
        let reference = Reference { kind: Kind::ConfigMap, namespace: "shop".into(), name: "m".into() };
        One { reference, out: Arc::clone(held), immutable: Arc::default() }
    }

    #[test]
    fn a_pod_waits_until_the_api_server_has_answered_and_not_for_what_is_not_there() {
        let pods = pods(&json!([{"name": "v", "configMap": {"name": "m"}}]));
        let pod = pods.as_ref().unwrap().pods.values().next().unwrap().clone();
        let held = Arc::new(watch::Sender::new(no_services()));
        let waits = || held.borrow().objects(&pods).is_unread(&pod);
        assert!(waits());
        let mut one = one(&held);
        one.listed(Vec::new());
        assert!(!waits() && held.borrow().objects(&pods).config_map("shop", "m").is_none());
        one.applied(&json!({"metadata": {"namespace": "shop", "name": "m"}, "data": {"a": "1"}}));
        assert!(held.borrow().objects(&pods).config_map("shop", "m").is_some());
        one.deleted(&json!({"metadata": {"namespace": "shop", "name": "m"}}));
        assert!(held.borrow().objects(&pods).config_map("shop", "m").is_none());
        // No pod refers to the object any more.
        assert!(held.send_if_modified(|held| held.keep(&BTreeSet::new())));
        assert!(held.borrow().objects.is_empty());
    }

    #[test]
    fn a_pod_waits_for_its_token() {
        let token = json!({"sources": [{"serviceAccountToken": {"path": "token"}}]});
        let pods = pods(&json!([{"name": "v", "projected": token}]));
        let pod = pods.as_ref().unwrap().pods.values().next().unwrap().clone();
        let mut held = no_services();
        assert!(held.objects(&pods).is_unread(&pod));
        let of = references::tokens(&pod).into_iter().next().unwrap();
        held.tokens.insert(of.clone(), "t".into());
        let objects = held.objects(&pods);
        assert!(!objects.is_unread(&pod));
        assert_eq!(objects.tokens.get(&of), Some("t"));
    }

    #[test]
    fn a_pod_that_gets_no_token_is_told_why_once_per_cause() {
        let token = json!({"sources": [{"serviceAccountToken": {"path": "token"}}]});
        let pods = pods(&json!([{"name": "kube-api-access-x", "projected": token}]));
        let pod = pods.as_ref().unwrap().pods.values().next().unwrap().clone();
        let of = references::tokens(&pod).into_iter().next().unwrap();
        let (_out, pods) = watch::channel(pods);
        let events = Recorder::default();
        let mut waiting = Waiting { of: of.clone(), pods, events: events.clone(), said: None };
        let error = |code, message: &str| Error {
            request: "POST /token".to_owned(),
            kind: Failure::Status { code, retry_after: None },
            message: message.to_owned(),
        };
        let mut held = Held::default();
        for _ in 0..2 {
            waiting.record(&held, &error(404, "serviceaccounts \"app\" not found"));
        }
        waiting.record(&held, &error(403, "forbidden"));
        held.tokens.insert(of, "t".into());
        waiting.record(&held, &error(500, "a pod that has a token does not wait"));
        let log = events.subscribe().borrow().all();
        let said: Vec<_> = log.iter().map(|event| (event.reason.clone(), event.message.clone())).collect();
        let words = "MountVolume.SetUp failed for volume \"kube-api-access-x\" : failed to fetch token: ";
        let expected = ["serviceaccounts \"app\" not found", "forbidden"]
            .map(|why| ("FailedMount".to_owned(), format!("{words}{why}")));
        assert_eq!(said, expected);
    }

    #[test]
    fn a_pod_waits_for_the_services_and_follows_their_changes() {
        let pods = pods(&json!([]));
        let pod = pods.as_ref().unwrap().pods.values().next().unwrap().clone();
        let held = Arc::new(watch::Sender::new(Held::default()));
        let mut all = All::<core::Service> { known: BTreeMap::new(), out: Arc::clone(&held) };
        let told = || -> Vec<String> {
            let objects = held.borrow().objects(&pods);
            objects
                .services
                .iter()
                .flat_map(Services::iter)
                .filter_map(|service| service.metadata.name.clone())
                .collect()
        };
        let service = |name: &str, address: &str| {
            json!({"metadata": {"namespace": "shop", "name": name, "uid": "u"},
                "spec": {"clusterIP": address, "ports": [{"port": 80}], "selector": {"a": "b"}}})
        };
        assert!(held.borrow().objects(&pods).is_unread(&pod));
        all.listed(vec![service("web", "10.0.0.1"), service("headless", "None"), json!({"spec": 1})]);
        assert!(!held.borrow().objects(&pods).is_unread(&pod));
        assert_eq!(told(), ["web"]);
        all.applied(&service("db", "10.0.0.2"));
        all.applied(&service("web", ""));
        assert_eq!(told(), ["db"]);
        all.deleted(&service("db", "10.0.0.2"));
        assert!(told().is_empty());
    }
}
