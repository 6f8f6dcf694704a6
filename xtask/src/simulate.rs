//! `cargo xtask simulate`: builds sim/ with the features of the tests, and runs it.

use crate::{shell, test};
use anyhow::{Context as _, Result};
use beelet_tests_base::workdir;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;

/// Runs the whole agent in a seeded, simulated world, and judges it by a model
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Arguments of the simulation; `--help` lists them. A first `--fast` builds it with optimization
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// Builds the simulation, and becomes it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let fast = args.arguments.first().is_some_and(|first| first == "--fast");
    let (profile, folder) = if fast { (&["--profile", "sim"][..], "sim") } else { (&[][..], "debug") };
    shell::run(
        shell::cargo().arg("build").args(test::selection()).args(["--bin", "simulate"]).args(profile),
    )?;
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let program = workdir::repository().join(target).join(folder).join("simulate");
    let mut simulation = std::process::Command::new(program);
    simulation.args(args.arguments.iter().skip(usize::from(fast)));
    Err(simulation.exec()).context("could not start the simulation")
}
