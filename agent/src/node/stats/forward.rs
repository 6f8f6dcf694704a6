//! Forwards the kernel half's edges, with the names of the containers, to the feed of watching clients.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use beelet_proto::beelet::SignalEdge;
use beelet_proto::beelet::signal_edge::Type;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use beelet_api::signals::feed::Feed;
use beelet_bpf::{Edge, Edges, Listener, PressureKind};
use beelet_stats::{NodeStats, Scope, Stats};

/// Minimum time between two lookups of containers after an unknown cgroup.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Maximum number of cached names, including those of removed containers, whose last edges may come late.
const NAMES: usize = 8192;

/// Namespace, pod, container.
type Name = (String, String, String);

/// Publishes every edge to the feed until `shutdown`. Reads and drops edges while the feed has no watcher.
pub(super) async fn run(edges: Edges, feed: Feed, pressure: Stats, shutdown: CancellationToken) {
    let mut names = Names { known: BTreeMap::new(), looked: None, pressure };
    while let Some(edge) = shutdown.run_until_cancelled(edges.recv()).await {
        if !feed.is_watched() {
            continue;
        }
        let (mut message, cgroup_id) = message(&edge);
        if cgroup_id != 0
            && let Some((namespace, pod, container)) = names.of(cgroup_id).await
        {
            message.cgroup_id = cgroup_id;
            (message.namespace, message.pod, message.container) = (namespace, pod, container);
        }
        feed.publish(message);
    }
}

struct Names {
    known: BTreeMap<u64, Name>,
    looked: Option<Instant>,
    pressure: Stats,
}

impl Names {
    async fn of(&mut self, cgroup_id: u64) -> Option<Name> {
        let due = self.looked.is_none_or(|at| at.elapsed() > LOOK_AGAIN);
        if !self.known.contains_key(&cgroup_id) && due {
            self.looked = Some(Instant::now());
            self.learn(&*self.pressure.now(Scope::Usage).await);
        }
        self.known.get(&cgroup_id).cloned()
    }

    fn learn(&mut self, pressure: &NodeStats) {
        for (pod, container) in pressure.containers() {
            let Some(id) = container.cgroup_id else { continue };
            let name = (pod.name.namespace.clone(), pod.name.name.clone(), container.name.clone());
            self.known.insert(id, name);
        }
        // Ids increase: the smallest are the oldest.
        while self.known.len() > NAMES {
            self.known.pop_first();
        }
    }
}

/// Converts an edge to a message, and returns the id of its cgroup.
fn message(edge: &Edge) -> (SignalEdge, u64) {
    let of = |kind: Type, at_ns: u64| SignalEdge { r#type: kind.into(), at_ns, ..SignalEdge::default() };
    let listener = |kind, listener: &Listener, at_ns| {
        let address = SocketAddr::new(listener.address, listener.port).to_string();
        (SignalEdge { address, ..of(kind, at_ns) }, listener.cgroup_id)
    };
    match *edge {
        Edge::ListenerOpened { listener: ref one, at_ns } => listener(Type::ListenerOpened, one, at_ns),
        Edge::ListenerClosed { listener: ref one, at_ns } => listener(Type::ListenerClosed, one, at_ns),
        Edge::ContainerExited { cgroup_id, pid, own_pid, code, signal, at_ns } => {
            let edge =
                SignalEdge { pid, main: own_pid == 1, exit_code: code, signal, ..of(Type::Exited, at_ns) };
            (edge, cgroup_id)
        }
        Edge::OomKill { cgroup_id, kill, at_ns } => {
            let edge = SignalEdge { pid: kill.pid, rss_bytes: kill.anon_rss, ..of(Type::OomKilled, at_ns) };
            (edge, cgroup_id)
        }
        Edge::Pressure { cgroup_id, kind, above, value, at_ns } => {
            let resource = match kind {
                PressureKind::RunQueue => "cpu",
                PressureKind::Reclaim => "memory",
            };
            let edge_kind = if above { Type::PressureRose } else { Type::PressureFell };
            (SignalEdge { resource: resource.into(), waited_ns: value, ..of(edge_kind, at_ns) }, cgroup_id)
        }
        Edge::Lost => (of(Type::Lost, 0), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_keeps_what_it_says() {
        let exited =
            Edge::ContainerExited { cgroup_id: 7, pid: 8, own_pid: 1, code: 0, signal: 9, at_ns: 10 };
        let (message, cgroup) = message(&exited);
        assert_eq!((message.r#type(), message.pid, message.main), (Type::Exited, 8, true));
        assert_eq!((message.exit_code, message.signal, message.at_ns, cgroup), (0, 9, 10, 7));
        let rose =
            Edge::Pressure { cgroup_id: 7, kind: PressureKind::Reclaim, above: true, value: 5, at_ns: 1 };
        let (message, _) = super::message(&rose);
        assert_eq!(
            (message.r#type(), message.resource.as_str(), message.waited_ns),
            (Type::PressureRose, "memory", 5)
        );
        let listener = Listener {
            cookie: 1,
            netns_cookie: 1,
            family: 10,
            address: std::net::Ipv6Addr::UNSPECIFIED.into(),
            port: 80,
            dual_stack: true,
            cgroup_id: 3,
            since_ns: 0,
        };
        let (message, cgroup) = super::message(&Edge::ListenerOpened { listener, at_ns: 1 });
        assert_eq!((message.address.as_str(), cgroup), ("[::]:80", 3));
        assert_eq!(super::message(&Edge::Lost).0.r#type(), Type::Lost);
    }
}
