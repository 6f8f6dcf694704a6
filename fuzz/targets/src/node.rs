//! Fuzzing: files of the machine that are read once, at the start.

use beelet::node::facts;

/// `/proc/meminfo` and `resolv.conf`.
pub(crate) fn machine(text: &str) {
    let _ = (facts::memory_total(text), facts::parse_resolver(text));
}
