//! Small things every command needs: the repository's folders, cargo, a command shown as a person would type
//! it.

use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's top folder.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_path_buf()
}

/// Cargo, started at the repository's top: the one that runs us, so the toolchain is the same.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(repository());
    // Set by the cargo that runs us for xtask alone; in a child they would make cargo rebuild things.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Runs `command` with our own standard streams; an error names it and its exit status.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = display(command);
    let status = command.status().with_context(|| format!("could not start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// The command as one would type it.
pub(crate) fn display(command: &Command) -> String {
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
