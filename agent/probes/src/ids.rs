//! The names of a probe: one for people and the runtime, one for this crate's maps.

use std::sync::Arc;

use beelet_policy::probe::ProbeKind;

slotmap::new_key_type! {
    /// A probe, for as long as the agent runs.
    pub(super) struct Id;
}

/// Which probe of which container.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub uid: Arc<str>,
    pub container: Arc<str>,
    pub kind: ProbeKind,
}
