//! The node's serving certificate from the cluster's signer (`serverTLSBootstrap`): requested with the node's
//! identity for the Node's addresses, and renewed when these change or the certificate nears its expiry. The
//! server only reads the file.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use beelet_base::work::Work;
use beelet_base::{blocking::blocking, kubelet_counter::KubeletCounter};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use prometheus_client::registry::Registry;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    certificate::{Addresses, Lifetime, Store},
    client::Client,
    rotation::part,
};

/// Interval of checks of the clock and the file.
const CHECK_PERIOD: Duration = Duration::from_secs(60);
/// Minimum time between two requests, even for short-lived certificates.
const LEAST: Duration = Duration::from_secs(1);

/// Metrics with the kubelet's names.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    errors: KubeletCounter,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Failed requests for a new serving certificate";
        registry.register("kubelet_server_expiration_renew_errors", help, self.errors.clone());
    }
}

/// Inputs of [`keep`].
#[derive(Debug)]
pub struct Inputs {
    /// Folder of the node's certificates.
    pub cert_dir: PathBuf,
    /// The node's name.
    pub node_name: String,
    /// The Node; None until the Node is registered.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// Metrics.
    pub metrics: Metrics,
}

/// Maintains the certificate until `stop`.
pub fn keep(client: Client, inputs: Inputs, stop: CancellationToken) -> Work {
    Box::pin(async move {
        stop.run_until_cancelled(run(client, inputs)).await;
    })
}

async fn run(client: Client, inputs: Inputs) {
    let Inputs { cert_dir, node_name, mut node, metrics } = inputs;
    let store = Store::serving(cert_dir);
    let (mut part, mut asked) = (part(), None);
    let mut backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(600));
    loop {
        let addresses = node.borrow_and_update().as_deref().map(addresses).unwrap_or_default();
        if addresses.ips.is_empty() {
            // Signers refuse a request without an address.
            if node.changed().await.is_err() {
                sleep(CHECK_PERIOD).await;
            }
            continue;
        }
        let kept = store.clone();
        let known = blocking("the serving certificate", move || kept.in_use()).await;
        let due = due(known.as_ref(), &addresses, asked.as_ref(), part);
        let left = due.duration_since(Timestamp::now());
        if left.is_positive() {
            let pause = Duration::try_from(left).unwrap_or(CHECK_PERIOD).min(CHECK_PERIOD);
            tokio::select! {
                () = sleep(pause) => {}
                Ok(()) = node.changed() => {}
            }
            continue;
        }
        let pause = match store.renew(&client, &node_name, &addresses).await {
            Ok(fresh) => {
                info!(until = %fresh.until, "got a new serving certificate");
                (part, asked) = (self::part(), Some(addresses));
                backoff.reset();
                LEAST
            }
            Err(error) => {
                metrics.errors.inc();
                warn!("cannot get a serving certificate, retrying: {error}");
                backoff.next(None)
            }
        };
        sleep(pause).await;
    }
}

/// Returns the time of the next request. A certificate for other addresses must be replaced at once, unless
/// the signer has already dropped some of the `asked` ones.
fn due(
    known: Option<&(Lifetime, Addresses)>,
    wanted: &Addresses,
    asked: Option<&Addresses>,
    part: f64,
) -> Timestamp {
    match known {
        Some((lifetime, found)) if found == wanted || asked == Some(wanted) => lifetime.rotation(part),
        _ => Timestamp::UNIX_EPOCH,
    }
}

/// Returns the names and addresses under which clients reach the node.
fn addresses(node: &Node) -> Addresses {
    let status = node.status.as_ref();
    let (mut names, mut ips) = (BTreeSet::new(), BTreeSet::new());
    for address in status.iter().flat_map(|status| status.addresses.iter().flatten()) {
        match (address.type_.as_str(), address.address.parse::<IpAddr>()) {
            ("Hostname" | "InternalIP" | "ExternalIP", Ok(ip)) => drop(ips.insert(ip)),
            ("Hostname" | "InternalDNS" | "ExternalDNS", Err(_)) if !address.address.is_empty() => {
                names.insert(address.address.clone());
            }
            _ => {}
        }
    }
    Addresses { names, ips }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_certificate_is_for_the_addresses_that_the_node_has() {
        let node: Node = serde_json::from_value(json!({"metadata": {}, "status": {"addresses": [
            {"type": "InternalIP", "address": "192.0.2.7"},
            {"type": "ExternalIP", "address": "2001:db8::7"},
            {"type": "ExternalIP", "address": "nonsense"},
            {"type": "Hostname", "address": "n1"},
            {"type": "InternalDNS", "address": "n1.example"},
            {"type": "Other", "address": "x"},
        ]}}))
        .unwrap();
        let found = addresses(&node);
        assert_eq!(found.names, ["n1", "n1.example"].map(str::to_owned).into());
        assert_eq!(found.ips, ["192.0.2.7", "2001:db8::7"].map(|ip| ip.parse().unwrap()).into());
        assert_eq!(addresses(&Node::default()), Addresses::default());
    }

    #[test]
    fn the_next_one_is_due_in_time_or_when_addresses_change() {
        let of = |ip: &str| Addresses { names: BTreeSet::new(), ips: [ip.parse().unwrap()].into() };
        let (one, two) = (of("192.0.2.1"), of("192.0.2.2"));
        let known = (Lifetime { from: at(1000), until: at(2000) }, one.clone());
        assert_eq!(due(None, &one, None, 0.8), Timestamp::UNIX_EPOCH);
        assert_eq!(due(Some(&known), &one, None, 0.8), at(1800));
        assert_eq!(due(Some(&known), &two, None, 0.8), Timestamp::UNIX_EPOCH);
        // The signer has dropped an address: no repeated request.
        assert_eq!(due(Some(&known), &two, Some(&two), 0.8), at(1800));
    }
}
