//! Commands that run beelet and measure it: `cargo xtask --help` lists them, `cargo xtask` starts them.
//!
//! Each command has its own file or folder. The demo, the tests and the benches share a private containerd,
//! images built without a registry and the agent as a child process; these are in `beelet-tests`. Setup,
//! steps, cross builds and packages are shared with the other commands, in `xtask`.

mod bench;
mod build_and_load;
mod cluster;
mod conformance;
mod demo;
mod vm;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Commands that run beelet and measure it.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    BuildAndLoad(build_and_load::Args),
    Cluster(cluster::Args),
    Conformance(conformance::Args),
    Demo(demo::Args),
    Unload(build_and_load::UnloadArgs),
    Vm(vm::Args),
    /// Process that loads the machine, for the benches
    #[command(hide = true)]
    Load {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    if cluster::is_systemctl(arguments.next().as_deref()) {
        return cluster::unit::systemctl(&arguments.collect::<Vec<_>>());
    }
    xtask::shell::finish(match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::BuildAndLoad(args) => build_and_load::run(&args),
        Command::Cluster(args) => cluster::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Unload(args) => build_and_load::unload(&args),
        Command::Vm(args) => vm::run(&args),
        Command::Load { arguments } => beelet_tests::load::serve(&arguments),
    })
}
