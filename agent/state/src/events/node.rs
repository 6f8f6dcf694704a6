//! What the node says of itself, as the kubelet's events on its Node: image garbage collection failed, memory
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
    /// Events of the node of this name.
    #[must_use]
    pub fn new(recorder: Recorder, node: &str) -> Self {
        Self { recorder, node: node.to_owned() }
    }

    /// Something that somebody should look at.
    pub fn warning(&self, reason: &str, message: &str) {
        warn!(reason, "{message}");
        self.recorder.warning(Object::node(&self.node), reason, message);
    }

    /// Something that is good to know.
    pub fn normal(&self, reason: &str, message: &str) {
        info!(reason, "{message}");
        self.recorder.normal(Object::node(&self.node), reason, message);
    }
}
