//! Plugins of the node, and who takes them in by what they say they are.

use std::{collections::BTreeMap, fmt, future::Future, path::Path, pin::Pin};

use tokio::time::Instant;

/// Drivers by name, each with the time since when nobody answers for it, if nobody does.
pub type Presences = BTreeMap<String, Option<Instant>>;

/// A registration under way; its error is a sentence for the plugin.
pub type Registering<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// Takes in plugins of one kind.
pub trait PluginHandler: Send + Sync + fmt::Debug {
    /// A plugin is there, and listens at `socket`.
    fn register<'a>(&'a self, name: &'a str, versions: &'a [String], socket: &'a Path) -> Registering<'a>;
    /// A plugin that was taken in is gone.
    fn deregister(&self, name: &str, socket: &Path);
}
