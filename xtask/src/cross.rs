//! Builds for another target than this machine's: a static binary, or another processor. rustup provides the
//! target's standard library, which for musl contains a libc to link with. Debian provides the C compiler,
//! which links the binary and compiles the C code of one dependency (ring).

use crate::{setup, shell};
use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use std::path::Path;
use std::process::Command;

/// A kind of processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
pub enum Arch {
    /// x86-64.
    #[value(name = "amd64")]
    Amd64,
    /// 64-bit ARM.
    #[value(name = "arm64")]
    Arm64,
}

impl Arch {
    /// Returns this machine's kind of processor.
    ///
    /// # Errors
    /// xtask does not know this kind.
    pub fn here() -> Result<Arch> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(Arch::Amd64),
            "aarch64" => Ok(Arch::Arm64),
            other => bail!("this machine is {other}; xtask knows amd64 and arm64 only"),
        }
    }

    /// Returns the name that Debian and container images use.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Amd64 => "amd64",
            Arch::Arm64 => "arm64",
        }
    }

    /// Returns the name that Linux and Rust use.
    pub fn machine(self) -> &'static str {
        match self {
            Arch::Amd64 => "x86_64",
            Arch::Arm64 => "aarch64",
        }
    }

    /// Returns the target of static binaries.
    pub fn musl(self) -> &'static str {
        match self {
            Arch::Amd64 => "x86_64-unknown-linux-musl",
            Arch::Arm64 => "aarch64-unknown-linux-musl",
        }
    }

    /// Returns the program that removes a binary's symbols, and its Debian package.
    pub fn strip(self) -> (&'static str, &'static str) {
        match self {
            Arch::Amd64 => ("x86_64-linux-gnu-strip", "binutils"),
            Arch::Arm64 => ("aarch64-linux-gnu-strip", "binutils-aarch64-linux-gnu"),
        }
    }

    /// Returns the C compiler for [`Arch::musl`], and its Debian packages. glibc's headers are sufficient for
    /// arm64: the parts that ring includes are the same in both, and rustc links with its own musl.
    fn compiler(self) -> (&'static str, &'static str) {
        match self {
            Arch::Amd64 => ("musl-gcc", "musl-tools"),
            Arch::Arm64 => ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
        }
    }
}

/// Makes `cargo` build for [`Arch::musl`].
///
/// # Errors
/// The target's standard library or its C compiler is missing; the message names the command that installs
/// it.
pub fn target_musl(cargo: &mut Command, arch: Arch) -> Result<()> {
    let target = arch.musl();
    require_standard_library(target)?;
    let (compiler, package) = arch.compiler();
    if setup::find(compiler).is_none() {
        bail!("{compiler} is missing: apt-get install {package}");
    }
    cargo.args(["--target", target]);
    // cargo and the crate cc expect the target's name in this form.
    cargo.env(format!("CC_{}", target.replace('-', "_")), compiler);
    if Arch::here()? != arch {
        cargo.env(format!("AR_{}", target.replace('-', "_")), format!("{}-linux-gnu-ar", arch.machine()));
        let linker = format!("CARGO_TARGET_{}_LINKER", target.replace('-', "_").to_uppercase());
        cargo.env(linker, compiler);
    }
    Ok(())
}

fn require_standard_library(target: &str) -> Result<()> {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let listed = rustc.args(["--print", "target-libdir", "--target", target]).output();
    let dir = listed.context("could not start rustc")?.stdout;
    if !Path::new(String::from_utf8_lossy(&dir).trim()).is_dir() {
        bail!("rustc has no standard library for {target}: rustup target add {target}");
    }
    Ok(())
}

/// Writes a copy of `binary` without symbols to `copy`.
///
/// # Errors
/// The `strip` for this processor is missing or failed.
pub fn strip(binary: &Path, copy: &Path, arch: Arch) -> Result<()> {
    let (own, package) = arch.strip();
    let native = Arch::here().is_ok_and(|here| here == arch);
    let program = if native { setup::find("strip") } else { setup::find(own) };
    let program = program.with_context(|| format!("{own} is missing: apt-get install {package}"))?;
    shell::run(Command::new(program).arg("-o").arg(copy).arg(binary))
}
