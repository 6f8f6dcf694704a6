//! Parsers of files that the agent reads once, at its start, for the target `proc_files`.

use beelet::node::facts;

/// Tests the parser of `resolv.conf`.
pub(crate) fn machine(text: &str) {
    let _ = facts::parse_resolver(text);
}
