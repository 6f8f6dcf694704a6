//! The command line: one file per command, arguments in, text out, no decisions.
//!
//! Exit codes: 0 on success, 1 on failure, 2 if the command line or a file named on it is invalid.

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
pub mod drain;
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

/// The client commands: most ask a running agent, some work without one.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List pods, containers, nodes and other objects of this machine.
    Get(get::GetArgs),
    /// Show details of one object.
    Describe(describe::DescribeArgs),
    /// List events of pods and of the node.
    Events(events::EventsArgs),
    /// List devices and the containers that hold them.
    Devices(devices::DevicesArgs),
    /// Remove unused images or dead containers now.
    Gc(gc::GcArgs),
    /// List, pull, import and remove the runtime's images.
    Images(images::ImagesArgs),
    /// Display live resource usage and waits of pods and containers.
    Top(top::TopArgs),
    /// Print the logs of a container.
    Logs(logs::LogsArgs),
    /// Run a command in a container.
    Exec(exec::ExecArgs),
    /// Copy files and directories to and from containers.
    Cp(cp::CpArgs),
    /// Attach to a container's main process.
    Attach(attach::AttachArgs),
    /// Add an ephemeral container to a running pod.
    Debug(debug::DebugArgs),
    /// Forward local ports to a pod.
    PortForward(port_forward::PortForwardArgs),
    /// Restart containers immediately, skipping their back-off.
    Restart(restart::RestartArgs),
    /// Validate manifests and write them to the agent's manifest directory.
    Apply(apply::ApplyArgs),
    /// Show the changes that `apply` would make.
    Diff(diff::DiffArgs),
    /// Remove manifests from the agent's manifest directory; their pods are terminated.
    Delete(delete::DeleteArgs),
    /// Wait until pods reach a state.
    Wait(wait::WaitArgs),
    /// Mark this machine's Node as unschedulable.
    Cordon(drain::CordonArgs),
    /// Mark this machine's Node as schedulable again.
    Uncordon(drain::CordonArgs),
    /// Cordon this machine's Node, evict its pods through the API server, and wait until they have left.
    Drain(drain::DrainArgs),
    /// Show the probes of a pod and their results, or run one now.
    Probe(probe::ProbeArgs),
    /// Check what this kernel, these privileges and this runtime support, and suggest fixes.
    Doctor(doctor::DoctorArgs),
    /// Generate a configuration file for this machine.
    Config(config::ConfigArgs),
    /// Show the state and the recent actions of the cgroup tuner.
    Tune(tune::TuneArgs),
    /// Show the agent's BPF programs and maps in the kernel.
    Bpf(bpf::BpfArgs),
    /// Compute the agent's decisions for a scenario file.
    Plan(plan::PlanArgs),
    /// Print a shell completion script.
    Completions(manual::CompletionsArgs),
    /// Generate the manual pages.
    Man(manual::ManArgs),
}

/// Exit code for an invalid command line or an invalid file (clap's own).
pub const USAGE: u8 = 2;

/// Runs a command. `whole` is the complete command line definition, `preflight` the daemon's own checks.
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
        Command::Cordon(args) => drain::cordon(&args),
        Command::Uncordon(args) => drain::uncordon(&args),
        Command::Drain(args) => drain::run(&args),
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

/// Runs `command` to completion on the current thread.
fn block_on<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(command);
    // A thread that reads keys may still block on the next key.
    runtime.shutdown_background();
    done
}

/// Runs a command to completion, prints its error if any, and returns the exit code.
fn finish<T: Termination>(command: impl Future<Output = anyhow::Result<T>>) -> ExitCode {
    match block_on(command) {
        Ok(done) => done.report(),
        // The reader of standard output has closed it (`… | head`).
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Returns the exit code of a command that answers yes or no.
fn code(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Converts the exit code of a process in a container to the exit code of this process.
fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Prints `error: …` with all causes and returns the exit code 1.
pub fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {}", plain::lines(&with_causes(error)));
    ExitCode::FAILURE
}

/// Returns the error's text followed by its causes, skipping a cause that the text already contains.
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
        let plain = Err::<(), _>(denied()).context("cannot read").unwrap_err();
        assert_eq!(with_causes(&plain), "cannot read: Permission denied (os error 13)");
    }
}
