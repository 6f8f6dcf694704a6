//! The agent's helper `beelet-exec`, as its own unit starts it: outside the agent's confinement.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::agent;
use crate::guards::Process;
use crate::workdir::{PATIENCE, wait_for};

/// A running helper. Dropping it ends its process.
#[derive(Debug)]
pub struct Helper {
    process: Process,
    socket: PathBuf,
}

impl Helper {
    /// Starts the helper that belongs to the agent's binary, with its socket in `dir`.
    ///
    /// # Errors
    /// The helper can't be built or started.
    pub fn start(dir: &Path) -> Result<Helper> {
        Helper::run(&binary()?, dir)
    }

    /// Starts the helper next to this agent's binary, with its socket in `dir`.
    ///
    /// # Errors
    /// The helper is missing or can't be started.
    pub fn beside(agent: &Path, dir: &Path) -> Result<Helper> {
        Helper::run(&agent.with_file_name("beelet-exec"), dir)
    }

    fn run(binary: &Path, dir: &Path) -> Result<Helper> {
        let socket = dir.join("exec.sock");
        let log = std::fs::File::create(dir.join("exec.log")).context("cannot create the helper's log")?;
        let child = Command::new(binary)
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("cannot start the helper")?;
        let helper = Helper { process: Process(child), socket };
        wait_for("the helper to listen", PATIENCE, || {
            std::os::unix::net::UnixStream::connect(&helper.socket).map(drop)
        })?;
        Ok(helper)
    }

    /// Returns the helper's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the helper's pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }
}

/// Returns the helper's binary: next to the agent's, or the one that cargo builds now.
///
/// # Errors
/// Cargo fails.
pub fn binary() -> Result<PathBuf> {
    let beside = agent::binary()?.with_file_name("beelet-exec");
    if beside.exists() && std::env::var_os("BEELET_BIN").is_some() {
        return Ok(beside);
    }
    agent::build("beelet-exec")
}
