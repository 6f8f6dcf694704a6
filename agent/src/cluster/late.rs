//! Clients of the API server for parts that start before the node has connected. They fail until the
//! connection is set.

use std::sync::{Arc, OnceLock};

use beelet_policy::{node::access::Access, pod::references::TokenReference, volumes::growth::StatusPatch};
use k8s_openapi::api::{
    core::v1 as core,
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use tokio::sync::{SetOnce, watch};

use beelet_cluster::{accounts::Accounts, client::Client, identity::Connections, reviews::Reviews, storage};
use beelet_model::{
    accounts::{Account, AccountError, Asked, ServiceAccounts},
    review::{AccessReviewer, Review, ReviewError, TokenReviewer, User},
    storage::{Answer, Storage, StorageError, Token},
};

/// The shared connection.
#[derive(Clone)]
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) connections: Connections,
}

/// Authenticates and authorizes users of the node's server once the node has connected.
pub(super) struct LateReviews {
    pub(super) session: Arc<SetOnce<Session>>,
    pub(super) node: String,
}

impl LateReviews {
    fn reviews(&self) -> Result<Reviews, ReviewError> {
        let none = || ReviewError("not connected to the API server yet".to_owned());
        let session = self.session.get().ok_or_else(none)?;
        Ok(Reviews::new(session.client.clone(), self.node.clone()))
    }
}

impl TokenReviewer for LateReviews {
    fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
        Box::pin(async move { TokenReviewer::review(&self.reviews()?, token).await })
    }
}

impl AccessReviewer for LateReviews {
    fn review<'a>(&'a self, user: &'a User, access: Access) -> Review<'a, bool> {
        Box::pin(async move { AccessReviewer::review(&self.reviews()?, user, access).await })
    }
}

/// Reads service accounts once the node has connected.
#[derive(Default)]
pub(super) struct LateAccounts {
    pub(super) session: Arc<SetOnce<Session>>,
    pub(super) accounts: OnceLock<Accounts>,
}

impl std::fmt::Debug for LateAccounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LateAccounts").finish_non_exhaustive()
    }
}

impl LateAccounts {
    fn accounts(&self) -> Result<&Accounts, AccountError> {
        let none = || AccountError("not connected to the API server yet".to_owned());
        let session = self.session.get().ok_or_else(none)?;
        Ok(self.accounts.get_or_init(|| Accounts::new(session.client.clone())))
    }
}

impl ServiceAccounts for LateAccounts {
    fn account<'a>(&'a self, namespace: &'a str, name: &'a str) -> Asked<'a, Account> {
        Box::pin(async move { self.accounts()?.account(namespace, name).await })
    }

    fn token<'a>(&'a self, of: &'a TokenReference) -> Asked<'a, Arc<str>> {
        Box::pin(async move { self.accounts()?.token(of).await })
    }
}

/// Reads storage objects once the node has connected.
pub(super) struct LateStorage {
    pub(super) session: Arc<SetOnce<Session>>,
    pub(super) node: watch::Receiver<Option<Arc<core::Node>>>,
}

impl std::fmt::Debug for LateStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LateStorage").finish_non_exhaustive()
    }
}

impl LateStorage {
    fn storage(&self) -> Result<storage::Storage, StorageError> {
        let none = || StorageError {
            message: "not connected to the API server yet".to_owned(),
            is_not_found: false,
        };
        Ok(storage::Storage::new(self.session.get().ok_or_else(none)?.client.clone()))
    }
}

impl Storage for LateStorage {
    fn claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, core::PersistentVolumeClaim> {
        Box::pin(async move { self.storage()?.claim(namespace, name).await })
    }

    fn patch_claim<'a>(
        &'a self,
        claim: &'a core::PersistentVolumeClaim,
        status: &'a StatusPatch,
    ) -> Answer<'a, core::PersistentVolumeClaim> {
        Box::pin(async move { self.storage()?.patch_claim(claim, status).await })
    }

    fn volume<'a>(&'a self, name: &'a str) -> Answer<'a, core::PersistentVolume> {
        Box::pin(async move { self.storage()?.volume(name).await })
    }

    fn attachment<'a>(&'a self, name: &'a str) -> Answer<'a, VolumeAttachment> {
        Box::pin(async move { self.storage()?.attachment(name).await })
    }

    fn driver<'a>(&'a self, name: &'a str) -> Answer<'a, Option<CSIDriver>> {
        Box::pin(async move { self.storage()?.driver(name).await })
    }

    fn resource_claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, ResourceClaim> {
        Box::pin(async move { self.storage()?.resource_claim(namespace, name).await })
    }

    fn secret<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, core::Secret> {
        Box::pin(async move { self.storage()?.secret(namespace, name).await })
    }

    fn token<'a>(&'a self, of: &'a TokenReference) -> Answer<'a, Token> {
        Box::pin(async move { self.storage()?.token(of).await })
    }

    fn node(&self) -> watch::Receiver<Option<Arc<core::Node>>> {
        self.node.clone()
    }
}
