//! Service accounts and their tokens, for the credential providers of image registries (KEP-4412). A token is
//! cached and renewed before it expires. Must never request an account that no pod of this node uses: the API
//! server would refuse.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use beelet_base::clock::After as _;
use beelet_model::accounts::{Account, AccountError};
use beelet_policy::{node::token, pod::references::TokenReference};
use tokio::time::Instant;

use crate::{
    backoff::chance,
    client::{Client, Error},
    tokens::request_token,
    url::escaped,
};

/// Maximum number of cached tokens.
const KEPT: usize = 1000;

/// Reads service accounts and tokens from the API server.
pub struct Accounts {
    client: Client,
    tokens: Mutex<BTreeMap<TokenReference, (Arc<str>, Instant)>>,
}

impl fmt::Debug for Accounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accounts").finish_non_exhaustive()
    }
}

fn account_error(error: &Error) -> AccountError {
    AccountError(error.to_string())
}

impl Accounts {
    /// Sends requests through `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, tokens: Mutex::default() }
    }

    /// Returns an account by namespace and name.
    ///
    /// # Errors
    /// The account does not exist, or the API server does not answer.
    pub async fn account(&self, namespace: &str, name: &str) -> Result<Account, AccountError> {
        let path = format!("/api/v1/namespaces/{}/serviceaccounts/{}", escaped(namespace), escaped(name));
        let found = self.client.get(&path).await.map_err(|error| account_error(&error))?;
        let metadata = &found["metadata"];
        let annotations = metadata["annotations"].as_object().into_iter().flatten();
        let annotations =
            annotations.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
        Ok(Account {
            uid: metadata["uid"].as_str().unwrap_or_default().to_owned(),
            annotations: annotations.collect(),
        })
    }

    /// Returns a token of an account, bound to a pod.
    ///
    /// # Errors
    /// The API server does not issue a token.
    pub async fn token(&self, of: &TokenReference) -> Result<Arc<str>, AccountError> {
        let now = Instant::now();
        let known = self.kept().get(of).filter(|(_, until)| *until > now).map(|(token, _)| Arc::clone(token));
        if let Some(token) = known {
            return Ok(token);
        }
        let (token, lifetime) =
            request_token(&self.client, of).await.map_err(|error| account_error(&error))?;
        let until = now.after(token::renew_after(lifetime, chance()));
        let mut kept = self.kept();
        kept.retain(|_, (_, until)| *until > now);
        if kept.len() < KEPT {
            kept.insert(of.clone(), (Arc::clone(&token), until));
        }
        Ok(token)
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, BTreeMap<TokenReference, (Arc<str>, Instant)>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
