//! Who asks this node for something, and whose word decides whether they may.

use std::{collections::BTreeMap, fmt, future::Future, pin::Pin};

use beelet_policy::node::access::Access;

/// Somebody who is known by a certificate or a token.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct User {
    /// Their name.
    pub name: String,
    /// Their UID, where they have one.
    pub uid: String,
    /// What they belong to.
    pub groups: Vec<String>,
    /// What else the authenticator says of them.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// A review under way.
pub type Review<'a, T> = Pin<Box<dyn Future<Output = Result<T, ReviewError>> + Send + 'a>>;

/// Why there is no verdict. Displayed, it is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewError(pub String);

impl fmt::Display for ReviewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ReviewError {}

/// Knows the user of a bearer token.
pub trait TokenReviewer: Send + Sync {
    /// The token's user; None if the token is not valid.
    fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>>;
}

/// Knows what a user may do on this node.
pub trait AccessReviewer: Send + Sync {
    /// Returns true if the user has that access.
    fn review<'a>(&'a self, user: &'a User, access: Access) -> Review<'a, bool>;
}
