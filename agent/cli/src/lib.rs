//! The command line: one file per command, arguments in, text out, no decisions.
//!
//! Exit codes: 0 all well, 1 it could not be done, 2 the command line or a file given on it is wrong.

use std::io;
use std::process::{ExitCode, Termination};

use clap::Subcommand;

mod again;
pub mod apply;
mod args;
pub mod attach;
pub mod bpf;
mod complete;
pub mod config;
pub mod cp;
pub mod debug;
pub mod delete;
pub mod describe;
pub mod devices;
pub mod diff;
pub mod doctor;
pub mod events;
pub mod exec;
mod files;
pub mod gc;
pub mod get;
pub mod images;
pub mod logs;
pub mod manual;
mod neighbours;
mod plain;
pub mod plan;
pub mod port_forward;
mod print;
pub mod probe;
mod requested;
pub mod restart;
pub mod top;
pub mod tune;
mod until;
pub mod wait;
mod waited;
mod why;

/// Default path of the agent's socket.
const SOCKET: &str = "/run/beelet/beelet.sock";

pub use args::{kinds, with_hint};

/// The commands that ask an agent, or decide or look without one.
#[derive(Debug, Subcommand)]
pub enum Command {
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
    /// Show, fetch and remove the runtime's images.
    Images(images::ImagesArgs),
    /// Show what pods and containers use and wait for, live.
    Top(top::TopArgs),
    /// Print what a container has printed.
    Logs(logs::LogsArgs),
    /// Run a command in a container.
    Exec(exec::ExecArgs),
    /// Copy files and folders between this machine and a container.
    Cp(cp::CpArgs),
    /// Show what a container's own process prints, and let it have what is typed.
    Attach(attach::AttachArgs),
    /// Add a container with tools of its own to a pod that runs.
    Debug(debug::DebugArgs),
    /// Let ports of this machine lead into a pod.
    PortForward(port_forward::PortForwardArgs),
    /// Start containers again at once, without their back-off.
    Restart(restart::RestartArgs),
    /// Check manifests and put them into the agent's folder.
    Apply(apply::ApplyArgs),
    /// Show what apply would change.
    Diff(diff::DiffArgs),
    /// Take manifests out of the agent's folder; what they describe is stopped and removed.
    Delete(delete::DeleteArgs),
    /// Wait until pods are ready, ended or gone.
    Wait(wait::WaitArgs),
    /// Show what probes look at and what they say, or run one now.
    Probe(probe::ProbeArgs),
    /// Say what this kernel, these privileges and this runtime allow, and what to do about the rest.
    Doctor(doctor::DoctorArgs),
    /// Write a configuration for this machine.
    Config(config::ConfigArgs),
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
pub const USAGE: u8 = 2;

/// Does what a command says. `whole` is the command line that it is a part of, `preflight` the daemon's own
/// checks.
#[must_use]
pub fn run(command: Command, whole: clap::Command, preflight: doctor::Preflight) -> ExitCode {
    match command {
        Command::Get(args) => get::run(&args),
        Command::Describe(args) => describe::run(&args),
        Command::Events(args) => events::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Gc(args) => gc::run(&args),
        Command::Images(args) => images::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Logs(args) => logs::run(&args),
        Command::Exec(args) => exec::run(args),
        Command::Cp(args) => cp::run(&args),
        Command::Attach(args) => attach::run(args),
        Command::Debug(args) => debug::run(args),
        Command::PortForward(args) => port_forward::run(&args),
        Command::Restart(args) => restart::run(&args),
        Command::Apply(args) => apply::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Delete(args) => delete::run(&args),
        Command::Wait(args) => wait::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::Doctor(args) => doctor::run(&args, preflight),
        Command::Config(args) => config::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Bpf(args) => bpf::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args, whole),
    }
}

/// Does what `command` does, on this thread.
fn block_on<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(command);
    // A thread that reads keys may still wait for one.
    runtime.shutdown_background();
    done
}

/// Runs a command to its end, tells why it failed, and is its exit code.
fn finish<T: Termination>(command: impl Future<Output = anyhow::Result<T>>) -> ExitCode {
    match block_on(command) {
        Ok(done) => done.report(),
        // The reader of our output has seen enough (`… | head`).
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// The exit code of a command that says whether all is as it was wanted.
fn code(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The exit code of a process in a container as this program's.
fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Prints `error: …` with all its causes, and is the exit code for it.
pub fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {}", plain::lines(&with_causes(error)));
    ExitCode::FAILURE
}

/// A sentence with its causes behind it, those that it does not name itself.
fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.as_str() {
        "" => cause,
        known if known.contains(&cause) => said,
        known => format!("{known}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn a_cause_that_the_sentence_names_is_not_said_again() {
        let denied = || io::Error::from_raw_os_error(13);
        let lock =
            beelet_base::lock::LockError::Io { what: "it".into(), path: "/x".into(), source: denied() };
        let said = with_causes(&anyhow::Error::new(lock).context("cannot start"));
        assert_eq!(said.matches("os error 13").count(), 1, "{said}");
        assert!(said.starts_with("cannot start: it cannot be locked: /x: "), "{said}");
        let plain = Err::<(), _>(denied()).context("cannot look").unwrap_err();
        assert_eq!(with_causes(&plain), "cannot look: Permission denied (os error 13)");
    }
}
