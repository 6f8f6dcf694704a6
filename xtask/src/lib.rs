//! The project's own commands: `cargo xtask --help`.
//!
//! Each command has a file with its arguments and its steps in order. These commands depend on the
//! repository, cargo and the machine, but on no crate of the agent, so `cargo xtask tidy` builds in seconds.
//! The commands that run the agent (vm, bench, demo, conformance, build-and-load) are in lab/, which builds
//! on this library; `lab.rs` is the only way to them. beelet itself needs none of these commands to build or
//! to run.

pub mod build_ebpf;
pub mod cross;
mod deny;
mod docs;
mod fuzz;
mod lab;
pub mod package;
pub mod progress;
pub mod qemu;
mod release;
pub mod rootfs;
pub mod setup;
pub mod setup_ebpf;
pub mod shell;
mod simulate;
mod skips;
pub mod test;
mod tidy;
mod tools;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// The project's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    BuildEbpf(build_ebpf::Args),
    Deny(deny::Args),
    Docs(docs::Args),
    Fuzz(fuzz::Args),
    Package(package::Args),
    Release(release::Args),
    Setup(setup::Args),
    Simulate(simulate::Args),
    Test(test::Args),
    Tidy(tidy::Args),
    #[command(flatten)]
    Lab(lab::Command),
}

/// Runs the command that the command line names.
pub fn main() -> ExitCode {
    shell::finish(match Cli::parse().command {
        Command::BuildEbpf(args) => build_ebpf::run(&args),
        Command::Deny(args) => deny::run(&args),
        Command::Docs(args) => docs::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Package(args) => package::run(&args),
        Command::Release(args) => release::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::Lab(command) => lab::run(&command),
    })
}
