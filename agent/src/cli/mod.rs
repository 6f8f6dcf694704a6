//! The command line: one file a subcommand, arguments in, text out, no decisions.
//!
//! Exit codes: 0 all well, 1 it could not be done, 2 the command line or a file given on it is wrong.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

pub mod apply;
pub mod bpf;
pub mod delete;
pub mod describe;
pub mod devices;
pub mod doctor;
pub mod events;
pub mod exec;
pub mod gc;
pub mod get;
pub mod logs;
pub mod manual;
pub mod observe;
#[cfg(test)]
mod packaging;
mod plain;
pub mod plan;
pub mod probe;
pub mod run;
mod threads;
pub mod top;
pub mod tune;

/// A node agent that runs a machine's pods and keeps them healthy at kernel speed.
#[derive(Debug, Parser)]
#[command(name = "beelet", version, propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the pods of this machine.
    Run(run::RunArgs),
    /// Measure the pods of a kubelet (or of anything that speaks CRI), changing nothing.
    Observe(observe::ObserveArgs),
    /// Show what runs on this machine.
    Get(get::GetArgs),
    /// Show one thing with all that is known of it.
    Describe(describe::DescribeArgs),
    /// Show what happened to pods, and what went wrong.
    Events(events::EventsArgs),
    /// Show the devices of this machine and who holds them.
    Devices(devices::DevicesArgs),
    /// Remove unused images or dead containers now.
    Gc(gc::GcArgs),
    /// Show what pods and containers use and wait for, live.
    Top(top::TopArgs),
    /// Print what a container has printed.
    Logs(logs::LogsArgs),
    /// Run a command in a container.
    Exec(exec::ExecArgs),
    /// Check manifests and put them into the agent's folder.
    Apply(apply::ApplyArgs),
    /// Take manifests out of the agent's folder; what they describe is stopped and removed.
    Delete(delete::DeleteArgs),
    /// Show what probes look at and what they say, or run one now.
    Probe(probe::ProbeArgs),
    /// Say what this kernel, these privileges and this runtime allow, and what to do about the rest.
    Doctor(doctor::DoctorArgs),
    /// Show what the tuner of cgroups sees, holds and did.
    Tune(tune::TuneArgs),
    /// Show what the agent has in the kernel: its BPF programs and maps.
    Bpf(bpf::BpfArgs),
    /// Decide for a scenario what the agent would do.
    Plan(plan::PlanArgs),
    /// Print completions for a shell.
    Completions(manual::CompletionsArgs),
    /// Make the manual pages.
    Man(manual::ManArgs),
}

/// Exit code of a wrong command line or a wrong file, clap's own.
const USAGE: u8 = 2;

/// Parses the command line and does what it says.
#[must_use]
pub fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Observe(args) => observe::run(&args),
        Command::Get(args) => get::run(&args),
        Command::Describe(args) => describe::run(&args),
        Command::Events(args) => events::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Gc(args) => gc::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Logs(args) => logs::run(&args),
        Command::Exec(args) => exec::run(args),
        Command::Apply(args) => apply::run(&args),
        Command::Delete(args) => delete::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Bpf(args) => bpf::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Completions(args) => manual::completions(&args, Cli::command()),
        Command::Man(args) => manual::man(&args, Cli::command()),
    }
}

/// Prints `error: …` with all its causes, and is the exit code for it.
fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {}", plain::lines(&format!("{error:#}")));
    ExitCode::FAILURE
}
