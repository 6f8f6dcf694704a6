//! Sets the addresses of this node's pods in the container runtime (the kubelet's `updatePodCIDR`): runtimes
//! without a network of their own create one from a template with these addresses (containerd's
//! `conf_template`).

use std::{os::unix::fs::MetadataExt, path::Path, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Node;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use crate::node::Builder;
use beelet_base::blocking::blocking;
use beelet_config::Config;
use beelet_cri::Runtime;

/// Interval of checks for a restarted runtime, and pause before a retry.
const CHECK_PERIOD: Duration = Duration::from_secs(10);

/// Source of the addresses.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The API server's Node.
    Node(watch::Receiver<Option<Arc<Node>>>),
    /// The configuration.
    Configured(String),
}

impl Source {
    /// Returns the addresses in the runtime's format; empty if unset.
    fn now(&mut self) -> String {
        match self {
            Self::Configured(cidr) => cidr.clone(),
            Self::Node(node) => node.borrow_and_update().as_deref().map(of_node).unwrap_or_default(),
        }
    }

    /// Waits until the addresses may have changed.
    async fn changed(&mut self) {
        let changed = match self {
            Self::Node(node) => node.changed().await.is_ok(),
            Self::Configured(_) => false,
        };
        if !changed {
            std::future::pending::<()>().await;
        }
    }
}

/// Returns the addresses that the cluster assigned to a node's pods.
fn of_node(node: &Node) -> String {
    let spec = node.spec.as_ref();
    spec.and_then(|spec| spec.pod_cidrs.as_ref()).map(|all| all.join(",")).unwrap_or_default()
}

/// Keeps the configured addresses set in the runtime of a standalone node.
pub(crate) fn configured(builder: Builder, config: &Config) -> Builder {
    match config.pod_cidr.as_str() {
        "" => builder,
        cidr => keep(builder, Source::Configured(cidr.to_owned())),
    }
}

/// Keeps the addresses of `source` set in the runtime.
pub(crate) fn keep(builder: Builder, source: Source) -> Builder {
    builder.attach("pod CIDR", move |handles, stop| async move {
        stop.run_until_cancelled(follow(handles.services.runtime, source)).await;
    })
}

async fn follow(runtime: Runtime, mut source: Source) {
    let mut current: Option<Update> = None;
    let mut failing = false;
    loop {
        let (cidr, socket) = (source.now(), identity(runtime.socket()).await);
        if cidr.is_empty() {
            source.changed().await;
            continue;
        }
        let wanted = Update { cidr, socket };
        if current.as_ref() != Some(&wanted) {
            match runtime.update_runtime_config(&wanted.cidr).await {
                Ok(()) => {
                    info!(cidr = wanted.cidr, "set the pod CIDR in the container runtime");
                    (current, failing) = (Some(wanted), false);
                }
                Err(error) if !std::mem::replace(&mut failing, true) => {
                    warn!(%error, cidr = wanted.cidr, "cannot set the pod CIDR in the container runtime, retrying");
                }
                Err(_) => {}
            }
        }
        tokio::select! {
            () = source.changed() => {}
            () = sleep(CHECK_PERIOD) => {}
        }
    }
}

/// Addresses and the runtime that has them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Update {
    cidr: String,
    socket: Option<(u64, u64, i64)>,
}

/// Returns the identity of the runtime's socket, which distinguishes a restarted runtime.
async fn identity(socket: &Path) -> Option<(u64, u64, i64)> {
    let socket = socket.to_owned();
    let look = move || {
        let found = std::fs::metadata(socket).ok()?;
        Some((found.dev(), found.ino(), found.ctime()))
    };
    blocking("inspecting the container runtime's socket", look).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_addresses_are_all_that_the_node_has() {
        let check = |spec: serde_json::Value, expected: &str| {
            let node: Node = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
            assert_eq!(of_node(&node), expected);
        };
        check(json!({}), "");
        check(json!({"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]}), "10.244.1.0/24");
        check(json!({"podCIDRs": ["10.244.1.0/24", "fd00:1::/64"]}), "10.244.1.0/24,fd00:1::/64");
    }
}
