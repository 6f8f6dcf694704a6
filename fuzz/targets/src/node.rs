//! Fuzzing: files of the machine that are read once, at the start.

use beelet::node::facts;

/// `resolv.conf`.
pub(crate) fn machine(text: &str) {
    let _ = facts::parse_resolver(text);
}
