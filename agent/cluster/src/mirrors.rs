//! Maintains a mirror pod in the API server for each static pod, to make static pods visible there.
//! `beelet_policy::pod::mirror` decides on the steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use beelet_codec::ApiType;
use beelet_model::{
    origin::Origin,
    table::{Complete, PodTable},
};
use beelet_policy::pod::mirror::{self, MirrorStep, Name, Owner};
use k8s_openapi::api::core::v1 as core;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::{
    assigned::Pods,
    backoff::Backoff,
    client::{Client, Error},
    url::escaped,
};

/// Maintains the mirrors.
pub(crate) struct Mirrors {
    pub(crate) client: Client,
    pub(crate) node_name: String,
    pub(crate) node: watch::Receiver<Option<Arc<core::Node>>>,
    pub(crate) table: watch::Receiver<Arc<PodTable>>,
    pub(crate) pods: watch::Receiver<Pods>,
    pub(crate) complete: Complete,
    /// Number of mirrors.
    pub(crate) count: Gauge,
}

impl Mirrors {
    /// Maintains the mirrors until dropped.
    pub(crate) async fn keep(mut self) {
        // Before that, the table may lack static pods that have not been read yet.
        self.complete.wait().await;
        let mut backoff = Backoff::default();
        // Steps whose effect the watch has not shown yet.
        let mut asked = BTreeSet::new();
        loop {
            let pause = if self.step(&mut asked).await {
                backoff.reset();
                None
            } else {
                Some(backoff.next(None))
            };
            tokio::select! {
                changed = self.pods.changed(), if pause.is_none() => {
                    if changed.is_err() { return }
                    asked.clear();
                }
                changed = self.table.changed(), if pause.is_none() => if changed.is_err() { return },
                changed = self.node.changed(), if pause.is_none() => if changed.is_err() { return },
                () = tokio::time::sleep(pause.unwrap_or_default()), if pause.is_some() => {}
            }
        }
    }

    /// Performs all due steps. Returns false if one failed.
    async fn step(&mut self, asked: &mut BTreeSet<Name>) -> bool {
        let pods = self.pods.borrow_and_update().clone();
        let table = Arc::clone(&self.table.borrow_and_update());
        let uid = self.node.borrow_and_update().as_ref().and_then(|node| node.metadata.uid.clone());
        let (Some(pods), Some(uid)) = (pods, uid) else { return true };
        let owner = Owner { name: self.node_name.clone(), uid };
        let own = table.pods.values().map(|entry| &entry.pod);
        let own = own.filter(|pod| !Origin::of(pod).is_api() && is_whole(pod));
        let own: BTreeMap<Name, &core::Pod> = own.map(|pod| (mirror::name_of(pod), pod)).collect();
        let mirrors = pods.values().filter(|pod| pod.wanted.is_none()).map(|pod| &*pod.object);
        let mirrors: BTreeMap<Name, &core::Pod> = mirrors.map(|pod| (mirror::name_of(pod), pod)).collect();
        self.count.set(i64::try_from(mirrors.len()).unwrap_or(i64::MAX));
        let mut all = true;
        for step in mirror::steps(&own, &mirrors, &owner) {
            let name = match &step {
                MirrorStep::Create(pod) => mirror::name_of(pod),
                MirrorStep::Delete { name, .. } => name.clone(),
            };
            if !asked.insert(name.clone()) {
                continue;
            }
            if let Err(error) = self.perform(&step).await {
                asked.remove(&name);
                all = false;
                warn!(pod = %format!("{}/{}", name.0, name.1), %error, "cannot create or delete the mirror pod");
            }
        }
        all
    }

    async fn perform(&self, step: &MirrorStep) -> Result<(), Error> {
        match step {
            MirrorStep::Create(pod) => {
                let (namespace, name) = mirror::name_of(pod);
                let path = format!("/api/v1/namespaces/{}/pods", escaped(&namespace));
                match self.client.create(&path, &pod.to_value()).await {
                    Ok(_) => info!(namespace, name, "created the mirror pod"),
                    // The watch has not shown an earlier creation yet.
                    Err(error) if error.is_conflict() => {
                        debug!(namespace, name, "a pod of the mirror pod's name exists");
                    }
                    Err(error) => return Err(error),
                }
            }
            MirrorStep::Delete { name: (namespace, name), uid } => {
                let path = format!("/api/v1/namespaces/{}/pods/{}", escaped(namespace), escaped(name));
                match self.client.delete(&path, Some(uid)).await {
                    Ok(_) => debug!(namespace, name, "deleted an outdated mirror pod"),
                    Err(error) if error.is_not_found() || error.is_conflict() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// Returns true for the pod of a manifest, and false for the remains of a removed one.
fn is_whole(pod: &core::Pod) -> bool {
    let containers = pod.spec.as_ref().is_some_and(|spec| !spec.containers.is_empty());
    containers && pod.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(mirror::HASH))
}
