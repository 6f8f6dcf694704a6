//! Builds an agent. `run` and `observe` use the defaults; tests replace [`Doors`]; parts that are built
//! elsewhere (a cluster's) add sources of pods and tasks. `node/run.rs` and `node/observe.rs` list the parts
//! that a built agent starts.

use std::{fmt, sync::Arc};

use futures::FutureExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    doors::Doors,
    handles::{Attached, Handles},
    services::ApiServer,
};
use beelet_kubelet_api::{Verbosity, auth::Reviewers};
use beelet_model::{accounts::ServiceAccounts, desired::Desired, storage::Storage};

/// Builds an agent and runs it.
#[derive(Default)]
pub struct Builder {
    pub(super) doors: Doors,
    pub(super) sources: Vec<watch::Receiver<Arc<Desired>>>,
    pub(super) attached: Vec<Attached>,
    pub(super) reviewers: Reviewers,
    pub(super) verbosity: Option<Verbosity>,
    pub(super) api_server: ApiServer,
}

impl Builder {
    /// Replaces the machine's own doors.
    #[must_use]
    pub fn doors(self, doors: Doors) -> Self {
        Self { doors, ..self }
    }

    /// Adds a source of pods in addition to the static manifests.
    #[must_use]
    pub fn source(mut self, desired: watch::Receiver<Arc<Desired>>) -> Self {
        self.sources.push(desired);
        self
    }

    /// Adds a concurrent part, which is created once the container runtime has answered. The part must end
    /// when its token is cancelled, and not earlier: that would end the agent. The token is cancelled after
    /// the pods' manager has ended, so that the part can still handle the last changes of the pod table.
    #[must_use]
    pub fn attach<F>(
        mut self,
        name: &'static str,
        part: impl FnOnce(Handles, CancellationToken) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.attached.push((name, Box::new(|handles, working| part(handles, working).boxed())));
        self
    }

    /// Sets the reviewers that authorize clients of the node's HTTPS server: the API server, on a cluster's
    /// node. With reviewers the default port is 10250; without them the server is off by default.
    #[must_use]
    pub fn reviewers(self, reviewers: Reviewers) -> Self {
        Self { reviewers, ..self }
    }

    /// Sets the source of the pods' service accounts: the API server, on a cluster's node.
    #[must_use]
    pub fn accounts(mut self, accounts: Arc<dyn ServiceAccounts>) -> Self {
        self.api_server.accounts = Some(accounts);
        self
    }

    /// Asks `storage` for the volumes that claims are bound to: the API server, on a node of a cluster.
    #[must_use]
    pub fn storage(mut self, storage: Arc<dyn Storage>) -> Self {
        self.api_server.storage = Some(storage);
        self
    }

    /// Lets clients of the node's HTTPS server set the log level.
    #[must_use]
    pub fn verbosity(self, verbosity: Verbosity) -> Self {
        Self { verbosity: Some(verbosity), ..self }
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attached: Vec<&str> = self.attached.iter().map(|(name, _)| *name).collect();
        f.debug_struct("Builder")
            .field("doors", &self.doors)
            .field("sources", &self.sources.len())
            .field("attached", &attached)
            .finish()
    }
}
