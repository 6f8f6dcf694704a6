//! Small helpers for all commands: cargo, the text of a command as a user would type it, the exit code.

use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Returns a command for the cargo that runs xtask, so the toolchain is the same, in the repository's top
/// folder.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workdir::repository());
    // The cargo that runs xtask sets these variables for xtask; in a child they would make cargo rebuild
    // crates.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Runs `command` with the standard streams of xtask; an error names the command and its exit status.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = display(command);
    let status = command.status().with_context(|| format!("could not start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// Writes a program, and returns its path.
///
/// # Errors
/// The program cannot be written.
pub fn script(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    workdir::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("could not set the mode of {}", path.display()))?;
    Ok(path)
}

/// Prints a command's error and returns its exit code.
pub fn finish(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{} {error:#}", console::style("error:").red().bold().for_stderr());
            ExitCode::FAILURE
        }
    }
}

/// Returns the command as a user would type it.
pub fn display(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        let argument = argument.to_string_lossy();
        text.push(' ');
        if argument.contains(char::is_whitespace) {
            text.push_str(&format!("'{argument}'"));
        } else {
            text.push_str(&argument);
        }
    }
    text
}
