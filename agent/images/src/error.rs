//! Why images and dead containers could not be collected, or credentials not be found.

/// A failure of this crate. Displayed, it is a whole sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A call to the runtime failed.
    #[error(transparent)]
    Runtime(#[from] beelet_cri::Error),
    /// The images' file system can't be measured.
    #[error(transparent)]
    Disk(#[from] beelet_base::Error),
    /// The runtime names no place for its images.
    #[error("the container runtime does not say where it keeps its images (ImageFsInfo names no mountpoint)")]
    NoMountpoint,
    /// The collector has ended, with the agent.
    #[error("the agent stops; ask again when it runs")]
    Stopping,
    /// A Secret whose content can't be read. The parser's own words might quote the secret.
    #[error("the Secret {secret}: {key} is not docker's configuration in JSON")]
    NotDockerConfig {
        /// Its name.
        secret: String,
        /// The key.
        key: &'static str,
    },
    /// A Secret of another kind.
    #[error("the Secret {0} has neither .dockerconfigjson nor .dockercfg, so it can't be an imagePullSecret")]
    NotAPullSecret(String),
    /// An entry for a registry that holds no user and password.
    #[error("the entry for {0}: auth is not base64 of user:password")]
    NotBase64(String),
}

impl Error {
    /// Returns true if the same may well succeed later, with nothing changed by anybody.
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
