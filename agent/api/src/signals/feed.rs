//! Edges from the BPF programs to watchers: one bounded queue for all watchers. A watcher that falls behind
//! by more than its length receives `LOST` in place of the missed edges.

use std::sync::Arc;

use beelet_proto::beelet::SignalEdge;
use tokio::sync::broadcast;

/// Maximum number of edges by which a watcher may be behind.
const QUEUE: usize = 1024;

/// Publisher of edges. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Feed {
    sender: broadcast::Sender<Arc<SignalEdge>>,
}

impl Default for Feed {
    fn default() -> Self {
        Self { sender: broadcast::channel(QUEUE).0 }
    }
}

impl Feed {
    /// Returns true if there is a watcher; edges need not be created without one.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.sender.receiver_count() > 0
    }

    /// Publishes an edge to all watchers.
    pub fn publish(&self, edge: SignalEdge) {
        // An error means that there are no watchers.
        let _ = self.sender.send(Arc::new(edge));
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<Arc<SignalEdge>> {
        self.sender.subscribe()
    }
}
