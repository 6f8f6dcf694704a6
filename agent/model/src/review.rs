//! Users of this node's server, and the traits that authenticate and authorize them.

use std::{collections::BTreeMap, fmt, future::Future, pin::Pin};

use beelet_policy::node::access::Access;

/// A user, identified by a certificate or a token.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct User {
    /// Name of the user.
    pub name: String,
    /// UID of the user, if known.
    pub uid: String,
    /// Groups of the user.
    pub groups: Vec<String>,
    /// Other attributes from the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// A review under way.
pub type Review<'a, T> = Pin<Box<dyn Future<Output = Result<T, ReviewError>> + Send + 'a>>;

/// Failure of a review; its display is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewError(pub String);

impl fmt::Display for ReviewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ReviewError {}

/// Authenticates bearer tokens.
pub trait TokenReviewer: Send + Sync {
    /// Returns the token's user; None if the token is not valid.
    fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>>;
}

/// Authorizes users of this node.
pub trait AccessReviewer: Send + Sync {
    /// Returns true if the user has this access.
    fn review<'a>(&'a self, user: &'a User, access: Access) -> Review<'a, bool>;
}
