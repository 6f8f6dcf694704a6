//! Finds or installs the tools that build the kernel programs. The first is bpf-linker: setup builds it once
//! against the LLVM that rustc itself uses, because another LLVM could not read rustc's bitcode. The second
//! is the sources of `core`, because the BPF target has no ready-made `core`. Both go to a cache folder of
//! the user, so every clone finds them.

use crate::progress::Step;
use crate::shell;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The linker whose output is committed.
const BPF_LINKER_VERSION: &str = "0.13.0";

/// The tools that a BPF build needs in addition to cargo and rustc.
pub struct Toolchain {
    /// The folder with `bpf-linker`.
    pub linker_dir: PathBuf,
    /// The folder `library` of rustc's sources.
    pub library: PathBuf,
    /// True if `library` is outside the sysroot, so the build must pass its path to cargo.
    pub library_elsewhere: bool,
    /// The versions of rustc and bpf-linker that make the object.
    pub versions: String,
}

/// The compiler in use.
struct Rustc {
    sysroot: PathBuf,
    host: String,
    release: String,
    llvm: String,
}

/// Returns the toolchain of this machine; None if a part of it is missing.
///
/// # Errors
/// rustc does not run, or a path does not lead to the expected file.
pub fn find() -> Result<Option<Toolchain>> {
    let rustc = rustc()?;
    let Some(linker_dir) = find_linker(&rustc)? else { return Ok(None) };
    let Some((library, library_elsewhere)) = find_library(&rustc)? else { return Ok(None) };
    Ok(Some(Toolchain { linker_dir, library, library_elsewhere, versions: versions(&rustc) }))
}

/// Returns the toolchain; installs its missing parts.
///
/// # Errors
/// A part could not be installed: the message names the part and the remedy.
pub fn ensure() -> Result<Toolchain> {
    let rustc = rustc()?;
    let linker_dir = match find_linker(&rustc)? {
        Some(dir) => dir,
        None => install_linker(&rustc)?,
    };
    let (library, library_elsewhere) = library_of(&rustc)?;
    Ok(Toolchain { linker_dir, library, library_elsewhere, versions: versions(&rustc) })
}

/// Returns the folder `library` of rustc's sources, and true if the build must pass its path to cargo.
/// Installs the sources if they are missing.
///
/// # Errors
/// The sources could not be installed.
pub fn library() -> Result<(PathBuf, bool)> {
    library_of(&rustc()?)
}

fn library_of(rustc: &Rustc) -> Result<(PathBuf, bool)> {
    match find_library(rustc)? {
        Some(found) => Ok(found),
        None => install_library(rustc),
    }
}

/// Returns the command that starts LLVM's objcopy, which each toolchain of rustup has.
///
/// # Errors
/// This toolchain has none.
pub fn objcopy() -> Result<Command> {
    let rustc = rustc()?;
    let program = rustc.sysroot.join("lib/rustlib").join(&rustc.host).join("bin/rust-objcopy");
    if !program.exists() {
        bail!("{} is missing: build with a toolchain of rustup", program.display());
    }
    let mut command = Command::new(program);
    // The program does not find rustc's LLVM by itself.
    command.env("LD_LIBRARY_PATH", rustc.sysroot.join("lib"));
    Ok(command)
}

/// Runs the part of `cargo xtask setup` for BPF builds.
///
/// # Errors
/// [`ensure`] fails.
pub fn run() -> Result<()> {
    let step = Step::start("setup for ebpf");
    let toolchain = ensure()?;
    step.done(&toolchain.versions);
    Ok(())
}

fn versions(rustc: &Rustc) -> String {
    format!("rustc {} (LLVM {}), bpf-linker {BPF_LINKER_VERSION}", rustc.release, rustc.llvm)
}

