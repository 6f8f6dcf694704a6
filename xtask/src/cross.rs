//! Builds static binaries, for this machine's processor or another one.
//!
//! Rust's standard library is built from its sources, as for the BPF target. Zig contains a C compiler, musl
//! and a linker for every processor; it compiles the C code of one dependency (ring), and links. A fixed
//! version of Zig comes from PyPI, so every distribution has the same C compiler, libc and linker.

use crate::{setup_ebpf, shell, tools};
use anyhow::{Result, bail};
use beelet_tests_base::workdir;
use clap::ValueEnum;
use std::path::{Path, PathBuf};
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
}

/// Zig as a C compiler and linker for the target TARGET. Zig ignores `-static-pie`, and would link a binary
/// with fixed addresses. Zig does not know the two other arguments.
const COMPILER: &str = r#"#!/bin/bash
set -eu
arguments=()
for argument in "$@"; do
  case $argument in
    -static-pie) arguments+=(-static -pie) ;;
    --target=* | -Wl,--fix-cortex-a53-843419) ;;
    *) arguments+=("$argument") ;;
  esac
done
exec "$BEELET_ZIG" cc -target TARGET -fno-sanitize=undefined "${arguments[@]}"
"#;

/// Zig as the maker of archives.
const ARCHIVER: &str = "#!/bin/sh\nexec \"$BEELET_ZIG\" ar \"$@\"\n";

/// Returns the text of the C compiler and linker for `arch`.
fn compiler(arch: Arch) -> String {
    COMPILER.replace("TARGET", &format!("{}-linux-musl", arch.machine()))
}

/// Makes `cargo` build for [`Arch::musl`]; returns the folder of the standard library's sources.
///
/// # Errors
/// The sources of the standard library or Zig are missing and cannot be installed.
pub fn target_musl(cargo: &mut Command, arch: Arch) -> Result<PathBuf> {
    let target = arch.musl();
    let (library, is_elsewhere) = setup_ebpf::library()?;
    let (folder, zig) = (workdir::target_dir().join("zig"), tools::ZIG.ensure()?);
    let cache = zig.with_file_name("cache");
    let compiler = shell::script(&folder, target, &compiler(arch))?;
    cargo
        .args(["--target", target, "-Z", "build-std=std,panic_unwind"])
        // Stable cargo builds the standard library only with this variable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("BEELET_ZIG", &zig)
        .env("ZIG_GLOBAL_CACHE_DIR", &cache)
        .env("ZIG_LOCAL_CACHE_DIR", &cache);
    if is_elsewhere {
        cargo.env("__CARGO_TESTS_ONLY_SRC_ROOT", &library);
    }
    // cargo and the crate cc expect the target's name in these forms.
    let (lower, upper) = (target.replace('-', "_"), target.replace('-', "_").to_uppercase());
    cargo
        .env(format!("CC_{lower}"), &compiler)
        .env(format!("AR_{lower}"), shell::script(&folder, "ar", ARCHIVER)?)
        .env(format!("CARGO_TARGET_{upper}_LINKER"), &compiler)
        // musl is Zig's, not one beside the standard library. RUSTFLAGS would take precedence.
        .env(format!("CARGO_TARGET_{upper}_RUSTFLAGS"), "-C link-self-contained=no")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    Ok(library)
}

/// Writes a copy of `binary`, of any processor, without symbols to `copy`.
///
/// # Errors
/// rustc's `rust-objcopy` is missing or failed.
pub fn strip(binary: &Path, copy: &Path) -> Result<()> {
    shell::run(setup_ebpf::objcopy()?.arg("--strip-all").arg(binary).arg(copy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zig_gets_the_arguments_that_it_knows() {
        let folder = tempfile::tempdir().unwrap();
        let program = shell::script(folder.path(), "cc", &compiler(Arch::Arm64)).unwrap();
        let output = Command::new(program)
            .args(["--target=aarch64-unknown-linux-musl", "-Wl,--fix-cortex-a53-843419", "a.o"])
            .args(["-o", "a program", "-static-pie", "-nodefaultlibs"])
            .env("BEELET_ZIG", "/bin/echo")
            .output()
            .unwrap();
        let expected = "cc -target aarch64-linux-musl -fno-sanitize=undefined a.o -o a program -static -pie \
                        -nodefaultlibs\n";
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }
}
