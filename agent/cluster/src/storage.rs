//! The storage of the cluster, read by name. Must never list: a node may read only the claims that its own
//! pods name, and the volumes that these are bound to.

use beelet_codec::ApiType;
use beelet_model::storage::StorageError;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use crate::client::{Client, Error};

/// Asks the API server.
#[derive(Clone, Debug)]
pub struct Storage {
    client: Client,
}

impl Storage {
    /// Asks by `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// A claim by its namespace and name.
    ///
    /// # Errors
    /// It isn't there, or the API server gives no answer.
    pub async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, StorageError> {
        self.get(&format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")).await
    }

    /// A PersistentVolume by its name.
    ///
    /// # Errors
    /// It isn't there, or the API server gives no answer.
    pub async fn volume(&self, name: &str) -> Result<PersistentVolume, StorageError> {
        self.get(&format!("/api/v1/persistentvolumes/{name}")).await
    }

    async fn get<T: ApiType>(&self, path: &str) -> Result<T, StorageError> {
        let found = self.client.get(path).await.map_err(|error| told(&error))?;
        let unread = |problem: beelet_codec::error::Problem| StorageError {
            message: format!("{path} can't be read: {problem}"),
            is_not_found: false,
        };
        T::from_value(&found).map_err(unread)
    }
}

/// The server's own words where it has some: they say what was asked.
fn told(error: &Error) -> StorageError {
    let message = if error.code().is_some() { error.message.clone() } else { error.to_string() };
    StorageError { message, is_not_found: error.is_not_found() }
}
