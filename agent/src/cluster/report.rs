//! Collects the report for the Node's status: the runtime's facts, and the machine's resources and
//! conditions.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_policy::node::{
    repair::{self, Convention, Fault},
    status::{self, NodeReport},
};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::node::Handles;
use beelet_cri::Runtime;

/// Interval of requests to a runtime whose network is not ready.
const NETWORK: Duration = Duration::from_secs(1);
/// Interval of lists of images.
const IMAGES: Duration = Duration::from_secs(60);

/// The container runtime's part of the Node's status.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RuntimeFacts {
    version: String,
    handlers: Vec<core::NodeRuntimeHandler>,
    features: Option<core::NodeFeatures>,
    images: Vec<core::ContainerImage>,
    /// Reason for a network that is not ready.
    network: Option<String>,
}

/// Conditions for node repair.
#[derive(Clone, Debug)]
pub(super) struct Repair {
    /// Conventions of the conditions; none: no conditions.
    pub(super) conventions: Vec<Convention>,
    /// Measured faults, without those of the network; None before the first measurement.
    pub(super) faults: watch::Receiver<Option<Vec<Fault>>>,
}

impl Repair {
    /// Returns the conditions for the measured faults and for the state of the network. Empty before
    /// the first measurement: a start of the agent must not end a fault of the Node for a moment.
    fn conditions(&self, network: Option<&str>, has_address: bool) -> Vec<core::NodeCondition> {
        let Some(mut faults) = self.faults.borrow().clone() else { return Vec::new() };
        faults.extend(repair::network(network, has_address));
        let all = self.conventions.iter().flat_map(|one| repair::conditions(*one, &faults));
        all.map(|condition| core::NodeCondition {
            type_: condition.name.to_owned(),
            status: match condition.holds {
                Some(true) => "True",
                Some(false) => "False",
                None => "Unknown",
            }
            .to_owned(),
            reason: Some(condition.reason),
            message: Some(condition.message),
            ..core::NodeCondition::default()
        })
        .collect()
    }
}

/// Keeps `facts` up to date, so that the writer of the status never waits for the runtime. Notifies `changes`
/// when the status may have changed.
pub(super) async fn follow(
    handles: Handles,
    facts: watch::Sender<RuntimeFacts>,
    changes: watch::Sender<()>,
    every: Duration,
    most_images: Option<usize>,
) {
    let (runtime, mut devices) = (handles.services.runtime.clone(), handles.devices.node());
    let (mut shutdown, mut volumes) = (handles.shutdown.clone(), handles.services.csi.in_use());
    let mut images_due = Instant::now();
    loop {
        let mut new = facts.borrow().clone();
        ask(&runtime, &mut new).await;
        if images_due <= Instant::now() {
            if let Ok(images) = runtime.images.list().await {
                new.images = status::images(images.into_iter().map(image).collect(), most_images);
            }
            images_due = Instant::now() + IMAGES;
        }
        let next = Instant::now().after(if new.network.is_some() { NETWORK.min(every) } else { every });
        let changed = facts.send_if_modified(|known| {
            let differ = *known != new;
            *known = new;
            differ
        });
        if changed {
            changes.send_replace(());
        }
        loop {
            tokio::select! {
                () = sleep_until(next) => break,
                Ok(()) = devices.changed() => { changes.send_replace(()); }
                Ok(()) = shutdown.changed() => { changes.send_replace(()); }
                Ok(()) = volumes.changed() => { changes.send_replace(()); }
            }
        }
    }
}

/// Reads the facts that change while the runtime runs or when it is replaced. Facts without an answer keep
/// their value.
async fn ask(runtime: &Runtime, facts: &mut RuntimeFacts) {
    if let Ok(version) = runtime.version().await {
        facts.version = format!("{}://{}", version.runtime_name, version.runtime_version);
    }
    let Ok(status) = runtime.status(false).await else { return };
    facts.handlers = status.runtime_handlers.into_iter().map(handler).collect();
    facts.handlers.sort_by(|a, b| a.name.cmp(&b.name));
    facts.features = status.features.map(|features| core::NodeFeatures {
        supplemental_groups_policy: Some(features.supplemental_groups_policy),
    });
    let conditions = status.status.map(|status| status.conditions).unwrap_or_default();
    let network = conditions.into_iter().find(|condition| condition.r#type == "NetworkReady");
    facts.network = network.filter(|condition| !condition.status).map(|condition| {
        let (reason, message) = (shortened(&condition.reason), shortened(&condition.message));
        format!("container runtime network not ready: NetworkReady=false reason:{reason} message:{message}")
    });
}

/// Limits the length of a runtime's text, which may be arbitrary.
fn shortened(words: &str) -> String {
    words.chars().take(1024).collect()
}

fn handler(handler: cri::RuntimeHandler) -> core::NodeRuntimeHandler {
    let features = handler.features.map(|features| core::NodeRuntimeHandlerFeatures {
        recursive_read_only_mounts: Some(features.recursive_read_only_mounts),
        user_namespaces: Some(features.user_namespaces),
    });
    core::NodeRuntimeHandler { name: Some(handler.name), features }
}

fn image(image: cri::Image) -> core::ContainerImage {
    core::ContainerImage {
        names: Some(image.repo_digests.into_iter().chain(image.repo_tags).collect()),
        size_bytes: i64::try_from(image.size).ok(),
    }
}

/// Returns a function that reports the machine's current state without waiting.
pub(super) fn reporter(
    handles: Handles,
    facts: watch::Receiver<RuntimeFacts>,
    repair: Repair,
    info: core::NodeSystemInfo,
    port: u16,
) -> Arc<dyn Fn() -> NodeReport + Send + Sync> {
    let (devices, volumes) = (handles.devices.node(), handles.services.csi.in_use());
    Arc::new(move || {
        let (facts, devices) = (facts.borrow().clone(), Arc::clone(&devices.borrow()));
        let with = |own: &BTreeMap<String, String>, devices: &BTreeMap<String, usize>, gone: &[String]| {
            let gone = gone.iter().map(|name| (name.clone(), "0".to_owned()));
            let devices = devices.iter().map(|(name, count)| (name.clone(), count.to_string()));
            own.clone().into_iter().chain(gone).chain(devices).collect()
        };
        let gone: Vec<String> = devices.removed.iter().cloned().collect();
        let mut conditions = (handles.conditions)();
        if let Some(why) = &facts.network {
            not_ready(&mut conditions, why);
        }
        conditions.extend(repair.conditions(facts.network.as_deref(), !handles.host.now().is_empty()));
        NodeReport {
            capacity: with(&handles.resources.capacity, &devices.capacity, &gone),
            allocatable: with(&handles.resources.allocatable, &devices.allocatable, &gone),
            conditions,
            info: core::NodeSystemInfo { container_runtime_version: facts.version, ..info.clone() },
            images: facts.images,
            handlers: facts.handlers,
            features: facts.features,
            volumes_in_use: volumes.borrow().keys().cloned().collect(),
            port: port.into(),
            ..NodeReport::default()
        }
    })
}

/// Sets the Ready condition to false because the network is not ready.
fn not_ready(conditions: &mut [core::NodeCondition], why: &str) {
    let ready = conditions.iter_mut().find(|condition| condition.type_ == "Ready");
    let Some(ready) = ready else { return };
    let message = match (&ready.message, ready.status.as_str()) {
        (Some(other), "False") => format!("[{other}, {why}]"),
        _ => why.to_owned(),
    };
    ready.status = "False".to_owned();
    ready.reason = Some("KubeletNotReady".to_owned());
    ready.message = Some(message);
}
