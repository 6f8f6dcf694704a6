//! `cargo xtask deny`: the gate for dependencies (deny.toml): licences, duplicates, sources and advisories.

use crate::{shell, tools};
use anyhow::{Context as _, Result};
use beelet_tests_base::workdir;
use std::process::Command;

/// Checks licences, duplicates, sources and advisories of the dependencies with cargo-deny (deny.toml)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the advisories, whose database is fetched from RustSec's repository
    #[arg(long)]
    offline: bool,
}

/// Checks that need no other data than the repository's and the registry's.
const LOCAL: [&str; 3] = ["bans", "licenses", "sources"];

/// Runs `cargo xtask deny`.
pub(crate) fn run(args: &Args) -> Result<()> {
    check(&LOCAL)?;
    if args.offline {
        eprintln!("advisories were not checked (--offline)");
        return Ok(());
    }
    check(&["advisories"])
        .context("--offline leaves out the advisories where their database cannot be reached")
}

fn check(what: &[&str]) -> Result<()> {
    let mut command = Command::new(tools::DENY.ensure()?);
    command.args(["--workspace", "check", "--hide-inclusion-graph"]).args(what);
    shell::run(command.current_dir(workdir::repository()))
}
