//! `beelet completions` and `beelet man`: what packagers put beside the binary, made from the command line's own definition.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;

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

/// Prints the completions of `command`.
#[must_use]
pub fn completions(args: &CompletionsArgs, mut command: Command) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "beelet", &mut text);
    ended(io::stdout().write_all(&text).context("the completions could not be printed"))
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
    clap_mangen::Man::new(command.clone()).render(&mut text).context("the manual page could not be made")?;
    Ok(text)
}
