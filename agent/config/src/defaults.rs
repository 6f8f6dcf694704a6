//! Defaults that other crates use, too.

use std::time::Duration;

/// Default time that a pod waits for a plugin: as long as the kubelet remembers one.
pub const PLUGIN_WAIT: Duration = Duration::from_secs(300);
/// Default time that a cluster's node waits at its start for the API server before it runs pods from the
/// cache.
pub const AUTONOMY: Duration = Duration::from_secs(30);
