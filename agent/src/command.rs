//! The command line: the daemon's own commands, and those of [`beelet_cli`].

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{handover, kubelet, node::preflight, observe, run};

#[cfg(test)]
mod packaging;
#[cfg(test)]
mod reference;

/// The version, with the commit if it is known.
const VERSION: &str = env!("BEELET_VERSION");

/// A node agent that runs the pods of a machine and keeps them healthy at kernel speed.
#[derive(Debug, Parser)]
#[command(name = "beelet", version = VERSION, propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the pods of this machine.
    Run(run::RunArgs),
    /// Measure the pods of a kubelet, or of any CRI runtime, without changing anything.
    Observe(observe::ObserveArgs),
    /// Print the version.
    Version,
    /// Change the agent of this node between a kubelet and beelet under running pods.
    Handover(handover::HandoverArgs),
    #[command(flatten)]
    Other(beelet_cli::Command),
}

/// Parses the command line and runs the command.
#[must_use]
pub fn main() -> ExitCode {
    if kubelet::is_called(std::env::args_os().next().as_deref()) {
        return kubelet::main(std::env::args_os());
    }
    beelet_cli::manual::complete(Cli::command);
    let arguments = beelet_cli::kinds(std::env::args_os());
    let cli = Cli::try_parse_from(&arguments)
        .unwrap_or_else(|error| beelet_cli::with_hint(error, &arguments).exit());
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Observe(args) => observe::run(&args),
        Command::Version => {
            println!("beelet {VERSION}");
            ExitCode::SUCCESS
        }
        Command::Handover(args) => handover::run(&args),
        Command::Other(command) => beelet_cli::run(command, Cli::command(), preflight::refusals),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_the_place_of_a_kind_is_answered_with_the_way_to_a_pod() {
        let check = |line: &str, hint: Option<&str>| {
            let arguments = beelet_cli::kinds(line.split(' ').map(Into::into));
            let error = Cli::try_parse_from(&arguments).unwrap_err();
            let told = beelet_cli::with_hint(error, &arguments).to_string();
            let tip = told.lines().find_map(|line| line.trim().strip_prefix("tip: to name a pod, use "));
            assert_eq!(tip, hint, "{told}");
        };
        check("beelet describe web-1", Some("'beelet describe pod web-1'"));
        check("beelet delete web", Some("'beelet delete pod web'"));
        check("beelet get nodse", None);
        check("beelet get \u{1b}[2J", None);
        check("beelet nonsense web", None);
        // The fault is a different word.
        check("beelet get pod web -o nonsense", None);
        let tip = |line: &str| {
            let arguments = beelet_cli::kinds(line.split(' ').map(Into::into));
            let error = Cli::try_parse_from(&arguments).unwrap_err();
            let told = beelet_cli::with_hint(error, &arguments).to_string();
            told.lines().find_map(|line| Some(line.trim().strip_prefix("tip: ")?.to_owned())).unwrap_or(told)
        };
        let elsewhere = "a node has no objects of this kind; 'beelet get --help' lists the kinds";
        assert_eq!(tip("beelet get svc"), elsewhere);
        assert_eq!(tip("beelet get deployment/web"), elsewhere);
    }

    #[test]
    fn every_subcommand_has_a_page_and_pages_have_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Cli::command();
        command.build();
        beelet_cli::manual::pages(&command, folder.path()).unwrap();
        for page in [
            "beelet.1",
            "beelet-run.1",
            "beelet-observe.1",
            "beelet-handover.1",
            "beelet-top.1",
            "beelet-get-pods.1",
        ] {
            let text = std::fs::read_to_string(folder.path().join(page)).unwrap();
            assert!(text.starts_with(".ie") && text.contains(".SH SYNOPSIS"), "{page}: {text}");
        }
        let page = std::fs::read_to_string(folder.path().join("beelet-apply.1")).unwrap();
        for section in [".SH EXAMPLES", "beelet apply \\-f web.yaml", ".SH FILES", ".SH \"EXIT STATUS\""] {
            assert!(page.contains(section), "{section}: {page}");
        }
        let missing = folder.path().join("none");
        let error = beelet_cli::manual::pages(&command, &missing).unwrap_err().to_string();
        assert!(error.contains("beelet.1"), "{error}");
    }
}
