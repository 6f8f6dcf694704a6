//! Plugins of the node, and the trait that registers them by their type.

use std::{collections::BTreeMap, fmt, future::Future, path::Path, pin::Pin};

use tokio::time::Instant;

/// Drivers by name, each with the time since when it has no connected plugin, if it has none.
pub type Presences = BTreeMap<String, Option<Instant>>;

/// A refused registration: a sentence for the plugin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RegistrationRefusal(pub String);

/// A registration under way.
pub type Registering<'a> = Pin<Box<dyn Future<Output = Result<(), RegistrationRefusal>> + Send + 'a>>;

/// Registers plugins of one type.
pub trait PluginHandler: Send + Sync + fmt::Debug {
    /// Registers a plugin that listens at `socket`.
    fn register<'a>(&'a self, name: &'a str, versions: &'a [String], socket: &'a Path) -> Registering<'a>;
    /// Removes a registered plugin.
    fn deregister(&self, name: &str, socket: &Path);
}
