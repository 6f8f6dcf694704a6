//! The emulator: the machine's own if it is new enough, otherwise one that xtask unpacks.
//!
//! The unpacked emulator comes from a newer Debian release. A folder below cargo's target folder contains the
//! emulator and its libraries, and the loader in that folder starts the emulator. xtask installs nothing.

use crate::cross::Arch;
use crate::rootfs::{self, Made};
use crate::setup;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest version that runs every guest. 7.2 (Debian 12) panics a guest of Linux 6.12 within its first
/// minute (`rep stos` in update_sd_lb_stats).
const OLDEST: (u32, u32) = (9, 0);
/// The Debian release of the unpacked emulator.
const RELEASE: &str = "trixie";
/// The folders in which Debian's emulator finds firmware, from the root.
const DATA: &[&str] = &["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"];
const LIBRARIES: &[&str] = &["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// An emulator that can be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qemu {
    /// None: the program is the machine's own.
    root: Option<PathBuf>,
    program: PathBuf,
}

/// Returns the program that emulates a machine.
fn machine(arch: Arch) -> &'static str {
    match arch {
        Arch::Amd64 => "qemu-system-x86_64",
        Arch::Arm64 => "qemu-system-aarch64",
    }
}

/// Returns the folder of the unpacked emulator, and its packages.
fn source(arch: Arch) -> (&'static str, &'static str) {
    match arch {
        Arch::Amd64 => ("qemu", "qemu-system-x86"),
        Arch::Arm64 => ("qemu-arm", "qemu-system-arm,qemu-user"),
    }
}

/// Returns the folder, below cargo's target folder, that holds emulators and machines.
pub fn folder() -> PathBuf {
    workdir::target_dir().join("vm")
}

impl Qemu {
    /// Returns the machine's own emulator, or the unpacked one. Unpacks it below `work` if it is missing.
    pub fn ensure(work: &Path, arch: Arch) -> Result<Qemu> {
        let name = machine(arch);
        let own = setup::find(name).map(|program| Qemu { root: None, program });
        let version = own.as_ref().map(Qemu::version).transpose()?;
        if let (Some(own), Some(version)) = (own, version)
            && version >= OLDEST
        {
            return Ok(own);
        }
        if let Some((major, minor)) = version {
            let (oldest, older) = OLDEST;
            eprintln!(
                ".. {name} {major}.{minor} is too old and crashes guests with newer kernels (the oldest usable version is \
                 {oldest}.{older}); xtask uses {RELEASE}'s instead"
            );
        }
        let ours = Qemu::ours(work, arch, name)?;
        match ours.version()? {
            version if version >= OLDEST => Ok(ours),
            (major, minor) => bail!("{} is {major}.{minor}, too old as well", ours.program.display()),
        }
    }

    /// Returns the emulator that runs a single program of another processor on this machine's kernel.
    pub fn user(work: &Path, arch: Arch) -> Result<Qemu> {
        let name = format!("qemu-{}", arch.machine());
        match setup::find(&name) {
            Some(program) => Ok(Qemu { root: None, program }),
            None => Qemu::ours(work, arch, &name),
        }
    }

    fn ours(work: &Path, arch: Arch, name: &str) -> Result<Qemu> {
        let (folder, packages) = source(arch);
        let root = work.join(format!("{folder}-{RELEASE}"));
        let ours = Qemu { program: root.join("usr/bin").join(name), root: Some(root.clone()) };
        if !ours.program.exists() {
            let packages = rootfs::packages(work, folder, RELEASE, packages, Made::Installed)?;
            rootfs::unpack_once(&packages, &root)?;
        }
        Ok(ours)
    }

    fn version(&self) -> Result<(u32, u32)> {
        let output = self.command().arg("--version").output();
        let output = output.with_context(|| format!("could not start {}", self.program.display()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        parse(&text).with_context(|| format!("{} printed no version: {text}{said}", self.program.display()))
    }

    /// Returns the command that starts the emulator, without the machine's arguments.
    pub fn command(&self) -> Command {
        let Some(root) = &self.root else { return Command::new(&self.program) };
        let paths = |all: &[&str]| all.iter().map(|path| root.join(path)).collect::<Vec<_>>();
        let libraries: Vec<String> = paths(LIBRARIES).iter().map(|path| path.display().to_string()).collect();
        let mut command = Command::new(root.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(libraries.join(":")).arg(&self.program);
        // An emulator of a single program has no firmware, and -L means something else for it.
        if self.program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("qemu-system-")) {
            for data in paths(DATA) {
                command.arg("-L").arg(data);
            }
        }
        // Accelerators and disks are separate modules.
        command.env("QEMU_MODULE_DIR", root.join("usr/lib/x86_64-linux-gnu/qemu"));
        command
    }
}

/// Parses the version in `QEMU emulator version 7.2.22 (Debian …)`.
fn parse(text: &str) -> Option<(u32, u32)> {
    let version = text.split("version ").nth(1)?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_the_emulators_output() {
        let check = |text: &str, expected| assert_eq!(parse(text), expected, "{text}");
        check("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright …", Some((7, 2)));
        check("QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)", Some((10, 0)));
        check("no emulator", None);
        assert!((7, 2) < OLDEST && (10, 0) >= OLDEST);
    }

    #[test]
    fn the_unpacked_emulator_is_started_by_its_own_loader_with_its_own_files() {
        let qemu = Qemu { root: Some("/q".into()), program: "/q/usr/bin/qemu-system-x86_64".into() };
        let command = crate::shell::display(&qemu.command());
        assert!(command.starts_with("/q/lib64/ld-linux-x86-64.so.2 --library-path /q/usr/lib"), "{command}");
        assert!(command.contains(" /q/usr/bin/qemu-system-x86_64 -L /q/usr/share/qemu"), "{command}");
        let qemu = Qemu { root: Some("/q".into()), program: "/q/usr/bin/qemu-aarch64".into() };
        let command = crate::shell::display(&qemu.command());
        assert!(command.ends_with(" /q/usr/bin/qemu-aarch64"), "{command}");
    }
}
