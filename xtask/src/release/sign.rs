//! Signatures, made without a network: OpenPGP for the repositories, because APT and DNF verify that, and SSH
//! for the checksums. Both keys are Ed25519 keys without a passphrase, or keys whose agent runs; equal files
//! have equal signatures.

use crate::shell;
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An OpenPGP key in a keyring of its own.
pub(super) struct Gpg {
    home: tempfile::TempDir,
    /// The time of all signatures, seconds since 1970.
    seconds: u64,
}

impl Gpg {
    /// Imports the secret key of this file.
    ///
    /// # Errors
    /// gpg is missing, or the file has no secret key.
    pub(super) fn import(key: &Path, seconds: u64) -> Result<Self> {
        let private = fs::Permissions::from_mode(0o700);
        let home = tempfile::Builder::new().permissions(private).tempdir();
        let own = Gpg { home: home.context("could not make a folder for the keyring")?, seconds };
        quiet(own.command().arg("--import").arg(key))?;
        let listed = own.command().args(["--list-secret-keys", "--with-colons"]).output();
        let listed = String::from_utf8_lossy(&listed.context("could not start gpg")?.stdout).into_owned();
        if listed.lines().filter(|line| line.starts_with("sec:")).count() != 1 {
            bail!("{} must contain exactly one secret OpenPGP key", key.display());
        }
        Ok(own)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("gpg");
        command.args(["--batch", "--yes", "--quiet", "--no-tty", "--homedir"]).arg(self.home.path());
        // A signature contains its time. The key may be newer than the commit.
        command.args(["--faked-system-time", &format!("{}!", self.seconds), "--ignore-time-conflict"]);
        command.stdin(Stdio::null());
        command
    }

    /// Signs a file: inside the result (`InRelease`).
    pub(super) fn clear_sign(&self, file: &Path, out: &Path) -> Result<()> {
        quiet(self.command().args(["--digest-algo", "SHA512", "--clear-sign", "--output"]).arg(out).arg(file))
    }

    /// Signs a file: the result is the signature alone, in ASCII.
    pub(super) fn detach_sign(&self, file: &Path, out: &Path) -> Result<()> {
        let mut command = self.command();
        command.args(["--digest-algo", "SHA512", "--armor", "--detach-sign", "--output"]);
        quiet(command.arg(out).arg(file))
    }

    /// Writes the public key in ASCII.
    pub(super) fn export(&self, out: &Path) -> Result<()> {
        quiet(self.command().args(["--armor", "--export", "--output"]).arg(out))
    }
}

impl Drop for Gpg {
    fn drop(&mut self) {
        // gpg starts an agent for the keyring, which would outlive the keyring.
        let mut command = Command::new("gpgconf");
        let _ = command.arg("--homedir").arg(self.home.path()).args(["--kill", "all"]).status();
    }
}

/// Runs a program, and shows its output only if it fails: gpg warns about its set time at each call.
fn quiet(command: &mut Command) -> Result<()> {
    let shown = shell::display(command);
    let output = command.output().with_context(|| format!("could not start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Signs a file with an SSH key; the signature is `FILE.sig`. `ssh-keygen -Y verify -n file` verifies it.
pub(super) fn ssh(key: &Path, file: &Path) -> Result<PathBuf> {
    let signature = PathBuf::from(format!("{}.sig", file.display()));
    if signature.exists() {
        fs::remove_file(&signature).with_context(|| format!("could not remove {}", signature.display()))?;
    }
    let mut command = Command::new("ssh-keygen");
    shell::run(
        command.args(["-q", "-Y", "sign", "-n", "file", "-f"]).arg(key).arg(file).stdin(Stdio::null()),
    )?;
    Ok(signature)
}
