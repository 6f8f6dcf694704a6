//! `beelet completions` and `beelet man`: files for packages, generated from the command line's definition.

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
    /// Shell to generate completions for.
    #[arg(value_enum)]
    shell: Shell,
}

/// Arguments of `beelet man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Directory for beelet.1, beelet-run.1 and so on. Default: print beelet.1.
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Environment variable with which the shell's script requests completions.
const COMPLETE: &str = "BEELET_COMPLETE";

/// Answers a completion request of a shell, if this is one, and exits. `command` builds the command line's
/// definition.
pub fn complete(command: impl Fn() -> Command) {
    CompleteEnv::with_factory(command).var(COMPLETE).complete();
}

/// Prints the shell's completion script, which calls this program, which asks the agent for names.
#[must_use]
pub fn completions(args: &CompletionsArgs) -> ExitCode {
    let (shells, mut text) = (Shells::builtins(), Vec::new());
    let shell = args.shell.to_string();
    let shell = shells.completer(&shell).with_context(|| format!("unknown shell {shell}"));
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

/// Writes a page for the command and for each of its subcommands.
pub fn pages(command: &Command, folder: &Path) -> anyhow::Result<()> {
    // The page of `beelet get pods` is beelet-get-pods.1.
    let name = command.get_display_name().unwrap_or(command.get_name()).replace(' ', "-");
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command)?).with_context(|| format!("cannot write {}", path.display()))?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        pages(sub, folder)?;
    }
    Ok(())
}

fn page(command: &Command) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    // The examples have a section of their own.
    let plain = command.clone().after_help(Resettable::Reset);
    let made = clap_mangen::Man::new(plain)
        .render(&mut text)
        .and_then(|()| sections(&examples).to_writer(&mut text));
    made.context("cannot generate the manual page")?;
    Ok(text)
}

/// Returns the sections that the command line's definition lacks.
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

/// Default paths.
const FILES: &[(&str, &str)] = &[
    ("/etc/beelet/beelet.yaml", "Configuration of the agent; `beelet config init` generates it."),
    (
        "/etc/beelet/manifests",
        "Manifest directory in that configuration (staticPodPath); the agent runs its pods.",
    ),
    ("/run/beelet/beelet.sock", "Socket of the agent, for root; --socket or BEELET_SOCKET override it."),
    ("/var/lib/beelet", "State that the agent keeps across restarts."),
];
/// Exit codes of all commands; `exec` exits with the code of its command.
const CODES: &[(&str, &str)] = &[
    ("0", "Success."),
    ("1", "The command failed, or the requested condition is not met."),
    ("2", "The command line, or a file named on it, is invalid."),
];
