//! Errors of garbage collection and of the search for credentials.

/// Error of this crate. Its text is a whole sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A call to the runtime failed.
    #[error(transparent)]
    Runtime(#[from] beelet_cri::Error),
    /// The images' file system cannot be measured.
    #[error(transparent)]
    Disk(#[from] beelet_base::Error),
    /// The runtime does not report where its images are stored.
    #[error("the container runtime does not report where it stores images (ImageFsInfo has no mountpoint)")]
    NoMountpoint,
    /// The collector has stopped with the agent.
    #[error("the agent is stopping; retry after its restart")]
    Stopping,
    /// The Secret cannot be parsed. The parser's message is omitted, since it might quote the Secret.
    #[error("the Secret {secret}: {key} is not docker's configuration in JSON")]
    NotDockerConfig {
        /// Name of the Secret.
        secret: String,
        /// Key in the Secret's data.
        key: &'static str,
    },
    /// The Secret is of another kind.
    #[error(
        "the Secret {0} has neither .dockerconfigjson nor .dockercfg, so it cannot be an imagePullSecret"
    )]
    NotAPullSecret(String),
    /// The `auth` of a registry's entry does not contain a user and a password.
    #[error("the entry for {0}: `auth` is not the base64 form of `user:password`")]
    NotBase64(String),
}

impl Error {
    /// Returns true if the same operation may succeed later without any change by a user.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Runtime(error) => error.is_transient(),
            Self::Disk(_) | Self::Stopping => true,
            Self::NoMountpoint
            | Self::NotDockerConfig { .. }
            | Self::NotAPullSecret(_)
            | Self::NotBase64(_) => false,
        }
    }
}
