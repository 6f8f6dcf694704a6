//! Defaults that other parts of the agent use too.

use std::time::Duration;

/// How long a pod waits for a plugin, unless the configuration says otherwise: as long as the kubelet
/// remembers one.
pub const PLUGIN_WAIT: Duration = Duration::from_secs(300);
/// How long a node of a cluster waits at its start for the API server before it runs pods without it.
pub const AUTONOMY: Duration = Duration::from_secs(30);
