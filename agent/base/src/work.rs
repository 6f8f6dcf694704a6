//! What a part of the daemon does until it is told to stop.

use std::{future::Future, pin::Pin};

/// The work of a part, to be spawned.
///
/// An async function's code is generated in the crate that polls it, so the crate of the daemon, which is
/// above all parts, would generate theirs at every edit. Behind this pointer it is generated where it is
/// written (docs/decisions/0017-crates.md).
pub type Work<T = ()> = Pin<Box<dyn Future<Output = T> + Send>>;
