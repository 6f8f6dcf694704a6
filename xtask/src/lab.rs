//! The commands of lab/. They run the agent, so cargo builds the agent with them first. xtask passes the
//! arguments on unchanged, `--help` included: only lab/ parses them.

use crate::shell;
use anyhow::{Context as _, Result};
use clap::Subcommand;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;

/// A command of lab/.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Measures on real pods the properties that beelet promises, and compares them with the bounds
    Bench(Arguments),
    /// Builds the kernel programs, loads them, attaches them to a cgroup and pins everything, for bpftool
    BuildAndLoad(Arguments),
    /// Builds clusters of several nodes on this machine, with kubeadm and beelet
    Cluster(Arguments),
    /// Runs Kubernetes' own tests against a node, and keeps the results
    Conformance(Arguments),
    /// Runs three pods on a private containerd, and shows what beelet reports about them
    Demo(Arguments),
    /// Removes the pins, the cgroup and the mount that build-and-load created
    Unload(Arguments),
    /// Runs the tests that ask the kernel inside VMs, each with another kernel
    Vm(Arguments),
}

/// Arguments that lab/ parses.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Arguments of the command itself; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// Becomes `cargo run` for the command. The process stays the same, so a signal reaches the command itself.
pub(crate) fn run(command: &Command) -> Result<()> {
    let (name, arguments) = match command {
        Command::Bench(arguments) => ("bench", arguments),
        Command::BuildAndLoad(arguments) => ("build-and-load", arguments),
        Command::Cluster(arguments) => ("cluster", arguments),
        Command::Conformance(arguments) => ("conformance", arguments),
        Command::Demo(arguments) => ("demo", arguments),
        Command::Unload(arguments) => ("unload", arguments),
        Command::Vm(arguments) => ("vm", arguments),
    };
    let mut cargo = command_line(name);
    // Relative paths in the arguments start at the caller's folder.
    cargo.args(&arguments.arguments).current_dir(std::env::current_dir()?);
    Err(cargo.exec()).context("could not start cargo")
}

/// Returns the command line that runs a command of lab/, without its arguments.
pub(crate) fn command_line(name: &str) -> std::process::Command {
    let mut cargo = shell::cargo();
    cargo.args(["run", "--package", "beelet-lab", "--bin", "lab", "--", name]);
    cargo
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(subcommand)]
        command: Command,
    }

    #[test]
    fn arguments_are_passed_on_as_they_are() {
        let check = |line: &[&str]| {
            let parsed = Cli::try_parse_from(["xtask", "vm"].iter().chain(line)).map(|cli| cli.command);
            let Ok(Command::Vm(Arguments { arguments })) = parsed else { panic!("{line:?}: no vm command") };
            assert_eq!(arguments, line);
        };
        check(&[]);
        check(&["--help"]);
        check(&["-h"]);
        check(&["6.1", "--jobs", "2", "--write-docs"]);
        check(&["--machine", "debian-13", "--bench", "tuner --scenario memory"]);
    }
}
