//! The service accounts of a cluster, and who asks the API server for them.

use std::{collections::BTreeMap, fmt, future::Future, pin::Pin, sync::Arc};

use beelet_policy::pod::references::TokenReference;

/// A service account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Its UID.
    pub uid: String,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
}

/// A question under way.
pub type Asked<'a, T> = Pin<Box<dyn Future<Output = Result<T, AccountError>> + Send + 'a>>;

/// Why there is no answer. Displayed, it is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountError(pub String);

impl fmt::Display for AccountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AccountError {}

/// Knows service accounts.
pub trait ServiceAccounts: Send + Sync + fmt::Debug {
    /// An account by its namespace and name.
    fn account<'a>(&'a self, namespace: &'a str, name: &'a str) -> Asked<'a, Account>;
    /// A token of an account; the same one for the same question, as long as it holds.
    fn token<'a>(&'a self, of: &'a TokenReference) -> Asked<'a, Arc<str>>;
}