fn rustc() -> Result<Rustc> {
    // rustc runs in the repository's folder, where a rust-toolchain file would apply.
    let ask = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("rustc")
            .args(arguments)
            .current_dir(workdir::repository())
            .output()
            .with_context(|| format!("could not start `rustc {}`", arguments.join(" ")))?;
        if !output.status.success() {
            bail!("`rustc {}` ended with {}", arguments.join(" "), output.status);
        }
        String::from_utf8(output.stdout).context("the output of rustc is not UTF-8")
    };
    let verbose = ask(&["--version", "--verbose"])?;
    let field = |name: &str| {
        verbose
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map(|value| value.trim().to_owned())
            .with_context(|| format!("`rustc --version --verbose` does not print \"{name}\""))
    };
    Ok(Rustc {
        sysroot: PathBuf::from(ask(&["--print", "sysroot"])?.trim()),
        host: field("host:")?,
        release: field("release:")?,
        llvm: field("LLVM version:")?,
    })
}

/// Returns `$XDG_CACHE_HOME/beelet` or `~/.cache/beelet`.
fn cache() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(base) => PathBuf::from(base),
        None => {
            let home = std::env::var_os("HOME").filter(|value| !value.is_empty()).context(
                "no folder for the BPF tools: neither XDG_CACHE_HOME nor HOME is set; set one of them",
            )?;
            PathBuf::from(home).join(".cache")
        }
    };
    Ok(base.join("beelet"))
}

/// Returns the linker's folder. Each LLVM has its own folder, because the linker links against exactly that
/// LLVM.
fn linker_root(rustc: &Rustc) -> Result<PathBuf> {
    Ok(cache()?.join("tools").join(format!("bpf-linker-{BPF_LINKER_VERSION}-rust-{}", rustc.release)))
}

fn find_linker(rustc: &Rustc) -> Result<Option<PathBuf>> {
    let dir = linker_root(rustc)?.join("bin");
    // The linker must run, not just exist: a toolchain that was removed since also removed its LLVM.
    let works =
        Command::new(dir.join("bpf-linker")).arg("--version").output().is_ok_and(|o| o.status.success());
    Ok(works.then_some(dir))
}

fn install_linker(rustc: &Rustc) -> Result<PathBuf> {
    let step = Step::start(format!("bpf-linker {BPF_LINKER_VERSION}, once for rustc {}", rustc.release));
    let root = linker_root(rustc)?;
    // The linker's build finds `libLLVM.so` in LLVM_PREFIX/lib and records that folder, so the folder has to
    // stay.
    let prefix = root.join("llvm");
    let library = rustc_llvm(rustc)?;
    let lib = prefix.join("lib");
    std::fs::create_dir_all(&lib).with_context(|| format!("could not make the folder {}", lib.display()))?;
    let name = library.file_name().context("rustc's libLLVM has no name")?;
    for link in [lib.join(name), lib.join("libLLVM.so")] {
        match std::fs::remove_file(&link) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("could not replace {}", link.display()));
            }
            _ => {}
        }
        std::os::unix::fs::symlink(&library, &link)
            .with_context(|| format!("could not make the link {}", link.display()))?;
    }
    let major = rustc.llvm.split('.').next().unwrap_or_default();
    let mut install = shell::cargo();
    install
        .args(["install", "bpf-linker", "--locked", "--force", "--no-default-features"])
        .args(["--version", BPF_LINKER_VERSION, "--features", &format!("llvm-{major}")])
        .arg("--root")
        .arg(&root)
        .env("LLVM_PREFIX", &prefix)
        .env_remove("RUSTFLAGS");
    step.run(&mut install).with_context(|| {
        "bpf-linker could not be built; its build needs a C compiler, access to crates.io, and a rustc that brings its own \
         LLVM as a shared library, as the toolchains of rustup do"
    })?;
    step.done("");
    find_linker(rustc)?
        .context("bpf-linker was built, but does not run: see `bpf-linker --version` in the cache folder")
}

