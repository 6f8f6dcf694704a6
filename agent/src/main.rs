//! The `beelet` command.

fn main() {}
