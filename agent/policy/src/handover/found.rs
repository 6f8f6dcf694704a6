//! A pod in the runtime, with the agents that created its sandboxes and containers.

/// A pod of the runtime, from the labels and annotations of its sandboxes and containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The pod's UID.
    pub uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The source that its newest sandbox names.
    pub source: Source,
    /// Its sandboxes, in any order.
    pub sandboxes: Vec<FoundSandbox>,
    /// Its containers, in any order.
    pub containers: Vec<FoundContainer>,
}

/// Source of a pod, from the annotation `kubernetes.io/config.source` of its sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The sandbox names no source: beelet writes none for the pods of manifests, unless they are critical.
    #[default]
    Unnamed,
    /// The API server.
    Api,
    /// A static manifest.
    File,
    /// Another source: a kubelet also reads manifests from a URL.
    Other,
}

impl Source {
    /// Returns the source with this value of the annotation.
    #[must_use]
    pub fn of(annotation: Option<&str>) -> Self {
        match annotation {
            None => Self::Unnamed,
            Some("api") => Self::Api,
            Some("file") => Self::File,
            Some(_) => Self::Other,
        }
    }
}

/// The agent that created a sandbox or a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// beelet: its label is present.
    Beelet,
    /// A kubelet: the kubelet's labels are present, and beelet's is not.
    Kubelet,
}

/// A sandbox of the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSandbox {
    /// True if its namespaces and its network exist.
    pub ready: bool,
    /// Creation time in nanoseconds since the epoch.
    pub created_at: i64,
    /// The agent that created it.
    pub maker: Maker,
}

/// A container of the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundContainer {
    /// The name in the pod's spec.
    pub name: String,
    /// Number of earlier starts.
    pub attempt: u32,
    /// True if it runs.
    pub running: bool,
    /// The agent that created it.
    pub maker: Maker,
    /// Digest of the container's definition, as the annotation has it.
    pub hash: Option<String>,
    /// Exit code of a container that ended, if the reader requested it.
    pub exit_code: Option<i32>,
}

impl Found {
    /// Returns true if an object of the pod was created by `maker`.
    #[must_use]
    pub fn has_any_of(&self, maker: Maker) -> bool {
        self.sandboxes.iter().any(|one| one.maker == maker)
            || self.containers.iter().any(|one| one.maker == maker)
    }

    /// Returns the creation time of the newest sandbox.
    #[must_use]
    pub fn newest_sandbox(&self) -> Option<i64> {
        self.sandboxes.iter().map(|sandbox| sandbox.created_at).max()
    }

    /// Returns true if this instance of a container runs.
    #[must_use]
    pub fn runs_on(&self, instance: &FoundContainer) -> bool {
        self.instance(instance).is_some_and(|one| one.running)
    }

    /// Returns the same instance of a container, if the pod still has it.
    pub(super) fn instance(&self, of: &FoundContainer) -> Option<&FoundContainer> {
        self.containers.iter().find(|one| (&one.name, one.attempt) == (&of.name, of.attempt))
    }

    /// Returns true if a sandbox is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.sandboxes.iter().any(|one| one.ready)
    }

    /// Returns true if a sandbox is ready or a container runs.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.is_ready() || self.containers.iter().any(|one| one.running)
    }
}
