//! Tells the container runtime the addresses of this node's pods (`updatePodCIDR` of the kubelet): runtimes
//! without a network of their own make one from a template with them (containerd's `conf_template`).

use std::{os::unix::fs::MetadataExt, path::Path, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Node;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use crate::node::Builder;
use beelet_base::blocking::blocking;
use beelet_config::Config;
use beelet_cri::Runtime;

/// How often it is looked whether the runtime has been started anew, and the pause before another try.
const LOOK: Duration = Duration::from_secs(10);

/// Where the addresses come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The Node, as the API server has it.
    Node(watch::Receiver<Option<Arc<Node>>>),
    /// The configuration.
    Configured(String),
}

impl Source {
    /// As the runtime takes them; empty if nobody has said any.
    fn now(&mut self) -> String {
        match self {
            Self::Configured(cidr) => cidr.clone(),
            Self::Node(node) => node.borrow_and_update().as_deref().map(of_node).unwrap_or_default(),
        }
    }

    /// Waits until they may be others.
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

/// The addresses that the cluster gave to a node's pods.
fn of_node(node: &Node) -> String {
    let spec = node.spec.as_ref();
    spec.and_then(|spec| spec.pod_cidrs.as_ref()).map(|all| all.join(",")).unwrap_or_default()
}

/// Keeps telling the runtime of a node without an API server what is configured.
pub(crate) fn configured(builder: Builder, config: &Config) -> Builder {
    match config.pod_cidr.as_str() {
        "" => builder,
        cidr => keep(builder, Source::Configured(cidr.to_owned())),
    }
}

/// Keeps telling the runtime what `source` says.
pub(crate) fn keep(builder: Builder, source: Source) -> Builder {
    builder.attach("pod CIDR", move |handles, stop| async move {
        stop.run_until_cancelled(follow(handles.services.runtime, source)).await;
    })
}

async fn follow(runtime: Runtime, mut source: Source) {
    let mut told: Option<Told> = None;
    let mut failing = false;
    loop {
        let (cidr, socket) = (source.now(), identity(runtime.socket()).await);
        if cidr.is_empty() {
            source.changed().await;
            continue;
        }
        let wanted = Told { cidr, socket };
        if told.as_ref() != Some(&wanted) {
            match runtime.update_runtime_config(&wanted.cidr).await {
                Ok(()) => {
                    info!(cidr = wanted.cidr, "the container runtime knows the addresses of pods");
                    (told, failing) = (Some(wanted), false);
                }
                Err(error) if !std::mem::replace(&mut failing, true) => {
                    warn!(%error, cidr = wanted.cidr, "cannot tell the container runtime the addresses of pods");
                }
                Err(_) => {}
            }
        }
        tokio::select! {
            () = source.changed() => {}
            () = sleep(LOOK) => {}
        }
    }
}

/// What was told, and to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    cidr: String,
    socket: Option<(u64, u64, i64)>,
}

/// Tells a runtime that was started anew from the one before: it has made another socket.
async fn identity(socket: &Path) -> Option<(u64, u64, i64)> {
    let socket = socket.to_owned();
    let look = move || {
        let found = std::fs::metadata(socket).ok()?;
        Some((found.dev(), found.ino(), found.ctime()))
    };
    blocking("looking at the container runtime's socket", look).await
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
