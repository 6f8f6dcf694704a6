//! Events of the node itself, like the kubelet's events on its Node: image garbage collection failed, memory
//! is short.

use tracing::{info, warn};

use super::{Object, Recorder};

/// Records events of the node, and logs them. Clones share the log.
#[derive(Clone, Debug)]
pub struct NodeEvents {
    recorder: Recorder,
    node: String,
}

impl NodeEvents {
    /// Creates the recorder of the node with this name.
    #[must_use]
    pub fn new(recorder: Recorder, node: &str) -> Self {
        Self { recorder, node: node.to_owned() }
    }

    /// Records a warning.
    pub fn warning(&self, reason: &str, message: &str) {
        warn!(reason, "{message}");
        self.recorder.warning(Object::node(&self.node), reason, message);
    }

    /// Records a normal event.
    pub fn normal(&self, reason: &str, message: &str) {
        info!(reason, "{message}");
        self.recorder.normal(Object::node(&self.node), reason, message);
    }
}
