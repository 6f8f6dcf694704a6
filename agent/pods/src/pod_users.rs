//! The user namespace of a pod: the node's, or the pod's own with a unique ID range.

use std::sync::Arc;

use beelet_base::blocking::BlockingTasks;
use beelet_cri::Runtime;
use beelet_proto::cri;
use beelet_spec::cri_config::UserNamespace;

use crate::{
    error::Error,
    plan::PodPlan,
    user_namespaces::{self, UserNamespaces},
};

/// Allocates user namespaces.
#[derive(Clone, Debug)]
pub(crate) struct PodUsers {
    pub(crate) runtime: Runtime,
    pub(crate) users: Arc<UserNamespaces>,
}

impl PodUsers {
    /// Returns the user namespace of a pod. Allocates an ID range for a pod with its own user namespace.
    ///
    /// # Errors
    /// All ranges are allocated, or the range of another pod is unknown.
    pub(crate) async fn of_pod(&self, plan: &PodPlan, tasks: &BlockingTasks) -> Result<UserNamespace, Error> {
        if !plan.own_users {
            return Ok(UserNamespace::OfMachine);
        }
        let choose = || {
            let (users, uid) = (Arc::clone(&self.users), plan.uid.clone());
            tasks.run(move || users.of(&uid))
        };
        let mut ids = choose().await;
        if let Err(user_namespaces::Error::Unknown { .. }) = &ids {
            self.learn(tasks).await?;
            ids = choose().await;
        }
        Ok(UserNamespace::Own(ids.map_err(Error::of_files)?))
    }

    /// Queries the runtime for the ranges of pods with unreadable records. A range that the runtime does not
    /// report stays unknown.
    async fn learn(&self, tasks: &BlockingTasks) -> Result<(), Error> {
        let users = Arc::clone(&self.users);
        let unknown = tasks.run(move || users.unknown().map_err(Error::of_files)).await?;
        let mut all = self.runtime.sandboxes.list(None).await?;
        // No process runs in a sandbox that is not ready.
        all.retain(|sandbox| sandbox.state == i32::from(cri::PodSandboxState::SandboxReady));
        for uid in unknown {
            let of_pod =
                |sandbox: &&cri::PodSandbox| sandbox.metadata.as_ref().is_some_and(|of| of.uid == uid);
            let mut reported = None;
            for sandbox in all.iter().filter(of_pod) {
                let status = self.runtime.sandboxes.status(&sandbox.id, false).await?;
                let ids = user_namespaces::reported(&status);
                reported = reported.or(ids.map_err(|why| Error::of_files(format!("pod {uid}: {why}")))?);
            }
            let users = Arc::clone(&self.users);
            tasks.run(move || users.learn(&uid, reported).map_err(Error::of_files)).await?;
        }
        Ok(())
    }

    /// Refuses a pod with its own user namespace if the runtime would silently run the pod in the node's
    /// (`GetOrCreateUserNamespaceMappings`).
    ///
    /// # Errors
    /// The handler does not support user namespaces, or the query to the runtime fails.
    pub(crate) async fn require_support(&self, handler: &str) -> Result<(), Error> {
        let status = self.runtime.status(false).await?;
        let known = status.runtime_handlers.iter().find(|known| known.name == handler);
        if known.and_then(|known| known.features.as_ref()).is_some_and(|features| features.user_namespaces) {
            return Ok(());
        }
        let who = match handler {
            "" => "runtime".to_owned(),
            handler => format!("RuntimeClass handler {handler:?}"),
        };
        Err(Error::Spec(format!(
            "can't set `spec.hostUsers: false`, {who} does not support user namespaces (containerd 2.0 or CRI-O 1.25, with \
             runc 1.2 or crun 1.9, on Linux 6.3 do)"
        )))
    }

    /// Releases the range of a pod that has ended.
    ///
    /// # Errors
    /// The record cannot be removed.
    pub(crate) async fn release(&self, uid: &str, tasks: &BlockingTasks) -> Result<(), Error> {
        let (users, uid) = (Arc::clone(&self.users), uid.to_owned());
        tasks.run(move || users.release(&uid).map_err(Error::of_files)).await
    }
}
