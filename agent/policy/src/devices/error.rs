//! Why a container can't have the devices it asks for.

/// Why no devices can be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The container already has another number of them.
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
        /// How many it has.
        held: usize,
        /// How many it asks for now.
        requested: usize,
    },
    /// The resource had a plugin once; it hasn't listed its devices since.
    #[error("the device plugin of {resource} is not registered")]
    Unregistered {
        /// The resource.
        resource: String,
    },
    /// All its devices are unhealthy, or its plugin is gone.
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
    /// There aren't enough.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}"
    )]
    TooFew {
        /// The resource.
        resource: String,
        /// How many are still wanted.
        requested: usize,
        /// How many there are.
        available: usize,
    },
    /// Devices are listed, but nobody can be asked to allocate them.
    #[error("the device plugin of {resource} is gone")]
    PluginGone {
        /// The resource.
        resource: String,
    },
}

impl AllocateError {
    /// Might waiting help? True where the plugin isn't there or well (yet): after a restart or reboot it may
    /// come late.
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
