//! Reads storage objects of the cluster by name. Must never list: a node may read only the claims of its own
//! pods and the volumes bound to these claims.

use beelet_codec::ApiType;
use beelet_model::storage::{StorageError, Token};
use beelet_policy::{pod::references::TokenReference, volumes::growth::StatusPatch};
use k8s_openapi::api::{
    core::v1::{PersistentVolume, PersistentVolumeClaim, Secret},
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};

use serde_json::{Value, json};

use crate::{
    client::{Client, Error, Patch},
    tokens::token_status,
    url::escaped,
};

/// Reads storage objects from the API server.
#[derive(Clone, Debug)]
pub struct Storage {
    client: Client,
}

impl Storage {
    /// Sends requests through `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Returns a claim by namespace and name.
    ///
    /// # Errors
    /// The claim does not exist, or the API server does not answer.
    pub async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, StorageError> {
        self.get(&claim_path(namespace, name)).await
    }

    /// Patches the status of a claim, if the claim has not changed since it was read. Returns the patched
    /// claim.
    ///
    /// # Errors
    /// The claim has changed, or the API server does not answer.
    pub async fn patch_claim(
        &self,
        claim: &PersistentVolumeClaim,
        status: &StatusPatch,
    ) -> Result<PersistentVolumeClaim, StorageError> {
        let of = &claim.metadata;
        let (namespace, name) =
            (of.namespace.as_deref().unwrap_or_default(), of.name.as_deref().unwrap_or_default());
        let path = format!("{}/status", claim_path(namespace, name));
        let change = json!({"metadata": {"resourceVersion": of.resource_version}, "status": status.0});
        let changed = self.client.patch(&path, Patch::Merge, &change).await;
        let changed = changed.map_err(|error| storage_error(&error))?;
        read(&path, &changed)
    }

    /// Returns a PersistentVolume by name.
    ///
    /// # Errors
    /// The volume does not exist, or the API server does not answer.
    pub async fn volume(&self, name: &str) -> Result<PersistentVolume, StorageError> {
        self.get(&format!("/api/v1/persistentvolumes/{}", escaped(name))).await
    }

    /// Returns an attachment of a volume by name.
    ///
    /// # Errors
    /// The attachment does not exist, or the API server does not answer.
    pub async fn attachment(&self, name: &str) -> Result<VolumeAttachment, StorageError> {
        self.get(&format!("/apis/storage.k8s.io/v1/volumeattachments/{}", escaped(name))).await
    }

    /// Returns the CSIDriver of a storage plugin, if it exists.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn driver(&self, name: &str) -> Result<Option<CSIDriver>, StorageError> {
        match self.get(&format!("/apis/storage.k8s.io/v1/csidrivers/{}", escaped(name))).await {
            Err(error) if error.is_not_found => Ok(None),
            found => found.map(Some),
        }
    }

    /// Returns a ResourceClaim by namespace and name.
    ///
    /// # Errors
    /// The claim does not exist, or the API server does not answer.
    pub async fn resource_claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, StorageError> {
        let (namespace, name) = (escaped(namespace), escaped(name));
        self.get(&format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}")).await
    }

    /// Returns a Secret by namespace and name.
    ///
    /// # Errors
    /// The Secret does not exist, or the API server does not answer.
    pub async fn secret(&self, namespace: &str, name: &str) -> Result<Secret, StorageError> {
        self.get(&format!("/api/v1/namespaces/{}/secrets/{}", escaped(namespace), escaped(name))).await
    }

    /// Requests a token of a service account.
    ///
    /// # Errors
    /// The API server does not issue a token.
    pub async fn token(&self, of: &TokenReference) -> Result<Token, StorageError> {
        let answer = token_status(&self.client, of).await.map_err(|error| storage_error(&error))?;
        let text = |field: &str| answer["status"][field].as_str().unwrap_or_default().to_owned();
        Ok(Token { token: text("token"), expires: text("expirationTimestamp") })
    }

    async fn get<T: ApiType>(&self, path: &str) -> Result<T, StorageError> {
        let found = self.client.get(path).await.map_err(|error| storage_error(&error))?;
        read(path, &found)
    }
}

fn claim_path(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{}/persistentvolumeclaims/{}", escaped(namespace), escaped(name))
}

/// Parses an answer of the API server.
fn read<T: ApiType>(path: &str, found: &Value) -> Result<T, StorageError> {
    T::from_value(found).map_err(|problem| StorageError {
        message: format!("cannot read {path}: {problem}"),
        is_not_found: false,
    })
}

/// Converts an error. The server's own message, if any, already names the request.
fn storage_error(error: &Error) -> StorageError {
    let message = if error.code().is_some() { error.message.clone() } else { error.to_string() };
    StorageError { message, is_not_found: error.is_not_found() }
}
