//! Errors of device allocation.

/// A reason why a container cannot get its devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The container already holds another number of devices.
    #[error(
        "pod {pod_uid:?}, container {container:?}: the request for {resource} changed from {held} to {requested} devices"
    )]
    Changed {
        /// The pod's uid.
        pod_uid: String,
        /// The container's name.
        container: String,
        /// The resource.
        resource: String,
        /// Number of devices held.
        held: usize,
        /// Number of devices requested now.
        requested: usize,
    },
    /// The resource had a plugin, but the plugin has not listed its devices since the restart.
    #[error("the device plugin of {resource} is not registered")]
    Unregistered {
        /// The resource.
        resource: String,
    },
    /// All devices are unhealthy, or the plugin is gone.
    #[error("no healthy devices present; cannot allocate unhealthy devices {resource}")]
    NoneHealthy {
        /// The resource.
        resource: String,
    },
    /// The container's own devices are no longer healthy.
    #[error(
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
    )]
    HeldUnhealthy {
        /// The resource.
        resource: String,
    },
    /// Too few devices are free.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}"
    )]
    TooFew {
        /// The resource.
        resource: String,
        /// Number of devices still wanted.
        requested: usize,
        /// Number of free devices.
        available: usize,
    },
    /// Devices are listed, but their plugin is not connected.
    #[error("the device plugin of {resource} has disconnected")]
    PluginGone {
        /// The resource.
        resource: String,
    },
}

impl AllocateError {
    /// Returns true if waiting may help: the plugin is missing or its devices unhealthy, and a plugin may
    /// register late after a restart or reboot.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Unregistered { .. }
                | Self::NoneHealthy { .. }
                | Self::HeldUnhealthy { .. }
                | Self::PluginGone { .. }
        )
    }

    /// The resource.
    #[must_use]
    pub fn resource(&self) -> &str {
        match self {
            Self::Changed { resource, .. }
            | Self::Unregistered { resource }
            | Self::NoneHealthy { resource }
            | Self::HeldUnhealthy { resource }
            | Self::TooFew { resource, .. }
            | Self::PluginGone { resource } => resource,
        }
    }
}
