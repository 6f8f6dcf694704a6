//! The type of a daemon part's work.

use std::{future::Future, pin::Pin};

/// The work of a part until its shutdown, to be spawned.
///
/// An async function's code is generated in the crate that polls it, so the crate of the daemon, which is
/// above all parts, would generate theirs at every edit. Behind this pointer the code is generated in its own
/// crate (docs/decisions/0017-crates.md).
pub type Work<T = ()> = Pin<Box<dyn Future<Output = T> + Send>>;
