//! The node's data of storage plugins, as the kubelet's `nodeinfomanager` publishes it: the CSINode, and on
//! the Node the annotation with the plugins' names of the node and the topology labels. The CSINode also
//! lists the volume types that are migrated to CSI. Must never remove a driver that merely has not registered
//! again yet.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_base::work::Work;
use beelet_codec::{ApiType, data};
use beelet_policy::{
    node::status::CONTROLLER_ATTACHES,
    volumes::{
        csi::{self, Drivers, NODE_IDS},
        migration,
    },
};
use k8s_openapi::api::{core::v1::Node, storage::v1::CSINode};
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    backoff::Backoff,
    client::{Client, Error, Patch},
};

/// Path of the CSINodes.
const CSI_NODES: &str = "/apis/storage.k8s.io/v1/csinodes";

/// Inputs of [`keep`].
#[derive(Debug)]
pub struct Inputs {
    /// The node's name.
    pub node_name: String,
    /// The watched Node; None until the Node is registered.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// The drivers.
    pub drivers: watch::Receiver<Arc<Drivers>>,
}

/// Maintains the CSINode until `stop`.
pub fn keep(client: Client, inputs: Inputs, stop: CancellationToken) -> Work {
    Box::pin(async move {
        stop.run_until_cancelled(run(client, inputs)).await;
    })
}

async fn run(client: Client, inputs: Inputs) {
    let Inputs { node_name, mut node, mut drivers } = inputs;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(30));
    let mut failing = false;
    loop {
        let Ok(seen) = node.wait_for(Option::is_some).await.map(|node| node.clone()) else { return };
        let Some(seen) = seen else { continue };
        let of = Arc::clone(&drivers.borrow_and_update());
        let written = write(&client, &node_name, &seen, &of).await;
        if let Err(error) = written {
            if !std::mem::replace(&mut failing, true) {
                warn!(%error, "cannot write the CSINode, retrying");
            }
            client.presence().pause(&mut backoff, &error).await;
            continue;
        }
        failing = false;
        backoff.reset();
        let uid = seen.metadata.uid.clone();
        let another = |node: &Option<Arc<Node>>| node.as_ref().is_some_and(|node| node.metadata.uid != uid);
        let changed = tokio::select! {
            changed = drivers.changed() => changed.is_ok(),
            another = node.wait_for(another) => another.is_ok(),
        };
        if !changed {
            return;
        }
    }
}

async fn write(client: &Client, name: &str, node: &Node, drivers: &Drivers) -> Result<(), Error> {
    if let Some(change) = change_of_node(node, drivers) {
        match client.patch(&format!("/api/v1/nodes/{name}"), Patch::Merge, &change).await {
            // The node may not set one of the labels: the CSINode has the topology all the same.
            Err(error) if !error.is_transient() && !error.is_not_found() && !error.is_conflict() => {
                warn!(%error, "cannot write the storage plugins' labels and annotations to the Node");
            }
            patched => drop(patched?),
        }
    }
    let uid = node.metadata.uid.as_deref().unwrap_or_default();
    let path = format!("{CSI_NODES}/{name}");
    let found = match client.get(&path).await {
        Ok(found) => Some(read(&path, &found)?),
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error),
    };
    let found = match found {
        Some(found) if csi::is_of(&found, uid) => found,
        of_another => {
            if of_another.is_some() {
                client.delete(&path, None).await?;
            }
            read(&path, &client.create(CSI_NODES, &csi::new_node(name, uid).to_value()).await?)?
        }
    };
    match changed(found, drivers) {
        Some(wanted) => client.replace(&path, &wanted.to_value()).await.map(drop),
        None => Ok(()),
    }
}

/// Returns the changed CSINode, or None if it is up to date.
fn changed(mut found: CSINode, drivers: &Drivers) -> Option<CSINode> {
    let (drivers, migrated) = (csi::changed_drivers(&found, drivers), migration::changed_annotation(&found));
    if drivers.is_none() && migrated.is_none() {
        return None;
    }
    if let Some(drivers) = drivers {
        found.spec.drivers = drivers;
    }
    if let Some(kinds) = migrated {
        found.metadata.annotations.get_or_insert_default().insert(migration::ANNOTATION.to_owned(), kinds);
    }
    Some(found)
}

fn read(path: &str, value: &Value) -> Result<CSINode, Error> {
    CSINode::from_value(value).map_err(|problem| Error::unreachable(path, &problem))
}

/// Returns the merge patch of the Node, if it needs one.
fn change_of_node(node: &Node, drivers: &Drivers) -> Option<Value> {
    let annotations = node.metadata.annotations.clone().unwrap_or_default();
    let mut changed = Map::new();
    if annotations.get(CONTROLLER_ATTACHES).is_none_or(|value| value != "true") {
        changed.insert(CONTROLLER_ATTACHES.to_owned(), json!("true"));
    }
    let said = annotations.get(NODE_IDS).and_then(|text| data::parse(text.as_bytes()).ok());
    let known: BTreeMap<String, String> = said.and_then(|said| data::read(&said).ok()).unwrap_or_default();
    if let Some(ids) = csi::changed_ids(&known, drivers) {
        changed.insert(NODE_IDS.to_owned(), ids.map_or(Value::Null, |ids| json!(json!(ids).to_string())));
    }
    let (labels, collision) = csi::missing_labels(&node.metadata.labels.clone().unwrap_or_default(), drivers);
    if let Some(collision) = collision {
        warn!("cannot label the Node with a storage plugin's topology: {collision}");
    }
    let mut metadata = Map::new();
    if !changed.is_empty() {
        metadata.insert("annotations".to_owned(), Value::Object(changed));
    }
    if !labels.is_empty() {
        metadata.insert("labels".to_owned(), json!(labels));
    }
    (!metadata.is_empty()).then(|| json!({ "metadata": metadata }))
}