/// Returns the shared LLVM that rustc itself runs on.
fn rustc_llvm(rustc: &Rustc) -> Result<PathBuf> {
    let lib = rustc.sysroot.join("lib");
    let entries =
        std::fs::read_dir(&lib).with_context(|| format!("could not read the folder {}", lib.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // The small `libLLVM-22-….so` is a linker script that names the real library.
            name.starts_with("libLLVM.so.")
        })
        .collect();
    found.sort();
    found.pop().with_context(|| {
        format!(
            "{} has no libLLVM.so.*: this rustc contains its LLVM; use a toolchain of rustup to build the BPF objects \
             (the committed objects need no build)",
            lib.display()
        )
    })
}

/// Returns the folder `library`, and true if the build must pass its path to cargo.
fn find_library(rustc: &Rustc) -> Result<Option<(PathBuf, bool)>> {
    let own = rustc.sysroot.join("lib/rustlib/src/rust/library");
    if is_library(&own) {
        return Ok(Some((own, false)));
    }
    if let Some(given) = std::env::var_os("BEELET_RUST_SRC").map(PathBuf::from).filter(|path| path.is_dir()) {
        for folder in [given.join("library"), given.clone()] {
            if is_library(&folder) {
                return Ok(Some((absolute(&folder)?, true)));
            }
        }
        bail!(
            "BEELET_RUST_SRC is {}, but neither that folder nor its folder `library` contains core/src/lib.rs",
            given.display()
        );
    }
    let unpacked = unpacked(rustc)?.join("library");
    Ok(is_library(&unpacked).then_some((unpacked, true)))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize().with_context(|| format!("could not resolve {}", path.display()))
}

fn is_library(path: &Path) -> bool {
    path.join("core/src/lib.rs").exists() && path.join("Cargo.lock").exists()
}

/// Returns the folder into which the archive named by BEELET_RUST_SRC is unpacked.
fn unpacked(rustc: &Rustc) -> Result<PathBuf> {
    Ok(cache()?.join("tools").join(format!("rust-src-{}", rustc.release)))
}

fn install_library(rustc: &Rustc) -> Result<(PathBuf, bool)> {
    let step = Step::start(format!("rust-src {}", rustc.release));
    let rustup = step.run(
        Command::new("rustup")
            .args(["component", "add", "rust-src"])
            .current_dir(workdir::repository())
            // rustup installs into the toolchain in use, even if another one is the default.
            .env("RUSTUP_TOOLCHAIN", rustc.sysroot.file_name().unwrap_or_default()),
    );
    if rustup.is_ok()
        && let Some(found) = find_library(rustc)?
    {
        step.done("from rustup");
        return Ok(found);
    }
    let Some(archive) = std::env::var_os("BEELET_RUST_SRC").map(PathBuf::from) else {
        let why = rustup.err().map_or_else(String::new, |error| format!("\n{error:#}"));
        bail!(
            "the sources of Rust's core library are missing, and `rustup component add rust-src` failed; set \
             BEELET_RUST_SRC to the folder `library` of rustc {}'s sources, or to a .tar.xz of it{why}",
            rustc.release
        );
    };
    // The archive is unpacked next to its final place and then moved, so the place never has a half-unpacked
    // folder.
    let target = unpacked(rustc)?;
    let parent = target.parent().context("the cache folder has no parent")?;
    std::fs::create_dir_all(parent)
        .with_context(|| format!("could not make the folder {}", parent.display()))?;
    let part = tempfile::tempdir_in(parent).with_context(|| format!("no place in {}", parent.display()))?;
    step.run(Command::new("tar").arg("-xJf").arg(&archive).arg("-C").arg(part.path()))
        .with_context(|| format!("could not unpack BEELET_RUST_SRC, {}", archive.display()))?;
    let _ = std::fs::remove_dir_all(&target);
    std::fs::rename(part.keep(), &target)
        .with_context(|| format!("could not move the unpacked sources to {}", target.display()))?;
    let found = find_library(rustc)?.with_context(|| {
        format!("{} was unpacked, but lacks library/core/src/lib.rs or library/Cargo.lock", archive.display())
    })?;
    step.done("unpacked from BEELET_RUST_SRC");
    Ok(found)
}
