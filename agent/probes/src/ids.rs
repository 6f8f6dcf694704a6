//! The names of a probe: a key by pod and container, and an id for this crate's maps.

use std::sync::Arc;

use beelet_policy::probe::ProbeKind;

slotmap::new_key_type! {
    /// Id of a probe, unique while the agent runs.
    pub(super) struct Id;
}

/// Key of a probe: pod, container and kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub uid: Arc<str>,
    pub container: Arc<str>,
    pub kind: ProbeKind,
}
