//! Ends the node's pods, group by group, and restarts some after a cancelled shutdown.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_model::{
    failure::{NODE_SHUTDOWN, NODE_SHUTS_DOWN},
    origin::Origin,
    pod::grace_period,
    request::Request,
    table::{PodEntry, PodTable},
};
use beelet_policy::{
    node::shutdown::{self, Group},
    resources::critical::priority,
};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};
use tracing::{info, warn};

use super::Parts;

/// Message of the pods, as in the kubelet.
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";

/// A pod to terminate.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Going {
    uid: String,
    grace: Duration,
}

/// Ends all pods. Returns once all of them have released everything and the API server has their
/// statuses, and no later than `latest`.
pub(crate) async fn end_all(parts: &Parts, latest: Instant) {
    let pods = active(&parts.table.borrow());
    let uids: Vec<String> = pods.iter().map(|(going, _)| going.uid.clone()).collect();
    for group in parts.periods.groups(pods) {
        end_group(parts, &group, latest).await;
    }
    // Some may have used all of their time and still have volumes, or no status yet.
    let mut table = parts.table.clone();
    let left = await_gone(&mut table, &uids, latest).await;
    if !left.is_empty() {
        warn!(pods = left.join(", "), "pods have not ended within the shutdown delay");
    }
    let mut written = parts.written.clone();
    let is_written = |known: &Option<Arc<PodTable>>| {
        known.as_ref().is_none_or(|known| Arc::ptr_eq(known, &parts.table.borrow()))
    };
    // A closed channel means that no API server needs the statuses.
    if timeout_at(latest, written.wait_for(is_written)).await.is_err() {
        warn!("cannot write the pods' last statuses within the shutdown delay");
    }
}

async fn end_group(parts: &Parts, group: &Group<Going>, latest: Instant) {
    let period = group.period.grace;
    info!(
        priority = group.period.priority,
        pods = group.pods.len(),
        seconds = period.as_secs(),
        "terminating pods for the shutdown"
    );
    for Going { uid, grace } in &group.pods {
        let grace = shutdown::grace(*grace, period);
        let (reason, message) = (NODE_SHUTDOWN.to_owned(), MESSAGE.to_owned());
        let request = Request::Fail { uid: uid.clone(), reason, message, grace: Some(grace) };
        if parts.requests.send(request).await.is_err() {
            return; // the manager has ended, and with it the agent
        }
    }
    let uids: Vec<String> = group.pods.iter().map(|going| going.uid.clone()).collect();
    let mut table = parts.table.clone();
    await_gone(&mut table, &uids, latest.min(Instant::now().after(period))).await;
}

/// Waits until the pods have released everything, or until `deadline`. Returns the names of the others.
async fn await_gone(
    table: &mut watch::Receiver<Arc<PodTable>>,
    uids: &[String],
    deadline: Instant,
) -> Vec<String> {
    let gone = table.wait_for(|table| left_of(table, uids).is_empty());
    let ended = matches!(timeout_at(deadline, gone).await, Ok(Ok(_)));
    if ended { Vec::new() } else { left_of(&table.borrow(), uids) }
}

/// Returns the pods that have not ended, with their priorities.
fn active(table: &PodTable) -> Vec<(Going, i32)> {
    let active = table.pods.values().filter(|entry| !entry.is_gone());
    let going = |entry: &PodEntry| {
        let uid = entry.pod.metadata.uid.clone()?;
        Some((Going { uid, grace: grace_period(&entry.pod) }, priority(&entry.pod)))
    };
    active.filter_map(|entry| going(entry)).collect()
}

/// Returns the names of the pods that have not released everything.
fn left_of(table: &PodTable, uids: &[String]) -> Vec<String> {
    let uids: BTreeSet<&str> = uids.iter().map(String::as_str).collect();
    let is_asked = |entry: &PodEntry| entry.pod.metadata.uid.as_deref().is_some_and(|uid| uids.contains(uid));
    let left = table.pods.iter().filter(|(_, entry)| is_asked(entry) && !entry.is_gone());
    left.map(|(name, _)| name.to_string()).collect()
}

/// Restarts static pods that were terminated or rejected because of the shutdown. Controllers replace
/// other pods.
pub(crate) async fn begin_again(parts: &Parts) {
    let table = parts.table.borrow().clone();
    let went = |entry: &PodEntry| {
        let reason = entry.pod.status.as_ref().and_then(|status| status.reason.as_deref());
        reason.is_some_and(|reason| reason == NODE_SHUTDOWN || reason == NODE_SHUTS_DOWN)
    };
    for entry in table.pods.values().filter(|entry| went(entry) && !Origin::of(&entry.pod).is_api()) {
        let Some(uid) = entry.pod.metadata.uid.clone() else { continue };
        if parts.requests.send(Request::Retry { uid }).await.is_err() {
            return;
        }
    }
}
