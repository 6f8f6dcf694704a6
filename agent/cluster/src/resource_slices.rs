//! Removes the node's ResourceSlices of absent DRA drivers, so that the scheduler sends no pod for devices
//! that can't be prepared (the kubelet's `wipeResourceSlices`). Drivers publish their slices again when they
//! return.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use beelet_base::work::Work;
use beelet_model::plugins::Presences;
use k8s_openapi::api::core::v1::Node;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    client::{Client, Error},
    url::escaped,
};

/// Path of the API group's description, which any authenticated user may read.
const API: &str = "/apis/resource.k8s.io/v1";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
/// Time for a driver to return: the kubelet's.
const PATIENCE: Duration = Duration::from_secs(30);

/// Inputs of [`keep`].
#[derive(Debug)]
pub struct Inputs {
    /// The node's name.
    pub node_name: String,
    /// The watched Node; None until the Node is registered.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// The drivers.
    pub drivers: watch::Receiver<Arc<Presences>>,
}

/// Removes slices of absent drivers until `stop`.
pub fn keep(client: Client, inputs: Inputs, stop: CancellationToken) -> Work {
    Box::pin(async move {
        stop.run_until_cancelled(run(client, inputs)).await;
    })
}

async fn run(client: Client, inputs: Inputs) {
    let Inputs { node_name, mut node, mut drivers } = inputs;
    if node.wait_for(Option::is_some).await.is_err() {
        return;
    }
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
    let (mut began, mut wiped) = (false, BTreeSet::new());
    loop {
        let seen = Arc::clone(&drivers.borrow_and_update());
        let done = if began {
            away(&client, &node_name, &seen, &mut wiped).await
        } else {
            first(&client, &node_name, &seen).await
        };
        if let Err(error) = done {
            warn!(%error, "cannot remove the ResourceSlices of absent drivers, retrying");
            client.presence().pause(&mut backoff, &error).await;
            continue;
        }
        backoff.reset();
        began = true;
        let next = due(&seen, &wiped, Instant::now()).1;
        let later = next.unwrap_or_else(|| Instant::now() + PATIENCE);
        tokio::select! {
            changed = drivers.changed() => if changed.is_err() { return },
            () = sleep_until(later), if next.is_some() => {}
        }
    }
}

/// Removes the slices of all drivers that have not registered since the agent's start; they may never return.
async fn first(client: &Client, node: &str, drivers: &Presences) -> Result<(), Error> {
    let here = drivers.iter().filter(|(_, away)| away.is_none()).map(|(name, _)| format!("!={name}"));
    wipe(client, node, here).await
}

/// Removes the slices of drivers that have been absent for too long.
async fn away(
    client: &Client,
    node: &str,
    drivers: &Presences,
    wiped: &mut BTreeSet<String>,
) -> Result<(), Error> {
    // A driver that has returned may leave again.
    wiped.retain(|name| drivers.get(name).is_some_and(Option::is_some));
    for name in due(drivers, wiped, Instant::now()).0 {
        wipe(client, node, [format!("={name}")]).await?;
        info!(driver = name, "removed the ResourceSlices of an absent DRA driver");
        wiped.insert(name);
    }
    Ok(())
}

/// Removes the node's slices whose driver matches `terms`.
async fn wipe(client: &Client, node: &str, terms: impl IntoIterator<Item = String>) -> Result<(), Error> {
    let mut selector = format!("spec.nodeName={node}");
    for term in terms {
        selector.push_str(&format!(",spec.driver{term}"));
    }
    if !are_served(client).await? {
        return Ok(());
    }
    client.delete(&format!("{SLICES}?fieldSelector={}", escaped(&selector)), None).await.map(drop)
}

/// Returns true if the API server has ResourceSlices. A server before Kubernetes 1.34 has none and would
/// answer a deletion with "forbidden", since no role grants access to an unknown resource.
async fn are_served(client: &Client) -> Result<bool, Error> {
    match client.get(API).await {
        Err(error) if error.is_not_found() => Ok(false),
        // Nodes without access to the description may still remove slices.
        Err(error) if error.is_refusal() => Ok(true),
        served => served.map(|_| true),
    }
}

/// Returns the drivers whose slices are due for removal, and the time of the next removal.
fn due(drivers: &Presences, wiped: &BTreeSet<String>, now: Instant) -> (Vec<String>, Option<Instant>) {
    let waiting = drivers.iter().filter(|(name, _)| !wiped.contains(*name));
    let waiting = waiting.filter_map(|(name, away)| Some((name, (*away)? + PATIENCE)));
    let (now_due, later): (Vec<_>, Vec<_>) = waiting.partition(|(_, at)| *at <= now);
    let next = later.into_iter().map(|(_, at)| at).min();
    (now_due.into_iter().map(|(name, _)| name.clone()).collect(), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_has_half_a_minute_to_come_back() {
        let now = Instant::now() + Duration::from_secs(60);
        let since = |seconds| Some(now - Duration::from_secs(seconds));
        let check =
            |drivers: &[(&str, Option<Instant>)], wiped: &[&str], expected: &[&str], next: Option<u64>| {
                let drivers = drivers.iter().map(|(name, away)| ((*name).to_owned(), *away)).collect();
                let wiped = wiped.iter().map(|name| (*name).to_owned()).collect();
                let (found, at) = due(&drivers, &wiped, now);
                assert_eq!(found, expected);
                assert_eq!(at.map(|at| (at - now).as_secs()), next);
            };
        check(&[("a", None)], &[], &[], None);
        check(&[("a", since(30)), ("b", since(29)), ("c", since(5)), ("d", None)], &[], &["a"], Some(1));
        check(&[("a", since(40)), ("b", since(30))], &["a"], &["b"], None);
    }
}
