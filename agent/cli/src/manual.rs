//! `beelet completions` and `beelet man`: what packagers put beside the binary, made from the command line's
//! own definition.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::builder::Resettable;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_complete::env::{CompleteEnv, Shells};
use clap_mangen::roff::{Roff, bold, roman};

use super::failed;

/// Arguments of `beelet completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// For which shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Arguments of `beelet man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder for beelet.1, beelet-run.1, …; without one, beelet.1 is printed.
    #[arg(value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// The variable by which the shell's part asks this program for completions.
const COMPLETE: &str = "BEELET_COMPLETE";

/// Answers a shell that completes a command line, and ends the program then; `command` makes the whole
/// command line.
pub fn complete(command: impl Fn() -> Command) {
    CompleteEnv::with_factory(command).var(COMPLETE).complete();
}

/// Prints the shell's part of the completions: it asks this program, which asks the agent for names.
#[must_use]
pub fn completions(args: &CompletionsArgs) -> ExitCode {
    let (shells, mut text) = (Shells::builtins(), Vec::new());
    let shell = args.shell.to_string();
    let shell = shells.completer(&shell).with_context(|| format!("{shell} is not known"));
    let written = shell
        .and_then(|shell| Ok(shell.write_registration(COMPLETE, "beelet", "beelet", "beelet", &mut text)?));
    ended(written.and_then(|()| Ok(io::stdout().write_all(&text)?)))
}

/// Prints or writes the manual pages of `command`.
#[must_use]
pub fn man(args: &ManArgs, mut command: Command) -> ExitCode {
    command.build();
    ended(match &args.folder {
        None => page(&command).and_then(|page| Ok(io::stdout().write_all(&page)?)),
        Some(folder) => pages(&command, folder),
    })
}

fn ended(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// A page for the command, and one for each of its subcommands.
pub fn pages(command: &Command, folder: &Path) -> anyhow::Result<()> {
    // `beelet get pods` is in beelet-get-pods.1.
    let name = command.get_display_name().unwrap_or(command.get_name()).replace(' ', "-");
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command)?).with_context(|| format!("{} could not be written", path.display()))?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        pages(sub, folder)?;
    }
    Ok(())
}

fn page(command: &Command) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    // They have a section of their own.
    let plain = command.clone().after_help(Resettable::Reset);
    let made = clap_mangen::Man::new(plain)
        .render(&mut text)
        .and_then(|()| sections(&examples).to_writer(&mut text));
    made.context("the manual page could not be made")?;
    Ok(text)
}

/// What the command line's definition does not say by itself.
fn sections(examples: &str) -> Roff {
    let mut page = Roff::new();
    if let Some(examples) = examples.trim().strip_prefix("Examples:") {
        page.control("SH", ["EXAMPLES"]).control("nf", []);
        for line in examples.lines().filter(|line| !line.trim().is_empty()) {
            page.text([roman(line)]);
        }
        page.control("fi", []);
    }
    page.control("SH", ["FILES"]);
    for (path, what) in FILES {
        page.control("TP", []).text([bold(*path)]).text([roman(*what)]);
    }
    page.control("SH", ["EXIT STATUS"]);
    for (code, what) in CODES {
        page.control("TP", []).text([bold(*code)]).text([roman(*what)]);
    }
    page
}

/// Where things are if nobody says where.
const FILES: &[(&str, &str)] = &[
    ("/etc/beelet/beelet.yaml", "The configuration of the agent; `beelet config init` writes it."),
    (
        "/etc/beelet/manifests",
        "The folder of manifests in that configuration (staticPodPath): what lies there runs.",
    ),
    ("/run/beelet/beelet.sock", "The agent's socket, for root; --socket or BEELET_SOCKET name another."),
    ("/var/lib/beelet", "What the agent must know after a restart."),
];
/// As all commands have them; those of `exec` are the command's own.
const CODES: &[(&str, &str)] = &[
    ("0", "All went well."),
    ("1", "It could not be done, or is not as it was asked for."),
    ("2", "The command line, or a file given on it, is wrong."),
];
