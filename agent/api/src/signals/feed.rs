//! Edges on their way from the kernel half to whoever watches: one bounded queue that all watchers read. A
//! watcher that falls behind by its length hears `LOST` instead of what it missed.

use std::sync::Arc;

use beelet_proto::beelet::SignalEdge;
use tokio::sync::broadcast;

/// Edges that a watcher may be behind by.
const QUEUE: usize = 1024;

/// Where edges are published, and watched. Cheap to clone.
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
    /// Returns true if anybody watches: for nobody, nothing need be made.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.sender.receiver_count() > 0
    }

    /// Tells everybody who watches.
    pub fn publish(&self, edge: SignalEdge) {
        // Nobody watches: nobody misses it.
        let _ = self.sender.send(Arc::new(edge));
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<Arc<SignalEdge>> {
        self.sender.subscribe()
    }
}
