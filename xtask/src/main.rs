//! The project's own commands: `cargo xtask --help`.
//!
//! One file per command: arguments and the steps, in order. What the demo, the tests and the benches share (a
//! private containerd, images without a registry, the agent as a child process) lives in `beelet-tests`, so
//! that all of them go the same way. Nothing here is needed to build or to run beelet itself.

mod bench;
mod build_and_load;
mod build_ebpf;
mod conformance;
mod cross;
mod demo;
mod fuzz;
mod package;
mod progress;
mod setup;
mod setup_ebpf;
mod shell;
mod skips;
mod test;
mod tidy;
mod vm;

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
    BuildAndLoad(build_and_load::Args),
    Unload(build_and_load::UnloadArgs),
    Conformance(conformance::Args),
    Demo(demo::Args),
    Fuzz(fuzz::Args),
    Package(package::Args),
    Setup(setup::Args),
    Test(test::Args),
    Bench(bench::Args),
    Tidy(tidy::Args),
    Vm(vm::Args),
    /// A process that loads the machine, for the benches
    #[command(hide = true)]
    Load {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::BuildEbpf(args) => build_ebpf::run(&args),
        Command::BuildAndLoad(args) => build_and_load::run(&args),
        Command::Unload(args) => build_and_load::unload(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Package(args) => package::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::Vm(args) => vm::run(&args),
        Command::Load { arguments } => beelet_tests::load::serve(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{} {error:#}", console::style("error:").red().bold().for_stderr());
            ExitCode::FAILURE
        }
    }
}
