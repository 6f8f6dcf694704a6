//! Service accounts of a cluster, and the trait that reads them from the API server.

use std::{collections::BTreeMap, fmt, future::Future, pin::Pin, sync::Arc};

use beelet_policy::pod::references::TokenReference;

/// A service account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// UID of the account.
    pub uid: String,
    /// Annotations of the account.
    pub annotations: BTreeMap<String, String>,
}

/// A request under way.
pub type Asked<'a, T> = Pin<Box<dyn Future<Output = Result<T, AccountError>> + Send + 'a>>;

/// Failure of a request; its display is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountError(pub String);

impl fmt::Display for AccountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AccountError {}

/// Reads service accounts.
pub trait ServiceAccounts: Send + Sync + fmt::Debug {
    /// Reads an account by its namespace and name.
    fn account<'a>(&'a self, namespace: &'a str, name: &'a str) -> Asked<'a, Account>;
    /// Returns a token of an account; the same one for the same reference, while it is valid.
    fn token<'a>(&'a self, of: &'a TokenReference) -> Asked<'a, Arc<str>>;
}
